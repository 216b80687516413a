/**
 * `kernels.*`: one function per native kernel, with its arguments checked.
 *
 * Arguments come in the order outputs, inputs, scalars, options. A call enqueues work on the stream of its options and
 * returns; the tensors belong to the stream until it has passed. Arithmetic is fp32 whatever the storage type, and
 * reductions have a fixed order: the same inputs give the same bits with any number of threads.
 *
 * Letters: T rows (tokens), C width of the residual stream, K inputs and N outputs of a linear, R sum of the LoRA ranks of
 * a group, Hq/Hk query/key-value heads, D head size, I width of the gated MLP, V vocabulary, M labelled rows, P positions.
 */
export * from "./attention.ts";
export * from "./elementwise.ts";
export * from "./linear.ts";
export * from "./loss.ts";
export * from "./optimizer.ts";
export * from "./rope.ts";
export * from "./rows.ts";
export {
  type ScalerSettings,
  type ScalerValues,
  scalerScale,
  scalerSet,
  scalerUnscale,
  scalerUpdate,
  scalerValues,
} from "./scaler.ts";
export * from "./step_structs.ts";
export type { KernelOptions, MaybeTensor, RowOptions } from "./tensors.ts";
