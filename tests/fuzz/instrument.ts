/**
 * Branch counters for our own modules: rewrites copies of TypeScript sources so that they count which way every branch
 * went. It works in both runtimes, as the copies are plain modules that are imported from a temporary folder.
 *
 * Counted are the conditions of `if`, `while` and `for` (true and false apart), right-hand sides of `&&` and `||` that are
 * reached, and `catch` blocks. Arms of `?:` and everything inside a template are not told apart.
 */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";
import { importsOf } from "../../tools/source_scan.ts";
import { ROOT, readText } from "../help.ts";

/** Modules with counters. */
export interface Instrumented extends Disposable {
  /** One counter for every outcome of every branch; set to zero by whoever reads them. */
  readonly counts: Uint32Array;
  /** Imports the instrumented copy of a file of the project. */
  load<T>(file: string): Promise<T>;
}

/** Comments, strings, templates and regular expressions: what is no code. */
const NO_CODE =
  /\/\/[^\n]*|\/\*[\s\S]*?\*\/|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\[\s\S])*`|(?<=[(,=:!&|?]\s*)\/(?:[^/\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\//g;

const COUNTERS = `
export const counts = new Uint32Array(1 << 12);
export const branch = (id, value) => (counts[value ? id : id + 1]++, value);
export const reachedAnd = (id) => (counts[id]++, true);
export const reachedOr = (id) => (counts[id]++, false);
`;

/**
 * Copies files of the project, and whatever they import, with counters in them.
 *
 * @param files Paths from the project folder; these get counters, what they import does not.
 * @param planted Sources that stand in for files of the project, by path.
 */
export async function instrument(
  files: readonly string[],
  planted: ReadonlyMap<string, string> = new Map(),
): Promise<Instrumented> {
  mkdirSync(join(ROOT, "out"), { recursive: true });
  const folder = mkdtempSync(join(ROOT, "out", "fuzz-"));
  const place = (file: string, text: string) => {
    mkdirSync(dirname(join(folder, file)), { recursive: true });
    writeFileSync(join(folder, file), text);
  };
  const read = (file: string) => planted.get(file) ?? readText(file);
  let next = 0;
  const id = () => {
    next += 2;
    return next - 2;
  };
  const reached = new Set(files);
  for (const file of reached) {
    const source = read(file);
    for (const { specifier } of importsOf(source)) {
      if (specifier?.startsWith(".")) reached.add(join(dirname(file), specifier));
    }
    const up = "../".repeat(file.split("/").length - 1) || "./";
    const counted = files.includes(file) ? addCounters(source, id) : source;
    const head = `import { branch, reachedAnd, reachedOr } from "${up}counters.js";\n`;
    place(file, head + counted);
  }
  place("counters.js", COUNTERS);
  const load = (file: string) => import(pathToFileURL(join(folder, file)).href);
  const { counts } = await load("counters.js");
  return {
    counts: (counts as Uint32Array).subarray(0, next),
    load,
    [Symbol.dispose]: () => rmSync(folder, { recursive: true }),
  };
}

/** The source with counters; `id` gives two fresh ones. */
export function addCounters(source: string, id: () => number): string {
  const code = source.replace(NO_CODE, (text) => text.replace(/[^\n]/g, " "));
  const inserts: (readonly [at: number, text: string])[] = [];
  const wrap = (from: number, to: number) => {
    inserts.push([from, `branch(${id()}, `], [to, ")"]);
  };
  for (const match of code.matchAll(/\b(if|while|for)\s*\(/g)) {
    const from = match.index + match[0].length;
    const to = closing(code, from);
    if (match[1] !== "for") {
      wrap(from, to);
      continue;
    }
    const [start, condition] = code.slice(from, to).split(";") as [string, string?];
    if (!condition?.trim()) continue; // for-of, or without a condition
    const at = from + start.length + 1;
    wrap(at, at + condition.length);
  }
  for (const match of code.matchAll(/\s(&&|\|\|)\s/g)) {
    const reached = match[1] === "&&" ? `reachedAnd(${id()}) &&` : `reachedOr(${id()}) ||`;
    inserts.push([match.index + match[0].length, `${reached} `]);
  }
  for (const match of code.matchAll(/\bcatch\b[^{]*\{/g)) {
    inserts.push([match.index + match[0].length, ` reachedAnd(${id()});`]);
  }
  let [text, done] = ["", 0];
  for (const [at, insert] of inserts.sort(([a], [b]) => a - b)) {
    text += source.slice(done, at) + insert;
    done = at;
  }
  return text + source.slice(done);
}

/** Index of the parenthesis that closes the one before `from`. */
function closing(code: string, from: number): number {
  let depth = 1;
  for (let at = from; at < code.length; at++) {
    if (code[at] === "(") depth++;
    else if (code[at] === ")" && --depth === 0) return at;
  }
  throw new Error("a parenthesis is not closed");
}
