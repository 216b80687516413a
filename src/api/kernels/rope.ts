/** Rotary position embedding. */
import { badArgument, checkInteger } from "../memory/arguments.ts";
import type { TensorView } from "../memory/tensor_view.ts";
import {
  activation,
  checkTensors,
  dense,
  expect,
  launch,
  liveRows,
  type RowOptions,
  typeCode,
} from "./tensors.ts";

/** Options of {@linkcode rope}. */
export interface RopeOptions extends RowOptions {
  /** Leading heads of a row that are rotated; the others are copied. */
  readonly heads: number;
  /** Size D of a head, even. */
  readonly headDim: number;
  /** Whether to apply the transpose, the backward pass. Default false. */
  readonly backward?: boolean;
}

/**
 * Rotates the first heads of every row by its position, half-split pairs (i, i + D/2); copies the rest (Su et al. 2021,
 * arXiv:2104.09864).
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(8192);
 * stream.fill(memory, 0);
 * const x = memory.as("f32", [4, 3 * 16]); // two query heads, one value head
 * const cos = memory.as("f32", [32, 8], { offset: 4096 });
 * const positions = memory.as("i32", [4], { offset: 6144 });
 * kernels.rope(x, x, cos, cos, positions, { stream, heads: 2, headDim: 16 });
 * await stream.done();
 * ```
 *
 * @param y [T, width] f32, bf16 or f16, written; may be `x`.
 * @param x [T, width] of the same type, read.
 * @param cos [P, D/2] f32, read.
 * @param sin [P, D/2] f32, read.
 * @param positions [T] i32, each in [0, P), read.
 * @param options The stream, the heads, the direction, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function rope(
  y: TensorView,
  x: TensorView,
  cos: TensorView,
  sin: TensorView,
  positions: TensorView,
  options: RopeOptions,
): void {
  const op = "rope";
  const { heads, headDim } = options;
  checkInteger(op, "headDim", headDim, 2, 2 ** 16);
  checkInteger(op, "heads", heads, 1, 2 ** 16);
  const half = headDim / 2;
  checkTensors(
    op,
    {
      x: activation(x, "T width"),
      y: activation(y, "T width"),
      cos: dense(expect(cos, "P D/2", "f32")),
      sin: dense(expect(sin, "P D/2", "f32")),
      positions: expect(positions, "T", "i32"),
      live: liveRows(options),
    },
    { "D/2": half },
  );
  if (!Number.isInteger(half) || heads * headDim > y.width) {
    const what = `heads is ${heads}, headDim is ${headDim}, y is ${y}`;
    badArgument(
      op,
      `the rotated heads do not fit a row: ${what}: pass an even headDim`,
      "headDim",
      headDim,
    );
  }
  launch(op, "lm_rope", options, {
    type: typeCode(y),
    y,
    x,
    cos,
    sin,
    positions,
    live: options.live,
    rows: y.rows,
    width: y.width,
    heads,
    head_dim: headDim,
    position_count: cos.rows,
    y_pitch: y.pitch,
    x_pitch: x.pitch,
    direction: options.backward === true ? -1 : 1,
  });
}
