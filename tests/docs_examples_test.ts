import assert from "node:assert/strict";
import { test } from "node:test";
import { docExamples, readTree, runPrograms } from "./help.ts";

const EXAMPLES = [...readTree(["src/api", "src/ffi/error.ts"], /\.ts$/)].flatMap(([file, source]) =>
  docExamples(file, source),
);

test("@example blocks of the public documentation run to their end", () => {
  assert.ok(EXAMPLES.length >= 20, `only ${EXAMPLES.length} examples found`);
  const failed = runPrograms(EXAMPLES);
  assert.equal(failed.length, 0, failed.join("\n"));
});

test("@example blocks say where their names come from", () => {
  const loose = EXAMPLES.filter(({ text }) => !/\bfrom "\.\//.test(text)).map(({ name }) => name);
  assert.deepEqual(loose, []);
});

test("docExamples() takes the ts blocks that follow an @example", () => {
  const source = `
/** No example. */
/**
 * Sentence.
 *
 * \`\`\`ts
 * not();
 * \`\`\`
 *
 * @example Usage
 * \`\`\`ts
 * if (a) {
 *   b();
 * }
 * \`\`\`
 * \`\`\`sh
 * not
 * \`\`\`
 *
 * @returns nothing
 */
  /**
   * @example Inside
   * \`\`\`ts
   * c();
   * \`\`\`
   */
`;
  assert.deepEqual(docExamples("x.ts", source), [
    { name: "x.ts:11", text: "if (a) {\n  b();\n}\n" },
    { name: "x.ts:24", text: "c();\n" },
  ]);
});

test("runPrograms() reports programs that throw or end the process", () => {
  const failed = runPrograms([
    { name: "good", text: 'import { test } from "node:test"; console.log(typeof test);' },
    { name: "relative", text: 'import { ROOT } from "./tests/help.ts"; console.log(ROOT);' },
    { name: "throws", text: 'throw new Error("planted");' },
    { name: "later", text: "console.log(1);" },
    { name: "exits", text: "process.exit(0);" },
    { name: "unreached", text: "" },
  ]);
  assert.deepEqual(
    failed.map((text) => text.split(":")[0]),
    ["throws", "exits", "unreached"],
  );
  assert.match(failed[0] ?? "", /planted/);
});
