/** "Planned equals observed": proof (a) to (d) of ARCHITECTURE.md section 2 for 25 configurations on every device. */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { Precision } from "../../src/api/amp/precision.ts";
import type { Document } from "../../src/api/data/conversation.ts";
import type { ProgramName } from "../../src/api/graph/program.ts";
import { aligned, type Value } from "../../src/api/graph/value.ts";
import { findProfile } from "../../src/api/plan/profiles.ts";
import { parsePoints, type SavePoints } from "../../src/api/plan/save_points.ts";
import { fullLoad } from "../../src/api/plan/time.ts";
import { exportAdapters } from "../../src/api/train/adapter_state.ts";
import { FitSearch } from "../../src/api/train/fit_run.ts";
import type { WeightPlace } from "../../src/api/train/run_plan.ts";
import type { Session } from "../../src/api/train/session.ts";
import { shrunkSlots } from "../plan/shrunk_slots.ts";
import { deepGolden } from "./deep.ts";
import { shadowRun } from "./shadow.ts";
import {
  type Golden,
  KINDS,
  openGolden,
  planGolden,
  readGolden,
  type SessionSetup,
  SMALL_RING,
} from "./support.ts";

/** Golden case, precision, loss chunk (a divisor of the 78 labels), save points or the share of the way from the leanest
 * to the fastest plan that the budget allows, and rows of a tile of the MLP. Golden models have two layers. */
const CONFIGURATIONS: readonly (readonly [string, Precision, number, string | number, number?])[] =
  [
    ["llama", "fp32", 39, "keep"],
    ["llama", "fp32", 39, "dropMlp"],
    ["llama", "fp32", 39, "checkpoint"],
    ["llama", "fp32", 26, "1 keep + 1 checkpoint"],
    ["llama", "fp32", 13, "1 keep + 1 dropMlp"],
    ["llama", "fp32", 78, "1 dropMlp + 1 checkpoint"],
    ["llama", "bf16", 39, "keep"],
    ["llama", "bf16", 26, "dropMlp"],
    ["llama", "bf16", 78, "checkpoint"],
    ["llama", "fp32", 26, 0],
    ["llama", "bf16", 39, 0.5],
    ["llama", "fp32", 13, 0.8],
    ["qwen2", "fp32", 39, "keep"],
    ["qwen2", "fp32", 39, "dropMlp"],
    ["qwen2", "fp32", 39, "checkpoint"],
    ["qwen2", "bf16", 13, "1 keep + 1 dropMlp"],
    ["qwen2", "bf16", 78, "1 dropMlp + 1 checkpoint"],
    ["qwen2", "fp32", 26, 0.3],
    ["qwen2", "bf16", 39, 0.6],
    ["qwen2", "fp16", 39, "1 keep + 1 checkpoint"],
    ["llama3-rope-tied", "bf16", 39, "keep"],
    ["llama3-rope-tied", "bf16", 26, "1 keep + 1 checkpoint"],
    ["llama+qv-only", "fp32", 39, "dropMlp"],
    ["llama+rank-pattern", "fp32", 39, "1 keep + 1 checkpoint"],
    ["llama+rank-pattern", "bf16", 26, "checkpoint"],
    ["llama", "fp32", 39, "checkpoint", 16],
    ["qwen2", "bf16", 26, "1 keep + 1 checkpoint", 27],
    ["llama+rank-pattern", "fp32", 39, "1 dropMlp + 1 checkpoint", 48],
  ];

/** The same with five layers whose weights may be streamed. */
const DEEP: readonly (readonly [string, Precision, number, string, WeightPlace])[] = [
  ["llama", "fp32", 39, "offload", "resident"],
  ["llama", "fp32", 26, "1 keep + 1 dropMlp + 1 checkpoint + 2 offload", "stream"],
  ["llama", "bf16", 39, "keep", "stream"],
  ["qwen2", "fp32", 13, "offload", "stream"],
  ["qwen2", "bf16", 39, "1 keep + 4 offload", "stream"],
  ["qwen2", "fp16", 26, "2 checkpoint + 3 offload", "stream"],
  ["llama", "bf16", 39, "checkpoint", "file"],
  ["qwen2", "fp16", 26, "2 keep + 3 offload", "file"],
];

/** Documents that fill a micro-batch to the last token, with every label that is possible. */
function fullDocuments(documents: readonly Document[]): Document[] {
  return documents.map(({ ids, where }) => ({
    ids,
    labelled: new Uint8Array(ids.length).fill(1).fill(0, 0, 1),
    where,
  }));
}

/** The save points of a configuration. */
async function pointsOf(
  golden: Golden,
  setup: Pick<SessionSetup, "device" | "precision">,
  lossChunkTokens: number,
  wanted: string | number,
): Promise<SavePoints> {
  const { spec } = await planGolden(golden, { ...setup, dims: { lossChunkTokens } });
  if (typeof wanted === "string") return parsePoints(wanted, spec.config.layers);
  const profile = findProfile("cpu");
  assert.ok(profile !== null);
  const step = fullLoad(spec.dims.tokensPerMicroBatch);
  const choices = { savePoints: null, lossChunkTokens, weights: "resident" } as const;
  const search = new FitSearch(spec, { ...choices, hostBudget: 0, profile, step });
  const front = search.frontier();
  const [low, high] = [front[0]?.deviceBytes ?? 0, front.at(-1)?.deviceBytes ?? 0];
  return search.fit(low + wanted * (high - low)).savePoints;
}

/** Memory of the device and of the process, as counted by the library. */
function counters({ executor }: Session): Readonly<Record<string, number>> {
  const { kernelLaunches: _, heapAllocs, ...memory } = executor.device.stats();
  // The read of a layer from a file takes a description on the heap.
  return executor.plan.classes.file === 0 ? { ...memory, heapAllocs } : memory;
}

/**
 * What a GPU need not use to its end in 16-bit precision. The gradient of s = scale x A^T is planned in fp32, as it is
 * stored on the CPU, and kept in 16 bits with lines padded to whole 16-byte words, which the fp32 room always holds. The
 * ordered sums of attention have a turn for every block of rows of the worst division into documents.
 */
function isUpperBound({ executor, run }: Session, { name }: Value): boolean {
  const sixteenBits = executor.device.kind !== "cpu" && run.spec.precision !== "fp32";
  return sixteenBits && /^(d\(.*\.s\)|dqSums)$/.test(name);
}

/** Proof (a): every op touches declared memory only, and the highest byte touched is the planned peak. */
async function proveTouched(session: Session, documents: readonly Document[]): Promise<void> {
  const [batch] = session.pack(documents);
  assert.ok(batch !== undefined);
  // An ordinary run gives the bits to compare with.
  const labelled = await session.accumulate(documents);
  const expected = await exportAdapters(session.executor, session.run, "gradient");
  session.executor.clear(session.run.adapters.gradient);
  const programs: ProgramName[] = [
    "train",
    "optimizer",
    "evaluate",
    "evaluateBase",
    "logits",
    "logitsBase",
  ];
  let highest = 0;
  for (const program of programs) {
    await session.stage(batch, 1 / labelled);
    const report = await shadowRun(session, program, session.headChunks(batch));
    highest = Math.max(highest, report.highest);
    const planned = session.executor.plan.programs.get(program);
    assert.ok(planned !== undefined && report.ops > 0);
    assert.ok(aligned(report.highest) <= planned.bytes, program);
    assert.equal(planned.bytes, planned.lowerBound, program);
    if (program !== "train") continue;
    assert.deepEqual(await exportAdapters(session.executor, session.run, "gradient"), expected);
    assert.equal(aligned(report.highest), planned.bytes, "highest byte touched by training");
    // Every activation is used to its last granule: no slot could be 256 bytes smaller.
    const loose = planned.buffers.flatMap(({ tenants }) => {
      const values = tenants
        .map(({ value }): Value => value)
        .filter((value) => report.writable.has(value) && !isUpperBound(session, value));
      const used = values.length === 0 || values.some((value) => report.full.has(value));
      return used ? [] : values.map(({ name }) => name).join(" over ");
    });
    assert.deepEqual(loose, []);
  }
  assert.equal(aligned(highest), session.executor.plan.classes.activations);
}

/** All four proofs on one configuration. */
async function prove(golden: Golden, setup: SessionSetup): Promise<void> {
  const documents = fullDocuments(golden.batches[0] ?? []);
  await using session = await openGolden(golden, setup);
  const { plan } = session.executor;
  await proveTouched(session, documents);
  // (b) and (d): nothing moves from the first step to the last.
  const step = async (index: number) => {
    const batch = golden.batches[index % golden.batches.length] ?? [];
    await session.trainStep(batch, golden.settings);
    await session.evaluate(batch);
  };
  await step(0);
  const before = counters(session);
  for (let index = 1; index < 8; index++) await step(index);
  assert.deepEqual(counters(session), before);
  assert.ok((before.reserved ?? 0) - plan.deviceBytes < 3 * 4096, "the plan, rounded to pages");
  // Layers from a file come through the ring, which is there in every run but not in the other sessions here.
  const ring = plan.classes.file === 0 ? 0 : SMALL_RING.slots * SMALL_RING.slotBytes;
  const pinned = plan.classes.staging + plan.classes.host + ring;
  assert.ok((before.pinned ?? 0) - pinned < 2 * 4096, "page-locked memory likewise");
  // (c): no slot may be 256 bytes smaller.
  const { checked, accepted } = shrunkSlots(plan);
  assert.ok(checked > 100, `${checked} slots`);
  assert.deepEqual(accepted, []);
}

const onEveryDevice = KINDS.flatMap((device) =>
  CONFIGURATIONS.map((configuration) => [device, ...configuration] as const),
);
for (const [device, name, precision, lossChunkTokens, wanted, mlpTileTokens] of onEveryDevice) {
  const tiles = mlpTileTokens === undefined ? "" : `, tiles of ${mlpTileTokens}`;
  const what = `${typeof wanted === "string" ? wanted : `budget ${wanted}`}${tiles}`;
  test(`Executor keeps to its plan: ${device}, ${name}, ${precision}, loss chunk ${lossChunkTokens}, ${what}`, async () => {
    const golden = await readGolden(name);
    const policy = await pointsOf(golden, { device, precision }, lossChunkTokens, wanted);
    const dims = { lossChunkTokens, ...(mlpTileTokens === undefined ? {} : { mlpTileTokens }) };
    await prove(golden, { device, policy, precision, dims });
  });
}

const deepOnEveryDevice = KINDS.flatMap((device) =>
  DEEP.map((configuration) => [device, ...configuration] as const),
);
for (const [device, name, precision, lossChunkTokens, wanted, weights] of deepOnEveryDevice) {
  test(`Executor keeps to its plan: ${device}, ${name} of 5 layers, ${precision}, ${weights}, ${wanted}`, async () => {
    using golden = await deepGolden(name, 5);
    const policy = parsePoints(wanted, 5);
    await prove(golden, { device, policy, precision, weights, dims: { lossChunkTokens } });
  });
}

test("Executor takes no memory from the system and no heap after commit", async () => {
  const golden = await readGolden("llama");
  const setups = KINDS.flatMap((device) => [
    { device, mode: "graph" } as const,
    { device, mode: "eager" } as const,
  ]);
  for (const setup of setups) {
    await using session = await openGolden(golden, setup);
    const step = async (index: number) => {
      const documents = golden.batches[index % golden.batches.length] ?? [];
      await session.trainStep(documents, golden.settings);
      await session.evaluate(documents);
    };
    await step(0);
    const before = session.executor.device.stats();
    const memory = counters(session);
    for (let index = 1; index < 60; index++) await step(index);
    assert.ok(session.executor.device.stats().kernelLaunches > before.kernelLaunches);
    assert.deepEqual(counters(session), memory, JSON.stringify(setup));
    const { plan } = session.executor;
    assert.ok(
      before.reserved - plan.deviceBytes < 3 * 4096,
      "reservations are the plan, rounded to pages",
    );
  }
});
