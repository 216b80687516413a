/** A plan as a short hash: under one hash, every value on the device has the same place. */
import { createHash } from "node:crypto";
import type { Value } from "../graph/value.ts";
import type { Plan } from "./plan.ts";

/** Hex digits of a hash. */
const DIGITS = 16;

/** SHA-256 over name, type, shape and place of every value on the device. */
export function planHash(plan: Plan): string {
  const hash = createHash("sha256");
  const add = (value: Value) =>
    hash.update(
      `\n${value.name} ${value.dtype} ${value.shape} ${value.pitch} ${plan.offset(value)}`,
    );
  for (const value of plan.resident) {
    if (value.memory === "weights" || value.memory === "trainable") add(value);
  }
  for (const [name, { buffers }] of plan.programs) {
    hash.update(`\n${name}`);
    for (const { tenants } of buffers) for (const { value } of tenants) add(value);
  }
  return hash.digest("hex").slice(0, DIGITS);
}
