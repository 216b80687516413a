/**
 * Llama-3.1-8B in 6 GiB: weights streamed from host memory, beside what the host link allows. First the same losses and
 * gradient norms, bit for bit, as with resident weights; then tokens per second by micro-batch. Random weights, the same
 * for every plan; the data is random, so the loss itself says nothing.
 *
 *     bun bench/stream.ts [result.json]
 */
import process from "node:process";
import type { Document } from "../src/api/data/conversation.ts";
import { shuffledOrder } from "../src/api/data/order.ts";
import type { Transfer } from "../src/api/graph/program.ts";
import { bytesOf, DTYPES } from "../src/api/graph/value.ts";
import { Device } from "../src/api/memory/mod.ts";
import { ropeTable } from "../src/api/nn/rope.ts";
import { findProfile } from "../src/api/plan/profiles.ts";
import { describePoints } from "../src/api/plan/save_points.ts";
import { fullLoad } from "../src/api/plan/time.ts";
import { initializeAdapters } from "../src/api/train/adapter_state.ts";
import { FitSearch } from "../src/api/train/fit_run.ts";
import { uploadFloats } from "../src/api/train/load_weights.ts";
import { planRun, type RunPlan, type RunSpec, TRANSFER_BYTES } from "../src/api/train/run_plan.ts";
import { Session } from "../src/api/train/session.ts";
import { type MODELS, specOf } from "../tests/plan/models.ts";
import { SETTINGS } from "./demo_session.ts";
import { writeResult } from "./results.ts";

// Without a GPU a small model shows that everything runs; its times mean nothing.
const device = await deviceKind();
const MODEL: keyof typeof MODELS = device === "cpu" ? "four layers" : "Llama-3.1-8B";
const BUDGET = (device === "cpu" ? 0.025 : 6) * 2 ** 30;
const TOKENS = device === "cpu" ? [64, 128] : [1024, 2048, 4096, 8192];
const [WARM, STEPS] = [2, 4];
/** Norm weights are one: bytes of ones at the end of the transfer block. */
const ONES = 1 << 16;

async function deviceKind(): Promise<"cpu" | "cuda:0"> {
  await using found = await Device.open("auto");
  return found.kind === "cpu" ? "cpu" : "cuda:0";
}

function specFor(tokens: number): RunSpec {
  const dims = { documentsPerMicroBatch: 1, prefillTokens: 0, contextTokens: 0 };
  return {
    ...specOf(MODEL, { ...dims, tokensPerMicroBatch: tokens }),
    backend: device === "cpu" ? "cpu" : "cuda",
    programs: ["train", "optimizer"],
  };
}

/** Fills every tensor with bf16 numbers of about 0.02, each from its own place in one random block. */
async function randomWeights({ executor, run }: Session): Promise<void> {
  const { transfer } = run.staging;
  const block = executor.hostView(transfer, Uint16Array);
  const random = (TRANSFER_BYTES - ONES) / 2;
  let state = 1;
  for (let at = 0; at < random; at++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    // Sign and mantissa at random, exponent of numbers between 2^-7 and 2^-5.
    block[at] = ((state >>> 16) & 0x807f) | ((120 + ((state >>> 8) & 1)) << 7);
  }
  block.fill(0x3f80, random);
  run.weights.sources.forEach(({ tensor, value, element, elements }, index) => {
    const size = DTYPES[value.dtype].bytes;
    const isNorm = tensor.includes("norm");
    const start = isNorm ? 2 * random : (index * 1_000_448) % random;
    const most = isNorm ? ONES : random;
    for (let at = 0; at < elements * size; at += most) {
      const bytes = Math.min(most, elements * size - at);
      executor.upload(value, transfer, bytes, element * size + at, start);
    }
  });
  await executor.stream.done();
  const { cos, sin } = run.weights;
  const { rope, headDim } = run.spec.config;
  const table = ropeTable(rope, headDim, cos.shape[0] as number);
  await uploadFloats(executor, transfer, cos, 0, table.cos);
  await uploadFloats(executor, transfer, sin, 0, table.sin);
}

/** Bytes that a step brings to the device. */
function copiedBytes({ set }: RunPlan): number {
  let bytes = 0;
  for (const { kind, attributes } of set.programs.flatMap(({ ops }) => ops)) {
    const { to, from } = attributes as Transfer;
    if (kind.name === "transfer" && to.memory !== "host") bytes += bytesOf(from);
  }
  return bytes;
}

/** Bytes per second of one large copy to the device, alone. */
async function measureLink(): Promise<number> {
  await using opened = await Device.open(device);
  await using stream = opened.createStream();
  using host = opened.createPinnedBuffer(256 << 20);
  using target = opened.createBuffer(host.bytes);
  stream.copy(target, host);
  await stream.done();
  const [copies, start] = [8, performance.now()];
  for (let copy = 0; copy < copies; copy++) stream.copy(target, host);
  await stream.done();
  return (copies * host.bytes * 1000) / (performance.now() - start);
}

/** Trains on random tokens; what no choice may change, and how long it took. */
async function measure(run: RunPlan) {
  const tokens = run.spec.dims.tokensPerMicroBatch;
  const ids = Int32Array.from({ length: tokens }, (_, at) => at % run.spec.config.vocabSize);
  ids.set(shuffledOrder(run.spec.config.vocabSize, 1, 0).subarray(0, tokens));
  const labelled = new Uint8Array(tokens).fill(1).fill(0, 0, 1);
  const documents: Document[] = [{ ids, labelled, where: "random" }];
  await using opened = await Device.open(device);
  const free = () => Number(opened.info().memoryFree);
  const [before, begun] = [free(), performance.now()];
  const session = Session.commit(opened, run, "graph");
  await randomWeights(session);
  await initializeAdapters(session.executor, session.run, 0);
  const loading = (performance.now() - begun) / 1000;
  const seconds: number[] = [];
  const outcomes: string[] = [];
  for (let step = 0; step < WARM + STEPS; step++) {
    const start = performance.now();
    const { loss, gradNorm } = await session.trainStep(documents, SETTINGS);
    if (step >= WARM) seconds.push((performance.now() - start) / 1000);
    outcomes.push(`${loss} ${gradNorm}`);
  }
  const driver = device === "cpu" ? null : before - free();
  await session.dispose();
  const median = seconds.toSorted((a, b) => a - b)[STEPS >> 1] as number;
  return { tokensPerSecond: tokens / median, seconds: median, loading, driver, outcomes };
}

const link = await measureLink();
console.log(`host to device: ${(link / 1e9).toFixed(1)} GB/s`);

const small = TOKENS[0] as number;
const resident = await measure(planRun(specFor(small), "keep"));
console.log(`${MODEL}, ${small} tokens, resident: ${resident.tokensPerSecond.toFixed(0)} tokens/s`);
console.log(`losses and gradient norms: ${resident.outcomes.join(", ")}`);

const rows: Record<string, unknown>[] = [];
for (const tokens of TOKENS) {
  const profile = findProfile(device === "cpu" ? "cpu" : "h200");
  if (profile === null) throw new Error("no profile");
  const step = fullLoad(tokens);
  const choices = { savePoints: null, lossChunkTokens: null, weights: "stream" } as const;
  const run = new FitSearch(specFor(tokens), { ...choices, profile, step }).fit(BUDGET);
  const { outcomes, ...measured } = await measure(run);
  const limit = tokens / (copiedBytes(run) / link);
  const row = {
    tokens,
    savePoints: describePoints(run.savePoints),
    planGiB: run.plan.deviceBytes / 2 ** 30,
    hostGiB: run.plan.classes.host / 2 ** 30,
    ...measured,
    forecast: run.plan.forecast?.tokensPerSecond ?? null,
    linkLimit: limit,
    sameBits: tokens === small ? String(outcomes) === String(resident.outcomes) : null,
  };
  rows.push(row);
  const driver = row.driver === null ? "" : `, driver ${(row.driver / 2 ** 30).toFixed(2)} GiB`;
  const bits =
    row.sameBits === null ? "" : row.sameBits ? ", same bits as resident" : ", OTHER BITS";
  console.log(
    `${tokens} tokens, ${row.savePoints}: ${row.tokensPerSecond.toFixed(0)} tokens/s of ${limit.toFixed(0)} that the link ` +
      `allows, ${row.forecast?.toFixed(0)} predicted; plan ${row.planGiB.toFixed(2)} GiB${driver}, host ` +
      `${row.hostGiB.toFixed(2)} GiB, ready in ${row.loading.toFixed(1)} s${bits}`,
  );
}
const file = process.argv[2];
if (file !== undefined)
  await writeResult(file, { bench: "stream", model: MODEL, link, resident, rows });
if (rows.some(({ sameBits }) => sameBits === false)) process.exitCode = 1;
