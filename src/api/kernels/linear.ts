/**
 * Linear groups with LoRA (Hu et al. 2021, arXiv:2106.09685).
 *
 * A group is one matrix product over up to three matrices that lie next to each other, such as q|k|v or gate|up: w [N, K]
 * with N the sum of their outputs. Each part may carry an adapter. All A lie next to each other: a [R, K] with R the sum of
 * the ranks; each B is a matrix of its own.
 */
import { badArgument, checkFinite, checkInteger } from "../memory/arguments.ts";
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
  need,
  optional,
  type RowOptions,
  typeCode,
} from "./tensors.ts";

/** One matrix of a group. */
export interface LoraPart {
  /** Its outputs. */
  readonly out: number;
  /** Rank r of its adapter; 0, the default, means none. */
  readonly rank?: number;
  /** alpha / r. Default 1. */
  readonly scale?: number;
  /** [out, rank] of any float type, without gaps: B, read. */
  readonly b?: MaybeTensor;
  /** [out, rank] f32, without gaps: gradient of B, accumulated; for the backward pass. */
  readonly gradB?: MaybeTensor;
}

/** Up to three matrices that lie next to each other. */
export type LoraGroup = readonly LoraPart[];

/** Options of {@linkcode loraLinearForward}. */
export interface LoraLinearForwardOptions extends RowOptions {
  /** [N] of any float type, read. */
  readonly bias?: MaybeTensor;
  /** [T, N] of the activation type, read; may be `y`. */
  readonly residual?: MaybeTensor;
  /** [T, R] of the activation type, from {@linkcode loraDown}, read; needed if the group has adapters. */
  readonly s?: MaybeTensor;
}

/** Options of {@linkcode loraLinearBackward}; all but the stream and the rows are needed if the group has adapters. */
export interface LoraLinearBackwardOptions extends RowOptions {
  /** [T, K] of the activation type, input of the forward pass, read; without it, {@linkcode loraDownBackward} adds to `gradA`. */
  readonly x?: MaybeTensor;
  /** [T, R] of the activation type, from {@linkcode loraDown}, read. */
  readonly s?: MaybeTensor;
  /** [R, K] of the type of every B, without gaps, read. */
  readonly a?: MaybeTensor;
  /** [R, K] f32, without gaps, accumulated; given with `x`. */
  readonly gradA?: MaybeTensor;
  /** [T, R] f32, without gaps, workspace. What it holds afterwards is for {@linkcode loraDownBackward} on the same device. */
  readonly ds?: MaybeTensor;
}

/**
 * s_i = scale_i * x A_i^T for every adapter of a group.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(8192);
 * stream.fill(memory, 0);
 * const x = memory.as("f32", [4, 32]);
 * const a = memory.as("bf16", [8 + 4, 32], { offset: 1024 });
 * const s = memory.as("f32", [4, 12], { offset: 4096 });
 * const group = [{ out: 64, rank: 8, scale: 2 }, { out: 16 }, { out: 16, rank: 4, scale: 4 }];
 * kernels.loraDown(s, x, a, group, { stream });
 * await stream.done();
 * ```
 *
 * @param s [T, R] f32, bf16 or f16, written.
 * @param x [T, K] of the same type, read.
 * @param a [R, K] of any float type, without gaps, read.
 * @param group Ranks and scales.
 * @param options The stream, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function loraDown(
  s: TensorView,
  x: TensorView,
  a: TensorView,
  group: LoraGroup,
  options: RowOptions,
): void {
  const op = "loraDown";
  const { R, ranks, scales } = checkGroup(op, group);
  if (R === 0)
    badArgument(
      op,
      "the group has no adapter: every rank is 0: leave the call out",
      "group",
      group,
    );
  checkTensors(
    op,
    {
      x: activation(x, "T K"),
      s: activation(s, "T R"),
      a: dense(float(a, "R K")),
      live: liveRows(options),
    },
    { R },
  );
  launch(op, "lm_lora_down", options, {
    type: typeCode(x),
    s,
    x,
    a,
    live: options.live,
    rows: x.rows,
    in: x.width,
    s_pitch: s.pitch,
    x_pitch: x.pitch,
    a_type: typeCode(a),
    ...ranks,
    ...scales,
  });
}

/**
 * y = x W^T + bias + residual + [s_i B_i^T].
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(32768);
 * stream.fill(memory, 0);
 * const x = memory.as("f32", [4, 32]);
 * const w = memory.as("bf16", [64 + 16, 32], { offset: 4096 });
 * const s = memory.as("f32", [4, 8], { offset: 16384 });
 * const b = memory.as("f32", [64, 8], { offset: 20480 });
 * const y = memory.as("f32", [4, 80], { offset: 24576 });
 * const group = [{ out: 64, rank: 8, scale: 2, b }, { out: 16 }];
 * kernels.loraLinearForward(y, x, w, group, { stream, s });
 * await stream.done();
 * ```
 *
 * @param y [T, N] f32, bf16 or f16, written; may be the residual.
 * @param x [T, K] of the same type, read.
 * @param w [N, K] of any float type, read.
 * @param group The parts: outputs, ranks and B.
 * @param options The stream, what to add, `s`, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function loraLinearForward(
  y: TensorView,
  x: TensorView,
  w: TensorView,
  group: LoraGroup,
  options: LoraLinearForwardOptions,
): void {
  const op = "loraLinearForward";
  const { bias, residual, s, live } = options;
  const { N, R, outs, ranks } = checkGroup(op, group);
  checkTensors(
    op,
    {
      x: activation(x, "T K"),
      y: activation(y, "T N"),
      w: float(w, "N K"),
      bias: optional(float(bias, "N")),
      residual: optional(activation(residual, "T N")),
      s: optional(activation(s, "T R")),
      live: liveRows(options),
    },
    { N, R },
  );
  if (R > 0) need(op, "s", s, "the group has adapters: pass what loraDown wrote");
  const b = checkB(op, group);
  launch(op, "lm_lora_linear_forward", options, {
    type: typeCode(x),
    y,
    x,
    w,
    bias,
    residual,
    s: R > 0 ? s : null,
    ...b.views,
    live,
    rows: x.rows,
    in: x.width,
    out: N,
    y_pitch: y.pitch,
    x_pitch: x.pitch,
    w_pitch: w.pitch,
    residual_pitch: residual?.pitch ?? 0,
    s_pitch: s?.pitch ?? 0,
    w_type: typeCode(w),
    bias_type: typeCode(bias),
    b_type: b.type,
    ...outs,
    ...ranks,
  });
}

/**
 * Gradients of a group. With ds_i = scale_i * dy_i B_i: dB_i += dy_i^T s_i, dA_i += ds_i^T x, dx = dy W + ds A.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(8192);
 * stream.fill(memory, 0);
 * const dy = memory.as("f32", [4, 16]);
 * const w = memory.as("f32", [16, 32], { offset: 1024 });
 * const dx = memory.as("f32", [4, 32], { offset: 4096 });
 * kernels.loraLinearBackward(dx, dy, w, [{ out: 16 }], { stream }); // no adapter: only dx
 * await stream.done();
 * ```
 *
 * @param dx [T, K] f32, bf16 or f16, written; null where it is not wanted.
 * @param dy [T, N] of the same type, read.
 * @param w [N, K] of any float type, read.
 * @param group The parts: outputs, ranks, scales, B and its gradient.
 * @param options The stream, what adapters need, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function loraLinearBackward(
  dx: TensorView | null,
  dy: TensorView,
  w: TensorView,
  group: LoraGroup,
  options: LoraLinearBackwardOptions,
): void {
  const op = "loraLinearBackward";
  const { x, s, a, gradA, ds, live } = options;
  const { N, R, outs, ranks, scales } = checkGroup(op, group);
  if (R > 0) {
    for (const [name, tensor] of Object.entries({ s, a, ds })) {
      need(op, name, tensor, "the group has adapters");
    }
    if (gradA) need(op, "x", x, "gradA is given");
    if (x) need(op, "gradA", gradA, "x is given");
  }
  checkTensors(
    op,
    {
      dy: activation(dy, "T N"),
      w: float(w, "N K"),
      dx: optional(activation(dx, "T K")),
      x: optional(activation(x, "T K")),
      s: optional(activation(s, "T R")),
      a: optional(dense(float(a, "R K"))),
      gradA: optional(dense(expect(gradA, "R K", "f32"))),
      ds: optional(dense(expect(ds, "T R", "f32"))),
      live: liveRows(options),
    },
    { N, R },
  );
  const b = checkB(op, group, a);
  const adapters =
    R > 0 ? { x, s, a, da: gradA, ds } : { x: null, s: null, a: null, da: null, ds: null };
  launch(op, "lm_lora_linear_backward", options, {
    type: typeCode(dy),
    dx,
    dy,
    w,
    ...adapters,
    ...b.views,
    ...checkGradB(op, group),
    live,
    rows: dy.rows,
    in: w.width,
    out: N,
    dx_pitch: dx?.pitch ?? 0,
    dy_pitch: dy.pitch,
    x_pitch: x?.pitch ?? 0,
    s_pitch: s?.pitch ?? 0,
    w_pitch: w.pitch,
    w_type: typeCode(w),
    a_type: typeCode(a),
    ...outs,
    ...ranks,
    ...scales,
  });
}

/**
 * dA_i += ds_i^T x: the part of {@linkcode loraLinearBackward} that reads x, for callers that have x only later.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(16384);
 * stream.fill(memory, 0);
 * const at = (offset: number, shape: number[]) => memory.as("f32", shape, { offset });
 * const [dy, x, w] = [at(0, [4, 16]), at(1024, [4, 32]), at(2048, [16, 32])];
 * const [s, ds, a, gradA] = [at(4096, [4, 2]), at(5120, [4, 2]), at(6144, [2, 32]), at(7168, [2, 32])];
 * const group = [{ out: 16, rank: 2, b: at(8192, [16, 2]), gradB: at(9216, [16, 2]) }];
 * kernels.loraLinearBackward(null, dy, w, group, { stream, s, a, ds });
 * kernels.loraDownBackward(gradA, ds, x, a, group, { stream });
 * await stream.done();
 * ```
 *
 * @param gradA [R, K] f32, without gaps, accumulated.
 * @param ds [T, R] f32, without gaps, as loraLinearBackward left it, read.
 * @param x [T, K] f32, bf16 or f16, input of the forward pass, read.
 * @param a [R, K] as in that call; only its type is looked at.
 * @param group The parts: ranks as in that call.
 * @param options The stream, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function loraDownBackward(
  gradA: TensorView,
  ds: TensorView,
  x: TensorView,
  a: TensorView,
  group: LoraGroup,
  options: RowOptions,
): void {
  const op = "loraDownBackward";
  const { R, ranks } = checkGroup(op, group);
  if (R === 0) badArgument(op, "the group has no adapter: give a part a rank", "group", group);
  checkTensors(
    op,
    {
      x: activation(x, "T K"),
      a: dense(float(a, "R K")),
      gradA: dense(expect(gradA, "R K", "f32")),
      ds: dense(expect(ds, "T R", "f32")),
      live: liveRows(options),
    },
    { R },
  );
  launch(op, "lm_lora_down_backward", options, {
    type: typeCode(x),
    da: gradA,
    ds,
    x,
    live: options.live,
    rows: x.rows,
    in: x.width,
    x_pitch: x.pitch,
    a_type: typeCode(a),
    ...ranks,
  });
}

const SLOTS = [0, 1, 2] as const;

interface GroupFields {
  readonly N: number;
  readonly R: number;
  readonly outs: Readonly<Record<string, number>>;
  readonly ranks: Readonly<Record<string, number>>;
  readonly scales: Readonly<Record<string, number>>;
}

/** One field per slot of the kernel's struct: `rank0`, `rank1`, `rank2`. */
function slots<T>(name: string, value: (index: number) => T): Record<string, T> {
  return Object.fromEntries(SLOTS.map((index) => [`${name}${index}`, value(index)]));
}

function checkGroup(op: string, group: LoraGroup): GroupFields {
  if (!Array.isArray(group) || group.length < 1 || group.length > SLOTS.length) {
    badArgument(
      op,
      `group must have 1 to 3 parts: it has ${group?.length}: split it`,
      "group",
      group,
    );
  }
  for (const [index, { out, rank = 0, scale = 1 }] of group.entries()) {
    checkInteger(op, `group[${index}].out`, out, 1, 2 ** 31 - 1);
    checkInteger(op, `group[${index}].rank`, rank, 0, 2 ** 16);
    checkFinite(op, `group[${index}].scale`, scale);
  }
  const rank = (index: number) => group[index]?.rank ?? 0;
  return {
    N: group.reduce((sum, { out }) => sum + out, 0),
    R: group.reduce((sum, part) => sum + (part.rank ?? 0), 0),
    outs: slots("out", (index) => group[index]?.out ?? 0),
    ranks: slots("rank", rank),
    scales: slots("scale", (index) => (rank(index) === 0 ? 0 : (group[index]?.scale ?? 1))),
  };
}

/** Checks every B; they share one type, that of `a` where it is given. */
function checkB(
  op: string,
  group: LoraGroup,
  a?: MaybeTensor,
): { readonly views: Readonly<Record<string, MaybeTensor>>; readonly type: number } {
  let first = a;
  for (const [index, { out, rank = 0, b }] of group.entries()) {
    const name = `group[${index}].b`;
    if (rank === 0) continue;
    need(op, name, b, `its rank is ${rank}`);
    checkTensors(op, { [name]: dense(float(b, "out rank")) }, { out, rank });
    first ??= b;
    if (b.dtype !== first.dtype) {
      badArgument(
        op,
        `every A and B must share one dtype: ${name} is ${b}, another is ${first}: cast one`,
        name,
      );
    }
  }
  const views = slots("b", (index) => ((group[index]?.rank ?? 0) > 0 ? group[index]?.b : null));
  return { views, type: typeCode(first) };
}

function checkGradB(op: string, group: LoraGroup): Record<string, MaybeTensor> {
  for (const [index, { out, rank = 0, gradB }] of group.entries()) {
    const name = `group[${index}].gradB`;
    if (rank === 0) continue;
    need(op, name, gradB, `its rank is ${rank}`);
    checkTensors(op, { [name]: dense(expect(gradB, "out rank", "f32")) }, { out, rank });
  }
  return slots("db", (index) => ((group[index]?.rank ?? 0) > 0 ? group[index]?.gradB : null));
}
