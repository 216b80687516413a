/** Cross-entropy of a linear head with all logits at once. */
import { at, type Matrix, sum, timesTransposed } from "./matrix.ts";

/** Loss of every labelled row. */
export function crossEntropy(
  x: Matrix,
  w: Matrix,
  rows: readonly number[],
  ids: readonly number[],
): number[] {
  const logits = timesTransposed(x, w);
  return rows.map((row, index) => {
    let most = Number.NEGATIVE_INFINITY;
    for (let id = 0; id < w.rows; id++) most = Math.max(most, at(logits, row, id));
    const total = sum(w.rows, (id) => Math.exp(at(logits, row, id) - most));
    return most + Math.log(total) - at(logits, row, ids[index] as number);
  });
}
