/** Allocation traces of LoRA steps, and their replay on a pool. */
import type { DeviceBuffer, MemoryPool, Stream } from "../../src/api/mod.ts";
import { planModel } from "../plan/models.ts";

/** `["a", id, bytes]` takes a block, `["f", id]` gives it back. */
export type TraceOp = readonly ["a", number, number] | readonly ["f", number];

/** A sequence of allocations that is the same on every allocator. */
export interface Trace {
  readonly name: string;
  readonly ops: readonly TraceOp[];
}

/** What a synthetic step is made of. */
export interface TraceModel {
  readonly layers: number;
  readonly hidden: number;
  readonly keyValue: number;
  readonly intermediate: number;
  readonly heads: number;
  readonly vocabulary: number;
  readonly rank: number;
}

class Recorder {
  readonly ops: TraceOp[] = [];
  #next = 0;

  take(bytes: number): number {
    this.ops.push(["a", this.#next, bytes]);
    return this.#next++;
  }

  give(...ids: readonly number[]): void {
    for (const id of ids) this.ops.push(["f", id]);
  }
}

/** Pseudo-random integers from `least` to `most`, the same for the same seed. */
export function randomIntegers(seed: number): (least: number, most: number) => number {
  let state = seed >>> 0 || 1;
  return (least, most) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return least + Math.floor((state / 2 ** 32) * (most - least + 1));
  };
}

/** One layer's forward; gives back what is not saved. @returns the output and what backward needs */
function forward(r: Recorder, m: TraceModel, t: number, x: number, keep: boolean) {
  const norm = r.take(t * m.hidden * 2);
  const down = r.take(t * m.rank * 2);
  const qkv = r.take(t * (m.hidden + 2 * m.keyValue) * 2);
  const attention = r.take(t * m.hidden * 2);
  const lse = r.take(t * m.heads * 4);
  const mid = r.take(t * m.hidden * 2);
  const norm2 = r.take(t * m.hidden * 2);
  const gateUp = r.take(t * m.intermediate * 4);
  const act = r.take(t * m.intermediate * 2);
  const out = r.take(t * m.hidden * 2);
  r.give(norm, norm2, act);
  const saved = [down, qkv, attention, lse, mid, gateUp];
  if (!keep) r.give(...saved);
  return { out, saved: keep ? [x, ...saved] : [x] };
}

/** One layer's backward. @returns the gradient of the layer's input */
function backward(
  r: Recorder,
  m: TraceModel,
  t: number,
  gradient: number,
  saved: number[],
): number {
  const kept = saved.length > 1;
  const [x = 0, ...rest] = saved;
  let again: { out: number; saved: number[] } | undefined;
  if (!kept) again = forward(r, m, t, x, true);
  const dAct = r.take(t * m.intermediate * 2);
  const dGateUp = r.take(t * m.intermediate * 4);
  r.give(dAct);
  const dMid = r.take(t * m.hidden * 2);
  r.give(dGateUp, gradient);
  const dAttention = r.take(t * m.hidden * 2);
  const dQkv = r.take(t * (m.hidden + 2 * m.keyValue) * 2);
  r.give(dAttention);
  const dx = r.take(t * m.hidden * 2);
  r.give(dQkv, dMid, ...(again ? [again.out, ...again.saved.slice(1)] : rest), x);
  return dx;
}

/** Steps of varying length, as a framework without a plan runs them: everything is allocated where it is needed. */
export function syntheticTrace(
  name: string,
  model: TraceModel,
  options: { steps: number; shortest: number; longest: number; keep: boolean; seed: number },
): Trace {
  const { steps, shortest, longest, keep, seed } = options;
  const random = randomIntegers(seed);
  const r = new Recorder();
  for (let step = 0; step < steps; step++) {
    const t = random(shortest, longest);
    const saved: number[][] = [];
    let x = r.take(t * model.hidden * 2);
    for (let layer = 0; layer < model.layers; layer++) {
      const done = forward(r, model, t, x, keep);
      saved.push(done.saved);
      x = done.out;
    }
    const logits = r.take(t * model.vocabulary * 4);
    let gradient = r.take(t * model.hidden * 2);
    r.give(logits, x);
    for (const values of saved.reverse()) gradient = backward(r, model, t, gradient, values);
    r.give(gradient);
  }
  return { name, ops: r.ops };
}

/** The trainer's own step: every buffer of its plan, taken at its first op and given back after its last. */
export function plannedTrace(
  model: Parameters<typeof planModel>[0],
  policy: Parameters<typeof planModel>[1],
  steps: number,
): Trace {
  const { buffers = [], program } = planModel(model, policy).plan.programs.get("train") ?? {};
  const ops: TraceOp[] = [];
  for (let step = 0; step < steps; step++) {
    for (let at = -1; at <= (program?.ops.length ?? 0); at++) {
      for (const [id, { first, last, bytes }] of buffers.entries()) {
        if (first === at) ops.push(["a", step * buffers.length + id, bytes]);
        if (last === at - 1) ops.push(["f", step * buffers.length + id]);
      }
    }
    const open = new Set(ops.filter(([kind]) => kind === "a").map(([, id]) => id));
    for (const [kind, id] of ops) if (kind === "f") open.delete(id);
    for (const id of open) ops.push(["f", id]);
  }
  return { name: `plan of ${model}, ${policy}`, ops };
}

/** Most bytes that are live at once, in granules of 256: no allocator can do with less. */
export function lowerBound({ ops }: Trace): number {
  const sizes = new Map<number, number>();
  let live = 0;
  let most = 0;
  for (const op of ops) {
    if (op[0] === "a") {
      const bytes = Math.ceil(op[2] / 256) * 256;
      sizes.set(op[1], bytes);
      live += bytes;
      most = Math.max(most, live);
    } else {
      live -= sizes.get(op[1]) ?? 0;
    }
  }
  return most;
}

/** Runs a trace. @returns most bytes that the pool held from the system */
export function replay({ ops }: Trace, pool: MemoryPool, stream: Stream): number {
  const live = new Map<number, DeviceBuffer>();
  let most = 0;
  for (const op of ops) {
    if (op[0] === "a") {
      live.set(op[1], pool.alloc(op[2], { stream }));
      most = Math.max(most, pool.stats().reserved);
    } else {
      live.get(op[1])?.dispose();
      live.delete(op[1]);
    }
  }
  for (const block of live.values()) block.dispose();
  return most;
}

const SMALL: TraceModel = {
  layers: 12,
  hidden: 1024,
  keyValue: 256,
  intermediate: 2816,
  heads: 16,
  vocabulary: 8192,
  rank: 16,
};

/** The traces that are compared; all need less than 1 GiB. */
export function traces(): Trace[] {
  const about = { steps: 12, shortest: 64, longest: 512 };
  return [
    syntheticTrace("keep, lengths 64 to 512", SMALL, { ...about, keep: true, seed: 1 }),
    syntheticTrace("checkpoint, lengths 64 to 512", SMALL, { ...about, keep: false, seed: 2 }),
    syntheticTrace("keep, one length", SMALL, {
      ...about,
      shortest: 384,
      longest: 384,
      keep: true,
      seed: 3,
    }),
    syntheticTrace("checkpoint, one length", SMALL, {
      ...about,
      shortest: 512,
      longest: 512,
      keep: false,
      seed: 4,
    }),
  ];
}
