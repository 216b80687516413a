/**
 * Bounded exact search for a placement: branch and bound over canonical placements, in which every buffer lies at 0 or
 * directly on another one, taken in the order of their offsets (Moffitt, "MiniMalloc", ASPLOS 2023). It finds a placement
 * within a capacity, or proves that there is none, or runs out of its budget.
 */
import { aligned } from "../graph/value.ts";
import type { Buffer } from "./liveness.ts";

/** Elements that one search may look at; some hundredths of a second. */
const BUDGET = 6_000_000;

/**
 * Places `buffers` within `capacity` bytes, from 0 on.
 *
 * @returns Offsets; `"none"` if that is impossible; `"unknown"` if the budget ran out.
 */
export function placeWithin(
  buffers: readonly Buffer[],
  capacity: number,
): Map<Buffer, number> | "none" | "unknown" {
  for (const order of ORDERS) {
    const search = new Search(buffers.toSorted(order));
    const found = search.within(capacity, BUDGET / ORDERS.length);
    if (found !== "unknown") return found;
  }
  return "unknown";
}

type Order = (a: Buffer, b: Buffer) => number;
const life = ({ first, last }: Buffer): number => last - first + 1;

/** Which of the buffers that could be next is tried first; the orders fail on different programs. */
const ORDERS: readonly Order[] = [
  (a, b) => b.bytes - a.bytes,
  (a, b) => b.bytes * life(b) - a.bytes * life(a),
];

/** One search tree: buffers are tried in their given order. */
class Search {
  readonly #buffers: readonly Buffer[];
  readonly #size: Float64Array;
  /** Sections of time that a buffer lives in: from, to (exclusive). A section starts wherever a buffer does. */
  readonly #from: Int32Array;
  readonly #to: Int32Array;
  /** Buffers that live at the same time as a buffer. */
  readonly #overlaps: readonly Int32Array[];
  /** Offset of a placed buffer; lowest offset that a buffer could have otherwise. */
  readonly #offset: Float64Array;
  readonly #placed: Uint8Array;
  /** By section: end of the highest placed buffer, and bytes that are still to be placed. */
  readonly #floor: Float64Array;
  readonly #remaining: Float64Array;
  #capacity = 0;
  #visits = 0;

  constructor(buffers: readonly Buffer[]) {
    this.#buffers = buffers;
    const count = buffers.length;
    const starts = [...new Set(buffers.map(({ first }) => first))].sort((a, b) => a - b);
    this.#size = Float64Array.from(buffers, ({ bytes }) => aligned(bytes));
    this.#from = Int32Array.from(buffers, ({ first }) => starts.indexOf(first));
    this.#to = Int32Array.from(
      buffers,
      ({ last }) => starts.findLastIndex((start) => start <= last) + 1,
    );
    this.#overlaps = buffers.map(({ first, last }, index) =>
      Int32Array.from(
        buffers.flatMap((other, at) =>
          at !== index && other.first <= last && first <= other.last ? [at] : [],
        ),
      ),
    );
    this.#offset = new Float64Array(count);
    this.#placed = new Uint8Array(count);
    this.#floor = new Float64Array(starts.length);
    this.#remaining = new Float64Array(starts.length);
  }

  within(capacity: number, budget: number): Map<Buffer, number> | "none" | "unknown" {
    this.#offset.fill(0);
    this.#placed.fill(0);
    this.#floor.fill(0);
    this.#remaining.fill(0);
    this.#buffers.forEach((_, index) => {
      for (let section = this.#from[index] as number; section < this.#end(index); section++)
        (this.#remaining[section] as number) += this.#size[index] as number;
    });
    this.#capacity = capacity;
    this.#visits = budget;
    if (this.#descend(0, 0)) {
      return new Map(this.#buffers.map((buffer, index) => [buffer, this.#offset[index] as number]));
    }
    return this.#visits > 0 ? "none" : "unknown";
  }

  #end(index: number): number {
    return this.#to[index] as number;
  }

  /** Places what is left, not below `level`. */
  #descend(depth: number, level: number): boolean {
    const count = this.#buffers.length;
    if (depth === count) return true;
    this.#visits -= count;
    if (this.#visits <= 0) return false;
    // Whatever is placed from here on at or above `top` would leave room below for the buffer that ends there.
    let top = Number.POSITIVE_INFINITY;
    for (let index = 0; index < count; index++) {
      if (this.#placed[index] === 1) continue;
      const end = Math.max(this.#offset[index] as number, level) + (this.#size[index] as number);
      if (end < top) top = end;
    }
    for (let index = 0; index < count; index++) {
      if (this.#placed[index] === 1) continue;
      const offset = this.#offset[index] as number;
      if (offset < level || offset >= top || this.#twinIsFree(index)) continue;
      const undo = this.#place(index, offset);
      if (this.#mayFit(offset) && this.#descend(depth + 1, offset)) return true;
      this.#remove(index, offset, undo);
      if (this.#visits <= 0) return false;
    }
    return false;
  }

  /** Whether an equal buffer stands before this one: their order makes no difference. */
  #twinIsFree(index: number): boolean {
    if (index === 0 || this.#placed[index - 1] === 1) return false;
    return (
      this.#size[index - 1] === this.#size[index] &&
      this.#from[index - 1] === this.#from[index] &&
      this.#to[index - 1] === this.#to[index]
    );
  }

  /** Places a buffer; gives what {@linkcode Search.#remove} needs. */
  #place(index: number, offset: number): { floors: Float64Array; raised: number[] } {
    const [from, to] = [this.#from[index] as number, this.#end(index)];
    const size = this.#size[index] as number;
    const end = offset + size;
    const floors = this.#floor.slice(from, to);
    for (let section = from; section < to; section++) {
      this.#floor[section] = end;
      (this.#remaining[section] as number) -= size;
    }
    const raised: number[] = [];
    for (const other of this.#overlaps[index] as Int32Array) {
      const before = this.#offset[other] as number;
      if (this.#placed[other] === 1 || before >= end) continue;
      raised.push(other, before);
      this.#offset[other] = end;
    }
    this.#placed[index] = 1;
    return { floors, raised };
  }

  #remove(
    index: number,
    offset: number,
    { floors, raised }: { floors: Float64Array; raised: number[] },
  ): void {
    const from = this.#from[index] as number;
    this.#placed[index] = 0;
    this.#offset[index] = offset;
    for (let at = 0; at < raised.length; at += 2)
      this.#offset[raised[at] as number] = raised[at + 1] as number;
    this.#floor.set(floors, from);
    for (let section = from; section < this.#end(index); section++)
      (this.#remaining[section] as number) += this.#size[index] as number;
  }

  /** Whether every section has room for what is left, which cannot go below `level` any more. */
  #mayFit(level: number): boolean {
    this.#visits -= this.#floor.length;
    for (let section = 0; section < this.#floor.length; section++) {
      const left = this.#remaining[section] as number;
      if (Math.max(this.#floor[section] as number, level) + left > this.#capacity) return false;
    }
    return true;
  }
}
