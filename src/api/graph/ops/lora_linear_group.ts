/**
 * A linear group: one base GEMM over matrices that lie next to each other (q|k|v, gate|up, or a single one), with bias,
 * LoRA and residual add (Hu et al. 2021):
 *
 *     s_i = scale_i x A_i^T          loraDown, a kind of its own so that recomputing s costs no base GEMM
 *     y   = x W^T + bias + residual + [s_i B_i^T]
 *
 * Backward reads dY once for dB and ds, and x once for dA, which is loraDown's rule: x may come from the op before it only then:
 *
 *     ds_i = scale_i dy_i B_i,  dB_i += dy_i^T s_i,  dx = dy W + ds A        dA_i += ds_i^T x
 */
import { liveBytes, liveRows, matrixWork, type Work } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { bytesOf, DTYPES, makeValue, rowsOf, type Value } from "../value.ts";

/** The adapter of one part of a group. */
export interface LoraPart {
  /** Rows of W that this part owns. */
  readonly out: number;
  /** 0 = this part has no adapter. */
  readonly rank: number;
  /** alpha / rank (or alpha / sqrt(rank)). */
  readonly scale: number;
  /** [out, rank] compute copy; null if rank is 0. */
  readonly b: Value | null;
  /** [out, rank] f32 gradient; null if rank is 0. */
  readonly gradB: Value | null;
}

/** The adapters of a group. */
export interface LoraGroup {
  readonly parts: readonly LoraPart[];
  /** [R, K] compute copy, the parts' A below each other. */
  readonly a: Value;
  /** [R, K] f32 gradient. */
  readonly gradA: Value;
}

/** Largest number of matrices in a group; the ABI has this many slots. */
const MAX_PARTS = 3;

/** Sum of the ranks of a group. */
export function totalRank(lora: LoraGroup): number {
  return lora.parts.reduce((sum, part) => sum + part.rank, 0);
}

export interface LoraDownAttributes {
  /** [T, R] */
  readonly s: Value;
  /** [T, K] */
  readonly x: Value;
  readonly lora: LoraGroup;
  readonly live: Value;
}

/** s = scale x A^T. What s adds to dx is part of loraLinearGroup's rule. */
export const loraDown: OpKind<LoraDownAttributes> = {
  name: "loraDown",
  uses: ({ s, x, lora, live }) => ({ reads: [x, lora.a, live], writes: [s] }),
  cost: ({ s, x, lora }, load) => {
    const flops = 2 * liveRows(x, load) * (x.shape[1] as number) * totalRank(lora);
    return [matrixWork(x.dtype, flops, liveBytes(load, s, x) + bytesOf(lora.a))];
  },
  bind: ({ s, x, lora, live }) => ({
    kernel: "lm_lora_down",
    fields: {
      type: DTYPES[s.dtype].code,
      s,
      x,
      a: lora.a,
      live,
      rows: rowsOf(s),
      in: x.shape[1] as number,
      s_pitch: s.pitch,
      x_pitch: x.pitch,
      a_type: DTYPES[lora.a.dtype].code,
      ...ranks(lora),
      ...scales(lora),
    },
  }),
  backward({ s, x, lora, live }, walk) {
    const ds = walk.gradient(s) as Value;
    walk.later(x, (there) => walk.emit(loraDownBackward, { ds, x: there, lora, live }));
  },
};

interface LoraDownBackwardAttributes {
  /** [T, R] f32, as loraLinearGroup's rule left it */
  readonly ds: Value;
  /** [T, K] */
  readonly x: Value;
  readonly lora: LoraGroup;
  readonly live: Value | null;
}

export const loraDownBackward: OpKind<LoraDownBackwardAttributes> = {
  name: "loraDownBackward",
  uses: ({ ds, x, lora, live }) => ({
    reads: present([ds, x, live]),
    writes: [],
    updates: [lora.gradA],
  }),
  cost: ({ ds, x, lora }, load) => {
    const flops = 2 * liveRows(x, load) * (x.shape[1] as number) * totalRank(lora);
    return [matrixWork(x.dtype, flops, liveBytes(load, x, ds))];
  },
  bind: ({ ds, x, lora, live }) => ({
    kernel: "lm_lora_down_backward",
    fields: {
      type: DTYPES[x.dtype].code,
      da: lora.gradA,
      ds,
      x,
      live,
      rows: rowsOf(x),
      in: x.shape[1] as number,
      x_pitch: x.pitch,
      a_type: DTYPES[lora.a.dtype].code,
      ...ranks(lora),
    },
  }),
};

export interface LoraLinearGroupAttributes {
  /** [T, N] */
  readonly y: Value;
  /** [T, K] */
  readonly x: Value;
  /** [N, K] */
  readonly w: Value;
  /** [N] or null */
  readonly bias: Value | null;
  /** [T, N] or null */
  readonly residual: Value | null;
  /** [T, R] from loraDown; null without adapters. */
  readonly s: Value | null;
  readonly lora: LoraGroup | null;
  /** null = all rows */
  readonly live: Value | null;
}

export const loraLinearGroup: OpKind<LoraLinearGroupAttributes> = {
  name: "loraLinearGroup",
  uses: ({ y, x, w, bias, residual, s, lora, live }) => ({
    reads: present([x, w, bias, residual, s, ...(lora?.parts.map((part) => part.b) ?? []), live]),
    writes: [y],
    inPlace: residual === null ? [] : [[y, residual]],
  }),
  cost: ({ y, x, w, residual, s, lora }, load) => {
    const rows = liveRows(y, load);
    const flops = 2 * rows * (w.shape[0] as number) * (w.shape[1] as number);
    const bytes = liveBytes(load, y, x, residual, s) + bytesOf(w);
    return [matrixWork(x.dtype, flops + upFlops(lora, rows), bytes)];
  },
  bind: ({ y, x, w, bias, residual, s, lora, live }) => ({
    kernel: "lm_lora_linear_forward",
    fields: {
      type: DTYPES[y.dtype].code,
      y,
      x,
      w,
      bias,
      residual,
      s,
      live,
      rows: rowsOf(y),
      in: x.shape[1] as number,
      out: y.shape[1] as number,
      y_pitch: y.pitch,
      x_pitch: x.pitch,
      w_pitch: w.pitch,
      residual_pitch: residual?.pitch ?? 0,
      s_pitch: s?.pitch ?? 0,
      w_type: DTYPES[w.dtype].code,
      bias_type: DTYPES[(bias ?? w).dtype].code,
      b_type: DTYPES[lora?.a.dtype ?? "f32"].code,
      ...outs(lora, y.shape[1] as number),
      ...ranks(lora),
      ...perPart("b", lora, (part) => part.b),
    },
  }),
  backward({ y, x, w, residual, lora, s, live }, walk) {
    const dy = walk.gradient(y) as Value;
    if (residual !== null) walk.contribute(residual, dy);
    const wantsInput = walk.wants(x);
    if (lora === null && !wantsInput) return;
    walk.prepare(x);
    const dx = wantsInput ? walk.gradientLike(x) : null;
    let adapter: AdapterBackward | null = null;
    if (lora !== null && s !== null) {
      const ds = makeValue(`d(${s.name})`, "f32", s.shape, { layer: y.layer });
      adapter = { lora, s: walk.need(s), ds };
      walk.contribute(s, ds);
    }
    walk.emit(loraLinearBackward, { dx, dy, w, in: x.shape[1] as number, adapter, live });
    if (dx !== null) walk.contribute(x, dx);
  },
};

interface AdapterBackward {
  readonly lora: LoraGroup;
  readonly s: Value;
  /** [T, R] f32 */
  readonly ds: Value;
}

interface LoraLinearBackwardAttributes {
  /** [T, K]; null if nobody wants it (the lowest adapted layer). */
  readonly dx: Value | null;
  readonly dy: Value;
  readonly w: Value;
  /** K */
  readonly in: number;
  readonly adapter: AdapterBackward | null;
  readonly live: Value | null;
}

export const loraLinearBackward: OpKind<LoraLinearBackwardAttributes> = {
  name: "loraLinearGroupBackward",
  uses({ dx, dy, w, adapter, live }) {
    const base = present([dy, dx === null ? null : w, live]);
    if (adapter === null) return { reads: base, writes: present([dx]) };
    const { lora, s, ds } = adapter;
    return {
      reads: present([...base, s, lora.a, ...lora.parts.map((part) => part.b)]),
      writes: present([dx, ds]),
      updates: present(lora.parts.map((part) => part.gradB)),
    };
  },
  cost({ dx, dy, w, in: width, adapter }, load) {
    const rows = liveRows(dy, load);
    const type = dy.dtype;
    const work: Work[] = [];
    if (dx !== null) {
      const flops = 2 * rows * (w.shape[0] as number) * width;
      work.push(matrixWork(type, flops, liveBytes(load, dy, dx) + bytesOf(w)));
    }
    if (adapter === null) return work;
    const { lora, ds } = adapter;
    // dy is read for ds and dB; dx is read and written again for its part of ds A.
    work.push(matrixWork(type, 2 * upFlops(lora, rows), liveBytes(load, dy, ds)));
    if (dx === null) return work;
    const flops = 2 * rows * width * totalRank(lora);
    work.push(matrixWork(type, flops, liveBytes(load, ds, dx, dx)));
    return work;
  },
  bind: ({ dx, dy, w, in: width, adapter, live }) => ({
    kernel: "lm_lora_linear_backward",
    fields: {
      type: DTYPES[dy.dtype].code,
      dx,
      da: null,
      ds: adapter?.ds ?? null,
      dy,
      x: null,
      s: adapter?.s ?? null,
      w,
      a: adapter?.lora.a ?? null,
      live,
      rows: rowsOf(dy),
      in: width,
      out: dy.shape[1] as number,
      dx_pitch: dx?.pitch ?? 0,
      dy_pitch: dy.pitch,
      x_pitch: 0,
      s_pitch: adapter?.s.pitch ?? 0,
      w_pitch: w.pitch,
      w_type: DTYPES[w.dtype].code,
      a_type: DTYPES[adapter?.lora.a.dtype ?? "f32"].code,
      ...outs(adapter?.lora ?? null, dy.shape[1] as number),
      ...ranks(adapter?.lora ?? null),
      ...scales(adapter?.lora ?? null),
      ...perPart("b", adapter?.lora ?? null, (part) => part.b),
      ...perPart("db", adapter?.lora ?? null, (part) => part.gradB),
    },
  }),
};

/** Arithmetic of one product with the B matrices of a group. */
function upFlops(lora: LoraGroup | null, rows: number): number {
  return (lora?.parts ?? []).reduce((sum, { out, rank }) => sum + 2 * rows * out * rank, 0);
}

function present(values: readonly (Value | null)[]): Value[] {
  return values.filter((value) => value !== null);
}

/** Fields `<name>0` .. `<name>2` of the ABI structs. */
function slots<T>(name: string, item: (index: number) => T): Record<string, T> {
  const entries = Array.from({ length: MAX_PARTS }, (_, index) => [`${name}${index}`, item(index)]);
  return Object.fromEntries(entries) as Record<string, T>;
}

function perPart(name: string, lora: LoraGroup | null, of: (part: LoraPart) => Value | null) {
  return slots(name, (index) => {
    const part = lora?.parts[index];
    return part === undefined ? null : of(part);
  });
}

function ranks(lora: LoraGroup | null) {
  return slots("rank", (index) => lora?.parts[index]?.rank ?? 0);
}

function scales(lora: LoraGroup | null) {
  return slots("scale", (index) => lora?.parts[index]?.scale ?? 0);
}

function outs(lora: LoraGroup | null, out: number) {
  return slots("out", (index) =>
    lora === null ? (index === 0 ? out : 0) : (lora.parts[index]?.out ?? 0),
  );
}
