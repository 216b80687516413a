/** Dense matrices of doubles, for references that are written to be read. */

/** Row-major numbers. */
export interface Matrix {
  readonly rows: number;
  readonly cols: number;
  readonly data: Float64Array<ArrayBuffer>;
}

/** A matrix of `f(row, column)`. */
export function matrix(
  rows: number,
  cols: number,
  f: (row: number, col: number) => number,
): Matrix {
  const data = new Float64Array(rows * cols);
  for (let i = 0; i < data.length; i++) data[i] = f(Math.floor(i / cols), i % cols);
  return { rows, cols, data };
}

/** One element. */
export function at(m: Matrix, row: number, col: number): number {
  return m.data[row * m.cols + col] as number;
}

/** Columns [from, to). */
export function columns(m: Matrix, from: number, to: number): Matrix {
  return matrix(m.rows, to - from, (row, col) => at(m, row, from + col));
}

/** Rows [from, to). */
export function rows(m: Matrix, from: number, to: number): Matrix {
  return matrix(to - from, m.cols, (row, col) => at(m, from + row, col));
}

/** f(0) + ... + f(n - 1). */
export function sum(n: number, f: (index: number) => number): number {
  let total = 0;
  for (let i = 0; i < n; i++) total += f(i);
  return total;
}

/** a b^T. */
export function timesTransposed(a: Matrix, b: Matrix): Matrix {
  return matrix(a.rows, b.rows, (i, j) => sum(a.cols, (k) => at(a, i, k) * at(b, j, k)));
}
