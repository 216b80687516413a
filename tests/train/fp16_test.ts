/** Training with f16 activations and a gradient scaler; what a step that is skipped leaves alone. */
import assert from "node:assert/strict";
import { cp, open } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { LoraTrainer, openSafetensors, type StepInfo } from "../../mod.ts";
import { bytesOf, type Value } from "../../src/api/graph/value.ts";
import type { ScalerSettings } from "../../src/api/kernels/mod.ts";
import { hostView } from "../../src/api/memory/internal.ts";
import { importAdapters } from "../../src/api/train/adapter_state.ts";
import { checkStep } from "../../src/api/train/check_step.ts";
import { loadWeights } from "../../src/api/train/load_weights.ts";
import { learningRateAt, SCHEDULES } from "../../src/api/train/schedule.ts";
import type { Session, StepResult } from "../../src/api/train/session.ts";
import { readStruct } from "../../src/ffi/structs.ts";
import { DEMO } from "../cli/support.ts";
import { rejects, withScratch } from "../io/scratch.ts";
import { type Golden, openGolden, readGolden, type SessionSetup, SMALL_RING } from "./support.ts";

/** Memory of a value of the CPU backend. */
function memoryOf(session: Session, value: Value): Uint8Array<ArrayBuffer> {
  const { buffer, offset } = session.executor.locate(value);
  return hostView(buffer, Uint8Array, offset, bytesOf(value));
}

/** Everything that an update changes: parameters, compute copy, moments, and the count of updates. */
function optimizerBits(session: Session): string {
  const { master, copy, m, v } = session.run.adapters;
  const values = [master, copy, m, v].filter((value) => value !== null);
  const bytes = values.map((value) => Buffer.from(memoryOf(session, value)).toString("base64"));
  return [...bytes, countsOf(session).step].join();
}

function countsOf(session: Session): { step: number; skipped: number } {
  const bytes = memoryOf(session, session.run.adapters.state);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return { ...readStruct("lm_optimizer_state", view) };
}

/** Writes one element of the gradient. */
function plant(session: Session, element: number, value: number): void {
  const bytes = memoryOf(session, session.run.adapters.gradient);
  new DataView(bytes.buffer, bytes.byteOffset).setFloat32(4 * element, value, true);
}

function gradientIsZero(session: Session): boolean {
  return memoryOf(session, session.run.adapters.gradient).every((byte) => byte === 0);
}

async function train(session: Session, golden: Golden, steps: number, from = 0) {
  const results: StepResult[] = [];
  for (let step = from; step < from + steps; step++) {
    results.push(await session.trainStep(golden.batches[step % 3] ?? [], golden.settings));
  }
  return results;
}

const fp16 = (scaler: ScalerSettings = {}, setup: SessionSetup = {}): SessionSetup => ({
  precision: "fp16",
  scaler,
  ...setup,
});

test("Session trains in fp16 close to fp32, without a skip at the usual loss scale", async () => {
  for (const name of ["llama", "qwen2", "llama3-rope-tied"]) {
    const golden = await readGolden(name);
    await using session = await openGolden(golden, fp16());
    const results = await train(session, golden, golden.losses.length);
    for (const [step, { loss, skipped, lossScale, gradNorm }] of results.entries()) {
      assert.ok(Math.abs(loss - (golden.losses[step] ?? 0)) < 0.005, `${name} ${step}: ${loss}`);
      assert.deepEqual([skipped, lossScale], [false, 65536]);
      const ratio = gradNorm / (golden.gradNorms[step] ?? 1);
      assert.ok(Math.abs(ratio - 1) < 0.02, `${name} ${step}: norm ${gradNorm}`);
    }
  }
});

test("Session gives the same bits in fp16 for any threads, save points and execution mode", async () => {
  const golden = await readGolden("qwen2");
  const run = async (setup: SessionSetup) => {
    await using session = await openGolden(golden, fp16({ initScale: 2 ** 24 }, setup));
    const results = await train(session, golden, 12);
    return [JSON.stringify(results), optimizerBits(session)];
  };
  const reference = await run({ threads: 1 });
  assert.match(reference[0] ?? "", /"skipped":true.*"skipped":false/);
  for (const setup of [
    { threads: 3 },
    { threads: 2, policy: "checkpoint" },
    { threads: 2, policy: "dropMlp", mode: "eager" },
    { threads: 2, dims: { lossChunkTokens: 9 } },
  ] as const) {
    assert.deepEqual(await run(setup), reference, JSON.stringify(setup));
  }
});

for (const precision of ["fp32", "bf16", "fp16"] as const) {
  test(`Session leaves an update with a gradient that is not finite out, bit for bit, in ${precision}`, async () => {
    const golden = await readGolden("llama");
    await using session = await openGolden(golden, { precision });
    await train(session, golden, 3);
    const before = optimizerBits(session);
    const tensor = session.run.adapters.tensors[5];
    assert.ok(tensor);
    for (const [turn, value] of [Number.POSITIVE_INFINITY, Number.NaN].entries()) {
      const documents = golden.batches[0] ?? [];
      const labelled = await session.accumulate(documents);
      plant(session, tensor.element + 3, value);
      const result = await session.update(labelled, golden.settings);
      assert.ok(result.skipped);
      assert.equal(result.badTensor, tensor.name);
      assert.ok(Number.isFinite(result.loss), "the loss is reported apart from the gradient");
      assert.equal(result.lossScale, precision === "fp16" ? 65536 / 2 ** turn : 1);
      assert.equal(optimizerBits(session), before);
      assert.ok(gradientIsZero(session), "or the next step would be skipped too");
    }
    assert.deepEqual(countsOf(session), { step: 3, skipped: 2 });
    const [next] = await train(session, golden, 1);
    assert.equal(next?.skipped, false);
    assert.notEqual(optimizerBits(session), before);
    assert.deepEqual(countsOf(session), { step: 4, skipped: 2 });
  });
}

test("Session keeps an overflow of the first micro-batch to the end of the step", async () => {
  const golden = await readGolden("llama");
  await using session = await openGolden(golden, fp16());
  const before = optimizerBits(session);
  await session.accumulate(golden.batches[0] ?? []);
  plant(session, 0, Number.NEGATIVE_INFINITY);
  const labelled = await session.accumulate(golden.batches[1] ?? []);
  const { skipped } = await session.update(labelled, golden.settings);
  assert.ok(skipped);
  assert.equal(optimizerBits(session), before);
});

test("Session comes down from a loss scale that overflows, and then trains as from a good one", async () => {
  const golden = await readGolden("llama");
  await using high = await openGolden(golden, fp16({ initScale: 2 ** 40 }));
  const before = optimizerBits(high);
  const documents = golden.batches[0] ?? [];
  let [skips, scale] = [0, 2 ** 40];
  for (; skips < 40; skips++, scale /= 2) {
    const result = await high.trainStep(documents, golden.settings);
    assert.equal(result.lossScale, scale);
    if (!result.skipped) break;
    assert.equal(optimizerBits(high), before);
  }
  assert.ok(skips >= 10 && skips < 40, `${skips} skips`);
  assert.deepEqual(countsOf(high), { step: 1, skipped: skips });
  await using low = await openGolden(golden, fp16({ initScale: scale }));
  await low.trainStep(documents, golden.settings);
  assert.equal(optimizerBits(high), optimizerBits(low));
});

test("Session stays finite from a loss scale of 2^127 with a growth interval of 1", async () => {
  const golden = await readGolden("llama");
  const scaler = { initScale: 2 ** 127, growthInterval: 1 };
  await using session = await openGolden(golden, fp16(scaler));
  const results = await train(session, golden, 130);
  assert.ok(results.every(({ lossScale }) => lossScale > 0 && Number.isFinite(lossScale)));
  // It then grows every step until it overflows, so every other step is skipped.
  assert.ok(results.slice(-6).some(({ skipped }) => skipped));
  assert.ok(results.slice(-6).some(({ skipped }) => !skipped));
  const bytes = memoryOf(session, session.run.adapters.master);
  const masters = new Float32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4);
  assert.ok(masters.every(Number.isFinite));
});

test("Session works the learning rate out as learningRateAt() does, by applied updates", async () => {
  const golden = await readGolden("llama");
  for (const schedule of SCHEDULES) {
    await using session = await openGolden(golden, fp16());
    const over = { schedule, learningRate: 3e-4, warmupSteps: 3, totalSteps: 8 };
    const settings = { ...golden.settings, ...over };
    let applied = 0;
    for (let step = 0; step < 10; step++) {
      const labelled = await session.accumulate(golden.batches[0] ?? []);
      if (step % 4 === 1) plant(session, 7, Number.NaN);
      const { learningRate, skipped } = await session.update(labelled, settings);
      const want = learningRateAt(applied, over);
      assert.ok(Math.abs(learningRate - want) <= 1e-15 * want, `${schedule} ${step}`);
      assert.equal(skipped, step % 4 === 1);
      if (!skipped) applied++;
    }
  }
});

test("Session goes on with the same bits from the trainable memory of another, scaler and counts included", async () => {
  const golden = await readGolden("llama");
  const scaler = { initScale: 2 ** 22, growthInterval: 3 };
  await using whole = await openGolden(golden, fp16(scaler));
  const first = await train(whole, golden, 7);
  const { master, copy, m, v, state, scaler: scalerValue } = whole.run.adapters;
  const saved = [master, copy, m, v, state, scalerValue].map((value) =>
    value === null ? null : memoryOf(whole, value).slice(),
  );
  const rest = await train(whole, golden, 12, 7);
  assert.ok(first.some(({ skipped }) => skipped));
  assert.ok(new Set(rest.map(({ lossScale }) => lossScale)).size > 1);

  await using other = await openGolden(golden, fp16()); // another scaler: what is saved wins
  const now = other.run.adapters;
  const values = [now.master, now.copy, now.m, now.v, now.state, now.scaler];
  for (const [index, value] of values.entries()) {
    const bytes = saved[index];
    if (value !== null && bytes) memoryOf(other, value).set(bytes);
  }
  assert.deepEqual(await train(other, golden, 12, 7), rest);
  assert.equal(optimizerBits(other), optimizerBits(whole));
});

test("importAdapters() starts a run anew, its count of updates included", async () => {
  const golden = await readGolden("llama");
  await using session = await openGolden(golden, fp16());
  const first = await train(session, golden, 3);
  await importAdapters(session.executor, session.run, golden.adapter0.tensors);
  assert.deepEqual(await train(session, golden, 3), first);
  assert.deepEqual(countsOf(session), { step: 3, skipped: 0 });
});

test("loadWeights() brings bf16 weights to f16 and refuses what f16 cannot hold, by name", async () => {
  const golden = await readGolden("qwen2");
  await using session = await openGolden(golden, fp16());
  const { embedding } = session.run.weights;
  assert.equal(embedding.dtype, "f16");
  await using files = await openSafetensors(`${golden.folder}/model`);
  const entry = files.tensors.get("model.embed_tokens.weight");
  assert.ok(entry);
  const stored = new Uint8Array(entry.bytes);
  await files.read(entry, stored);
  const bytes = memoryOf(session, embedding);
  const halves = new Float16Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 2);
  const words = new Uint16Array(stored.buffer);
  const floats = new Float32Array(Uint32Array.from(words, (word) => word << 16).buffer);
  for (const [index, half] of halves.entries()) {
    assert.equal(half, Math.f16round(floats[index] as number), `element ${index}`);
  }

  await withScratch(async (dir) => {
    await cp(`${golden.folder}/model`, dir, { recursive: true });
    const tensor = "model.layers.1.mlp.down_proj.weight";
    const at = files.tensors.get(tensor)?.offset ?? 0;
    const handle = await open(join(dir, "model.safetensors"), "r+");
    await handle.write(new Uint8Array([0x80, 0x47]), 0, 2, at + 6); // 65536
    await handle.close();
    await using broken = await openSafetensors(dir);
    await using ring = session.executor.device.createFileRing(SMALL_RING);
    const load = () => loadWeights(session.executor, session.run, broken, ring);
    const named = /layers\.1\.mlp\.down_proj\.weight: 65536, at most 65504: use precision bf16/;
    await rejects(load, "UNSUPPORTED", named);
  });
});

const RECORDS = ["rack", "aim", "selfish", "love", "year", "cat"].map((word) => ({
  messages: [
    { role: "user", content: `Define: ${word}` },
    { role: "assistant", content: `The ${word} of another day.` },
  ],
}));
const OPTIONS = {
  model: `${DEMO}/model`,
  data: RECORDS,
  device: "cpu",
  batchSize: 2,
  lora: { rank: 4, alpha: 8 },
  learningRate: 1e-3,
  promptTokens: 0,
} as const;

test("LoraTrainer.steps() tells skipped steps and the loss scale, and ends with its data", async () => {
  await using trainer = await LoraTrainer.open({
    ...OPTIONS,
    precision: "fp16",
    initLossScale: 2 ** 26,
    schedule: "linear",
    epochs: 7,
  });
  const steps: StepInfo[] = [];
  for await (const step of trainer.steps()) steps.push(step);
  assert.equal(steps.length, 21);
  assert.equal(trainer.stepsDone, 21);
  const skipped = steps.filter((step) => step.skipped).length;
  assert.ok(skipped > 2 && skipped < 18, `${skipped} skipped`);
  for (const [index, step] of steps.entries()) {
    assert.equal(step.step, index + 1);
    assert.ok(Number.isFinite(step.loss));
    const next = steps[index + 1];
    if (next) assert.equal(next.lossScale, step.skipped ? step.lossScale / 2 : step.lossScale);
    if (next?.skipped)
      assert.equal(next.learningRate, step.skipped ? step.learningRate : next.learningRate);
  }
  assert.equal(steps.find((step) => !step.skipped)?.learningRate, 1e-3);
});

test("LoraTrainer.steps() stops where a gradient overflows at the lowest loss scale", async () => {
  const scales = { initLossScale: 2 ** 40, minLossScale: 2 ** 38 };
  await using trainer = await LoraTrainer.open({ ...OPTIONS, ...scales, precision: "fp16" });
  const seen: number[] = [];
  const run = async () => {
    for await (const { lossScale } of trainer.steps()) seen.push(lossScale);
  };
  await assert.rejects(run(), {
    code: "DEVICE",
    message:
      /at step 3: the gradient is not finite at the lowest loss scale, 274877906944: .*lora_/,
  });
  assert.deepEqual(seen, [2 ** 40, 2 ** 39]);
});

test("LoraTrainer.steps() stops where the loss itself is not finite, whatever the precision", async () => {
  for (const precision of ["fp32", "fp16"] as const) {
    const options = { ...OPTIONS, precision, learningRate: 1e30 } as const;
    await using trainer = await LoraTrainer.open(options);
    const run = async () => {
      for await (const _ of trainer.steps());
    };
    await assert.rejects(run(), { code: "DEVICE", message: /at step 2: the loss is not finite/ });
  }
});

test("checkStep() lets a run go on only where a lower loss scale may help", () => {
  const good = { loss: 1, gradNorm: 1, learningRate: 1, lossScale: 8, skipped: false };
  const clean: StepResult = { ...good, badTensor: null };
  const skipped = { ...clean, gradNorm: Number.NaN, skipped: true, badTensor: "layer.lora_A" };
  const check = (result: StepResult, precision: "fp32" | "bf16" | "fp16", minLossScale = 0) =>
    checkStep(7, result, { precision, minLossScale });
  check(clean, "fp32");
  check(skipped, "fp16");
  check(skipped, "fp16", 4);
  const message = /at step 7: the gradient is not finite: .* first in layer\.lora_A/;
  assert.throws(() => check(skipped, "bf16"), { code: "DEVICE", message });
  assert.throws(() => check(skipped, "fp32"), { code: "DEVICE", message });
  assert.throws(() => check(skipped, "fp16", 8), /at the lowest loss scale, 8/);
  const lost = { ...skipped, loss: Number.NaN };
  assert.throws(() => check(lost, "fp16"), /the loss is not finite: loss NaN/);
});

test("LoraTrainer follows fp32 on the demo for 20 steps of fp16", {
  timeout: 120_000,
}, async () => {
  const losses = async (precision: "fp32" | "fp16") => {
    await using trainer = await LoraTrainer.open({
      model: `${DEMO}/model`,
      data: `${DEMO}/train.jsonl`,
      device: "cpu",
      learningRate: 2e-3,
      promptTokens: 0,
      precision,
    });
    const seen: number[] = [];
    for await (const { step, loss, skipped } of trainer.steps()) {
      assert.equal(skipped, false);
      seen.push(loss);
      if (step === 20) break;
    }
    return seen;
  };
  const [single, half] = [await losses("fp32"), await losses("fp16")];
  for (const [step, loss] of half.entries()) {
    assert.ok(
      Math.abs(loss - (single[step] ?? 0)) < 0.02,
      `step ${step}: ${loss}, ${single[step]}`,
    );
  }
});
