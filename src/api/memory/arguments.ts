/** Argument checks of the public API: both runtimes coerce silently, and differently. */
import { LoramemError } from "../../ffi/error.ts";

/** Throws `BAD_ARGUMENT` unless `value` is an integer in [least, most]. */
export function checkInteger(
  op: string,
  name: string,
  value: number,
  least: number,
  most: number = Number.MAX_SAFE_INTEGER,
): void {
  if (Number.isSafeInteger(value) && value >= least && value <= most) return;
  const message = `${op}: ${name} must be an integer from ${least} to ${most}: it is ${show(value)}`;
  throw new LoramemError("BAD_ARGUMENT", message, { name, value });
}

/** Throws `BAD_ARGUMENT` unless `value` is a finite number. */
export function checkFinite(op: string, name: string, value: number): void {
  if (Number.isFinite(value)) return;
  const message = `${op}: ${name} must be a finite number: it is ${show(value)}`;
  throw new LoramemError("BAD_ARGUMENT", message, { name, value });
}

/** Throws `BAD_ARGUMENT` with a message that is complete but for the op. */
export function badArgument(op: string, message: string, name: string, value?: unknown): never {
  throw new LoramemError("BAD_ARGUMENT", `${op}: ${message}`, { name, value });
}

function show(value: unknown): string {
  return typeof value === "string" ? JSON.stringify(value) : String(value);
}
