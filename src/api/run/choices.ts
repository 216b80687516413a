/**
 * Choices between ways of computing a matrix product: a GPU times them before the first step, or uses what an earlier run
 * chose. Different ways may round differently, so equal choices are part of equal bits.
 */
import { pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check, decodeText } from "../../ffi/status.ts";
import type { KernelCall } from "../graph/program.ts";
import type { Device } from "../memory/mod.ts";

/** `"estimated"`: nothing is timed; `"timed"`; or the text that {@linkcode readChoices} gave. */
export type Algorithms = "estimated" | "timed" | (string & {});

/** The kernels that choose. */
const CHOOSING: ReadonlySet<string> = new Set([
  "lm_lora_linear_forward",
  "lm_lora_linear_backward",
  "lm_linear_cross_entropy",
]);

/** Whether a call chooses, and what tells its choice from others; null if it does not. */
export function choiceKey({ kernel, fields }: KernelCall): string | null {
  if (!CHOOSING.has(kernel)) return null;
  const sizes = Object.entries(fields).map(([field, value]) =>
    value === null || typeof value === "number" ? [field, value] : [field, "given"],
  );
  return JSON.stringify([kernel, sizes]);
}

/** Runs `launch` while kernels time their choices; what they work on is overwritten. */
export function timeChoices(device: Device, launch: () => void): void {
  const ctx = pointerOf(device);
  const { fn } = native();
  check(native(), ctx, fn.lm_choices_time(ctx, 1), "commit");
  try {
    launch();
  } finally {
    fn.lm_choices_time(ctx, 0);
  }
}

/** Every choice that was timed or taken over, as text; empty if there is none. */
export function readChoices(device: Device): string {
  const ctx = pointerOf(device);
  const { fn } = native();
  const needed = fn.lm_choices_write(ctx, new Uint8Array(1), 1n);
  check(native(), ctx, needed, "commit");
  const text = new Uint8Array(needed);
  check(native(), ctx, fn.lm_choices_write(ctx, text, BigInt(needed)), "commit");
  return decodeText(text);
}

/**
 * Takes over what {@linkcode readChoices} gave. Choices of another GPU or library are passed over.
 *
 * @throws {LoramemError} BAD_ARGUMENT if the text is not understood.
 */
export function useChoices(device: Device, text: string): void {
  const ctx = pointerOf(device);
  const bytes = new TextEncoder().encode(`${text}\0`);
  check(native(), ctx, native().fn.lm_choices_read(ctx, bytes), "commit");
}
