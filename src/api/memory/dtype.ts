/** Element types of device memory. */
import { LoramemError } from "../../ffi/error.ts";

/** An element type of the ABI. */
export type DType = "f32" | "bf16" | "f16" | "i32" | "f64";

interface DTypeInfo {
  /** `LM_F32`, ... of csrc/include/loramem.h. */
  readonly code: number;
  /** Bytes of one element. */
  readonly bytes: number;
}

/** Every element type. */
export const DTYPES: Readonly<Record<DType, DTypeInfo>> = {
  f32: { code: 0, bytes: 4 },
  bf16: { code: 1, bytes: 2 },
  f16: { code: 2, bytes: 2 },
  i32: { code: 3, bytes: 4 },
  f64: { code: 4, bytes: 8 },
};

/** Code and size of an element type. */
export function dtypeInfo(dtype: DType, op: string): DTypeInfo {
  if (Object.hasOwn(DTYPES, dtype)) return DTYPES[dtype];
  const message = `${op}: unknown dtype: ${String(dtype)}: use one of ${Object.keys(DTYPES).join(", ")}`;
  throw new LoramemError("BAD_ARGUMENT", message, { name: "dtype", value: dtype });
}
