/** The safetensors header under a million inputs, guided by branch counters (see tests/fuzz/). */
import assert from "node:assert/strict";
import { test } from "node:test";
import { fuzz } from "../fuzz/fuzz.ts";
import { FORMAT, openTarget } from "../fuzz/safetensors_target.ts";

test("parseHeader() answers a million guided inputs with a result or BAD_FILE", {
  timeout: 900_000,
}, async () => {
  using target = await openTarget();
  const seed = Date.now() % 2 ** 31; // another one each time; a finding names it
  const { kept, outcomes } = fuzz(target.check, {
    ...FORMAT,
    runs: 1_000_000,
    counts: target.counts,
    seed,
  });
  console.log(`seed ${seed}: ${kept} inputs kept, ${outcomes} outcomes of branches`);
  assert.ok(outcomes >= 78, `${outcomes} of ${target.counts.length} outcomes of branches`);
});
