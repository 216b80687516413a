/** The file readers under a million inputs each, guided by branch counters (see tests/fuzz/). */
import assert from "node:assert/strict";
import { test } from "node:test";
import * as checkpoint from "../fuzz/checkpoint_target.ts";
import { fuzz } from "../fuzz/fuzz.ts";
import * as safetensors from "../fuzz/safetensors_target.ts";

for (const [name, { FORMAT, openTarget }, least] of [
  ["parseHeader()", safetensors, 78],
  ["parseCheckpointHeader()", checkpoint, 88],
] as const) {
  test(`${name} answers a million guided inputs with a result or an error that names what is wrong`, {
    timeout: 3_600_000,
  }, async () => {
    using target = await openTarget();
    const seed = Date.now() % 2 ** 31; // another one each time; a finding names it
    const options = { ...FORMAT, runs: 1_000_000, counts: target.counts, seed };
    const { kept, outcomes } = fuzz(target.check, options);
    console.log(`seed ${seed}: ${kept} inputs kept, ${outcomes} outcomes of branches`);
    assert.ok(outcomes >= least, `${outcomes} of ${target.counts.length} outcomes of branches`);
  });
}
