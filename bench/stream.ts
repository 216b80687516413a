/**
 * Llama-3.1-8B in 6 GiB: weights streamed from host memory, beside what the host link allows. First the same loss, bit for
 * bit, as with resident weights; then tokens per second by micro-batch, the rest of the device's memory being taken
 * meanwhile. Random weights, the same in every run; the data is random, so the loss itself says nothing.
 *
 *     bun bench/stream.ts [--steps 4] [--device auto] [--out result.json]
 *
 * `--device cpu` runs a small model, to try the mechanics.
 */
import process from "node:process";
import { parseArgs } from "node:util";
import type { Transfer } from "../src/api/graph/program.ts";
import { bytesOf } from "../src/api/graph/value.ts";
import { isTransfer } from "../src/api/graph/weave.ts";
import { Device } from "../src/api/memory/mod.ts";
import { describePoints } from "../src/api/plan/save_points.ts";
import { fullLoad } from "../src/api/plan/time.ts";
import { FitSearch } from "../src/api/train/fit_run.ts";
import { planRun, type RunPlan } from "../src/api/train/run_plan.ts";
import { type Shape, shapeSpec } from "../tests/shapes/session.ts";
import { benchDevice, shapeDocuments } from "./gpu_shapes.ts";
import { gib, measureRun, printTable } from "./random_session.ts";
import { writeResult } from "./results.ts";

const { values: flags } = parseArgs({
  options: {
    steps: { type: "string", default: "4" },
    device: { type: "string", default: "auto" },
    out: { type: "string" },
  },
});
const { device, profile } = await benchDevice(flags.device);
const steps = Number(flags.steps);
const shapes: readonly Shape[] =
  device === "cpu"
    ? [64, 128].map((tokens) => ({ model: "four layers", documents: 1, tokens }))
    : [1024, 2048, 4096, 8192].map((tokens) => ({ model: "Llama-3.1-8B", documents: 1, tokens }));
const budget = device === "cpu" ? 12 << 20 : 6 * 2 ** 30;

/** Bytes per second of large copies to the device, alone. */
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

/** Bytes that a step brings to the device. */
function copiedBytes({ set }: RunPlan): number {
  const copies = set.programs.flatMap(({ ops }) => ops).filter(isTransfer);
  return copies.reduce((sum, { attributes }) => {
    const { to, from } = attributes as Transfer;
    return to.memory === "host" ? sum : sum + bytesOf(from);
  }, 0);
}

const measure = (shape: Shape, run: RunPlan, limit: number | null) =>
  measureRun(run, shapeDocuments(shape), { device, warm: 2, steps, limit });

const link = await measureLink();
const [smallest] = shapes as [Shape];
const resident = await measure(smallest, planRun(shapeSpec(smallest, { device }), "keep"), null);
const rows = [];
for (const shape of shapes) {
  const { model, tokens } = shape;
  const choices = { savePoints: null, lossChunkTokens: null, weights: "stream" } as const;
  const options = { ...choices, profile, step: fullLoad(tokens) };
  const run = new FitSearch(shapeSpec(shape, { device }), options).fit(budget);
  const measured = await measure(shape, run, budget);
  rows.push({
    model,
    tokens,
    savePoints: describePoints(run.savePoints),
    hostBytes: run.plan.classes.host,
    predictedSeconds: run.plan.forecast?.seconds ?? Number.NaN,
    linkSeconds: copiedBytes(run) / link,
    sameLoss: shape === smallest ? String(measured.losses) === String(resident.losses) : null,
    ...measured,
  });
}
console.log(
  `host to device ${(link / 1e9).toFixed(1)} GB/s; ${smallest.model}, ${smallest.tokens} tokens, resident: ` +
    `${Math.round(resident.tokensPerSecond)} tokens/s, loss ${resident.losses.at(-1)}`,
);
printTable(
  [
    "tokens",
    "save points",
    "plan GiB",
    "driver",
    "host",
    "link ms",
    "predicted",
    "measured",
    "tokens/s",
    "loss as resident",
  ],
  rows.map((row) => [
    String(row.tokens),
    row.savePoints,
    gib(row.planBytes),
    gib(row.driverEnd),
    gib(row.hostBytes),
    (row.linkSeconds * 1000).toFixed(1),
    (row.predictedSeconds * 1000).toFixed(1),
    (row.seconds * 1000).toFixed(1),
    String(Math.round(row.tokensPerSecond)),
    row.sameLoss === null ? "-" : row.sameLoss ? "same bits" : "OTHER BITS",
  ]),
);
if (flags.out !== undefined) {
  const settings = { device, steps, budget, profile: profile.name };
  await writeResult(flags.out, { bench: "stream", settings, link, resident, rows });
}
if (rows.some(({ sameLoss }) => sameLoss === false)) process.exitCode = 1;
