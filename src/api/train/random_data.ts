/** Numbers, weights and documents for measuring without a checkpoint. */
import type { Document } from "../data/conversation.ts";
import { shuffledOrder } from "../data/order.ts";
import { DTYPES } from "../graph/value.ts";
import { loadRopeTables } from "./load_weights.ts";
import { TRANSFER_BYTES } from "./run_plan.ts";
import type { Session } from "./session.ts";

/** Bytes of ones at the end of the transfer block, for norms. */
const ONES = 1 << 16;

/** Fills a block with numbers of about 0.02 in either sign; of f32 it holds the halves. */
export function fillRandom(block: Uint16Array, dtype: "f32" | "bf16"): void {
  let state = 1;
  for (let at = 0; at < block.length; at++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    // Sign and mantissa at random, exponent of numbers between 2^-7 and 2^-5; the lower half of an f32 is all mantissa.
    const mantissa = dtype === "f32" && at % 2 === 0;
    block[at] = mantissa
      ? state >>> 16
      : ((state >>> 16) & 0x807f) | ((120 + ((state >>> 8) & 1)) << 7);
  }
}

/**
 * Fills every tensor with bf16 numbers of about 0.02, each from its own place in one random block, and norms with ones: the
 * same wherever the weights are.
 */
export async function randomWeights({ executor, run }: Session): Promise<void> {
  const { transfer } = run.staging;
  const block = executor.hostView(transfer, Uint16Array);
  const random = (TRANSFER_BYTES - ONES) / 2;
  fillRandom(block.subarray(0, random), "bf16");
  block.fill(0x3f80, random);
  run.weights.sources.forEach(({ tensor, value, element, elements }, index) => {
    const size = DTYPES[value.dtype].bytes;
    const isNorm = tensor.includes("norm");
    const start = isNorm ? 2 * random : (index * 1_000_448) % random;
    const most = isNorm ? ONES : random;
    for (let at = 0; at < elements * size; at += most) {
      const bytes = Math.min(most, elements * size - at);
      executor.upload(value, transfer, bytes, element * size + at, start);
    }
  });
  await executor.stream.done();
  await loadRopeTables(executor, run);
}

/** `count` documents of `tokens` random tokens, all but the first labelled. */
export function randomDocuments(vocabSize: number, count: number, tokens: number): Document[] {
  return Array.from({ length: count }, (_, index): Document => {
    const ids = new Int32Array(tokens);
    // A permutation of the vocabulary, again and again where the document is longer.
    const order = shuffledOrder(vocabSize, 1, index);
    for (let at = 0; at < tokens; at += vocabSize) {
      ids.set(order.subarray(0, Math.min(vocabSize, tokens - at)), at);
    }
    return { ids, labelled: new Uint8Array(tokens).fill(1).fill(0, 0, 1), where: "random" };
  });
}
