/** Models at real shapes with random weights, for benchmarks on a GPU. */
import type { Document } from "../src/api/data/conversation.ts";
import { shuffledOrder } from "../src/api/data/order.ts";
import { bytesOf } from "../src/api/graph/value.ts";
import type { Device } from "../src/api/memory/mod.ts";
import type { SavePolicy } from "../src/api/plan/save_points.ts";
import { initializeAdapters } from "../src/api/train/adapter_state.ts";
import { planRun, type RunSpec, TRANSFER_BYTES } from "../src/api/train/run_plan.ts";
import { Session } from "../src/api/train/session.ts";
import { type MODELS, specOf } from "../tests/plan/models.ts";

/** Model, documents, tokens of each. */
export type Shape = readonly [keyof typeof MODELS, number, number];

/** The shapes that PEFT was measured at. */
export const SHAPES: readonly Shape[] = [
  ["Qwen2.5-0.5B", 8, 1024],
  ["Llama-3.2-1B", 4, 2048],
  ["Llama-3.1-8B", 2, 2048],
];

/** What a training step of `shape` is planned from. */
export function specOfShape([model, count, tokens]: Shape, policy: SavePolicy): RunSpec {
  return {
    ...specOf(model, {
      tokensPerMicroBatch: count * tokens,
      documentsPerMicroBatch: count,
      prefillTokens: 0,
      contextTokens: 0,
      // As a budget would choose it: under checkpoint the logits are the peak.
      lossChunkTokens: policy === "checkpoint" ? 512 : 1024,
    }),
    programs: ["train", "optimizer"],
  };
}

/** Random tokens, all of them labelled but the first of a document. */
export function documentsOf([, count, tokens]: Shape, spec: RunSpec): Document[] {
  return Array.from({ length: count }, (_, index): Document => {
    const ids = Int32Array.from(shuffledOrder(spec.config.vocabSize, 1, index).subarray(0, tokens));
    return { ids, labelled: new Uint8Array(tokens).fill(1).fill(0, 0, 1), where: "random" };
  });
}

/** A session with weights of a sensible scale. */
export async function openShape(
  device: Device,
  spec: RunSpec,
  policy: SavePolicy,
): Promise<Session> {
  const session = Session.commit(device, planRun(spec, policy), "graph");
  await randomWeights(session);
  await initializeAdapters(session.executor, session.run, 0);
  return session;
}

/** Fills every weight with bf16 numbers of about 0.02, from one random block that is copied over and over. */
async function randomWeights(session: Session): Promise<void> {
  const { executor, run } = session;
  const { transfer } = run.staging;
  const block = executor.hostView(transfer, Uint16Array);
  let state = 1;
  for (let at = 0; at < block.length; at++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    // Sign and mantissa at random, exponent of numbers between 2^-7 and 2^-5.
    block[at] = ((state >>> 16) & 0x807f) | ((120 + ((state >>> 8) & 1)) << 7);
  }
  for (const value of run.weights.values) {
    const bytes = bytesOf(value);
    for (let at = 0; at < bytes; at += TRANSFER_BYTES) {
      executor.upload(value, transfer, Math.min(TRANSFER_BYTES, bytes - at), at);
    }
  }
  await executor.stream.done();
}
