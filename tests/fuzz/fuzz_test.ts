/** The fuzzer itself: that its counters guide it, and that it finds mistakes that were planted. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { readText } from "../help.ts";
import * as checkpoint from "./checkpoint_target.ts";
import { fuzz } from "./fuzz.ts";
import { addCounters, instrument } from "./instrument.ts";
import { FORMAT, openTarget } from "./safetensors_target.ts";

test("addCounters() counts conditions, reached operands and catch blocks, and leaves text alone", () => {
  let next = 0;
  const source = [
    'if (a("if (x)")) f(); // if (b)',
    "for (let i = 0; i < n; i++) while (g(i)) h(`&& ${i}`);",
    "for (const x of list) y = x && z || /a && b/.test(x);",
    "try { t(); } catch (error) { u(); }",
  ].join("\n");
  assert.equal(
    addCounters(source, () => next++),
    [
      'if (branch(0, a("if (x)"))) f(); // if (b)',
      "for (let i = 0;branch(1,  i < n); i++) while (branch(2, g(i))) h(`&& ${i}`);",
      "for (const x of list) y = x && reachedAnd(3) && z || reachedOr(4) || /a && b/.test(x);",
      "try { t(); } catch (error) { reachedAnd(5); u(); }",
    ].join("\n"),
  );
});

test("fuzz() reaches by its counters what blind mutation does not", async () => {
  const planted = [76, 77, 0xf1, 0x1e].map((byte, at) => `if (x[${at}] === ${byte}) {`);
  const source = `export function f(x) { ${planted.join(" ")} throw new Error("reached"); }}}}}`;
  using modules = await instrument(["planted.ts"], new Map([["planted.ts", source]]));
  const { f } = await modules.load<{ f: (input: Uint8Array) => void }>("planted.ts");
  const options = { runs: 100_000, corpus: [new Uint8Array(8)], seed: 1 };
  assert.equal(fuzz(f, options).kept, 0);
  assert.throws(() => fuzz(f, { ...options, counts: modules.counts }), /reached.*base64/); // mutant: isNew() is false
});

const HEADER = "src/api/io/safetensors_header.ts";
const options = { ...FORMAT, runs: 30_000, seed: 7 };

test("fuzz() finds nothing in the safetensors header", async () => {
  using target = await openTarget();
  const { outcomes } = fuzz(target.check, { ...options, counts: target.counts });
  assert.ok(outcomes >= 75, `${outcomes} of ${target.counts.length} outcomes of branches`);
});

for (const [guard, instead, finding] of [
  ["length > BigInt(fileBytes - LENGTH_BYTES)", "false", /would allocate/],
  ["Array.isArray(shape)", "shape", /TypeError/],
  ["!isObject(value)", "false", /TypeError/],
  ["entry.offset < end", "false", /tile/],
  ["entry.offset > end", "false", /tile/],
  ["end !== fileBytes", "false", /tile/],
] as const) {
  test(`fuzz() finds a header reader without the check ${guard}`, async () => {
    const source = readText(HEADER);
    assert.ok(source.includes(guard), "the check has moved");
    using target = await openTarget(new Map([[HEADER, source.replace(guard, instead)]]));
    assert.throws(() => fuzz(target.check, { ...options, counts: target.counts }), finding);
  });
}

const CHECKPOINT = "src/api/io/checkpoint_header.ts";

test("fuzz() finds nothing in the header of a checkpoint, and one that takes any text for a checksum", async () => {
  const settings = { ...checkpoint.FORMAT, runs: 10_000, seed: 3 };
  using target = await checkpoint.openTarget();
  const { outcomes } = fuzz(target.check, { ...settings, counts: target.counts });
  assert.ok(outcomes >= 80, `${outcomes} of ${target.counts.length} outcomes of branches`);
  const source = readText(CHECKPOINT);
  const guard = "!/^[0-9a-f]{8}$/.test(sum)";
  assert.ok(source.includes(guard), "the check has moved");
  using mutant = await checkpoint.openTarget(
    new Map([[CHECKPOINT, source.replace(guard, "false")]]),
  );
  const run = () => fuzz(mutant.check, { ...settings, counts: mutant.counts });
  assert.throws(run, /a checksum is/);
});
