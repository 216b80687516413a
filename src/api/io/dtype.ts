/**
 * The element types of the safetensors format, and small tensors as Float32Array.
 *
 * Weights never pass through here on their way to a device; this is for adapters, norms and tests.
 */
import { LoramemError } from "../../ffi/error.ts";

/** Bits of one element of every dtype that the specification names. */
const BITS = {
  BOOL: 8,
  U8: 8,
  I8: 8,
  I16: 16,
  U16: 16,
  I32: 32,
  U32: 32,
  I64: 64,
  U64: 64,
  F4: 4,
  F6_E2M3: 6,
  F6_E3M2: 6,
  F8_E4M3: 8,
  F8_E5M2: 8,
  F8_E8M0: 8,
  F8_E4M3FNUZ: 8,
  F8_E5M2FNUZ: 8,
  F16: 16,
  BF16: 16,
  F32: 32,
  F64: 64,
  C64: 64,
} as const;

/** An element type as safetensors spells it. */
export type Dtype = keyof typeof BITS;

/** Whether a string from a file names a dtype of the specification. */
export function isDtype(name: unknown): name is Dtype {
  return typeof name === "string" && Object.hasOwn(BITS, name);
}

/**
 * Bytes of a tensor, or `null` where the shape is not a list of non-negative integers, the product
 * exceeds 2^53 - 1 bits, or packed 4 and 6 bit elements do not fill whole bytes.
 */
export function tensorBytes(dtype: Dtype, shape: readonly unknown[]): number | null {
  let bits: number = BITS[dtype];
  for (const size of shape) {
    if (typeof size !== "number" || !Number.isSafeInteger(size) || size < 0) return null;
    bits *= size;
    if (!Number.isSafeInteger(bits)) return null;
  }
  return bits % 8 === 0 ? bits / 8 : null;
}

/** Bits of one element. */
export function dtypeBits(dtype: Dtype): number {
  return BITS[dtype];
}

/**
 * Converts stored elements to float32; exact, as float32 holds every float16 and bfloat16 value.
 *
 * @param dtype `F32`, `BF16` or `F16`.
 * @param bytes Little-endian elements at any alignment.
 * @returns A new array.
 * @throws {LoramemError} `UNSUPPORTED` for another dtype.
 */
export function toFloat32(dtype: Dtype, bytes: Uint8Array): Float32Array {
  if (dtype !== "F32" && dtype !== "BF16" && dtype !== "F16") {
    const message = `toFloat32: not a float of 16 or 32 bits: ${dtype}: convert the file first`;
    throw new LoramemError("UNSUPPORTED", message, { what: dtype });
  }
  const aligned = bytes.slice().buffer; // a copy, as offsets in files are not aligned
  if (dtype === "F32") return new Float32Array(aligned);
  const stored = new Uint16Array(aligned);
  if (dtype === "F16") return Float32Array.from(stored, halfToNumber);
  const bits = new Uint32Array(stored.length);
  for (let i = 0; i < stored.length; i++) bits[i] = (stored[i] as number) << 16;
  return new Float32Array(bits.buffer);
}

/** IEEE 754 binary16: 1 sign, 5 exponent and 10 fraction bits. */
function halfToNumber(half: number): number {
  const sign = half & 0x8000 ? -1 : 1;
  const exponent = (half >> 10) & 31;
  const fraction = half & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}
