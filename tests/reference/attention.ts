/** Causal grouped-query attention with the whole score matrix. */
import { at, type Matrix, matrix, sum } from "./matrix.ts";

/** Sizes of an attention. */
export interface Heads {
  readonly heads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly scale: number;
  /** Keys that a query sees at most, itself among them; 0 = all. */
  readonly window?: number;
  /** 0 = none */
  readonly softcap?: number;
}

/** What query row `row` may see: key rows [first, last]. */
type Range = (row: number) => { readonly first: number; readonly last: number };

function attend(
  q: Matrix,
  k: Matrix,
  v: Matrix,
  { heads, kvHeads, headDim, scale, window = 0, softcap = 0 }: Heads,
  range: Range,
): {
  readonly o: Matrix;
  readonly lse: Matrix;
} {
  const lse = matrix(heads, q.rows, () => 0);
  const o = matrix(q.rows, heads * headDim, () => 0);
  for (let head = 0; head < heads; head++) {
    const kv = Math.floor(head / (heads / kvHeads));
    for (let row = 0; row < q.rows; row++) {
      const { last, ...start } = range(row);
      const first = window === 0 ? start.first : Math.max(start.first, last - window + 1);
      const count = last - first + 1;
      if (count <= 0) continue;
      const scores = Array.from({ length: count }, (_, j) => {
        const score =
          scale *
          sum(headDim, (d) => at(q, row, head * headDim + d) * at(k, first + j, kv * headDim + d));
        return softcap === 0 ? score : softcap * Math.tanh(score / softcap);
      });
      const most = Math.max(...scores);
      const total = sum(count, (j) => Math.exp((scores[j] as number) - most));
      lse.data[head * q.rows + row] = most + Math.log(total);
      for (let d = 0; d < headDim; d++) {
        const mixed = sum(
          count,
          (j) =>
            (Math.exp((scores[j] as number) - most) / total) * at(v, first + j, kv * headDim + d),
        );
        o.data[row * o.cols + head * headDim + d] = mixed;
      }
    }
  }
  return { o, lse };
}

/** Rows of one document see only that document; rows past the last offset see nothing. */
export function attention(
  q: Matrix,
  k: Matrix,
  v: Matrix,
  cuSeqlens: readonly number[],
  heads: Heads,
): {
  readonly o: Matrix;
  readonly lse: Matrix;
} {
  return attend(q, k, v, heads, (row) => {
    const document = cuSeqlens.findLastIndex((start) => start <= row);
    const covered = row < (cuSeqlens.at(-1) as number);
    return { first: cuSeqlens[document] as number, last: covered ? row : -1 };
  });
}

/** Query row t sees rows 0 .. past + t of the cache. */
export function cachedAttention(
  q: Matrix,
  k: Matrix,
  v: Matrix,
  past: number,
  heads: Heads,
): Matrix {
  return attend(q, k, v, heads, (row) => ({ first: 0, last: past + row })).o;
}
