/** Brings the weights of a checkpoint to their planned slots. */
import { tmpdir } from "node:os";
import { LoramemError } from "../../ffi/error.ts";
import { DTYPES, type DType, type Value } from "../graph/value.ts";
import type { WeightStream } from "../graph/weave.ts";
import {
  type LoadOptions,
  type LoadProgress,
  loadTensors,
  type TensorTarget,
} from "../io/load_tensors.ts";
import type { TensorEntry, TensorFile } from "../io/safetensors.ts";
import type { FileRing } from "../memory/mod.ts";
import { ropeTable } from "../nn/rope.ts";
import type { WeightSource } from "../nn/weights.ts";
import type { Executor } from "../run/executor.ts";
import { WeightsFile } from "../run/weights_file.ts";
import { type Conversion, convertWeights } from "./convert_weights.ts";
import type { RunPlan } from "./run_plan.ts";

const STORED: Readonly<Record<string, DType>> = { F32: "f32", BF16: "bf16", F16: "f16" };

/** Element type of a tensor in a checkpoint. */
export function storedType(file: TensorFile, tensor: string): DType {
  const dtype = STORED[(file.tensors.get(tensor) as TensorEntry).dtype];
  if (dtype === undefined) {
    throw new LoramemError(
      "UNSUPPORTED",
      `model: tensor has an unsupported dtype: ${tensor}: use F32, BF16 or F16`,
    );
  }
  return dtype;
}

/** Settings of {@linkcode loadWeights}. */
export interface WeightOptions extends LoadOptions {
  /** Where the file of a plan that streams weights from one is made. Default: the system's folder for temporary files. */
  readonly folder?: string;
}

/**
 * Fills every weight slot and the rotary tables. Tensors go from the file to their slots through the ring; those that are
 * kept in another type are converted there. Layers that are to be streamed from a file go on to it, one by one.
 *
 * @param ring Must stay open as long as the session where layers are streamed from a file.
 * @returns Bytes read and the time that it took.
 */
export async function loadWeights(
  executor: Executor,
  run: RunPlan,
  file: TensorFile,
  ring: FileRing,
  options: WeightOptions = {},
): Promise<LoadProgress> {
  const { sources } = run.weights;
  const loaded =
    executor.plan.classes.file === 0
      ? await loadSources(executor, file, ring, sources, options)
      : await loadToFile(executor, run, file, ring, options);
  await loadRopeTables(executor, run);
  return loaded;
}

/** Fills the rotary tables. */
export async function loadRopeTables(executor: Executor, run: RunPlan): Promise<void> {
  const { config } = run.spec;
  const { cos, sin } = run.weights;
  const table = ropeTable(config.rope, config.headDim, cos.shape[0] as number);
  await uploadFloats(executor, run.staging.transfer, cos, 0, table.cos);
  await uploadFloats(executor, run.staging.transfer, sin, 0, table.sin);
}

/** Loads what stays on the device, then layer after layer into its window, and from there to the weights file. */
async function loadToFile(
  executor: Executor,
  run: RunPlan,
  file: TensorFile,
  ring: FileRing,
  { folder = tmpdir(), onProgress, ...options }: WeightOptions,
): Promise<LoadProgress> {
  const { plan, stream } = executor;
  const { sources, stream: layers } = run.weights;
  const { windows, layers: stored } = layers as WeightStream;
  const weights = await WeightsFile.create(ring, folder, plan.classes.file);
  executor.useWeightsFile(weights);
  const bytesOf = ({ tensor }: WeightSource) => (file.tensors.get(tensor) as TensorEntry).bytes;
  const totalBytes = sources.reduce((sum, source) => sum + bytesOf(source), 0);
  const start = performance.now();
  let done = 0;
  const progressAt = (bytes: number): LoadProgress => {
    const seconds = (performance.now() - start) / 1000;
    return { bytes, totalBytes, seconds, bytesPerSecond: bytes / seconds };
  };
  for (const layer of [null, ...stored.keys()]) {
    const part = sources.filter(({ value }) => value.layer === layer);
    const loaded = await loadSources(executor, file, ring, part, {
      ...options,
      onProgress: ({ bytes }) => {
        if (done + bytes < totalBytes) onProgress?.(progressAt(done + bytes));
      },
    });
    done += loaded.bytes;
    if (layer === null) continue;
    const value = stored[layer] as Value;
    const window = executor.locate(windows[layer % windows.length] as Value);
    await weights.write(value, plan.offset(value), window, stream);
  }
  const progress = progressAt(done);
  onProgress?.(progress);
  return progress;
}

/** Loads and converts some of the weights. */
async function loadSources(
  executor: Executor,
  file: TensorFile,
  ring: FileRing,
  sources: readonly WeightSource[],
  options: LoadOptions,
): Promise<LoadProgress> {
  const conversions: Conversion[] = [];
  const targets = sources.map((source): TensorTarget => {
    const { tensor, value, element, elements } = source;
    const entry = file.tensors.get(tensor) as TensorEntry;
    const stored = storedType(file, tensor);
    if (stored !== value.dtype) conversions.push({ source, stored });
    const { buffer, offset } = executor.locate(value);
    // A tensor that is to grow lies at the end of its part.
    const end = offset + (element + elements) * DTYPES[value.dtype].bytes;
    return { entry, memory: buffer, offset: end - entry.bytes };
  });
  const loaded = await loadTensors(ring, targets, options);
  await convertWeights(executor, file, conversions);
  return loaded;
}

/** Copies floats to a value of f32 elements, from element `first`. */
export async function uploadFloats(
  executor: Executor,
  transfer: Value,
  to: Value,
  first: number,
  floats: Float32Array,
): Promise<void> {
  const host = executor.hostView(transfer, Float32Array);
  for (let at = 0; at < floats.length; at += host.length) {
    const part = floats.subarray(at, at + host.length);
    host.set(part);
    executor.upload(to, transfer, part.byteLength, (first + at) * 4);
    await executor.stream.done();
  }
}

/** Copies `count` floats from a value of f32 elements, from element `first`. */
export async function downloadFloats(
  executor: Executor,
  transfer: Value,
  from: Value,
  first: number,
  count: number,
): Promise<Float32Array> {
  const host = executor.hostView(transfer, Float32Array);
  const floats = new Float32Array(count);
  for (let at = 0; at < count; at += host.length) {
    const length = Math.min(host.length, count - at);
    executor.download(transfer, from, length * 4, 0, (first + at) * 4);
    await executor.stream.done();
    floats.set(host.subarray(0, length), at);
  }
  return floats;
}
