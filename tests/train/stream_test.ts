/** Weights that stream from host memory, and layer inputs that wait there: the same bits as with everything on the device. */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { SimOptions } from "../../src/api/memory/mod.ts";
import type { SavePolicy } from "../../src/api/plan/save_points.ts";
import { exportAdapters } from "../../src/api/train/adapter_state.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { deepGolden } from "./deep.ts";
import { type Golden, KINDS, openGolden, type SessionSetup } from "./support.ts";

const DEPTH = 5;

/** Losses, evaluation, logits and trained adapters. */
async function outcome(golden: Golden, setup: SessionSetup) {
  await using session = await openGolden(golden, setup);
  const losses: number[] = [];
  for (let step = 0; step < 4; step++) {
    const documents = golden.batches[step % golden.batches.length] ?? [];
    losses.push((await session.trainStep(documents, golden.settings)).loss);
    losses.push(await session.evaluate(documents), await session.evaluate(documents, true));
  }
  const logits = await session.logits(golden.batches[0] ?? []);
  return { losses, logits, tensors: await exportAdapters(session.executor, session.run) };
}

const MIXES: readonly (SavePolicy | readonly SavePolicy[])[] = [
  "keep",
  "dropMlp",
  "checkpoint",
  "offload",
  ["offload", "offload", "checkpoint", "dropMlp", "keep"],
  ["keep", "offload", "keep", "offload", "checkpoint"],
  ["offload", "keep", "dropMlp", "checkpoint", "offload"],
];

for (const device of KINDS) {
  for (const name of ["llama", "qwen2"]) {
    test(`Session gives the same bits with streamed weights and offloaded inputs: ${name} on ${device}`, async () => {
      using golden = await deepGolden(name, DEPTH);
      const reference = await outcome(golden, { device });
      for (const policy of MIXES) {
        for (const weights of ["resident", "stream", "file"] as const) {
          for (const mode of ["graph", "eager"] as const) {
            const setup = { device, policy, weights, mode };
            assert.deepEqual(await outcome(golden, setup), reference, JSON.stringify(setup));
          }
        }
      }
    });
  }
}

// Mutants that these kill: Copies.start() without waitEvent (a window is overwritten while a late op still reads it), and
// Copies.await() without waitEvent (an op reads a window before the late copy has filled it).
test("Session gives the same bits however late ops and copies are", async () => {
  using golden = await deepGolden("llama", DEPTH);
  const setup = { policy: "offload", weights: "stream" } as const;
  const reference = await outcome(golden, {});
  // Microseconds before every op, copy to the device and copy to the host.
  for (const delays of [
    [0, 3000, 0],
    [0, 0, 3000],
    [0, 2000, 3000],
    [3000, 0, 0],
    [2000, 1000, 0],
  ]) {
    const late = await outcome(golden, { ...setup, device: "sim", sim: { delays } });
    assert.deepEqual(late, reference, String(delays));
  }
});

// The mutant that this kills: a stream that waits for another one's event and does not take over its failure.
test("Session reports every copy and every op that fails, and is disposed as ever", async () => {
  using golden = await deepGolden("llama", 3);
  const documents = golden.batches[0] ?? [];
  const losses = async (sim: SimOptions) => {
    const setup = { device: "sim", policy: "offload", weights: "stream", sim } as const;
    await using session = await openGolden(golden, setup);
    const first = await session.trainStep(documents, golden.settings);
    return [first.loss, await session.evaluate(documents)];
  };
  const expected = await losses({});
  let failures = 0;
  for (let faultAt = 1; ; faultAt++) {
    try {
      assert.deepEqual(await losses({ faultAt }), expected, `fault at ${faultAt}`);
      if (faultAt > failures + 20) break;
    } catch (error) {
      const primary = error instanceof SuppressedError ? error.suppressed : error;
      assert.ok(primary instanceof LoramemError && primary.is("DEVICE"), String(error));
      failures++;
    }
  }
  assert.ok(failures > 50, `${failures} failures`);
});
