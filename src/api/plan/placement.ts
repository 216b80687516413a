/**
 * Placement: offsets for buffers with known lifetimes (the dynamic storage allocation problem, NP-hard). Four orders times
 * two fits are tried, which is enough for decoders; where none of them meets the lower bound, hill climbing and then a
 * bounded exact search follow. The smallest placement wins.
 */
import { aligned } from "../graph/value.ts";
import { climb } from "./climb.ts";
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

/** `small` tells the lifetime of a buffer that is small beside the largest, 0 for the others. */
type Order = (a: Buffer, b: Buffer, small: (buffer: Buffer) => number) => number;
const life = (buffer: Buffer): number => buffer.last - buffer.first + 1;
const octave = (buffer: Buffer): number => Math.floor(Math.log2(life(buffer)));
/** A buffer is small if the largest is so many times as large. */
const SMALL = 64;
const ORDERS: readonly Order[] = [
  (a, b) => b.bytes - a.bytes,
  (a, b) => b.bytes * life(b) - a.bytes * life(a),
  (a, b) => life(b) - life(a),
  // Lives of about the same length by size, once small values are out of the way, which would split what large ones need.
  (a, b, small) => small(b) - small(a) || octave(b) - octave(a) || b.bytes - a.bytes,
  (a, b) => a.first - b.first,
];

/**
 * Places `buffers`; the first `fixed` of them go to the bottom in the given order, so that programs which carry the same
 * values agree on their addresses.
 */
export function place(buffers: readonly Buffer[], fixed: number): Placement {
  const { lowerBound, peakOp } = maximumLive(buffers);
  const sorted = placeSorted(buffers, fixed, lowerBound);
  const best = sorted.bytes === lowerBound ? sorted : search(buffers, fixed, lowerBound, sorted);
  return { ...best, lowerBound, peakOp };
}

/** The smallest of the ten combinations of order and fit; stops at one of `enough` bytes. */
export function placeSorted(buffers: readonly Buffer[], fixed: number, enough = 0): Placed {
  let best: Placed = { offsets: new Map(), bytes: Number.POSITIVE_INFINITY };
  for (const order of ORDERS) {
    for (const bestFit of [false, true]) {
      const tried = placeInOrder(buffers, fixed, order, bestFit);
      if (tried.bytes < best.bytes) best = tried;
      if (best.bytes <= enough) return best;
    }
  }
  return best;
}

/** The best of `sorted`, hill climbing, and an exact search at the lower bound. */
function search(
  buffers: readonly Buffer[],
  fixed: number,
  lowerBound: number,
  sorted: Placed,
): Placed {
  const bottom = buffers.slice(0, fixed);
  const free = buffers.slice(fixed);
  const base = bottom.reduce((sum, buffer) => sum + aligned(buffer.bytes), 0);
  const above = (offsets: ReadonlyMap<Buffer, number>) =>
    new Map([
      ...bottom.map((buffer) => [buffer, sorted.offsets.get(buffer) as number] as const),
      ...[...offsets].map(([buffer, offset]) => [buffer, base + offset] as const),
    ]);
  const climbed = climb(free, lowerBound - base, sorted.offsets);
  if (climbed.bytes > lowerBound - base) {
    const exact = placeWithin(free, lowerBound - base);
    if (exact instanceof Map) return { offsets: above(exact), bytes: lowerBound };
  }
  if (base + climbed.bytes >= sorted.bytes) return sorted;
  return { offsets: above(climbed.offsets), bytes: base + climbed.bytes };
}

/** The op with most live bytes, and those bytes. */
export function maximumLive(buffers: readonly Buffer[]): {
  readonly lowerBound: number;
  readonly peakOp: number;
} {
  const change = new Map<number, number>();
  const add = (op: number, bytes: number) => change.set(op, (change.get(op) ?? 0) + bytes);
  for (const buffer of buffers) {
    add(buffer.first, aligned(buffer.bytes));
    add(buffer.last + 1, -aligned(buffer.bytes));
  }
  let live = 0;
  let lowerBound = 0;
  let peakOp = 0;
  for (const [op, bytes] of [...change].sort(([a], [b]) => a - b)) {
    live += bytes;
    if (live > lowerBound) {
      lowerBound = live;
      peakOp = op;
    }
  }
  return { lowerBound, peakOp };
}

function placeInOrder(buffers: readonly Buffer[], fixed: number, order: Order, bestFit: boolean) {
  const limit = Math.max(...buffers.map((buffer) => buffer.bytes)) / SMALL;
  const small = (buffer: Buffer) => (buffer.bytes < limit ? life(buffer) : 0);
  const offsets = new Map<Buffer, number>();
  const placed: { start: number; end: number; buffer: Buffer }[] = [];
  let bytes = 0;
  const queue = [
    ...buffers.slice(0, fixed),
    ...buffers.slice(fixed).sort((a, b) => order(a, b, small)),
  ];
  queue.forEach((buffer, position) => {
    const size = aligned(buffer.bytes);
    const start = position < fixed ? bytes : findGap(placed, buffer, size, bestFit);
    offsets.set(buffer, start);
    bytes = Math.max(bytes, start + size);
    const at = lowerIndex(placed, start);
    placed.splice(at, 0, { start, end: start + size, buffer });
  });
  return { offsets, bytes };
}

function findGap(
  placed: readonly { start: number; end: number; buffer: Buffer }[],
  buffer: Buffer,
  size: number,
  bestFit: boolean,
): number {
  let cursor = 0;
  let best = -1;
  let bestSize = Number.POSITIVE_INFINITY;
  for (const { start, end, buffer: other } of placed) {
    if (other.first > buffer.last || other.last < buffer.first) continue;
    const gap = start - cursor;
    if (gap >= size && gap < bestSize) {
      if (!bestFit) return cursor;
      best = cursor;
      bestSize = gap;
    }
    if (end > cursor) cursor = end;
  }
  return best >= 0 ? best : cursor;
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
