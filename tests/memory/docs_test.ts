import assert from "node:assert/strict";
import { test } from "node:test";
import { codeBlocks, readText, runPrograms } from "../help.ts";

for (const page of ["docs/memory.md", "docs/checkpoints.md", "docs/performance.md"]) {
  test(`${page}: the programs run as they are`, () => {
    const programs = codeBlocks(readText(page))
      .filter(({ language }) => language === "ts")
      .map(({ text, line }) => ({ name: `${page}:${line}`, text }));
    assert.ok(programs.length > 0);
    const failed = runPrograms(programs);
    assert.equal(failed.length, 0, failed.join("\n"));
  });
}

test("docs/memory.md draws the tree of adviseMemory(), call names apart", () => {
  const lines = (text: string) =>
    [...text.matchAll(/^[ *]*([|+ ]*(?:\+-|do kernels).*)$/gm)].map(([, line = ""]) =>
      line.replace(/(\.{4,} \S+).*/, "$1").trim(),
    );
  const drawn = lines(readText("docs/memory.md"));
  assert.ok(drawn.length >= 12);
  assert.deepEqual(lines(readText("src/api/memory/advise_memory.ts")), drawn);
});
