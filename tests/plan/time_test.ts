import assert from "node:assert/strict";
import { test } from "node:test";
import type { Load, Work } from "../../src/api/graph/cost.ts";
import type { AttentionShape } from "../../src/api/graph/ops/attention.ts";
import type { Program } from "../../src/api/graph/program.ts";
import { modelFlops, peakFlops } from "../../src/api/plan/model_flops.ts";
import { findProfile, PROFILES, parseProfile, profileOf } from "../../src/api/plan/profiles.ts";
import { arrange, SAVE_POLICIES } from "../../src/api/plan/save_points.ts";
import { forecastStep, fullLoad, workSeconds } from "../../src/api/plan/time.ts";
import { planRun, type RunPlan } from "../../src/api/train/run_plan.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { MODELS, planModel, specOf } from "./models.ts";

function trainOf({ plan }: RunPlan): Program {
  const program = plan.programs.get("train")?.program;
  assert.ok(program !== undefined);
  return program;
}

/** Arithmetic by unit. */
function flops(program: Program, load: Load): Record<Work["unit"], number> {
  const sums = { matrix: 0, attention: 0, memory: 0 };
  for (const op of program.ops) {
    for (const work of op.kind.cost(op.attributes, load)) sums[work.unit] += work.flops;
  }
  return sums;
}

test("OpKind.cost() adds up to the arithmetic of a LoRA step in closed form", () => {
  const tokens = 2048;
  const { load } = fullLoad(tokens);
  const dims = { tokensPerMicroBatch: tokens };
  for (const name of ["Llama-3.1-8B", "Llama-3.2-1B", "Qwen2.5-0.5B"] as const) {
    const run = planModel(name, "keep", dims);
    const { config, targets } = run.spec;
    const { hiddenSize: h, intermediateSize: i, layers, headDim } = config;
    const [q, kv] = [config.heads * headDim, config.kvHeads * headDim];
    const perLayer = h * (q + 2 * kv) + q * h + 3 * h * i;
    const rankTimesWidths = targets.reduce(
      (sum, { rank, inFeatures, outFeatures }) => sum + rank * (inFeatures + outFeatures),
      0,
    );
    const sums = flops(trainOf(run), load);
    // Forward and the gradient of the input, both once; nobody wants the gradient of the embedding.
    const linears = 4 * layers * perLayer - 2 * h * (q + 2 * kv);
    const head = 4 * h * config.vocabSize;
    // s and y forward; ds, dB, dA and the adapter's part of dx backward, the last one not in the first layer's q, k, v.
    const lora = 6 * rankTimesWidths - 2 * 3 * 16 * h;
    assert.ok(Math.abs(sums.matrix / (tokens * (linears + head + lora)) - 1) < 1e-9, name);
    const pairs = (tokens * (tokens + 1)) / 2;
    assert.equal(sums.attention, 14 * layers * q * pairs, name);

    // Computing again: gate|up alone, or all of a layer but its last product.
    const dropMlp = flops(trainOf(planModel(name, "dropMlp", dims)), load);
    const ranks = 16;
    const up = (width: number) => 2 * ranks * width;
    const gateUp = tokens * layers * (4 * h * i + up(2 * i));
    assert.ok(Math.abs((dropMlp.matrix - sums.matrix) / gateUp - 1) < 1e-9, name);
    const checkpoint = flops(trainOf(planModel(name, "checkpoint", dims)), load);
    const down = 2 * (h * i) + up(h);
    const downs = 2 * ranks * (h * 3 + q + h * 2); // s of every group but the last, which is kept
    const again = tokens * layers * (2 * perLayer + up(q + 2 * kv + h + 2 * i + h) - down + downs);
    assert.ok(Math.abs((checkpoint.matrix - sums.matrix) / again - 1) < 1e-9, name);
    assert.equal(checkpoint.attention - sums.attention, 4 * layers * q * pairs, name);
  }
});

test("OpKind.cost() follows the load: rows, labels, and pairs of attention", () => {
  const program = trainOf(planModel("Llama-3.2-1B", "keep", { tokensPerMicroBatch: 4096 }));
  const all = flops(program, fullLoad(4096).load);
  const half = flops(program, { tokens: 2048, labelled: 2048, pairs: 1000, windowPairs: 0 });
  assert.ok(Math.abs(half.matrix / all.matrix - 0.5) < 1e-9);
  assert.equal(half.attention / 1000, all.attention / ((4096 * 4097) / 2));
  const unlabelled = flops(program, { tokens: 4096, labelled: 0, pairs: 0, windowPairs: 0 });
  assert.ok(Math.abs(all.matrix - unlabelled.matrix - 4 * 4096 * 2048 * 128_256) < 1);
});

test("OpKind.cost() of a layer with a window follows the pairs inside it, in every program", () => {
  const window = 64;
  const spec = specOf("four layers", { tokensPerMicroBatch: 1024 });
  const windows = [0, 0, 0, window];
  const run = planRun({ ...spec, config: { ...spec.config, windows } }, "keep");
  for (const [name, kind] of [
    ["train", "attention"],
    ["evaluate", "attention"],
    ["prefill", "cachedAttention"],
    ["decode", "cachedAttention"],
  ] as const) {
    const ops =
      run.plan.programs.get(name)?.program.ops.filter((op) => op.kind.name === kind) ?? [];
    const shapes = ops.map(({ attributes }) => (attributes as { shape: AttentionShape }).shape);
    assert.deepEqual(
      shapes.map((shape) => shape.window),
      windows,
    );
  }
  // Scratch for ordered sums only where the kernel makes them.
  const backward = trainOf(run).ops.filter((op) => op.kind.name === "attentionBackward");
  const scratch = backward.map(({ uses }) => (uses.scratch ?? []).map(({ name }) => name));
  assert.deepEqual(scratch, [["delta"], ...Array(3).fill(["delta", "dqSums"])]);

  const { heads, headDim } = spec.config;
  const { load } = fullLoad(1024, window);
  const inside = (window * (window + 1)) / 2 + (1024 - window) * window;
  assert.equal(load.windowPairs, inside);
  const pairs = 3 * load.pairs + inside;
  assert.equal(flops(trainOf(run), load).attention, 14 * heads * headDim * pairs);
  const step = modelFlops(trainOf(run), 1024);
  const slid = step({ ...load, windowPairs: 0 });
  assert.ok(Math.abs((step(load) - slid) / (14 * heads * headDim * inside) - 1) < 1e-9);
});

test("forecastStep() puts keep before dropMlp before checkpoint on every device, and mixes in between", () => {
  for (const name of Object.keys(MODELS) as (keyof typeof MODELS)[]) {
    const plans = SAVE_POLICIES.map((policy) => planModel(name, policy).set.programs);
    const { layers } = planModel(name, "keep").spec.config;
    const mix = arrange({ keep: layers / 2, dropMlp: 0, checkpoint: layers / 2 });
    const mixed = planModel(name, mix).set.programs;
    for (const profile of PROFILES) {
      const seconds = (programs: readonly Program[]) =>
        forecastStep(programs, profile, fullLoad(4096)).seconds;
      const [keep, dropMlp, checkpoint] = plans.map(seconds) as [number, number, number];
      assert.ok(keep < dropMlp && dropMlp < checkpoint, `${name} on ${profile.name}`);
      const between = seconds(mixed);
      assert.ok(keep < between && between < checkpoint);
    }
  }
});

test("forecastStep() counts micro-batches, tokens and phases", () => {
  const { programs } = planModel("Llama-3.1-8B", "checkpoint").set;
  const [profile] = PROFILES;
  assert.ok(profile !== undefined);
  const { load } = fullLoad(4096);
  const one = forecastStep(programs, profile, { load, microBatches: 1 });
  const three = forecastStep(programs, profile, { load, microBatches: 3 });
  assert.ok(Math.abs(three.phases.forward / one.phases.forward - 3) < 1e-9);
  assert.equal(three.phases.optimizer, one.phases.optimizer);
  assert.ok(Math.abs((three.tokensPerSecond * three.seconds) / (3 * 4096) - 1) < 1e-9);
  const parts = Object.values(one.phases).reduce((sum, part) => sum + part, 0);
  assert.ok(Math.abs(parts / one.seconds - 1) < 1e-9);
  assert.ok(one.phases.recompute > 0);
});

test("modelFlops() counts forward and backward once, for any load", () => {
  const dims = { tokensPerMicroBatch: 4096, lossChunkTokens: 512 };
  const keep = trainOf(planModel("Llama-3.2-1B", "keep", dims));
  const ofKeep = modelFlops(keep, 4096);
  const ofCheckpoint = modelFlops(trainOf(planModel("Llama-3.2-1B", "checkpoint", dims)), 4096);
  for (const load of [
    fullLoad(4096).load,
    { tokens: 1000, labelled: 700, pairs: 123_456, windowPairs: 0 },
    { tokens: 4096, labelled: 1, pairs: 4096, windowPairs: 0 },
  ]) {
    const { matrix, attention, memory } = flops(keep, load);
    const counted = matrix + attention + memory;
    assert.ok(Math.abs(ofKeep(load) / counted - 1) < 1e-9);
    // Computing again is no work of the model.
    assert.ok(Math.abs(ofCheckpoint(load) / counted - 1) < 1e-9);
  }
});

test("peakFlops() is the data sheet's, and unknown without one", () => {
  const [h200, cpu] = [findProfile("h200"), findProfile("cpu")];
  assert.ok(h200 !== null && cpu !== null);
  assert.equal(peakFlops(h200, "bf16"), 989e12);
  assert.equal(peakFlops(h200, "f32"), 67e12);
  assert.equal(peakFlops(cpu, "bf16"), null);
});

test("workSeconds() is limited by arithmetic or by memory", () => {
  const rates = { single: 1e12, half: 4e12 };
  const profile = parseProfile(
    { name: "x", title: "x", matrix: rates, attention: rates, bandwidth: 1e11, launch: 1e-6 },
    "x",
  );
  const seconds = (work: Partial<Work>) =>
    workSeconds({ flops: 0, bytes: 0, unit: "matrix", type: "bf16", ...work }, profile);
  assert.ok(Math.abs(seconds({ flops: 4e12 }) - 1.000001) < 1e-9);
  assert.ok(Math.abs(seconds({ flops: 4e12, type: "f32" }) - 4.000001) < 1e-9);
  assert.ok(Math.abs(seconds({ flops: 4e12, bytes: 2e11 }) - 2.000001) < 1e-9);
  assert.ok(Math.abs(seconds({ flops: 4e12, bytes: 1e11, unit: "memory" }) - 1.000001) < 1e-9);
});

test("profileOf() knows devices by the names of their drivers", () => {
  for (const [name, profile] of [
    ["NVIDIA H200", "h200"],
    ["NVIDIA A100-SXM4-80GB", "a100"],
    ["NVIDIA GeForce RTX 4090", "rtx-4090"],
    ["NVIDIA GeForce RTX 3090", "rtx-3090"],
  ] as const) {
    assert.equal(profileOf("cuda:0", name).name, profile);
  }
  assert.equal(profileOf("cpu", "AMD EPYC").name, "cpu");
  assert.match(profileOf("cuda:1", "NVIDIA L4").title, /for want of one for NVIDIA L4/);
});

test("parseProfile() names the field that is wrong", () => {
  const rates = { single: 1, half: 1 };
  const good = { name: "x", title: "x", matrix: rates, attention: rates, bandwidth: 1, launch: 1 };
  for (const [change, what] of [
    [{ matrix: { single: 1 } }, /matrix\.half is undefined/],
    [{ bandwidth: "fast" }, /bandwidth is "fast"/],
    [{ title: 7 }, /title is 7/],
    [{ memory: -4 }, /memory is -4/],
  ] as const) {
    assert.throws(
      () => parseProfile({ ...good, ...change }, "mine.json"),
      (error: unknown) => error instanceof LoramemError && what.test(error.message),
    );
  }
  assert.throws(() => parseProfile(null, "mine.json"), /mine\.json/);
});
