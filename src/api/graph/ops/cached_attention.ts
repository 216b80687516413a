/** Attention for generation: append k and v to the KV cache, attend to everything cached. Forward only. */
import { liveBytes, liveRows, rowBytes } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { DTYPES, rowsOf, type Value } from "../value.ts";
import { type AttentionShape, headFields, splitHeads } from "./attention.ts";

export interface CachedAttentionAttributes {
  /** [T, Hq D] */
  readonly o: Value;
  /** [T, (Hq + 2 Hk) D] */
  readonly qkv: Value;
  /** [capacity, Hk D] */
  readonly kCache: Value;
  readonly vCache: Value;
  /** [1] i32: cached rows before this call */
  readonly past: Value;
  readonly live: Value;
  readonly shape: AttentionShape;
}

export const cachedAttention: OpKind<CachedAttentionAttributes> = {
  name: "cachedAttention",
  uses: ({ o, qkv, kCache, vCache, past, live }) => ({
    reads: [qkv, past, live],
    writes: [o],
    updates: [kCache, vCache],
  }),
  // With the cache full, as at the end of a context; a window lets all but its last rows lie.
  cost: ({ o, qkv, kCache, vCache, shape }, load) => {
    const rows = liveRows(o, load);
    const window = shape.window || rowsOf(kCache);
    const read = Math.min(rowsOf(kCache), window + rows - 1);
    return [
      {
        flops: 4 * shape.heads * shape.headDim * rows * Math.min(rowsOf(kCache), window),
        bytes: liveBytes(load, o, qkv) + rowBytes(kCache, read) + rowBytes(vCache, read),
        unit: "attention",
        type: o.dtype,
      },
    ];
  },
  bind: ({ o, qkv, kCache, vCache, past, live, shape }) => ({
    kernel: "lm_attention_cached_forward",
    fields: {
      type: DTYPES[o.dtype].code,
      o,
      k_cache: kCache,
      v_cache: vCache,
      ...splitHeads(qkv, shape),
      past,
      live,
      rows: rowsOf(o),
      capacity: kCache.shape[0] as number,
      ...headFields(shape),
      qkv_pitch: qkv.pitch,
      o_pitch: o.pitch,
    },
  }),
};
