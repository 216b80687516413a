/**
 * Weaves copies between host and device into a finished program: weights of layers that are streamed through windows, layer
 * inputs that wait on the host for their backward pass. The order in which a program visits its layers is known, so every
 * copy is issued as early as the memory it goes to is free, and awaited right before it is needed.
 */
import { arrival, transfer } from "./ops/transfer.ts";
import type { Op, OpKind, Phase, Program, Segment, Transfer } from "./program.ts";
import type { Value } from "./value.ts";

/** Weights of decoder layers that live on the host or in a file and come to the device one after the other. */
export interface WeightStream {
  /** On the device; layer l comes to window l modulo their number. */
  readonly windows: readonly Value[];
  /** On the host or in a file, one value per layer. */
  readonly layers: readonly Value[];
}

/** A layer input that is on the host from the layer's forward to its backward. */
export interface OffloadedInput {
  readonly layer: number;
  /** As the forward pass wrote it. */
  readonly input: Value;
  readonly host: Value;
  /** As the backward pass reads it. */
  readonly restored: Value;
}

/** Ops of one layer that follow each other. */
export interface Visit {
  readonly layer: number;
  /** Index of the first op, and one past the last. */
  readonly from: number;
  readonly to: number;
}

/** A copy or a wait, to be inserted before op `at`. */
interface Insertion extends Transfer {
  readonly at: number;
  readonly kind: OpKind<Transfer>;
  /** The visit that it ends or begins; null = the start of the program. */
  readonly layer: number | null;
  readonly side: "end" | "start";
}

/** Whether an op starts a copy. */
export function isTransfer({ kind }: Op): boolean {
  return kind === (transfer as OpKind<never>);
}

/** In which order a program comes by its layers. */
function layerVisits(ops: readonly Op[]): Visit[] {
  const visits: Visit[] = [];
  ops.forEach(({ layer }, index) => {
    if (layer === null) return;
    const last = visits.at(-1);
    if (last?.layer === layer && last.to === index)
      visits.splice(-1, 1, { ...last, to: index + 1 });
    else visits.push({ layer, from: index, to: index + 1 });
  });
  return visits;
}

/** The program with the copies that it needs. Every copy and every wait is a segment of its own. */
export function weaveTransfers(
  program: Program,
  weights: WeightStream | null,
  offloaded: readonly OffloadedInput[],
): Program {
  const visits = layerVisits(program.ops);
  const streamed = weights === null || visits.length === 0 ? null : weights;
  const insertions = offloaded.flatMap((input) => offloadInput(visits, input));
  if (streamed !== null) insertions.push(...streamWeights(visits, streamed));
  if (insertions.length === 0) return program;
  // Where one visit ends and another begins, copies are issued before anything is awaited.
  const rank = ({ kind, side }: Insertion) =>
    (side === "end" ? 0 : 2) + (kind === transfer ? 0 : 1);
  insertions.sort((a, b) => a.at - b.at || rank(a) - rank(b));
  const opening = streamed === null ? [] : openingOf(streamed);
  return { ...insertOps(program, insertions), opening };
}

/** Every window starts with the first layer that it can hold. */
function openingOf({ windows, layers }: WeightStream): Transfer[] {
  return windows.map((to, index) => ({ to, from: layers[index] as Value }));
}

/**
 * A layer that is not in its window is copied there as soon as the layer before it in this window is done with. So windows
 * minus one layers are under way while one computes. At the end the windows get their opening layers back, for the next
 * program.
 */
function streamWeights(visits: readonly Visit[], { windows, layers }: WeightStream): Insertion[] {
  const insertions: Insertion[] = [];
  const states = windows.map((to, index) => ({
    to,
    held: index,
    freeAt: 0,
    freeIn: null as number | null,
    awaited: false,
  }));
  for (const { layer, from, to } of visits) {
    const state = states[layer % windows.length] as (typeof states)[number];
    const copy = { to: state.to, from: layers[layer] as Value };
    if (state.held !== layer) {
      insertions.push({
        ...copy,
        at: state.freeAt,
        kind: transfer,
        layer: state.freeIn,
        side: "end",
      });
      Object.assign(state, { held: layer, awaited: false });
    }
    if (!state.awaited) insertions.push({ ...copy, at: from, kind: arrival, layer, side: "start" });
    Object.assign(state, { awaited: true, freeAt: to, freeIn: layer });
  }
  for (const [index, { to, held, freeAt, freeIn }] of states.entries()) {
    if (held === index) continue;
    const from = layers[index] as Value;
    insertions.push({ to, from, at: freeAt, kind: transfer, layer: freeIn, side: "end" });
  }
  return insertions;
}

/** Out while the layer computes; back while the layer above it is in its backward pass. */
function offloadInput(visits: readonly Visit[], offloaded: OffloadedInput): Insertion[] {
  const { layer, input, host, restored } = offloaded;
  const own = [...visits.keys()].filter((index) => visits[index]?.layer === layer);
  const [forward, backward] = own.map((index) => visits[index] as Visit);
  if (forward === undefined || backward === undefined) return []; // nothing is trained from here down
  const before = visits[(own[1] as number) - 1] as Visit;
  const out = { to: host, from: input };
  const back = { to: restored, from: host };
  return [
    { ...out, at: forward.from, kind: transfer, layer, side: "start" },
    { ...out, at: forward.to, kind: arrival, layer, side: "end" },
    { ...back, at: before.from, kind: transfer, layer: before.layer, side: "start" },
    { ...back, at: backward.from, kind: arrival, layer, side: "start" },
  ];
}

/** Inserts ops, and splits segments around them. */
function insertOps(program: Program, insertions: readonly Insertion[]): Program {
  const turn = program.ops.findIndex(({ phase }) => phase !== "forward");
  const ops: Op[] = [];
  const segments: Segment[] = [];
  let next = 0;
  for (const segment of program.segments) {
    let from = ops.length;
    const close = (name: string, headChunk: number | null) => {
      if (ops.length > from) segments.push({ name, from, to: ops.length, headChunk });
      from = ops.length;
    };
    for (let at = segment.from; at <= segment.to; at++) {
      // What belongs between two segments goes behind the first.
      for (; insertions[next]?.at === at; next++) {
        const { kind, layer, to, from: source } = insertions[next] as Insertion;
        const phase: Phase = turn < 0 || at <= turn ? "forward" : "backward";
        const attributes = { to, from: source };
        close(segment.name, segment.headChunk);
        ops.push({
          kind: kind as OpKind<unknown>,
          attributes,
          uses: kind.uses(attributes),
          phase,
          layer,
        });
        close(kind.name, null);
      }
      if (at < segment.to) ops.push(program.ops[at] as Op);
    }
    close(segment.name, segment.headChunk);
  }
  return { ...program, ops, segments };
}
