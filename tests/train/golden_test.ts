/** Parity with transformers + PEFT: logits, gradients, 12 losses and the trained adapter of every golden case. */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { AdapterTensors } from "../../src/api/io/adapter.ts";
import { exportAdapters } from "../../src/api/train/adapter_state.ts";
import type { Session } from "../../src/api/train/session.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import {
  CASES,
  type Golden,
  KINDS,
  openGolden,
  planGolden,
  readGolden,
  relativeError,
  type SessionSetup,
} from "./support.ts";

/** Norm-wise tolerances of the project's parity promise. */
const LOGITS = 1e-4;
const GRADIENTS = 1e-4;
const LOSS = 1e-4;
const ADAPTER = 1e-3;

/** Cases that train more than LoRA on linears; they must be refused by name. */
const UNSUPPORTED: Readonly<Record<string, RegExp>> = {
  "llama+modules-to-save": /modules_to_save/,
  "llama+dora": /use_dora/,
  "llama+embed": /embed_tokens|lora_embedding/,
  "llama+bias-free-lmhead": /lm_head/,
};

async function lossesOf(session: Session, golden: Golden): Promise<number[]> {
  const losses: number[] = [];
  for (let step = 0; step < golden.losses.length; step++) {
    const documents = golden.batches[step % golden.batches.length] ?? [];
    losses.push((await session.trainStep(documents, golden.settings)).loss);
  }
  return losses;
}

function flatten(tensors: readonly AdapterTensors[]): Map<string, Float32Array> {
  return new Map(
    tensors.flatMap(({ path, a, b }): [string, Float32Array][] => [
      [`${path}.lora_A`, a],
      [`${path}.lora_B`, b],
    ]),
  );
}

for (const [name, feature] of Object.entries(UNSUPPORTED)) {
  if (!CASES.includes(name)) continue;
  test(`Session refuses ${name} by name`, async () => {
    await assert.rejects(
      async () => planGolden(await readGolden(name)),
      (error: unknown) => error instanceof LoramemError && feature.test(error.message),
    );
  });
}

const SUPPORTED = CASES.filter((name) => !(name in UNSUPPORTED));
for (const [name, device] of SUPPORTED.flatMap((name) =>
  KINDS.map((kind) => [name, kind] as const),
)) {
  test(`Session matches the logits of ${name} on ${device}, with and without the adapter`, async () => {
    const golden = await readGolden(name);
    await using session = await openGolden(golden, { device });
    const documents = golden.batches[0] ?? [];
    const base = await session.logits(documents, true);
    const expected = golden.tensors.get("base_logits");
    if (expected !== undefined) assert.ok(relativeError(base, expected) < LOGITS);
    else assert.ok(name.startsWith("llama+"), "kept once for all cases that differ in the adapter");
    const adapted = await session.logits(documents);
    assert.ok(relativeError(adapted, golden.tensors.get("logits") ?? []) < LOGITS);
  });

  for (const packing of ["in one micro-batch", "one document at a time"]) {
    test(`Session matches gradients, losses and trained adapter of ${name} on ${device}, ${packing}`, async () => {
      const golden = await readGolden(name);
      const documents = packing === "in one micro-batch" ? golden.rows : 1;
      const tokensPerMicroBatch = documents * golden.sequence;
      await using session = await openGolden(golden, { device, dims: { tokensPerMicroBatch } });
      await session.accumulate(golden.batches[0] ?? []);
      const gradients = flatten(await exportAdapters(session.executor, session.run, "gradient"));
      assert.ok(gradients.size > 0);
      for (const [key, gradient] of gradients) {
        const expected = golden.tensors.get(`grad.base_model.model.${key}.weight`) ?? [];
        assert.ok(relativeError(gradient, expected) < GRADIENTS, key);
      }
      session.executor.clear(session.run.adapters.gradient);

      const losses = await lossesOf(session, golden);
      for (const [step, loss] of losses.entries()) {
        assert.ok(Math.abs(loss - (golden.losses[step] ?? 0)) < LOSS, `step ${step}: ${loss}`);
      }
      const trained = flatten(await exportAdapters(session.executor, session.run));
      for (const [key, expected] of flatten(golden.adapterN.tensors)) {
        assert.ok(relativeError(trained.get(key) ?? [], expected) < ADAPTER, key);
      }
    });
  }
}

test("Session gives the same bits for any threads, save points, execution mode and loss chunk", async () => {
  for (const [name, device] of [
    ["llama", "cpu"],
    ["qwen2", "cpu"],
    ["qwen2", KINDS.at(-1) ?? "cpu"],
  ] as const) {
    const golden = await readGolden(name);
    const run = async (setup: SessionSetup) => {
      await using session = await openGolden(golden, { device, ...setup });
      const losses = await lossesOf(session, golden);
      return { losses, tensors: flatten(await exportAdapters(session.executor, session.run)) };
    };
    const reference = await run({ threads: 1 });
    const setups: SessionSetup[] = [
      { threads: 2 },
      { threads: 3 },
      { threads: 3, policy: "checkpoint" },
      { threads: 2, policy: "dropMlp" },
      { threads: 3, policy: ["checkpoint", "dropMlp"] },
      { threads: 2, policy: ["dropMlp", "keep"] },
      { threads: 3, policy: ["dropMlp", "checkpoint"] },
      { threads: 1, policy: ["keep", "dropMlp"] },
      { threads: 1, policy: ["keep", "checkpoint"], mode: "eager" },
      { threads: 2, policy: ["checkpoint", "keep"], dims: { lossChunkTokens: 9 } },
      { threads: 2, dims: { lossChunkTokens: 128 } },
      { threads: 2, mode: "eager" },
      { threads: 2, dims: { tokensPerMicroBatch: 128 } },
    ];
    for (const setup of setups) {
      const other = await run(setup);
      assert.deepEqual(other.losses, reference.losses, JSON.stringify(setup));
      assert.deepEqual(other.tensors, reference.tensors, JSON.stringify(setup));
    }
  }
});

/** Three tiles of the 80 tokens of a golden batch, the last one half full. */
const TILE = 32;

test("Session computes the MLP in tiles: gradients that differ in the order of sums only, the same bits under every policy", async () => {
  for (const [name, device] of [
    ["llama", "cpu"],
    ["llama+qv-only", "cpu"],
    ["qwen2", "cpu"],
    ["qwen2", KINDS.at(-1) ?? "cpu"],
  ] as const) {
    const golden = await readGolden(name);
    const run = async (setup: SessionSetup) => {
      await using session = await openGolden(golden, { device, ...setup });
      await session.accumulate(golden.batches[0] ?? []);
      const gradients = await exportAdapters(session.executor, session.run, "gradient");
      session.executor.clear(session.run.adapters.gradient);
      return { losses: await lossesOf(session, golden), gradients: flatten(gradients) };
    };
    const whole = await run({});
    const tiled = await run({ dims: { mlpTileTokens: TILE } });
    for (const [step, loss] of tiled.losses.entries())
      assert.ok(Math.abs(loss - (whole.losses[step] ?? 0)) < LOSS, `${name} step ${step}: ${loss}`);
    for (const [key, gradient] of tiled.gradients)
      assert.ok(relativeError(gradient, whole.gradients.get(key) ?? []) < 1e-5, `${name} ${key}`);
    if (device === "cpu") assert.equal(tiled.losses[0], whole.losses[0], name);
    const setups: SessionSetup[] = [
      { policy: "dropMlp" },
      { policy: "checkpoint" },
      { policy: "offload", weights: "stream" },
      { policy: ["keep", "checkpoint"], mode: "eager" },
      { policy: ["checkpoint", "keep"], threads: 3 },
      { policy: ["offload", "dropMlp"] },
    ];
    for (const setup of setups) {
      const other = await run({ ...setup, dims: { mlpTileTokens: TILE } });
      assert.deepEqual(other, tiled, `${name} ${device} ${JSON.stringify(setup)}`);
    }
  }
});

test("Session computes the MLP in tiles of any size, and leaves alone the rows that hold no tokens", async () => {
  const golden = await readGolden("llama");
  const gradients = async (dims: SessionSetup["dims"]) => {
    await using session = await openGolden(golden, { policy: "checkpoint", dims: dims ?? {} });
    await session.accumulate(golden.batches[0] ?? []);
    session.executor.clear(session.run.adapters.gradient);
    // One document after a full batch: the other rows hold what that one left there.
    await session.accumulate((golden.batches[0] ?? []).slice(0, 1));
    return flatten(await exportAdapters(session.executor, session.run, "gradient"));
  };
  const whole = await gradients({});
  for (const dims of [
    { mlpTileTokens: 27 },
    { mlpTileTokens: 24, tokensPerMicroBatch: 256 }, // the last tiles hold no tokens
    { mlpTileTokens: 79 },
  ]) {
    for (const [key, gradient] of await gradients(dims))
      assert.ok(
        relativeError(gradient, whole.get(key) ?? []) < 1e-5,
        `${dims.mlpTileTokens} ${key}`,
      );
  }
});

test("Session reports the gradient norm before clipping", async () => {
  const golden = await readGolden("llama");
  await using session = await openGolden(golden);
  const { gradNorm } = await session.trainStep(golden.batches[0] ?? [], golden.settings);
  assert.ok(Math.abs(gradNorm / (golden.gradNorms[0] ?? 1) - 1) < 1e-4);
});
