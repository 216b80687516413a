/**
 * The optimizer step over the flat arena of trainables: global norm with everything that is decided about the step, then
 * AdamW, which zeroes the gradient.
 */
import { memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { bytesOf, DTYPES, type Value } from "../value.ts";

/** Gradient elements per partial sum of the norm; part of the ABI. */
export const NORM_BLOCK = 65_536;

/** Norm, clipping, learning rate, whether the update is skipped, and the next loss scale. */
export const gradNorm: OpKind<{
  readonly metrics: Value;
  /** [ceil(n / 65536)] f64 scratch */
  readonly partial: Value;
  readonly state: Value;
  /** Null = the loss is not scaled. */
  readonly scaler: Value | null;
  readonly gradient: Value;
  readonly control: Value;
}> = {
  name: "gradNorm",
  uses: ({ metrics, partial, state, scaler, gradient, control }) => ({
    reads: [gradient, control],
    writes: [],
    updates: scaler === null ? [metrics, state] : [metrics, state, scaler],
    scratch: [partial],
  }),
  cost: ({ gradient }) => [memoryWork("f32", bytesOf(gradient))],
  bind: ({ metrics, partial, state, scaler, gradient, control }) => ({
    kernel: "lm_grad_norm",
    fields: {
      type: 0,
      metrics,
      partial,
      state,
      scaler,
      found: null,
      g: gradient,
      control,
      n: gradient.shape[0] as number,
    },
  }),
};

/** One AdamW update (Loshchilov & Hutter 2017). */
export const adamw: OpKind<{
  readonly master: Value;
  readonly m: Value;
  readonly v: Value;
  readonly gradient: Value;
  /** Compute copy in the activations' type; null when the masters themselves are used. */
  readonly copy: Value | null;
  readonly control: Value;
  readonly metrics: Value;
}> = {
  name: "adamw",
  uses: ({ master, m, v, gradient, copy, control, metrics }) => ({
    reads: [control, metrics],
    writes: copy === null ? [] : [copy],
    updates: [master, m, v, gradient],
  }),
  cost: ({ master, m, v, gradient, copy }) => {
    const updated = [master, m, v, gradient].reduce((sum, value) => sum + bytesOf(value), 0);
    return [memoryWork("f32", 2 * updated + (copy === null ? 0 : bytesOf(copy)))];
  },
  bind: ({ master, m, v, gradient, copy, control, metrics }) => ({
    kernel: "lm_adamw",
    fields: {
      type: 0,
      p: master,
      m,
      v,
      g: gradient,
      copy,
      control,
      metrics,
      n: master.shape[0] as number,
      copy_type: DTYPES[copy?.dtype ?? "f32"].code,
    },
  }),
};
