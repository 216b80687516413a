/** Embedding gather: y[t] = table[ids[t]]. The table is frozen, so there is no backward rule. */
import { liveBytes, memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { DTYPES, rowsOf, type Value } from "../value.ts";

export interface EmbeddingAttributes {
  /** [T, C] */
  readonly y: Value;
  /** [V, C] */
  readonly table: Value;
  /** [T] i32 */
  readonly ids: Value;
  readonly live: Value;
}

export const embedding: OpKind<EmbeddingAttributes> = {
  name: "embedding",
  uses: ({ y, table, ids, live }) => ({ reads: [table, ids, live], writes: [y] }),
  // The rows of the table that are read are as many as the tokens.
  cost: ({ y }, load) => [memoryWork(y.dtype, 2 * liveBytes(load, y))],
  bind: ({ y, table, ids, live }) => ({
    kernel: "lm_embedding_forward",
    fields: {
      type: DTYPES[y.dtype].code,
      y,
      table,
      ids,
      live,
      rows: rowsOf(y),
      width: y.shape[1] as number,
      vocab: table.shape[0] as number,
      y_pitch: y.pitch,
      table_type: DTYPES[table.dtype].code,
    },
  }),
};
