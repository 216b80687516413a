/** Row-wise kernels as their formulas. */
import { at, type Matrix, matrix, sum } from "./matrix.ts";

/** y[t] = x[index[t]]; an index outside reads row 0. */
export function gatherRows(x: Matrix, index: readonly number[]): Matrix {
  return matrix(index.length, x.cols, (row, col) => {
    const from = index[row] as number;
    return at(x, from >= 0 && from < x.rows ? from : 0, col);
  });
}

/** Index of the largest element of each row, the lowest on ties. */
export function argmax(x: Matrix): number[] {
  return Array.from({ length: x.rows }, (_, row) => {
    let best = 0;
    for (let col = 1; col < x.cols; col++) if (at(x, row, col) > at(x, row, best)) best = col;
    return best;
  });
}

/** y = x / sqrt(mean(x^2) + eps) * weight. */
export function rmsNorm(x: Matrix, weight: Matrix, eps: number): Matrix {
  const root = Array.from({ length: x.rows }, (_, row) =>
    Math.sqrt(sum(x.cols, (col) => at(x, row, col) ** 2) / x.cols + eps),
  );
  return matrix(
    x.rows,
    x.cols,
    (row, col) => (at(x, row, col) / (root[row] as number)) * at(weight, 0, col),
  );
}

/** h = silu(g) * u with gu = [g | u]. */
export function glu(gu: Matrix): Matrix {
  const width = gu.cols / 2;
  return matrix(gu.rows, width, (row, col) => {
    const g = at(gu, row, col);
    return (g / (1 + Math.exp(-g))) * at(gu, row, width + col);
  });
}

/** Rotates pairs (i, i + D/2) of the first heads; copies the rest. */
export function rope(
  x: Matrix,
  cos: Matrix,
  sin: Matrix,
  positions: readonly number[],
  heads: number,
  headDim: number,
  direction: 1 | -1,
): Matrix {
  const half = headDim / 2;
  return matrix(x.rows, x.cols, (row, col) => {
    if (col >= heads * headDim) return at(x, row, col);
    const within = col % headDim;
    const pair = within % half;
    const position = positions[row] as number;
    const c = at(cos, position, pair);
    const s = direction * at(sin, position, pair);
    return within < half
      ? at(x, row, col) * c - at(x, row, col + half) * s
      : at(x, row, col) * c + at(x, row, col - half) * s;
  });
}
