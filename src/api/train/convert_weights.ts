/**
 * Weights that are kept in another type than the checkpoint stores, converted on the device and put back where they were
 * loaded to, on the device or on the host. The activations, which hold nothing before the first step, are the workspace.
 */
import { LoramemError } from "../../ffi/error.ts";
import { DTYPES, type DType } from "../graph/value.ts";
import { toFloat32 } from "../io/dtype.ts";
import type { TensorEntry, TensorFile } from "../io/safetensors.ts";
import * as kernels from "../kernels/mod.ts";
import type { WeightSource } from "../nn/weights.ts";
import type { Executor } from "../run/executor.ts";

/** A tensor that lies in the last bytes of its part of a weight, as it was stored. */
export interface Conversion {
  readonly source: WeightSource;
  readonly stored: DType;
}

/** Bytes from one part of the workspace to the next; reservations are aligned to more. */
const ALIGNMENT = 256;

/** Bytes of a tensor that are read at a time to find the weight that does not fit. */
const SEARCH_BYTES = 1 << 22;

/**
 * Converts tensors where they lie, by way of f32, which is exact, a piece at a time. From its first piece to its last: as
 * what is written never overtakes what is still to be read, a 16-bit tensor may grow into the f32 that it ends.
 *
 * @param file Read again only to name a weight that does not fit.
 * @throws {LoramemError} UNSUPPORTED naming a tensor with a weight beyond the range of f16, and the weight. It would spoil
 * every step; infinity and NaN of the checkpoint itself stay what they are.
 */
export async function convertWeights(
  executor: Executor,
  file: TensorFile,
  conversions: readonly Conversion[],
): Promise<void> {
  if (conversions.length === 0) return;
  const { stream, workspace } = executor;
  const scalerAt = Math.ceil((conversions.length * DTYPES.f32.bytes) / ALIGNMENT) * ALIGNMENT;
  const floatsAt = scalerAt + ALIGNMENT;
  const half = Math.floor((workspace.bytes - floatsAt) / 2 / ALIGNMENT) * ALIGNMENT;
  const pieceAt = floatsAt + half;
  const most = half / DTYPES.f32.bytes;
  const scaler = workspace.as("f32", [8], { offset: scalerAt });
  kernels.scalerSet(scaler, kernels.scalerValues({ initScale: 1 }), { stream });
  stream.fill(workspace, 0, { bytes: scalerAt });
  for (const [index, { source, stored }] of conversions.entries()) {
    const { value, element, elements } = source;
    const { buffer, offset } = executor.locate(value);
    const { bytes } = DTYPES[value.dtype];
    const to = offset + element * bytes;
    const from = to + elements * (bytes - DTYPES[stored].bytes);
    const notFinite = workspace.as("f32", [1], { offset: index * DTYPES.f32.bytes });
    for (let at = 0; at < elements; at += most) {
      const count = Math.min(most, elements - at);
      const floats = workspace.as("f32", [count], { offset: floatsAt });
      const raw = workspace.as(stored, [count], { offset: pieceAt });
      const kept = workspace.as(value.dtype, [count], { offset: pieceAt });
      const srcOffset = from + at * DTYPES[stored].bytes;
      stream.copy(workspace, buffer, {
        bytes: count * DTYPES[stored].bytes,
        dstOffset: pieceAt,
        srcOffset,
      });
      kernels.cast(floats, raw, { stream });
      kernels.cast(kept, floats, { stream });
      stream.copy(buffer, workspace, {
        bytes: count * bytes,
        dstOffset: to + at * bytes,
        srcOffset: pieceAt,
      });
      if (value.dtype !== "f16") continue;
      kernels.cast(floats, kept, { stream });
      kernels.scalerUnscale(floats, notFinite, scaler, { stream });
    }
  }
  using flags = executor.device.createPinnedBuffer(scalerAt);
  stream.copy(flags, workspace, { bytes: scalerAt });
  await stream.done();
  for (const [index, flag] of flags.view(Float32Array).entries()) {
    if (flag !== 0) await refuseOverflow(file, (conversions[index] as Conversion).source.tensor);
  }
}

/** Throws if a tensor holds a finite weight that f16 does not. */
async function refuseOverflow(file: TensorFile, tensor: string): Promise<void> {
  const entry = file.tensors.get(tensor) as TensorEntry;
  const buffer = new Uint8Array(Math.min(SEARCH_BYTES, entry.bytes));
  for (let at = 0; at < entry.bytes; at += buffer.byteLength) {
    const part = buffer.subarray(0, Math.min(buffer.byteLength, entry.bytes - at));
    await file.read(entry, part, at);
    const beyond = toFloat32(entry.dtype, part).find(
      (weight) => Number.isFinite(weight) && !Number.isFinite(Math.f16round(weight)),
    );
    if (beyond === undefined) continue;
    const message = `model: a weight is beyond the range of f16: ${tensor}: ${beyond}, at most 65504: use precision bf16`;
    throw new LoramemError("UNSUPPORTED", message, { what: tensor });
  }
}
