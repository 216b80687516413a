/**
 * What ops cost: arithmetic and memory traffic of every kernel, from shapes alone. A device profile turns them into
 * seconds (src/api/plan/time.ts).
 */
import { DTYPES, type DType, rowsOf, type Value } from "./value.ts";

/** How full the planned rows are. Kernels leave the other rows alone, so costs follow the load. */
export interface Load {
  /** Rows that hold tokens. */
  readonly tokens: number;
  /** Rows with a label. */
  readonly labelled: number;
  /** Pairs of a query and a key that causal attention looks at. */
  readonly pairs: number;
  /** Those of them that lie in the model's sliding window. */
  readonly windowPairs: number;
}

/** Pairs of a query and a key in a document of n tokens: n (n + 1) / 2, or fewer with a window; 0 = none. */
export function documentPairs(length: number, window = 0): number {
  const most = window === 0 ? length : Math.min(length, window);
  return most * (length - (most - 1) / 2);
}

/** The work of one kernel. */
export interface Work {
  /** A multiplication and an addition are two. */
  readonly flops: number;
  /** Bytes read and written, each operand once. */
  readonly bytes: number;
  /** What does the arithmetic: matrix products, attention (a matrix product with a softmax inside), or nothing much. */
  readonly unit: "matrix" | "attention" | "memory";
  /** Element type of the operands. */
  readonly type: DType;
  /** Whether the forward pass has done it before. */
  readonly again?: boolean;
}

/** Rows of a value that hold tokens. */
export function liveRows(value: Value, load: Load): number {
  return Math.min(rowsOf(value), load.tokens);
}

/** Bytes of `rows` rows of a value, padding left out. */
export function rowBytes(value: Value, rows: number): number {
  return rows * (value.shape[value.shape.length - 1] as number) * DTYPES[value.dtype].bytes;
}

/** Bytes of the live rows of several values together. */
export function liveBytes(load: Load, ...values: readonly (Value | null)[]): number {
  return values.reduce(
    (sum, value) => sum + (value === null ? 0 : rowBytes(value, liveRows(value, load))),
    0,
  );
}

/** A kernel that is limited by memory alone. */
export function memoryWork(type: DType, bytes: number): Work {
  return { flops: 0, bytes, unit: "memory", type };
}

/** A kernel of matrix products. */
export function matrixWork(type: DType, flops: number, bytes: number): Work {
  return { flops, bytes, unit: "matrix", type };
}
