/** Precision policies: what activations are stored in. Arithmetic on the CPU is fp32 under every policy. */
import type { DType } from "../graph/value.ts";

/** `fp32` stores activations as f32; `bf16` as bf16, over fp32 master weights of the adapters. */
export type Precision = "fp32" | "bf16";

/** Every policy. */
export const PRECISIONS = ["fp32", "bf16"] as const satisfies readonly Precision[];

/** Element type of activations and compute copies under a policy. */
export function activationType(precision: Precision): DType {
  return precision === "fp32" ? "f32" : "bf16";
}
