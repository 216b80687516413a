/** Data that a model can learn within a few steps, unlike random tokens: a Markov chain over a part of the vocabulary. */
import type { Document } from "../../src/api/data/conversation.ts";
import { shuffledOrder } from "../../src/api/data/order.ts";
import { randomWords } from "./random.ts";

/** Tokens that occur at all: a model that only learns which they are comes from ln(V) to ln(256) = 5.5 nats. */
const STATES = 256;

/** Followers of a token. They come with 1/2, 1/4, 1/8 and 1/8, so that the chain has 1.2 nats a token. */
const FOLLOWERS = 4;
const CHOICE = [0, 0, 0, 0, 1, 1, 2, 3] as const;

/** Which documents: `step` numbers the batches of a run. */
export interface MarkovBatch {
  readonly vocabSize: number;
  readonly documents: number;
  readonly tokens: number;
  readonly seed: number;
  readonly step: number;
}

/** The documents of one step, every token labelled but the first of each. */
export function markovBatch(batch: MarkovBatch): Document[] {
  const { vocabSize, documents, tokens, seed, step } = batch;
  const states = shuffledOrder(vocabSize, seed, 0).subarray(0, STATES);
  const chain = randomWords(seed, 0);
  const followers = Uint32Array.from(
    { length: states.length * FOLLOWERS },
    () => chain() % states.length,
  );
  const next = randomWords(seed, 1 + step);
  return Array.from({ length: documents }, (_, index): Document => {
    let state = next() % states.length;
    const ids = Int32Array.from({ length: tokens }, () => {
      const id = states[state] as number;
      state = followers[FOLLOWERS * state + (CHOICE[next() & 7] as number)] as number;
      return id;
    });
    return { ids, labelled: allLabelled(tokens), where: `chain ${step}.${index}` };
  });
}

/** Labels on every token that has one before it. */
export function allLabelled(tokens: number): Uint8Array<ArrayBuffer> {
  return new Uint8Array(tokens).fill(1).fill(0, 0, 1);
}
