/** The bytes of a gradient scaler, `lm_scaler`. */
import { packStruct, readStruct, structLayout } from "../../ffi/structs.ts";
import { type ScalerValues, scalerFields } from "../kernels/scaler.ts";

/** f32 elements of a scaler. */
export const SCALER_WIDTH = structLayout("lm_scaler").size / 4;

/** A scaler as it lies in device memory. */
export function packScaler(values: ScalerValues): Uint8Array<ArrayBuffer> {
  return packStruct("lm_scaler", scalerFields(values));
}

/** Reads a scaler back. */
export function readScaler(bytes: Uint8Array<ArrayBuffer>): ScalerValues {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const values = readStruct("lm_scaler", view);
  return {
    scale: values.scale,
    growthTracker: values.growth_tracker,
    growthFactor: values.growth_factor,
    backoffFactor: values.backoff_factor,
    growthInterval: values.growth_interval,
    minScale: values.min_scale,
    maxScale: values.max_scale,
  };
}
