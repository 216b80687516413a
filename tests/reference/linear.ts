/** Linear groups with LoRA as their formulas. */
import { at, columns, type Matrix, matrix, sum, timesTransposed } from "./matrix.ts";

/** One matrix of a group. */
export interface Part {
  readonly out: number;
  readonly rank: number;
  readonly scale: number;
  /** [out, rank]. */
  readonly b: Matrix;
}

/** s_i = scale_i * x A_i^T. */
export function loraDown(x: Matrix, a: Matrix, parts: readonly Part[]): Matrix {
  const product = timesTransposed(x, a);
  const scales = parts.flatMap(({ rank, scale }) => Array<number>(rank).fill(scale));
  return matrix(
    product.rows,
    product.cols,
    (row, col) => at(product, row, col) * (scales[col] as number),
  );
}

/** y = x W^T + bias + residual + [s_i B_i^T]. */
export function loraLinear(
  x: Matrix,
  w: Matrix,
  s: Matrix,
  parts: readonly Part[],
  bias?: Matrix,
  residual?: Matrix,
): Matrix {
  const y = timesTransposed(x, w);
  let out = 0;
  let rank = 0;
  for (const part of parts) {
    const mine = columns(s, rank, rank + part.rank);
    for (let row = 0; row < y.rows; row++) {
      for (let col = 0; col < part.out; col++) {
        const lora = sum(part.rank, (k) => at(mine, row, k) * at(part.b, col, k));
        const index = row * y.cols + out + col;
        y.data[index] = (y.data[index] as number) + lora;
      }
    }
    out += part.out;
    rank += part.rank;
  }
  return matrix(
    y.rows,
    y.cols,
    (row, col) =>
      at(y, row, col) + (bias ? at(bias, 0, col) : 0) + (residual ? at(residual, row, col) : 0),
  );
}

/** Both together: the function that the backward kernel differentiates. */
export function loraGroup(x: Matrix, w: Matrix, a: Matrix, parts: readonly Part[]): Matrix {
  return loraLinear(x, w, loraDown(x, a, parts), parts);
}
