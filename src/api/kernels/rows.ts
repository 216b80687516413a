/** Kernels that go over rows: look-ups, normalization, the gated activation. */
import { checkFinite } from "../memory/arguments.ts";
import type { TensorView } from "../memory/tensor_view.ts";
import {
  activation,
  checkTensors,
  dense,
  expect,
  float,
  launch,
  liveRows,
  type MaybeTensor,
  optional,
  type RowOptions,
  typeCode,
} from "./tensors.ts";

/**
 * y[t] = table[ids[t]].
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(4096);
 * stream.fill(memory, 0); // ids are 0
 * const table = memory.as("bf16", [16, 8]);
 * const ids = memory.as("i32", [3], { offset: 1024 });
 * const y = memory.as("f32", [3, 8], { offset: 2048 });
 * kernels.embeddingForward(y, table, ids, { stream });
 * await stream.done();
 * ```
 *
 * @param y [T, C] f32, bf16 or f16, written.
 * @param table [V, C] of any float type, without gaps, read.
 * @param ids [T] i32, each in [0, V) (others read row 0), read.
 * @param options The stream, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function embeddingForward(
  y: TensorView,
  table: TensorView,
  ids: TensorView,
  options: RowOptions,
): void {
  const op = "embeddingForward";
  checkTensors(op, {
    y: activation(y, "T C"),
    table: dense(float(table, "V C")),
    ids: expect(ids, "T", "i32"),
    live: liveRows(options),
  });
  launch(op, "lm_embedding_forward", options, {
    type: typeCode(y),
    y,
    table,
    ids,
    live: options.live,
    rows: y.rows,
    width: y.width,
    vocab: table.rows,
    y_pitch: y.pitch,
    table_type: typeCode(table),
  });
}

/**
 * y[i] = x[index[i]].
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(4096);
 * stream.fill(memory, 0);
 * const x = memory.as("f32", [5, 8]);
 * const index = memory.as("i32", [2], { offset: 1024 });
 * const y = memory.as("f32", [2, 8], { offset: 2048 });
 * kernels.gatherRows(y, x, index, { stream });
 * await stream.done();
 * ```
 *
 * @param y [rows, C] f32, bf16 or f16, written.
 * @param x [sourceRows, C] of the same type, read.
 * @param index [rows] i32, each in [0, sourceRows), read.
 * @param options The stream, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function gatherRows(
  y: TensorView,
  x: TensorView,
  index: TensorView,
  options: RowOptions,
): void {
  const op = "gatherRows";
  checkTensors(op, {
    y: activation(y, "rows C"),
    x: activation(x, "sourceRows C"),
    index: expect(index, "rows", "i32"),
    live: liveRows(options),
  });
  launch(op, "lm_gather_rows", options, {
    type: typeCode(y),
    y,
    x,
    index,
    live: options.live,
    rows: y.rows,
    width: y.width,
    source_rows: x.rows,
    y_pitch: y.pitch,
    x_pitch: x.pitch,
  });
}

/**
 * out[t] = index of the largest x[t, :], the lowest index on ties.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(4096);
 * stream.fill(memory, 0);
 * kernels.argmax(memory.as("i32", [2], { offset: 2048 }), memory.as("f32", [2, 100]), { stream });
 * await stream.done();
 * ```
 *
 * @param out [T] i32, written.
 * @param x [T, width] f32, bf16 or f16, read.
 * @param options The stream, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function argmax(out: TensorView, x: TensorView, options: RowOptions): void {
  const op = "argmax";
  checkTensors(op, {
    x: activation(x, "T width"),
    out: expect(out, "T", "i32"),
    live: liveRows(options),
  });
  launch(op, "lm_argmax", options, {
    type: typeCode(x),
    out,
    x,
    live: options.live,
    rows: x.rows,
    width: x.width,
    x_pitch: x.pitch,
  });
}

/**
 * y = x / sqrt(mean(x^2) + eps) * weight, row by row (Zhang & Sennrich 2019, arXiv:1910.07467).
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(4096);
 * stream.fill(memory, 0);
 * const x = memory.as("f32", [4, 64]);
 * const weight = memory.as("bf16", [64], { offset: 2048 });
 * kernels.rmsNormForward(x, x, weight, 1e-6, { stream });
 * await stream.done();
 * ```
 *
 * @param y [T, C] f32, bf16 or f16, written; may be `x`.
 * @param x [T, C] of the same type, read.
 * @param weight [C] of any float type, read.
 * @param eps Added to the mean square, such as 1e-6.
 * @param options The stream, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function rmsNormForward(
  y: TensorView,
  x: TensorView,
  weight: TensorView,
  eps: number,
  options: RowOptions,
): void {
  const op = "rmsNormForward";
  checkTensors(op, {
    x: activation(x, "T C"),
    y: activation(y, "T C"),
    weight: float(weight, "C"),
    live: liveRows(options),
  });
  checkFinite(op, "eps", eps);
  launch(op, "lm_rms_norm_forward", options, {
    type: typeCode(y),
    y,
    x,
    weight,
    live: options.live,
    rows: y.rows,
    width: y.width,
    y_pitch: y.pitch,
    x_pitch: x.pitch,
    weight_type: typeCode(weight),
    eps,
  });
}

/** Options of {@linkcode rmsNormBackward}. */
export interface RmsNormBackwardOptions extends RowOptions {
  /** [T, C], added to the result: the gradient that flows around the norm. */
  readonly add?: MaybeTensor;
  /** [T, C], written with the output of the forward pass, bit for bit; may be `dy` or `add` where `dx` is not. */
  readonly y?: MaybeTensor;
}

/**
 * dx = d(norm)/dx applied to dy, plus `add`. The weight is frozen; the row's scale is computed again.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(8192);
 * stream.fill(memory, 0);
 * const x = memory.as("f32", [4, 64]);
 * const dy = memory.as("f32", [4, 64], { offset: 1024 });
 * const weight = memory.as("f32", [64], { offset: 2048 });
 * kernels.rmsNormBackward(dy, dy, x, weight, 1e-6, { stream, add: dy });
 * await stream.done();
 * ```
 *
 * @param dx [T, C] f32, bf16 or f16, written; may be `dy` or `add`.
 * @param dy [T, C] of the same type, read.
 * @param x [T, C] input of the forward pass, read.
 * @param weight [C] of any float type, read.
 * @param eps As in the forward pass.
 * @param options The stream, what to add, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function rmsNormBackward(
  dx: TensorView,
  dy: TensorView,
  x: TensorView,
  weight: TensorView,
  eps: number,
  options: RmsNormBackwardOptions,
): void {
  const op = "rmsNormBackward";
  const { add, y } = options;
  checkTensors(op, {
    x: activation(x, "T C"),
    dx: activation(dx, "T C"),
    dy: activation(dy, "T C"),
    add: optional(activation(add, "T C")),
    y: optional(activation(y, "T C")),
    weight: float(weight, "C"),
    live: liveRows(options),
  });
  checkFinite(op, "eps", eps);
  launch(op, "lm_rms_norm_backward", options, {
    type: typeCode(dx),
    dx,
    dy,
    x,
    weight,
    add,
    live: options.live,
    rows: dx.rows,
    width: dx.width,
    dx_pitch: dx.pitch,
    dy_pitch: dy.pitch,
    x_pitch: x.pitch,
    add_pitch: add?.pitch ?? 0,
    weight_type: typeCode(weight),
    eps,
    y,
    y_pitch: y?.pitch ?? 0,
  });
}

/**
 * h = silu(g) * u with gu = [g | u] (Shazeer 2020, arXiv:2002.05202).
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(4096);
 * stream.fill(memory, 0);
 * const gu = memory.as("f32", [4, 128]);
 * const h = memory.as("f32", [4, 64], { offset: 2048 });
 * kernels.gluForward(h, gu, { stream });
 * await stream.done();
 * ```
 *
 * @param h [T, I] f32, bf16 or f16, written.
 * @param gu [T, 2 I] of the same type, read.
 * @param options The stream, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function gluForward(h: TensorView, gu: TensorView, options: RowOptions): void {
  const op = "gluForward";
  checkTensors(op, {
    h: activation(h, "T I"),
    gu: activation(gu, "T 2I"),
    live: liveRows(options),
  });
  launch(op, "lm_glu_forward", options, {
    type: typeCode(h),
    h,
    gu,
    live: options.live,
    rows: h.rows,
    width: h.width,
    h_pitch: h.pitch,
    gu_pitch: gu.pitch,
  });
}

/** Options of {@linkcode gluBackward}. */
export interface GluBackwardOptions extends RowOptions {
  /** [T, I], written with the output of the forward pass, bit for bit; may be `dh`. */
  readonly h?: MaybeTensor;
}

/**
 * dgu = [dh * u * silu'(g) | dh * silu(g)].
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(4096);
 * stream.fill(memory, 0);
 * const gu = memory.as("f32", [4, 128]);
 * const dh = memory.as("f32", [4, 64], { offset: 2048 });
 * kernels.gluBackward(gu, dh, gu, { stream });
 * await stream.done();
 * ```
 *
 * @param dgu [T, 2 I] f32, bf16 or f16, written; may be `gu`.
 * @param dh [T, I] of the same type, read.
 * @param gu [T, 2 I] input of the forward pass, read.
 * @param options The stream, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function gluBackward(
  dgu: TensorView,
  dh: TensorView,
  gu: TensorView,
  options: GluBackwardOptions,
): void {
  const op = "gluBackward";
  const { h } = options;
  checkTensors(op, {
    dh: activation(dh, "T I"),
    h: optional(activation(h, "T I")),
    dgu: activation(dgu, "T 2I"),
    gu: activation(gu, "T 2I"),
    live: liveRows(options),
  });
  launch(op, "lm_glu_backward", options, {
    type: typeCode(dh),
    dgu,
    dh,
    gu,
    live: options.live,
    rows: dh.rows,
    width: dh.width,
    dgu_pitch: dgu.pitch,
    dh_pitch: dh.pitch,
    gu_pitch: gu.pitch,
    h_pitch: h?.pitch ?? 0,
    h,
  });
}
