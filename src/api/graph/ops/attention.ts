/** Causal grouped-query attention over packed documents, tiled, without a T x T matrix (Dao 2023). */
import { type Load, liveBytes, memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { bytesOf, DTYPES, makeValue, rowsOf, type Value, viewOf } from "../value.ts";

/** Head counts, scale and mask of an attention layer. */
export interface AttentionShape {
  readonly heads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly scale: number;
  /** Rows that a query sees at most, itself among them. Default 0 = all before it. */
  readonly window?: number;
  /** A score s counts as softcap * tanh(s / softcap). Default 0 = as it is. */
  readonly softcap?: number;
}

export interface AttentionAttributes {
  /** [T, Hq D] */
  readonly o: Value;
  /** [Hq, T] f32 log-sum-exp of the scores */
  readonly lse: Value;
  /** [T, (Hq + 2 Hk) D] */
  readonly qkv: Value;
  /** [documents + 1] i32 */
  readonly cuSeqlens: Value;
  readonly shape: AttentionShape;
  /** Backward adds the parts of dq up in order, in scratch of twice dq or more: five products instead of seven. */
  readonly ordered: boolean;
}

/** The q, k and v columns of a packed row. */
export function splitHeads(qkv: Value, { heads, kvHeads, headDim }: AttentionShape) {
  const rows = rowsOf(qkv);
  const part = (name: string, first: number, count: number) =>
    viewOf(qkv, `${qkv.name}.${name}`, [rows, count * headDim], first * headDim);
  return {
    q: part("q", 0, heads),
    k: part("k", heads, kvHeads),
    v: part("v", heads + kvHeads, kvHeads),
  };
}

/** The struct fields that all attention kernels share. */
export function headFields(shape: AttentionShape) {
  const { heads, kvHeads, headDim, scale, window = 0, softcap = 0 } = shape;
  return { heads, kv_heads: kvHeads, head_dim: headDim, scale, window, softcap };
}

/** Pairs of a query and a key that the layer looks at. */
function pairsOf({ window = 0 }: AttentionShape, load: Load): number {
  return window === 0 ? load.pairs : load.windowPairs;
}

export const attention: OpKind<AttentionAttributes> = {
  name: "attention",
  uses: ({ o, lse, qkv, cuSeqlens }) => ({ reads: [qkv, cuSeqlens], writes: [o, lse] }),
  // Two products over every pair: scores, and their weighted sum.
  cost: ({ o, qkv, shape }, load) => [
    {
      flops: 4 * shape.heads * shape.headDim * pairsOf(shape, load),
      bytes: liveBytes(load, o, qkv),
      unit: "attention",
      type: o.dtype,
    },
  ],
  bind: ({ o, lse, qkv, cuSeqlens, shape }) => ({
    kernel: "lm_attention_forward",
    fields: {
      type: DTYPES[o.dtype].code,
      o,
      lse,
      ...splitHeads(qkv, shape),
      cu_seqlens: cuSeqlens,
      rows: rowsOf(o),
      documents: (cuSeqlens.shape[0] as number) - 1,
      ...headFields(shape),
      qkv_pitch: qkv.pitch,
      o_pitch: o.pitch,
    },
  }),
  backward({ o, lse, qkv, cuSeqlens, shape, ordered }, walk) {
    if (!walk.wants(qkv)) return;
    const dqkv = walk.gradientLike(qkv);
    walk.emit(attentionBackward, {
      dqkv,
      do: walk.gradient(o) as Value,
      o: walk.need(o),
      lse: walk.need(lse),
      qkv: walk.need(qkv),
      delta: makeValue("delta", "f32", lse.shape, { layer: o.layer }),
      workspace: ordered
        ? makeValue(
            "dqSums",
            "f32",
            [attentionWorkspace(rowsOf(o), (cuSeqlens.shape[0] as number) - 1, shape)],
            { layer: o.layer },
          )
        : null,
      cuSeqlens,
      shape,
    });
    walk.contribute(qkv, dqkv);
  },
};

interface AttentionBackwardAttributes {
  readonly dqkv: Value;
  readonly do: Value;
  readonly o: Value;
  readonly lse: Value;
  readonly qkv: Value;
  /** [Hq, T] f32 scratch: row sums of o * do */
  readonly delta: Value;
  /** f32 scratch for ordered sums, or null */
  readonly workspace: Value | null;
  readonly cuSeqlens: Value;
  readonly shape: AttentionShape;
}

/** Fewer blocks of so many keys leave a part of a GPU idle, unless several share the query heads of a key-value head. */
const KEYS = 128;
const BLOCKS = 256;

/**
 * 32-bit words that lm_attention_backward asks for: sums of dq, a turn for every block of 16 rows, and sums of dk and dv where
 * it gains from them.
 */
export function attentionWorkspace(
  rows: number,
  documents: number,
  { heads, kvHeads, headDim }: Omit<AttentionShape, "scale">,
): number {
  const turns = (heads + kvHeads) * (Math.ceil(rows / 16) + documents);
  const few = rows * kvHeads < BLOCKS * KEYS;
  return rows * headDim * (few ? heads + 2 * kvHeads : heads) + turns + 4;
}

const attentionBackward: OpKind<AttentionBackwardAttributes> = {
  name: "attentionBackward",
  uses: ({ dqkv, do: grad, o, lse, qkv, delta, workspace, cuSeqlens }) => ({
    reads: [grad, o, lse, qkv, cuSeqlens],
    writes: [dqkv],
    scratch: workspace === null ? [delta] : [delta, workspace],
  }),
  // Row sums for delta, then five products over every pair, the scores among them a second time.
  cost: ({ dqkv, do: grad, o, qkv, shape }, load) => [
    memoryWork(o.dtype, liveBytes(load, o, grad)),
    {
      flops: 10 * shape.heads * shape.headDim * pairsOf(shape, load),
      bytes: liveBytes(load, dqkv, grad, o, qkv),
      unit: "attention",
      type: o.dtype,
    },
  ],
  bind: ({ dqkv, do: grad, o, lse, qkv, delta, workspace, cuSeqlens, shape }) => {
    const gradients = splitHeads(dqkv, shape);
    return {
      kernel: "lm_attention_backward",
      fields: {
        type: DTYPES[o.dtype].code,
        dq: gradients.q,
        dk: gradients.k,
        dv: gradients.v,
        delta,
        grad_o: grad,
        o,
        lse,
        ...splitHeads(qkv, shape),
        cu_seqlens: cuSeqlens,
        rows: rowsOf(o),
        documents: (cuSeqlens.shape[0] as number) - 1,
        ...headFields(shape),
        qkv_pitch: qkv.pitch,
        dqkv_pitch: dqkv.pitch,
        o_pitch: o.pitch,
        workspace,
        workspace_bytes: workspace === null ? 0 : bytesOf(workspace),
      },
    };
  },
};
