/** The order in which an epoch visits the documents: a pure function of seed and epoch. */
import { LoramemError } from "../../ffi/error.ts";

/**
 * Shuffled indices of one epoch, the share of one rank.
 *
 * A Fisher-Yates shuffle driven by Philox4x32-10 with the seed as key and (block, epoch) as counter,
 * so any epoch can be had without the ones before it: resuming needs no generator state. All ranks
 * shuffle alike; rank r takes places r, r + worldSize, r + 2 worldSize, ... of the common order, so
 * together they visit every document once, and shares differ by at most one.
 *
 * @example Usage
 * ```ts
 * import { shuffledOrder } from "./src/api/data/order.ts";
 * console.log(shuffledOrder(8, 0, 0)); // the same eight numbers on every machine
 * ```
 *
 * @param count Number of documents.
 * @param seed Non-negative safe integer.
 * @param epoch Counted from 0.
 * @param rank This process, from 0.
 * @param worldSize Number of processes.
 * @returns Indices below `count`, u32.
 * @throws {LoramemError} `BAD_ARGUMENT` for anything that is not such an integer.
 */
export function shuffledOrder(
  count: number,
  seed: number,
  epoch: number,
  rank = 0,
  worldSize = 1,
): Uint32Array {
  checkInteger("count", count, 0, 2 ** 32 - 1);
  checkInteger("seed", seed, 0, Number.MAX_SAFE_INTEGER);
  checkInteger("epoch", epoch, 0, 2 ** 32 - 1);
  checkInteger("worldSize", worldSize, 1, 2 ** 32 - 1);
  checkInteger("rank", rank, 0, worldSize - 1);
  const order = Uint32Array.from({ length: count }, (_, index) => index);
  const key = Uint32Array.of(seed, seed / 2 ** 32);
  const counter = Uint32Array.of(0, epoch, 0, 0);
  const random = new Uint32Array(4);
  for (let last = count - 1, word = 0; last > 0; last--, word = (word + 2) & 3) {
    if (word === 0) {
      philox4x32(random, counter, key);
      counter[0] = (counter[0] as number) + 1;
    }
    // 53 random bits as a fraction: the bias of an index is below count / 2^53.
    const high = (random[word] as number) >>> 5;
    const low = (random[word + 1] as number) >>> 6;
    const other = Math.floor(((high * 2 ** 26 + low) / 2 ** 53) * (last + 1));
    const swapped = order[last] as number;
    order[last] = order[other] as number;
    order[other] = swapped;
  }
  if (worldSize === 1) return order;
  return order.filter((_, place) => place % worldSize === rank);
}

/**
 * One block of the counter-based generator Philox4x32-10: four random words from 128 bits of counter
 * and 64 bits of key (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
 *
 * @param out u32 [4], written.
 * @param counter u32 [4], read.
 * @param key u32 [2], read.
 */
export function philox4x32(out: Uint32Array, counter: Uint32Array, key: Uint32Array): void {
  let [c0, c1, c2, c3] = counter as unknown as [number, number, number, number];
  let [k0, k1] = key as unknown as [number, number];
  for (let round = 0; round < 10; round++) {
    const high0 = multiplyHigh(0xd2511f53, c0);
    const high1 = multiplyHigh(0xcd9e8d57, c2);
    const low0 = Math.imul(0xd2511f53, c0);
    const low1 = Math.imul(0xcd9e8d57, c2);
    [c0, c1, c2, c3] = [high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0];
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

/** Upper 32 bits of the product of two unsigned 32-bit numbers, in 16-bit halves. */
function multiplyHigh(a: number, b: number): number {
  const aHigh = a >>> 16;
  const aLow = a & 0xffff;
  const bHigh = b >>> 16;
  const bLow = b & 0xffff;
  const middle = aHigh * bLow + ((aLow * bLow) >>> 16);
  const cross = aLow * bHigh + (middle & 0xffff);
  return (aHigh * bHigh + (middle >>> 16) + (cross >>> 16)) >>> 0;
}

function checkInteger(name: string, value: number, least: number, most: number): void {
  if (Number.isSafeInteger(value) && value >= least && value <= most) return;
  const message = `shuffledOrder: ${name} is not an integer from ${least} to ${most}: ${value}`;
  throw new LoramemError("BAD_ARGUMENT", message, { name, value });
}
