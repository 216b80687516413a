/**
 * Precision policies: what activations, compute copies and gradients of activations are stored in. Masters and moments of the
 * adapters are f32 under every policy, and arithmetic on the CPU is fp32.
 */
import type { DType } from "../graph/value.ts";

/** `fp32`; `bf16`; or `fp16`, whose gradients go through a scaler. */
export type Precision = "fp32" | "bf16" | "fp16";

/** Every policy. */
export const PRECISIONS = ["fp32", "bf16", "fp16"] as const satisfies readonly Precision[];

const ACTIVATIONS: Readonly<Record<Precision, DType>> = { fp32: "f32", bf16: "bf16", fp16: "f16" };

/** What "auto" stands for: bf16 where tensor cores multiply it, fp32 on the CPU, whose arithmetic it is. */
export function choosePrecision(precision: Precision | "auto", backend: "cpu" | "cuda"): Precision {
  if (precision !== "auto") return precision;
  return backend === "cpu" ? "fp32" : "bf16";
}

/** Element type of activations and compute copies under a policy. */
export function activationType(precision: Precision): DType {
  return ACTIVATIONS[precision];
}

/**
 * Element type that a frozen weight is kept in: as the checkpoint stores it, but bf16 becomes f16 under `fp16`, so that one
 * matrix product has one 16-bit type. Within the range of f16 that is exact down to 2^-14; loading refuses what lies above.
 */
export function weightType(precision: Precision, stored: DType): DType {
  return precision === "fp16" && stored === "bf16" ? "f16" : stored;
}
