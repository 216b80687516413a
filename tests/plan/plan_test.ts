import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import type { Value } from "../../src/api/graph/value.ts";
import { linearModules } from "../../src/api/nn/config_tensors.ts";
import { resolveLoraTargets } from "../../src/api/nn/lora_config.ts";
import { keptBytesOfLayer } from "../../src/api/plan/report.ts";
import { SAVE_POLICIES } from "../../src/api/plan/save_points.ts";
import { type PlacedValues, verifyProgram } from "../../src/api/plan/verify.ts";
import { planRun, WEIGHT_PLACES } from "../../src/api/train/run_plan.ts";
import { DIMS, MODELS, planModel, specOf } from "./models.ts";
import { shrunkSlots } from "./shrunk_slots.ts";

const PROJECTIONS = ["q", "k", "v", "o", "gate", "up", "down"].map((name) => `${name}_proj`);

test("makePlan() of Llama-3.1-8B keeps about 95 and 8 KB per token and layer", () => {
  const perToken = (policy: "keep" | "checkpoint") => {
    const bytes = keptBytesOfLayer(planModel("Llama-3.1-8B", policy).plan, 5) ?? 0;
    return bytes / DIMS.tokensPerMicroBatch / 1000;
  };
  assert.ok(Math.abs(perToken("keep") - 95) < 2, String(perToken("keep")));
  assert.ok(Math.abs(perToken("checkpoint") - 8.2) < 0.2, String(perToken("checkpoint")));
});

test("makePlan() lists at most 40 native calls per layer and step", () => {
  for (const policy of SAVE_POLICIES) {
    const { program } = planModel("Llama-3.1-8B", policy).plan.programs.get("train") ?? {};
    for (let layer = 0; layer < 32; layer++) {
      const ops = program?.ops.filter((op) => op.layer === layer) ?? [];
      // The MLP in tiles is one op of several calls.
      const calls = ops.filter((op) => !op.kind.name.startsWith("tiled")).length;
      assert.ok(calls > 15 && calls <= 40, `${policy}, layer ${layer}: ${calls} calls`);
    }
  }
});

test("makePlan() meets the lower bound on every program of real models", () => {
  for (const name of Object.keys(MODELS) as (keyof typeof MODELS)[]) {
    for (const policy of SAVE_POLICIES) {
      for (const planned of planModel(name, policy).plan.programs.values()) {
        assert.equal(
          planned.bytes,
          planned.lowerBound,
          `${name} ${policy} ${planned.program.name}`,
        );
      }
    }
  }
});

// Mutant: without the upper end in nested(), in placement.ts.
test("makePlan() meets the lower bound under any policies, sizes, LoRA and precision", () => {
  const upTo = (max: number) => fc.integer({ min: 1, max });
  const oneOf = <T>(values: readonly T[]) => fc.constantFrom(...values);
  const property = fc.property(
    oneOf(Object.keys(MODELS) as (keyof typeof MODELS)[]),
    fc.array(oneOf(SAVE_POLICIES), { minLength: 32, maxLength: 32 }),
    fc.record({ tokens: upTo(120), chunk: upTo(16), documents: upTo(30), prefill: upTo(8) }),
    fc.record({ rank: upTo(256), targetModules: fc.subarray(PROJECTIONS, { minLength: 1 }) }),
    oneOf(["bf16", "fp16", "fp32"] as const),
    oneOf(WEIGHT_PLACES),
    (name, points, { tokens, chunk, documents, prefill }, lora, precision, weights) => {
      const spec = specOf(name, {
        tokensPerMicroBatch: 64 * tokens,
        documentsPerMicroBatch: documents,
        lossChunkTokens: 64 * chunk,
        prefillTokens: 64 * prefill,
      });
      const targets = resolveLoraTargets(linearModules(spec.config), { ...lora, alpha: 32 });
      const run = { ...spec, targets, precision, weights };
      const { plan } = planRun(run, points.slice(0, spec.config.layers));
      for (const { bytes, lowerBound, program } of plan.programs.values())
        assert.equal(bytes, lowerBound, program.name);
    },
  );
  fc.assert(property, { seed: 5, numRuns: 60 });
});

test("makePlan() gives what several programs carry one address", () => {
  const { plan, set } = planModel("Qwen2.5-0.5B", "keep");
  const { incoming, block } = set.batch;
  // The next micro-batch may arrive while any program runs.
  for (const { program } of plan.programs.values()) assert.equal(program.carried[0], incoming);
  assert.equal(plan.slot(incoming).offset, 0);
  const behind = plan.slot(incoming).bytes;
  assert.equal(plan.slot(block).offset, behind);
  assert.equal(plan.slot(set.generation?.block as Value).offset, behind);
});

test("verifyProgram() refuses every slot that is 256 bytes too small", () => {
  const { plan } = planModel("Qwen2.5-0.5B", "checkpoint");
  const { checked, accepted } = shrunkSlots(plan);
  assert.ok(checked > 1000, `${checked} slots`);
  assert.deepEqual(accepted, []);
});

test("verifyProgram() finds a value whose memory is taken while it is needed", () => {
  const { plan } = planModel("Qwen2.5-0.5B", "keep");
  const { program, buffers } = plan.programs.get("train") ?? {};
  assert.ok(program !== undefined && buffers !== undefined);
  // The gate|up of layer 0 lives from forward to backward; put a short-lived value of layer 1 over it.
  const kept = buffers.find(({ tenants }) => tenants.some(({ value }) => value.role === "gateUp"));
  const guest = buffers.find(
    ({ tenants }) => tenants[0]?.value.name === "qkv.linear" && tenants[0].value.layer === 1,
  );
  const [victim, intruder] = [kept?.tenants[0]?.value, guest?.tenants[0]?.value];
  assert.ok(victim !== undefined && intruder !== undefined);
  const faulty: PlacedValues = {
    classes: plan.classes,
    resident: plan.resident,
    slot: (value) =>
      value === intruder
        ? { ...plan.slot(value), offset: plan.slot(victim).offset }
        : plan.slot(value),
  };
  assert.throws(() => verifyProgram(program, faulty), /overwritten before its last use/);
});

test("String(plan) names classes, programs and the peak", () => {
  const text = String(planModel("Qwen2.5-0.5B", "keep").plan);
  for (const part of [
    "weights",
    "trainable",
    "activations",
    "staging",
    "Peak: train",
    "0.000 % over",
  ]) {
    assert.ok(text.includes(part), part);
  }
});

test("makePlan() gives the backward pass of attention room for ordered sums where a GPU gains from it", () => {
  const workspaces = (name: keyof typeof MODELS, backend: "cpu" | "cuda", T = 4096) => {
    const spec = specOf(name, { tokensPerMicroBatch: T });
    const { plan } = planRun({ ...spec, backend }, "keep");
    const { buffers = [] } = plan.programs.get("train") ?? {};
    return buffers.filter(({ tenants }) => tenants[0]?.value.name === "dqSums");
  };
  // What the header asks for: T D Hq sums, 2 T D Hk more where rows are few, a turn for every 16 rows and document of every
  // head, and 4 words.
  for (const [T, heads] of [
    [2048, 32 + 2 * 8],
    [4096, 32],
  ] as const) {
    const bytes = 4 * (T * 64 * heads + (32 + 8) * (T / 16 + DIMS.documentsPerMicroBatch) + 4);
    const all = workspaces("Llama-3.2-1B", "cuda", T);
    assert.equal(all.length, 16);
    assert.ok(all.every((buffer) => buffer.bytes === bytes && buffer.first === buffer.last));
  }
  assert.equal(workspaces("Llama-3.1-8B", "cuda").length, 32);
  assert.equal(workspaces("Llama-3.2-1B", "cpu").length, 0);
});
