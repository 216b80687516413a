/** The MLP in tiles of rows: the same losses and gradients up to rounding, and the same bits for whatever may be chosen. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { exportAdapters } from "../../src/api/train/adapter_state.ts";
import { planModel } from "../plan/models.ts";
import { deepGolden } from "./deep.ts";
import {
  type Golden,
  KINDS,
  openGolden,
  readGolden,
  relativeError,
  type SessionSetup,
} from "./support.ts";

/** Three tiles of the 80 tokens of a golden batch, the last one half full. */
const TILE = 32;

async function gradients(golden: Golden, setup: SessionSetup) {
  await using session = await openGolden(golden, setup);
  await session.accumulate(golden.batches[0] ?? []);
  return await exportAdapters(session.executor, session.run, "gradient");
}

async function outcome(golden: Golden, setup: SessionSetup) {
  await using session = await openGolden(golden, setup);
  const losses: number[] = [];
  for (let step = 0; step < golden.losses.length; step++) {
    const documents = golden.batches[step % golden.batches.length] ?? [];
    losses.push((await session.trainStep(documents, golden.settings)).loss);
  }
  losses.push(await session.evaluate(golden.batches[0] ?? []));
  return { losses, tensors: await exportAdapters(session.executor, session.run) };
}

for (const device of KINDS) {
  for (const name of ["llama", "qwen2", "llama+qv-only"]) {
    test(`Session with a tiled MLP matches gradients and losses of ${name} on ${device}`, async () => {
      const golden = await readGolden(name);
      const setup = { device, dims: { mlpTileTokens: TILE } };
      for (const { path, a, b } of await gradients(golden, setup)) {
        for (const [matrix, gradient] of Object.entries({ A: a, B: b })) {
          const key = `grad.base_model.model.${path}.lora_${matrix}.weight`;
          assert.ok(relativeError(gradient, golden.tensors.get(key) ?? []) < 1e-4, key);
        }
      }
      const { losses } = await outcome(golden, setup);
      for (const [step, loss] of golden.losses.entries())
        assert.ok(Math.abs((losses[step] ?? 0) - loss) < 1e-4, `step ${step}`);
    });
  }

  test(`Session with a tiled MLP gives the same bits for any save points, weights and mode on ${device}`, async () => {
    using golden = await deepGolden("llama", 4);
    const dims = { mlpTileTokens: TILE };
    const reference = await outcome(golden, { device, dims });
    const setups: SessionSetup[] = [
      { policy: "dropMlp" },
      { policy: "checkpoint", weights: "stream" },
      { policy: "offload" },
      { policy: "offload", weights: "stream", mode: "eager" },
      { policy: ["offload", "checkpoint", "dropMlp", "keep"], weights: "stream" },
      { dims: { ...dims, lossChunkTokens: 9 }, threads: 3 },
    ];
    for (const setup of setups) {
      const other = await outcome(golden, { device, dims, ...setup });
      assert.deepEqual(other, reference, JSON.stringify(setup));
    }
  });
}

test("Session with a tiled MLP leaves alone the rows that hold no tokens", async () => {
  // One document at a time fills 40 of 80 rows: one tile, a quarter of the second, none of the third.
  const golden = await readGolden("llama");
  for (const documents of golden.batches[0] ?? []) {
    const one = { ...golden, batches: [[documents]] };
    const tiled = await gradients(one, { dims: { mlpTileTokens: TILE } });
    const whole = await gradients(one, {});
    for (const [index, { a, b, path }] of tiled.entries()) {
      assert.ok(relativeError(a, whole[index]?.a ?? []) < 1e-6, path);
      assert.ok(relativeError(b, whole[index]?.b ?? []) < 1e-6, path);
    }
  }
});

test("planRun() with a tiled MLP needs less than half of what a layer takes, and meets the lower bound", () => {
  const tokens = { tokensPerMicroBatch: 16_384, lossChunkTokens: 512 };
  const whole = planModel("Llama-3.1-8B", "offload", tokens).plan;
  const tiled = planModel("Llama-3.1-8B", "offload", { ...tokens, mlpTileTokens: 1024 }).plan;
  assert.ok(tiled.classes.activations < 0.5 * whole.classes.activations);
  for (const { bytes, lowerBound } of tiled.programs.values()) assert.equal(bytes, lowerBound);
});
