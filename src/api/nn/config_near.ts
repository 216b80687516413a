/**
 * Names that come close to a misspelt one.
 */

/**
 * Finds the path endings that look most like `wanted`.
 *
 * @param paths Module paths.
 * @param wanted What was asked for.
 * @returns Up to five names, `close` where they resemble `wanted`; else the endings that there are.
 */
export function nearMisses(
  paths: readonly string[],
  wanted: string,
): { readonly close: boolean; readonly names: string[] } {
  const parts = wanted.split(".").length;
  const ending = (path: string, count: number) => path.split(".").slice(-count).join(".");
  const names = [...new Set(paths.map((path) => ending(path, parts)))];
  const limit = Math.max(2, Math.floor(wanted.length / 3));
  const close = names
    .map((name) => ({ name, distance: name.includes(wanted) ? 0 : distance(name, wanted) }))
    .filter(({ distance }) => distance <= limit)
    .sort((a, b) => a.distance - b.distance || (a.name < b.name ? -1 : 1))
    .slice(0, 5)
    .map(({ name }) => name);
  if (close.length > 0) return { close: true, names: close };
  return { close: false, names: [...new Set(paths.map((path) => ending(path, 1)))].slice(0, 12) };
}

/** Levenshtein distance: the least number of insertions, deletions and substitutions. */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      const change = (row[j - 1] as number) + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(change, (row[j] as number) + 1, (next[j - 1] as number) + 1));
    }
    row = next;
  }
  return row[b.length] as number;
}
