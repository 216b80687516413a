/** The loss over a vocabulary, a chunk of labelled rows at a time. */
import { checkInteger } from "../memory/arguments.ts";
import type { TensorView } from "../memory/tensor_view.ts";
import {
  activation,
  checkTensors,
  dense,
  expect,
  float,
  type KernelOptions,
  launch,
  type MaybeTensor,
  optional,
  typeCode,
} from "./tensors.ts";

/** Options of {@linkcode linearCrossEntropy}. */
export interface LinearCrossEntropyOptions extends KernelOptions {
  /** Which chunk: labelled rows [chunk * chunkRows, (chunk + 1) * chunkRows), as far as there are any. Default 0. */
  readonly chunk?: number;
  /** f32 [8]: a gradient scaler, such as {@linkcode GradScaler.factor} gives; the gradient is multiplied by its scale. */
  readonly scaler?: MaybeTensor;
}

/**
 * For the labelled rows of one chunk: logits = x W^T, loss = lse(logits) - logit[label] and, if `dx` is given,
 * dx[row] = lossWeight * scale * (softmax - onehot) W. The gradient of the logits replaces them in place; only `chunkRows` of them
 * exist at a time.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using host = device.createPinnedBuffer(64);
 * using memory = device.createBuffer(32768);
 * stream.fill(memory, 0);
 * host.view(Uint8Array).set(kernels.packBatchHeader({ tokens: 4, documents: 1, labelled: 2, lossWeight: 0.5 }));
 * stream.copy(memory, host);
 * const batch = memory.as("i32", [4]);
 * const labels = memory.as("i32", [2], { offset: 256 }); // rows 0 and 0, label 0: stands for both
 * const loss = memory.as("f32", [2], { offset: 512 });
 * const x = memory.as("f32", [4, 32], { offset: 4096 });
 * const w = memory.as("f32", [100, 32], { offset: 8192 });
 * const logits = memory.as("f32", [2, 100], { offset: 24576 });
 * const gathered = memory.as("f32", [2, 32], { offset: 28672 });
 * kernels.linearCrossEntropy(loss, null, logits, gathered, x, w, labels, labels, batch, { stream });
 * await stream.done(); // each loss is log(100)
 * ```
 *
 * @param loss [M] f32, written for the rows of the chunk.
 * @param dx [T, C] f32, bf16 or f16, written at the labelled rows only; null for an evaluation.
 * @param logits [chunkRows, V] of the same type, without gaps, workspace.
 * @param gathered [chunkRows, C] of the same type, without gaps, workspace.
 * @param x [T, C] of the same type, read.
 * @param w [V, C] of any float type, read.
 * @param labelRows [M] i32: row of each label, read.
 * @param labelIds [M] i32: the label, in [0, V), read.
 * @param batch i32 [4]: what {@linkcode packBatchHeader} made, read.
 * @param options The stream, the chunk, and the scaler.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function linearCrossEntropy(
  loss: TensorView,
  dx: TensorView | null,
  logits: TensorView,
  gathered: TensorView,
  x: TensorView,
  w: TensorView,
  labelRows: TensorView,
  labelIds: TensorView,
  batch: TensorView,
  options: LinearCrossEntropyOptions,
): void {
  const op = "linearCrossEntropy";
  const { chunk = 0, scaler = null } = options;
  checkTensors(op, {
    x: activation(x, "T C"),
    dx: optional(activation(dx, "T C")),
    w: float(w, "V C"),
    logits: dense(activation(logits, "chunkRows V")),
    gathered: dense(activation(gathered, "chunkRows C")),
    labelRows: expect(labelRows, "M", "i32"),
    labelIds: expect(labelIds, "M", "i32"),
    loss: expect(loss, "M", "f32"),
    batch: expect(batch, "4", "i32"),
    scaler: optional(expect(scaler, "8", "f32")),
  });
  checkInteger(op, "chunk", chunk, 0, Math.ceil(loss.width / logits.rows) - 1);
  launch(op, "lm_linear_cross_entropy", options, {
    type: typeCode(x),
    loss,
    dx,
    logits,
    gathered,
    x,
    w,
    label_rows: labelRows,
    label_ids: labelIds,
    batch,
    rows: x.rows,
    width: x.width,
    vocab: w.rows,
    chunk,
    chunk_rows: logits.rows,
    dx_pitch: dx?.pitch ?? 0,
    x_pitch: x.pitch,
    w_pitch: w.pitch,
    w_type: typeCode(w),
    scaler,
  });
}

/**
 * metrics.lossSum += sum of loss[0 .. labelled), in a fixed order, in double precision.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(4096);
 * stream.fill(memory, 0); // no labelled row
 * const metrics = memory.as("f64", [9]);
 * const loss = memory.as("f32", [100], { offset: 256 });
 * const batch = memory.as("i32", [4], { offset: 1024 });
 * kernels.lossSum(metrics, loss, batch, { stream });
 * await stream.done();
 * ```
 *
 * @param metrics f64 [9], updated; see {@linkcode readStepMetrics}.
 * @param loss [M] f32, read.
 * @param batch i32 [4]: what {@linkcode packBatchHeader} made, read.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function lossSum(
  metrics: TensorView,
  loss: TensorView,
  batch: TensorView,
  options: KernelOptions,
): void {
  const op = "lossSum";
  checkTensors(op, {
    metrics: expect(metrics, "9", "f64"),
    loss: expect(loss, "M", "f32"),
    batch: expect(batch, "4", "i32"),
  });
  launch(op, "lm_loss_sum", options, {
    type: typeCode(loss),
    metrics,
    loss,
    batch,
    rows: loss.width,
  });
}
