/** Reads the JUnit reports of `bun test`, `deno test` and `ctest`. */

/** @typedef {{ name: string, status: "passed" | "failed" | "skipped" }} TestResult */

const ENTITIES = /** @type {Record<string, string>} */ ({
  "&lt;": "<",
  "&gt;": ">",
  "&quot;": '"',
  "&apos;": "'",
  "&amp;": "&",
});

/** @param {string} text */
function decode(text) {
  return text
    .replace(/&#(x?)([0-9a-f]+);/gi, (_, hex, digits) =>
      String.fromCodePoint(Number.parseInt(digits, hex ? 16 : 10)),
    )
    .replace(/&(?:lt|gt|quot|apos|amp);/g, (entity) => ENTITIES[entity] ?? entity);
}

/**
 * The test cases of a report, in its order.
 *
 * All three writers escape angle brackets in attributes and text, so tags are all that begins with "<".
 *
 * @param {string} xml
 * @returns {TestResult[]}
 */
export function parseJunit(xml) {
  return xml
    .split(/<testcase\b/)
    .slice(1)
    .map((part) => {
      const open = part.indexOf(">");
      const attributes = part.slice(0, open);
      const end = attributes.endsWith("/") ? open : part.indexOf("</testcase>");
      const body = part.slice(open, end < 0 ? undefined : end);
      const failed = /<(?:failure|error)\b/.test(body) || /\bstatus="fail"/.test(attributes);
      const skipped = /<skipped\b/.test(body) || /\bstatus="(?:notrun|disabled)"/.test(attributes);
      return {
        name: decode(/\bname="([^"]*)"/.exec(attributes)?.[1] ?? ""),
        status: failed ? "failed" : skipped ? "skipped" : "passed",
      };
    });
}
