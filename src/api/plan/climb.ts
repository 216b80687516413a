/**
 * Hill climbing for a placement: buffers are placed one after the other, each in the lowest gap that holds it, and their
 * order is changed by moving one at a time; half of the time the one that reaches highest, to an earlier place.
 */
import { aligned } from "../graph/value.ts";
import type { Buffer } from "./liveness.ts";

/** Elements that one climb may look at; some tenths of a second. */
const BUDGET = 20_000_000;

/** A placement that is worse by less than `SLACK` of the bound is taken with this probability. */
const ACCEPT = 0.1;
const SLACK = 0.004;

/**
 * Looks for a placement of fewer bytes than eight sorted orders found. The same buffers give the same placement.
 *
 * @param lowerBound Bytes at which to stop.
 * @param start Offsets of the placement to start from.
 * @returns The offsets, and the bytes that they take.
 */
export function climb(
  buffers: readonly Buffer[],
  lowerBound: number,
  start: ReadonlyMap<Buffer, number>,
) {
  const sizes = Float64Array.from(buffers, ({ bytes }) => aligned(bytes));
  const overlaps = buffers.map(({ first, last }, index) =>
    buffers.flatMap((other, at) =>
      at !== index && other.first <= last && first <= other.last ? [at] : [],
    ),
  );
  const offsets = new Float64Array(buffers.length);
  let work = BUDGET;
  /** The buffer that reaches highest. */
  let top = 0;
  const place = (order: readonly number[]): number => {
    offsets.fill(-1);
    let bytes = 0;
    for (const index of order) {
      const size = sizes[index] as number;
      const below = (overlaps[index] as number[]).filter(
        (other) => (offsets[other] as number) >= 0,
      );
      work -= (overlaps[index] as number[]).length + below.length;
      below.sort((a, b) => (offsets[a] as number) - (offsets[b] as number));
      let cursor = 0;
      for (const other of below) {
        if ((offsets[other] as number) - cursor >= size) break;
        cursor = Math.max(cursor, (offsets[other] as number) + (sizes[other] as number));
      }
      offsets[index] = cursor;
      if (cursor + size > bytes) top = index;
      bytes = Math.max(bytes, cursor + size);
    }
    return bytes;
  };

  const random = randomNumbers();
  const below = (count: number) => Math.floor(random() * count);
  let order = buffers.map((_, index) => index);
  const from = buffers.map((buffer) => start.get(buffer) as number);
  order.sort((a, b) => (from[a] as number) - (from[b] as number));
  let current = place(order);
  let peak = top;
  let best = { bytes: current, offsets: offsets.slice() };
  while (work > 0 && best.bytes > lowerBound) {
    const moved = order.slice();
    if (random() < 0.5) {
      const at = moved.indexOf(peak);
      moved.splice(at, 1);
      moved.splice(below(at + 1), 0, peak);
    } else {
      const [index] = moved.splice(below(moved.length), 1) as [number];
      moved.splice(below(moved.length + 1), 0, index);
    }
    const bytes = place(moved);
    const accepted =
      bytes <= current || (bytes - current < SLACK * lowerBound && random() < ACCEPT);
    if (!accepted) continue;
    current = bytes;
    order = moved;
    peak = top;
    if (bytes < best.bytes) best = { bytes, offsets: offsets.slice() };
  }
  return {
    bytes: best.bytes,
    offsets: new Map(buffers.map((buffer, index) => [buffer, best.offsets[index] as number])),
  };
}

/** Uniform numbers in [0, 1), always the same ones (Lehmer's generator, MINSTD of Park and Miller 1988). */
function randomNumbers(): () => number {
  const modulus = 2 ** 31 - 1;
  let state = 1;
  return () => {
    state = (state * 48_271) % modulus;
    return state / modulus;
  };
}
