/** Attention. */
import { badArgument, checkFinite, checkInteger } from "../memory/arguments.ts";
import type { TensorView } from "../memory/tensor_view.ts";
import {
  activation,
  checkTensors,
  dense,
  expect,
  type KernelOptions,
  launch,
  liveRows,
  type MaybeTensor,
  optional,
  type RowOptions,
  typeCode,
} from "./tensors.ts";

/** Heads of an attention. */
export interface AttentionHeads {
  /** Query heads Hq, a multiple of `kvHeads`. */
  readonly heads: number;
  /** Key-value heads Hk; query head h reads key-value head h / (Hq / Hk). */
  readonly kvHeads: number;
  /** Factor of the scores. Default 1 / sqrt(D). */
  readonly scale?: number;
  /**
   * Keys that a query sees at most, itself among them: row i of a document sees its rows i - window < j <= i (Mistral: Jiang et
   * al. 2023, arXiv:2310.06825). What lies before costs nothing. Default 0 = everything before it.
   */
  readonly window?: number;
  /** A scaled score s counts as softcap * tanh(s / softcap) (Gemma 2: arXiv:2408.00118). Default 0 = as it is. */
  readonly softcap?: number;
}

/** Options of {@linkcode attentionForward}. */
export interface AttentionOptions extends KernelOptions, AttentionHeads {}

/** Options of {@linkcode attentionBackward}. */
export interface AttentionBackwardOptions extends AttentionOptions {
  /**
   * f32 [n], aligned to 16 bytes, with which a GPU computes the scores once instead of twice where it gains from that
   * (16 bits, D of 32, 64 or 128, neither window nor softcap): n = T D (Hq + 2 Hk) + (Hq + Hk) (T / 16 + documents) + 4, of
   * which only a T with few rows uses the 2 Hk. A CPU leaves it alone.
   */
  readonly workspace?: MaybeTensor;
}

/** Options of {@linkcode attentionCachedForward}. */
export interface CachedAttentionOptions extends RowOptions, AttentionHeads {}

/**
 * Causal grouped-query attention over packed documents, tiled with a running maximum, without T x T memory (Dao 2023,
 * arXiv:2307.08691). Rows of one document see only that document.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(16384);
 * stream.fill(memory, 0); // two empty documents: nothing is read or written
 * const [heads, kvHeads, pitch] = [4, 2, (4 + 2 + 2) * 16];
 * const q = memory.as("f32", [8, 4 * 16], { pitch });
 * const k = memory.as("f32", [8, 2 * 16], { pitch, offset: 256 });
 * const v = memory.as("f32", [8, 2 * 16], { pitch, offset: 384 });
 * const o = memory.as("f32", [8, 4 * 16], { offset: 4096 });
 * const lse = memory.as("f32", [4, 8], { offset: 8192 });
 * const cuSeqlens = memory.as("i32", [3], { offset: 12288 });
 * kernels.attentionForward(o, lse, q, k, v, cuSeqlens, { stream, heads, kvHeads });
 * await stream.done();
 * ```
 *
 * @param o [T, Hq D] f32, bf16 or f16, written.
 * @param lse [Hq, T] f32, without gaps, written: log-sum-exp of the scores, scaled and capped, natural logarithm.
 * @param q [T, Hq D] of the same type, read.
 * @param k [T, Hk D] of the same type and pitch, read.
 * @param v [T, Hk D] of the same type and pitch, read.
 * @param cuSeqlens [documents + 1] i32, ascending from 0, read; equal neighbours are empty documents; rows at or past
 * the last offset are neither read nor written.
 * @param options The stream, and the heads.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function attentionForward(
  o: TensorView,
  lse: TensorView,
  q: TensorView,
  k: TensorView,
  v: TensorView,
  cuSeqlens: TensorView,
  options: AttentionOptions,
): void {
  const op = "attentionForward";
  const { heads, kvHeads } = options;
  checkTensors(
    op,
    {
      q: activation(q, "T HqD"),
      o: activation(o, "T HqD"),
      k: activation(k, "T HkD"),
      v: activation(v, "T HkD"),
      lse: dense(expect(lse, "Hq T", "f32")),
      cuSeqlens: expect(cuSeqlens, "documents+1", "i32"),
    },
    { Hq: heads },
  );
  const head = checkHeads(op, q, k, options);
  checkPitch(op, { q, k, v });
  launch(op, "lm_attention_forward", options, {
    type: typeCode(q),
    o,
    lse,
    q,
    k,
    v,
    cu_seqlens: cuSeqlens,
    rows: q.rows,
    documents: checkDocuments(op, cuSeqlens),
    heads,
    kv_heads: kvHeads,
    head_dim: head.size,
    qkv_pitch: q.pitch,
    o_pitch: o.pitch,
    scale: head.scale,
    window: head.window,
    softcap: head.softcap,
  });
}

/**
 * Gradients of {@linkcode attentionForward}; the probabilities are computed again, tile by tile, from `lse`.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(16384);
 * stream.fill(memory, 0); // one empty document
 * const x = memory.as("f32", [8, 2 * 16]); // stands for q, k, v, o and their gradients
 * const stats = memory.as("f32", [2, 8], { offset: 8192 });
 * const cuSeqlens = memory.as("i32", [2], { offset: 12288 });
 * const options = { stream, heads: 2, kvHeads: 2 };
 * kernels.attentionBackward(x, x, x, stats, x, x, stats, x, x, x, cuSeqlens, options);
 * await stream.done();
 * ```
 *
 * @param dq [T, Hq D] f32, bf16 or f16, written.
 * @param dk [T, Hk D] of the same type and pitch, written.
 * @param dv [T, Hk D] of the same type and pitch, written.
 * @param delta [Hq, T] f32, without gaps, workspace.
 * @param gradO [T, Hq D] of the same type, read.
 * @param o [T, Hq D] of the same type, with the pitch of `gradO`, read.
 * @param lse [Hq, T] f32 of the forward pass, read.
 * @param q [T, Hq D] of the same type, read.
 * @param k [T, Hk D] of the same type and pitch, read.
 * @param v [T, Hk D] of the same type and pitch, read.
 * @param cuSeqlens As in the forward pass.
 * @param options The stream, the heads, and workspace.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function attentionBackward(
  dq: TensorView,
  dk: TensorView,
  dv: TensorView,
  delta: TensorView,
  gradO: TensorView,
  o: TensorView,
  lse: TensorView,
  q: TensorView,
  k: TensorView,
  v: TensorView,
  cuSeqlens: TensorView,
  options: AttentionBackwardOptions,
): void {
  const op = "attentionBackward";
  const { heads, kvHeads, workspace } = options;
  checkTensors(
    op,
    {
      q: activation(q, "T HqD"),
      dq: activation(dq, "T HqD"),
      o: activation(o, "T HqD"),
      gradO: activation(gradO, "T HqD"),
      k: activation(k, "T HkD"),
      v: activation(v, "T HkD"),
      dk: activation(dk, "T HkD"),
      dv: activation(dv, "T HkD"),
      lse: dense(expect(lse, "Hq T", "f32")),
      delta: dense(expect(delta, "Hq T", "f32")),
      workspace: optional(expect(workspace, "n", "f32")),
      cuSeqlens: expect(cuSeqlens, "documents+1", "i32"),
    },
    { Hq: heads },
  );
  const head = checkHeads(op, q, k, options);
  checkPitch(op, { q, k, v });
  checkPitch(op, { dq, dk, dv });
  checkPitch(op, { o, gradO });
  launch(op, "lm_attention_backward", options, {
    type: typeCode(q),
    dq,
    dk,
    dv,
    delta,
    grad_o: gradO,
    o,
    lse,
    q,
    k,
    v,
    cu_seqlens: cuSeqlens,
    rows: q.rows,
    documents: checkDocuments(op, cuSeqlens),
    heads,
    kv_heads: kvHeads,
    head_dim: head.size,
    qkv_pitch: q.pitch,
    dqkv_pitch: dq.pitch,
    o_pitch: o.pitch,
    scale: head.scale,
    window: head.window,
    softcap: head.softcap,
    workspace,
    workspace_bytes: 4 * (workspace?.elements ?? 0),
  });
}

/**
 * Appends the live rows' k and v to the cache at row `past`, then attends causally to everything cached: row t sees cache
 * rows 0 to past + t, or the last `window` of them. Prefill is past = 0, decoding is one row.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(32768);
 * stream.fill(memory, 0);
 * const x = memory.as("f32", [4, 2 * 16]); // stands for q, k and v
 * const o = memory.as("f32", [4, 2 * 16], { offset: 4096 });
 * const kCache = memory.as("f32", [32, 2 * 16], { offset: 8192 });
 * const vCache = memory.as("f32", [32, 2 * 16], { offset: 16384 });
 * const past = memory.as("i32", [1], { offset: 24576 });
 * const options = { stream, heads: 2, kvHeads: 2 };
 * kernels.attentionCachedForward(o, kCache, vCache, x, x, x, past, options);
 * await stream.done();
 * ```
 *
 * @param o [T, Hq D] f32, bf16 or f16, written.
 * @param kCache [capacity, Hk D] of the same type, without gaps, updated.
 * @param vCache [capacity, Hk D] of the same type, without gaps, updated.
 * @param q [T, Hq D] of the same type, read.
 * @param k [T, Hk D] of the same type and pitch, read.
 * @param v [T, Hk D] of the same type and pitch, read.
 * @param past [1] i32: rows that the cache holds, read; rows that would pass the capacity are dropped.
 * @param options The stream, the heads, and how many rows are live.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function attentionCachedForward(
  o: TensorView,
  kCache: TensorView,
  vCache: TensorView,
  q: TensorView,
  k: TensorView,
  v: TensorView,
  past: TensorView,
  options: CachedAttentionOptions,
): void {
  const op = "attentionCachedForward";
  const { heads, kvHeads } = options;
  checkTensors(op, {
    q: activation(q, "T HqD"),
    o: activation(o, "T HqD"),
    k: activation(k, "T HkD"),
    v: activation(v, "T HkD"),
    kCache: dense(activation(kCache, "capacity HkD")),
    vCache: dense(activation(vCache, "capacity HkD")),
    past: expect(past, "1", "i32"),
    live: liveRows(options),
  });
  const head = checkHeads(op, q, k, options);
  checkPitch(op, { q, k, v });
  launch(op, "lm_attention_cached_forward", options, {
    type: typeCode(q),
    o,
    k_cache: kCache,
    v_cache: vCache,
    q,
    k,
    v,
    past,
    live: options.live,
    rows: q.rows,
    capacity: kCache.rows,
    heads,
    kv_heads: kvHeads,
    head_dim: head.size,
    qkv_pitch: q.pitch,
    o_pitch: o.pitch,
    scale: head.scale,
    window: head.window,
    softcap: head.softcap,
  });
}

interface Head {
  readonly size: number;
  readonly scale: number;
  readonly window: number;
  readonly softcap: number;
}

function checkHeads(op: string, q: TensorView, k: TensorView, options: AttentionHeads): Head {
  const { heads, kvHeads } = options;
  checkInteger(op, "kvHeads", kvHeads, 1, k.width);
  checkInteger(op, "heads", heads, kvHeads, q.width);
  const size = q.width / heads;
  if (!Number.isInteger(size) || size * kvHeads !== k.width || heads % kvHeads !== 0) {
    const what = `heads is ${heads}, kvHeads is ${kvHeads}, q is ${q}, k is ${k}`;
    badArgument(
      op,
      `the heads do not fit: ${what}: pass q [T, heads D] and k [T, kvHeads D]`,
      "heads",
      heads,
    );
  }
  const { scale = 1 / Math.sqrt(size), window = 0, softcap = 0 } = options;
  checkFinite(op, "scale", scale);
  checkInteger(op, "window", window, 0, 2 ** 31 - 1);
  checkFinite(op, "softcap", softcap);
  if (softcap < 0) {
    badArgument(op, `softcap is negative: ${softcap}: 0 = no cap`, "softcap", softcap);
  }
  return { size, scale, window, softcap };
}

/** The kernel has one pitch for all of them. */
function checkPitch(op: string, tensors: Readonly<Record<string, TensorView>>): void {
  const entries = Object.entries(tensors) as [[string, TensorView], ...[string, TensorView][]];
  const [[firstName, first]] = entries;
  for (const [name, { pitch }] of entries) {
    if (pitch === first.pitch) continue;
    const what = `${firstName} has pitch ${first.pitch}, ${name} has pitch ${pitch}`;
    badArgument(
      op,
      `rows must be equally far apart: ${what}: make them views of one matrix`,
      name,
      pitch,
    );
  }
}

function checkDocuments(op: string, cuSeqlens: TensorView): number {
  if (cuSeqlens.width >= 2) return cuSeqlens.width - 1;
  badArgument(
    op,
    `cuSeqlens has no document: it is ${cuSeqlens}: pass [documents + 1]`,
    "cuSeqlens",
  );
}
