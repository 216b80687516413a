/**
 * One measured run of loramem on a case of run.ts, in a process of its own; prints one JSON object.
 *
 *     bun bench/peers/loramem.ts CASE --device cuda:0 --policy keep --precision bf16 --warm 4 --steps 12
 */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import type { Precision } from "../../src/api/amp/precision.ts";
import type { Document } from "../../src/api/data/conversation.ts";
import { type AdapterTensors, readAdapter } from "../../src/api/io/adapter.ts";
import { openSafetensors, writeSafetensors } from "../../src/api/io/safetensors.ts";
import type { SavePolicy } from "../../src/api/plan/save_points.ts";
import { exportAdapters, importAdapters } from "../../src/api/train/adapter_state.ts";
import { loadWeights } from "../../src/api/train/load_weights.ts";
import {
  commitShape,
  freeBytes,
  SHAPES,
  type ShapeSetup,
  shapeSpec,
} from "../../tests/shapes/session.ts";
import { kernelHash } from "../results.ts";
import { readBatches, readCase } from "./case.ts";

/** Stretches into which the timed steps are cut; the median one counts. */
const STRETCHES = 3;
const MOST_SKIPPED = 64;
const GIB = 2 ** 30;

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    device: { type: "string", default: "cuda:0" },
    policy: { type: "string", default: "keep" },
    precision: { type: "string", default: "bf16" },
    warm: { type: "string", default: "4" },
    steps: { type: "string", default: "12" },
    "initial-scale": { type: "string" },
    gradients: { type: "string" },
  },
});
const folder = positionals[0] as string;
const about = await readCase(folder);
const batches = await readBatches(folder, about);
const setup: ShapeSetup = {
  device: values.device as "cpu",
  policy: values.policy as SavePolicy,
  precision: values.precision as Precision,
  // Where memory counts, logits are made in smaller chunks: beside the layer inputs they are the peak.
  lossChunkTokens: values.policy === "checkpoint" ? 512 : 1024,
  scaler: values["initial-scale"] ? { initScale: Number(values["initial-scale"]) } : {},
};
await using opened = await commitShape(shapeSpec(SHAPES[about.shape], setup), setup);
const { session, device } = opened;
const { executor, run } = session;
const onGpu = device.kind !== "cpu";

const loading = performance.now();
{
  await using files = await openSafetensors(join(folder, "model"));
  await using ring = device.createFileRing();
  await loadWeights(executor, run, files, ring);
}
await importAdapters(executor, run, (await readAdapter(join(folder, "adapter"))).tensors);
const loadSeconds = (performance.now() - loading) / 1000;

if (values.gradients !== undefined) {
  await session.accumulate(batches[0] ?? []);
  const gradients = await exportAdapters(executor, run, "gradient");
  executor.clear(run.adapters.gradient);
  await writeSafetensors(values.gradients, gradients.flatMap(asTensors));
}

/** Losses of the updates that were applied. A batch whose update was skipped comes again, so that runs stay comparable. */
const losses: number[] = [];
/** Loss scales at which an update was skipped. */
const skipped: number[] = [];
const driver: number[] = [];
async function steps(count: number): Promise<number> {
  const started = performance.now();
  for (const end = losses.length + count; losses.length < end; ) {
    const [documents = [], next = null] = [0, 1].map((ahead) => batchOf(losses.length + ahead));
    const result = await session.trainStep(documents, about.settings, next);
    if (!result.skipped) losses.push(result.loss);
    else if (skipped.push(result.lossScale) > MOST_SKIPPED)
      throw new Error("every step is skipped");
  }
  return (performance.now() - started) / 1000 / count;
}
function batchOf(step: number): Document[] {
  return batches[step % batches.length] ?? [];
}
await steps(Number(values.warm));
if (onGpu) driver.push(opened.freeBefore - freeBytes(device));
const end = Number(values.warm) + Number(values.steps);
const stretch = Math.max(1, Math.floor(Number(values.steps) / STRETCHES));
const seconds: number[] = [];
while (losses.length < end) {
  seconds.push(await steps(Math.min(stretch, end - losses.length)));
  if (onGpu) driver.push(opened.freeBefore - freeBytes(device));
}
const median = seconds.toSorted((a, b) => a - b)[seconds.length >> 1] as number;
const row = {
  system: "loramem",
  setting: values.precision === "bf16" ? values.policy : `${values.precision} ${values.policy}`,
  tokensPerSecond: (about.documents * about.tokens) / median,
  stepMs: median * 1000,
  stretchMs: seconds.map((one) => one * 1000),
  planGiB: run.plan.deviceBytes / GIB,
  ...(onGpu
    ? {
        driverGiB: Math.max(...driver) / GIB,
        driverMoved: Math.max(...driver) - Math.min(...driver),
      }
    : {}),
  processGiB: statusBytes("VmRSS") / GIB,
  processPeakGiB: statusBytes("VmHWM") / GIB,
  loadSeconds,
  skipped,
  losses,
  kernelHash: await kernelHash(),
};
console.log(JSON.stringify(row));

function asTensors({ path, rank, inFeatures, outFeatures, a, b }: AdapterTensors) {
  const tensor = (matrix: "A" | "B", shape: readonly number[], data: Float32Array) => ({
    name: `${path}.lora_${matrix}`,
    dtype: "F32" as const,
    shape,
    data: new Uint8Array(data.buffer, data.byteOffset, data.byteLength),
  });
  return [tensor("A", [rank, inFeatures], a), tensor("B", [outFeatures, rank], b)];
}

/** A figure of the process, in bytes. */
function statusBytes(field: string): number {
  const text = readFileSync("/proc/self/status", "utf8");
  return 1024 * Number(new RegExp(`^${field}:\\s+(\\d+)`, "m").exec(text)?.[1] ?? 0);
}
