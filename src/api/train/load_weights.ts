/** Brings the weights of a checkpoint to their planned slots, through the transfer block. */
import { LoramemError } from "../../ffi/error.ts";
import { DTYPES, type DType, type Value } from "../graph/value.ts";
import { toFloat32 } from "../io/dtype.ts";
import type { TensorEntry, TensorFile } from "../io/safetensors.ts";
import { ropeTable } from "../nn/rope.ts";
import type { WeightSource } from "../nn/weights.ts";
import type { Executor } from "../run/executor.ts";
import { type RunPlan, TRANSFER_BYTES } from "./run_plan.ts";

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

/** Fills every weight slot and the rotary tables. */
export async function loadWeights(
  executor: Executor,
  run: RunPlan,
  file: TensorFile,
): Promise<void> {
  for (const source of run.weights.sources) await loadTensor(executor, run, file, source);
  const { config } = run.spec;
  const { cos, sin } = run.weights;
  const table = ropeTable(config.rope, config.headDim, cos.shape[0] as number);
  await uploadFloats(executor, run.staging.transfer, cos, 0, table.cos);
  await uploadFloats(executor, run.staging.transfer, sin, 0, table.sin);
}

async function loadTensor(
  executor: Executor,
  run: RunPlan,
  file: TensorFile,
  { tensor, value, element }: WeightSource,
): Promise<void> {
  const entry = file.tensors.get(tensor) as TensorEntry;
  const { transfer } = run.staging;
  const converts = storedType(file, tensor) !== value.dtype;
  const host = executor.hostView(transfer, Uint8Array);
  // A converted chunk grows to at most twice its bytes: read into the second half, convert into the first.
  const chunk = converts ? TRANSFER_BYTES / 4 : TRANSFER_BYTES;
  let written = element * DTYPES[value.dtype].bytes;
  for (let at = 0; at < entry.bytes; at += chunk) {
    let bytes = Math.min(chunk, entry.bytes - at);
    if (converts) {
      const raw = host.subarray(TRANSFER_BYTES / 2, TRANSFER_BYTES / 2 + bytes);
      await file.read(entry, raw, at);
      const converted = convert(tensor, toFloat32(entry.dtype, raw), value.dtype);
      host.set(converted);
      bytes = converted.length;
    } else {
      await file.read(entry, host.subarray(0, bytes), at);
    }
    executor.upload(value, transfer, bytes, written);
    await executor.stream.done();
    written += bytes;
  }
}

/** Floats as bytes of f32 or f16. Weights are the same in every step, so one that f16 cannot hold would spoil them all. */
function convert(tensor: string, floats: Float32Array, to: DType): Uint8Array {
  if (to === "f32") return new Uint8Array(floats.buffer, floats.byteOffset, floats.byteLength);
  const halves = new Float16Array(floats);
  const at = halves.findIndex(
    (half, index) => !Number.isFinite(half) && Number.isFinite(floats[index]),
  );
  if (at >= 0) {
    const message = `model: a weight is beyond the range of f16: ${tensor}: ${floats[at]}, at most 65504: use precision bf16`;
    throw new LoramemError("UNSUPPORTED", message, { what: tensor });
  }
  return new Uint8Array(halves.buffer);
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
