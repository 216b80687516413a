/** Golden cases and small sessions for the tests of training. */

import { existsSync, readdirSync } from "node:fs";
import { copyFile, mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";
import type { Precision } from "../../src/api/amp/precision.ts";
import type { Document } from "../../src/api/data/conversation.ts";
import type { ProgramName } from "../../src/api/graph/program.ts";
import { type Adapter, readAdapter } from "../../src/api/io/adapter.ts";
import { toFloat32 } from "../../src/api/io/dtype.ts";
import { openSafetensors, type TensorFile } from "../../src/api/io/safetensors.ts";
import type { ScalerSettings } from "../../src/api/kernels/mod.ts";
import { Device, type DeviceOptions } from "../../src/api/memory/mod.ts";
import { readModelConfig } from "../../src/api/nn/config.ts";
import { linearModules } from "../../src/api/nn/config_tensors.ts";
import { resolveLoraTargets } from "../../src/api/nn/lora_config.ts";
import type { StepDims } from "../../src/api/nn/programs.ts";
import type { SavePoints, SavePolicy } from "../../src/api/plan/save_points.ts";
import type { ExecutionMode } from "../../src/api/run/executor.ts";
import { importAdapters } from "../../src/api/train/adapter_state.ts";
import { loadWeights, storedType } from "../../src/api/train/load_weights.ts";
import { planRun, type RunPlan, type WeightPlace } from "../../src/api/train/run_plan.ts";
import { type OptimizerSettings, Session } from "../../src/api/train/session.ts";
import { KINDS } from "../kernels/rig.ts";

/** Folder of the golden cases; LORAMEM_GOLDEN names another one with cases of the same form. */
export const GOLDEN =
  process.env.LORAMEM_GOLDEN ?? fileURLToPath(new URL("../golden", import.meta.url));

/** Every golden case with its reference results. */
export const CASES: readonly string[] = readdirSync(GOLDEN)
  .filter((name) => existsSync(join(GOLDEN, name, "expected.json")))
  .sort();

/** Every program that a session can have. */
export const ALL_PROGRAMS: readonly ProgramName[] = [
  "train",
  "optimizer",
  "evaluate",
  "evaluateBase",
  "logits",
  "logitsBase",
  "prefill",
  "decode",
];

export { KINDS };

export interface Golden {
  readonly folder: string;
  readonly adapter0: Adapter;
  readonly adapterN: Adapter;
  /** The two documents of each of the three batches. */
  readonly batches: readonly (readonly Document[])[];
  readonly tensors: ReadonlyMap<string, Float32Array>;
  readonly losses: readonly number[];
  readonly gradNorms: readonly number[];
  readonly settings: OptimizerSettings;
  /** Tokens of a document, and documents of a batch. */
  readonly sequence: number;
  readonly rows: number;
}

export async function readGolden(name: string): Promise<Golden> {
  const folder = join(GOLDEN, name);
  const expected = JSON.parse(await readFile(`${folder}/expected.json`, "utf8"));
  await using file = await openSafetensors(`${folder}/expected.safetensors`);
  const tensors = new Map<string, Float32Array>();
  for (const entry of file.tensors.values()) {
    if (entry.dtype === "F32")
      tensors.set(entry.name, toFloat32("F32", await readBytes(file, entry.name)));
  }
  const ids = new Int32Array((await readBytes(file, "input_ids")).buffer);
  const labels = new Int32Array((await readBytes(file, "labels")).buffer);
  const { batch: rows, seq } = expected;
  const batches = Array.from({ length: ids.length / (rows * seq) }, (_, batch) =>
    Array.from({ length: rows }, (_, row): Document => {
      const at = (batch * rows + row) * seq;
      const labelled = Uint8Array.from(labels.subarray(at, at + seq), (label) =>
        label === -100 ? 0 : 1,
      );
      labelled[0] = 0;
      return { ids: ids.slice(at, at + seq), labelled, where: `${name} batch ${batch} row ${row}` };
    }),
  );
  const { lr, betas, eps, weight_decay: weightDecay } = expected.adamw;
  const settings = {
    learningRate: lr,
    beta1: betas[0],
    beta2: betas[1],
    adamEps: eps,
    weightDecay,
  };
  return {
    folder,
    adapter0: await readAdapter(`${folder}/adapter0`),
    adapterN: await readAdapter(`${folder}/adapterN`),
    batches,
    tensors,
    losses: expected.losses,
    gradNorms: expected.grad_norms_before_clip,
    settings: { ...settings, maxGradNorm: expected.clip },
    sequence: seq,
    rows,
  };
}

/** The golden qwen2 with a window in the layers after the first `fullLayers`, in an empty folder: its results hold no more. */
export async function slidingGolden(
  folder: string,
  { window, fullLayers }: { readonly window: number; readonly fullLayers: number },
): Promise<Golden> {
  const golden = await readGolden("qwen2");
  const [from, to] = [join(golden.folder, "model"), join(folder, "model")];
  await mkdir(to);
  await copyFile(join(from, "model.safetensors"), join(to, "model.safetensors"));
  const config = JSON.parse(await readFile(join(from, "config.json"), "utf8"));
  const sliding = {
    use_sliding_window: true,
    sliding_window: window,
    max_window_layers: fullLayers,
    layer_types: null,
  };
  await writeFile(join(to, "config.json"), JSON.stringify({ ...config, ...sliding }));
  return { ...golden, folder };
}

async function readBytes(file: TensorFile, name: string): Promise<Uint8Array<ArrayBuffer>> {
  const entry = file.tensors.get(name);
  if (entry === undefined) throw new Error(`no tensor ${name}`);
  const bytes = new Uint8Array(entry.bytes);
  await file.read(entry, bytes);
  return bytes;
}

export interface SessionSetup {
  /** One policy for all layers, or several that take turns over the layers. */
  readonly policy?: SavePolicy | SavePoints;
  readonly precision?: Precision;
  readonly threads?: number;
  readonly dims?: Partial<StepDims>;
  readonly programs?: readonly ProgramName[];
  readonly mode?: ExecutionMode;
  readonly scaler?: ScalerSettings;
  readonly device?: (typeof KINDS)[number] | "sim";
  /** What a "sim" device does on purpose. */
  readonly sim?: DeviceOptions;
  readonly weights?: WeightPlace;
  /** Plan for checkpoints. */
  readonly snapshot?: boolean;
}

/** Enough for models of a test. */
export const SMALL_RING = { slots: 4, slotBytes: 1 << 16, threads: 2 };

/** Sizes that hold a golden batch in one micro-batch. */
function goldenDims({ rows, sequence }: Golden): StepDims {
  return {
    tokensPerMicroBatch: rows * sequence,
    documentsPerMicroBatch: rows,
    lossChunkTokens: 32,
    prefillTokens: 8,
    contextTokens: 24,
  };
}

/** Plans a golden case. */
export async function planGolden(golden: Golden, setup: SessionSetup = {}): Promise<RunPlan> {
  const config = await readModelConfig(`${golden.folder}/model`);
  await using files = await openSafetensors(`${golden.folder}/model`);
  const spec = {
    config,
    targets: resolveLoraTargets(linearModules(config), golden.adapter0.config),
    dtypeOf: (tensor: string) => storedType(files, tensor),
    precision: setup.precision ?? "fp32",
    backend: setup.device === "cuda:0" ? ("cuda" as const) : ("cpu" as const),
    dims: { ...goldenDims(golden), ...setup.dims },
    programs: setup.programs ?? ALL_PROGRAMS,
    weights: setup.weights ?? "resident",
    snapshot: setup.snapshot ?? false,
  };
  const { policy = "keep" } = setup;
  if (typeof policy === "string") return planRun(spec, policy);
  const points = Array.from({ length: config.layers }, (_, layer) => policy[layer % policy.length]);
  return planRun(spec, points as SavePoints);
}

/** A session on a golden case with adapter0 loaded. */
export async function openGolden(
  golden: Golden,
  setup: SessionSetup = {},
): Promise<Session & AsyncDisposable> {
  const run = await planGolden(golden, setup);
  await using files = await openSafetensors(`${golden.folder}/model`);
  const { device: kind = "cpu", threads = 2, sim } = setup;
  const device = await Device.open(kind, { threads, ...sim });
  const session = Session.commit(device, run, setup.mode ?? "graph", setup.scaler);
  const ring = device.createFileRing(SMALL_RING);
  await loadWeights(session.executor, run, files, ring);
  await importAdapters(session.executor, run, golden.adapter0.tensors);
  if (setup.weights !== "file") await ring.dispose();
  return Object.assign(session, {
    async [Symbol.asyncDispose]() {
      await session.dispose();
      await ring.dispose();
      await device[Symbol.asyncDispose]();
    },
  });
}

/** ||a - b|| / ||b||, norm-wise. */
export function relativeError(actual: ArrayLike<number>, expected: ArrayLike<number>): number {
  if (actual.length !== expected.length)
    throw new Error(`lengths differ: ${actual.length}, ${expected.length}`);
  let [difference, norm] = [0, 0];
  for (let index = 0; index < expected.length; index++) {
    difference += ((actual[index] as number) - (expected[index] as number)) ** 2;
    norm += (expected[index] as number) ** 2;
  }
  return Math.sqrt(difference) / Math.sqrt(norm);
}
