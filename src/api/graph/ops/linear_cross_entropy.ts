/**
 * Output head and loss over one chunk of the labelled rows: the logits of a chunk are computed, turned into their own
 * gradient in place, and multiplied back, so that no [T, V] matrix ever exists. The head is frozen; the op seeds the
 * backward pass instead of having a rule of its own.
 */
import { matrixWork, memoryWork, rowBytes } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { bytesOf, DTYPES, rowsOf, type Value } from "../value.ts";

export interface LinearCrossEntropyAttributes {
  /** [M] f32: loss of every labelled row */
  readonly loss: Value;
  /** [T, C] gradient of x, zero before the first chunk; null = evaluation */
  readonly dx: Value | null;
  /** [chunkRows, V] scratch */
  readonly logits: Value;
  /** [chunkRows, C] scratch; null on the CPU, which reads labelled rows where they are. */
  readonly gathered: Value | null;
  /** [T, C] */
  readonly x: Value;
  /** [V, C] */
  readonly head: Value;
  /** [M] i32 */
  readonly labelRows: Value;
  readonly labelIds: Value;
  /** Header of the micro-batch. */
  readonly header: Value;
  /** Its scale multiplies dx; null = 1. */
  readonly scaler: Value | null;
  readonly chunk: number;
}

export const linearCrossEntropy: OpKind<LinearCrossEntropyAttributes> = {
  name: "linearCrossEntropy",
  uses: ({ loss, dx, logits, gathered, x, head, labelRows, labelIds, header, scaler }) => ({
    reads: [x, head, labelRows, labelIds, header, ...(scaler === null ? [] : [scaler])],
    // Only the chunk's rows are written.
    writes: [],
    updates: dx === null ? [loss] : [loss, dx],
    scratch: gathered === null ? [logits] : [logits, gathered],
  }),
  // Logits, then a softmax that reads them twice and writes their gradient, then dx.
  cost: ({ dx, logits, x, head, chunk }, load) => {
    const planned = logits.shape[0] as number;
    const rows = Math.max(0, Math.min(planned, load.labelled - chunk * planned));
    if (rows === 0) return []; // the host skips the segment
    const flops = 2 * rows * (head.shape[0] as number) * (head.shape[1] as number);
    const product = matrixWork(
      x.dtype,
      flops,
      rowBytes(x, rows) + rowBytes(logits, rows) + bytesOf(head),
    );
    const softmax = memoryWork(x.dtype, (dx === null ? 1 : 3) * rowBytes(logits, rows));
    return dx === null ? [product, softmax] : [product, softmax, product];
  },
  bind: ({ loss, dx, logits, gathered, x, head, labelRows, labelIds, header, scaler, chunk }) => ({
    kernel: "lm_linear_cross_entropy",
    fields: {
      type: DTYPES[x.dtype].code,
      loss,
      dx,
      logits,
      gathered,
      x,
      w: head,
      label_rows: labelRows,
      label_ids: labelIds,
      batch: header,
      rows: rowsOf(x),
      width: x.shape[1] as number,
      vocab: head.shape[0] as number,
      chunk,
      chunk_rows: logits.shape[0] as number,
      dx_pitch: dx?.pitch ?? 0,
      x_pitch: x.pitch,
      w_pitch: head.pitch,
      w_type: DTYPES[head.dtype].code,
      scaler,
    },
  }),
};

/** Adds the row losses to the step's metrics, in double precision and a fixed order. */
export const lossSum: OpKind<{
  readonly metrics: Value;
  readonly loss: Value;
  readonly header: Value;
}> = {
  name: "lossSum",
  uses: ({ metrics, loss, header }) => ({ reads: [loss, header], writes: [], updates: [metrics] }),
  cost: ({ loss }, load) => [memoryWork("f32", load.labelled * DTYPES[loss.dtype].bytes)],
  bind: ({ metrics, loss, header }) => ({
    kernel: "lm_loss_sum",
    fields: { type: 0, metrics, loss, batch: header, rows: loss.shape[0] as number },
  }),
};
