/**
 * Placement: offsets for buffers with known lifetimes (the dynamic storage allocation problem, NP-hard). Buffers are
 * placed one after the other, each in the lowest gap that holds it; four orders are tried, which is enough for decoders.
 * Where none of them meets the lower bound, a bounded exact search follows. The smallest placement wins.
 *
 * The orders begin where bytes are short: with what is alive at the peak, then at the next lower one, and so on.
 */
import { aligned } from "../graph/value.ts";
import { placeWithin } from "./exact.ts";
import type { Buffer } from "./liveness.ts";

/** Offsets of buffers. */
export interface Placed {
  readonly offsets: ReadonlyMap<Buffer, number>;
  /** Bytes of the whole arena. */
  readonly bytes: number;
}

/** Offsets of buffers and how good they are. */
export interface Placement extends Placed {
  /** Most bytes alive at one op: no placement can be smaller. */
  readonly lowerBound: number;
  /** Index of the op where the lower bound is reached. */
  readonly peakOp: number;
}

type Order = (a: Buffer, b: Buffer) => number;

/** Who holds the others of the peak inside its life: those that begin first, or those that end last. */
const OUTER: readonly Order[] = [
  (a, b) => b.last - a.last || a.first - b.first,
  (a, b) => a.first - b.first || b.last - a.last,
];

/** Which goes first of those that see equally many bytes alive: the one that ends last, or the largest. */
const EQUAL: readonly Order[] = [(a, b) => b.last - a.last, (a, b) => b.bytes - a.bytes];

/** Where the lower bound is not met, the search for less ends within this part of it. */
const CLOSE = 0.001;

/**
 * Places `buffers`; the first `fixed` of them, which live throughout, go to the bottom in the given order, so that programs
 * which carry the same values agree on their addresses.
 */
export function place(buffers: readonly Buffer[], fixed: number): Placement {
  const { lowerBound, peakOp } = maximumLive(buffers);
  const sorted = placeSorted(buffers, fixed);
  const best = sorted.bytes === lowerBound ? sorted : search(buffers, fixed, lowerBound, sorted);
  return { ...best, lowerBound, peakOp };
}

/** The smallest placement of the four orders. */
export function placeSorted(buffers: readonly Buffer[], fixed: number): Placed {
  const { lowerBound, peakOp } = maximumLive(buffers);
  const bottom = buffers.slice(0, fixed);
  const free = buffers.slice(fixed);
  const atPeak = free.filter(({ first, last }) => first <= peakOp && peakOp <= last);
  const others = free.filter(({ first, last }) => first > peakOp || peakOp > last);
  const live = liveBytes(buffers);
  const most = new Map(others.map((buffer) => [buffer, mostBeside(buffer, live)]));
  const pressure = (buffer: Buffer) => most.get(buffer) as number;
  let best: Placed = { offsets: new Map(), bytes: Number.POSITIVE_INFINITY };
  for (const equal of EQUAL) {
    const behind = others.toSorted((a, b) => pressure(b) - pressure(a) || equal(a, b));
    for (const outer of OUTER) {
      const tried = placeInOrder([...bottom, ...nested(atPeak, outer), ...behind]);
      if (tried.bytes < best.bytes) best = tried;
      if (best.bytes === lowerBound) return best;
    }
  }
  return best;
}

/**
 * Orders what is alive at the peak, where no byte is to spare. Before the peak the ones that begin late leave room, after it
 * the ones that end early do. That room is in one piece if every buffer lives inside the life of the one below it; the
 * ones that break the chain go to the upper end, upside down.
 */
function nested(atPeak: readonly Buffer[], outer: Order): Buffer[] {
  const chain: Buffer[] = [];
  const upper: Buffer[] = [];
  for (const buffer of atPeak.toSorted(outer)) {
    const below = chain.at(-1);
    const fits = below === undefined || (below.first <= buffer.first && buffer.last <= below.last);
    (fits ? chain : upper).push(buffer);
  }
  return [...chain, ...upper.reverse()];
}

/** An exact search at the lower bound; if that fails, by bisection between it and `sorted`. Gives the best that is found. */
function search(
  buffers: readonly Buffer[],
  fixed: number,
  lowerBound: number,
  sorted: Placed,
): Placed {
  const bottom = buffers.slice(0, fixed);
  const free = buffers.slice(fixed);
  const base = bottom.reduce((sum, buffer) => sum + aligned(buffer.bytes), 0);
  const close = Math.max(aligned(1), CLOSE * lowerBound);
  let [best, failed, capacity] = [sorted, 0, lowerBound];
  while (best.bytes > lowerBound && best.bytes - failed > close) {
    const found = placeWithin(free, capacity - base);
    if (found instanceof Map) {
      const offsets = new Map(sorted.offsets);
      for (const [buffer, offset] of found) offsets.set(buffer, base + offset);
      best = { offsets, bytes: capacity };
    } else failed = capacity;
    capacity = aligned((failed + best.bytes) / 2);
  }
  return best;
}

/** The first op with most live bytes, and those bytes. */
export function maximumLive(buffers: readonly Buffer[]): {
  readonly lowerBound: number;
  readonly peakOp: number;
} {
  const live = liveBytes(buffers);
  const lowerBound = live.reduce((most, bytes) => Math.max(most, bytes), 0);
  return { lowerBound, peakOp: live.indexOf(lowerBound) };
}

/** Bytes alive at every op. */
function liveBytes(buffers: readonly Buffer[]): Float64Array {
  const ops = buffers.reduce((count, { last }) => Math.max(count, last + 1), 0);
  const live = new Float64Array(ops + 1);
  for (const { bytes, first, last } of buffers) {
    (live[first] as number) += aligned(bytes);
    (live[last + 1] as number) -= aligned(bytes);
  }
  for (let op = 1; op <= ops; op++) (live[op] as number) += live[op - 1] as number;
  return live;
}

/** Most bytes alive at an op of a buffer's life. */
function mostBeside({ first, last }: Buffer, live: Float64Array): number {
  return live.subarray(first, last + 1).reduce((most, bytes) => Math.max(most, bytes), 0);
}

function placeInOrder(queue: readonly Buffer[]): Placed {
  const offsets = new Map<Buffer, number>();
  const placed: { start: number; end: number; buffer: Buffer }[] = [];
  let bytes = 0;
  for (const buffer of queue) {
    const size = aligned(buffer.bytes);
    const start = lowestGap(placed, buffer, size);
    offsets.set(buffer, start);
    bytes = Math.max(bytes, start + size);
    placed.splice(lowerIndex(placed, start), 0, { start, end: start + size, buffer });
  }
  return { offsets, bytes };
}

/** The lowest offset with `size` bytes that nothing else has during the life of `buffer`; `placed` is sorted by start. */
function lowestGap(
  placed: readonly { start: number; end: number; buffer: Buffer }[],
  buffer: Buffer,
  size: number,
): number {
  let cursor = 0;
  for (const { start, end, buffer: other } of placed) {
    if (other.first > buffer.last || other.last < buffer.first) continue;
    if (start - cursor >= size) break;
    if (end > cursor) cursor = end;
  }
  return cursor;
}

function lowerIndex(placed: readonly { start: number }[], start: number): number {
  let low = 0;
  let high = placed.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((placed[middle] as { start: number }).start < start) low = middle + 1;
    else high = middle;
  }
  return low;
}
