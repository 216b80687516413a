import assert from "node:assert/strict";
import { test } from "node:test";
import { findProfile } from "../../src/api/plan/profiles.ts";
import { describePoints } from "../../src/api/plan/save_points.ts";
import { fullLoad } from "../../src/api/plan/time.ts";
import { type FitOptions, FitSearch, largestTokens } from "../../src/api/train/fit_run.ts";
import type { RunSpec } from "../../src/api/train/run_plan.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { MODELS, specOf } from "./models.ts";

const GIB = 2 ** 30;

function searchOf(spec: RunSpec, options: Partial<FitOptions> = {}): FitSearch {
  const profile = findProfile("h200");
  assert.ok(profile !== null);
  const step = fullLoad(spec.dims.tokensPerMicroBatch);
  const choices = { savePoints: null, lossChunkTokens: null, weights: "resident" } as const;
  return new FitSearch(spec, { ...choices, profile, step, ...options });
}

const refuses =
  (...texts: RegExp[]) =>
  (error: unknown) =>
    error instanceof LoramemError &&
    error.code === "OUT_OF_MEMORY" &&
    texts.every((text) => text.test(error.message));

test("FitSearch estimates bytes and seconds of every mix exactly, with resident and with streamed weights", () => {
  for (const name of Object.keys(MODELS) as (keyof typeof MODELS)[]) {
    const search = searchOf(specOf(name, { tokensPerMicroBatch: 1536 }), { weights: null });
    const { candidates } = search;
    // Some of the thousands of mixes, and all of the small model.
    const stride = name === "four layers" ? 1 : 1 + Math.floor(candidates.length / 18);
    for (let index = 0; index < candidates.length; index += stride) {
      const candidate = candidates[index];
      assert.ok(candidate !== undefined);
      const planned = search.plan(candidate).plan;
      const where = `${name} ${describePoints(candidate.savePoints)} ${candidate.lossChunkTokens}`;
      assert.equal(planned.deviceBytes, candidate.deviceBytes, where);
      assert.equal(planned.classes.host, candidate.hostBytes, where);
      assert.ok(Math.abs((planned.forecast?.seconds ?? 0) / candidate.seconds - 1) < 1e-9, where);
      for (const { bytes, lowerBound } of planned.programs.values())
        assert.equal(bytes, lowerBound, where);
    }
  }
});

test("FitSearch.fit() takes the fastest combination that fits, to the byte", () => {
  const search = searchOf(specOf("Llama-3.1-8B"));
  const front = search.frontier();
  assert.ok(front.length > 100);
  for (const index of [0, 1, Math.floor(front.length / 2), front.length - 1]) {
    const candidate = front[index];
    assert.ok(candidate !== undefined);
    const { plan, savePoints } = search.fit(candidate.deviceBytes);
    assert.equal(plan.deviceBytes, candidate.deviceBytes);
    assert.deepEqual(savePoints, candidate.savePoints);
    if (index === 0) continue;
    const tighter = search.fit(candidate.deviceBytes - 1);
    assert.ok((tighter.plan.forecast?.seconds ?? 0) >= candidate.seconds);
    assert.ok(tighter.plan.deviceBytes < candidate.deviceBytes);
  }
  assert.equal(describePoints(search.fit(1000 * GIB).savePoints), "keep");
});

test("FitSearch.fit() plans Llama-3.1-8B at 24, 20, 18 and 16 GiB and refuses 15.8 and 8 with what helps", () => {
  const search = searchOf(specOf("Llama-3.1-8B", { tokensPerMicroBatch: 4096 }));
  for (const budget of [24, 20, 18, 16]) {
    assert.ok(search.fit(budget * GIB).plan.deviceBytes <= budget * GIB);
  }
  const smallest = search.smallest.deviceBytes;
  assert.throws(
    () => search.fit(15.8 * GIB),
    refuses(
      /15\.80 GiB given/,
      new RegExp(`${smallest} bytes`),
      /weights 14\.96 GiB, trainable 720\.00 MiB, activations/,
      /set tokensPerMicroBatch to \d+ or less/,
    ),
  );
  assert.throws(
    () => search.fit(8 * GIB),
    refuses(
      /8\.00 GiB given/,
      /the weights alone do not fit/,
      /set weights to "auto" or "stream"/,
      /a smaller model/,
    ),
  );
  assert.throws(
    () => search.fit(15.2 * GIB),
    refuses(/weights and adapters alone do not fit/, /lower the LoRA rank/),
  );
  assert.ok(search.fit(smallest).plan.deviceBytes === smallest);
});

test("FitSearch.fit() streams weights where the budget needs it, and only there", () => {
  for (const tokensPerMicroBatch of [1024, 8192]) {
    const search = searchOf(specOf("Llama-3.1-8B", { tokensPerMicroBatch }), { weights: null });
    const resident = searchOf(specOf("Llama-3.1-8B", { tokensPerMicroBatch }));
    for (const budget of [6, 8, 16]) {
      const { plan, spec } = search.fit(budget * GIB);
      assert.ok(plan.deviceBytes <= budget * GIB);
      // 32 layers of 436 MB, and two windows for them.
      const layers = 32 * 436_224_000;
      const asStreamed = spec.weights === "stream";
      assert.equal(asStreamed, resident.smallest.deviceBytes > budget * GIB, `${budget} GiB`);
      if (asStreamed) assert.ok(plan.classes.host >= layers && plan.classes.host < 1.2 * layers);
    }
    assert.equal(search.fit(24 * GIB).spec.weights, "resident");
  }
});

test("FitSearch.fit() keeps to the host budget, and names it where it is what is short", () => {
  const spec = specOf("Llama-3.1-8B", { tokensPerMicroBatch: 4096 });
  const fit = (hostBudget: number, budget: number) =>
    searchOf(spec, { weights: null, hostBudget }).fit(budget * GIB);
  assert.ok(fit(13.5 * GIB, 6).plan.classes.host <= 13.5 * GIB);
  assert.equal(fit(0, 24).plan.classes.host, 0);
  // Where it does not hold the layers, they are in a file.
  assert.equal(fit(8 * GIB, 6).spec.weights, "file");
  assert.equal(fit(8 * GIB, 6).plan.classes.file, 32 * 436_224_000);
  assert.throws(
    () => searchOf(spec, { weights: "stream", hostBudget: 8 * GIB }).fit(6 * GIB),
    refuses(
      /6\.00 GiB given/,
      /give 13\.\d\d GiB of host memory with hostMemoryBudget \(8\.00 GiB now\)/,
    ),
  );
});

test("FitSearch keeps to save points and a loss chunk that were asked for", () => {
  const spec = specOf("Qwen2.5-0.5B");
  const savePoints = Array.from({ length: 24 }, () => "dropMlp" as const);
  const search = searchOf(spec, { savePoints, lossChunkTokens: 192 });
  assert.equal(search.candidates.length, 1);
  const { plan, spec: planned } = search.fit(100 * GIB);
  assert.equal(planned.dims.lossChunkTokens, 192);
  assert.throws(
    () => search.fit(plan.deviceBytes - 1),
    refuses(/set savePoints to "auto"/, /set lossChunkTokens to "auto"/),
  );
});

// Mutant: the chunks of the CPU for both.
test("FitSearch takes one loss chunk on a GPU, where its rows decide on the order of sums, and several on the CPU", () => {
  const chunks = (backend: "cpu" | "cuda") => [
    ...new Set(
      searchOf({ ...specOf("Llama-3.2-1B"), backend }).candidates.map((c) => c.lossChunkTokens),
    ),
  ];
  assert.deepEqual(chunks("cuda"), [512]);
  assert.deepEqual(
    chunks("cpu").toSorted((a, b) => a - b),
    [128, 256, 512, 1024],
  );
  const search = searchOf(specOf("Qwen2.5-0.5B"));
  assert.throws(
    () => search.fit(search.smallest.deviceBytes - 1),
    refuses(/set lossChunkTokens to 128/),
  );
});

test("FitSearch never changes what a step computes on", () => {
  const spec = specOf("Llama-3.2-1B");
  const search = searchOf(spec);
  for (const candidate of [search.smallest, search.candidates[0]]) {
    assert.ok(candidate !== undefined);
    const { lossChunkTokens: _, ...dims } = search.plan(candidate).spec.dims;
    const { lossChunkTokens: __, ...asked } = spec.dims;
    assert.deepEqual(dims, asked);
  }
});

// Mutant: leave the mixes whose last layer keeps everything out of leanest().
test("largestTokens() is the most that fits, with host memory and without", () => {
  const spec = specOf("Llama-3.2-1B");
  for (const hostBudget of [0, 4 * GIB]) {
    const { options } = searchOf(spec, { hostBudget });
    const budget = 6 * GIB;
    const tokens = largestTokens(spec, options, budget, 131_072);
    assert.ok(tokens !== null && tokens % 64 === 0);
    const bytes = (tokensPerMicroBatch: number) =>
      searchOf(specOf("Llama-3.2-1B", { tokensPerMicroBatch }), { hostBudget }).smallest
        .deviceBytes;
    assert.ok(bytes(tokens) <= budget);
    assert.ok(bytes(tokens + 64) > budget, `host ${hostBudget}`);
    assert.equal(largestTokens(spec, options, GIB, 131_072), null);
  }
});
