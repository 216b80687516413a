/** Weights for measuring without a checkpoint. */
import { DTYPES } from "../graph/value.ts";
import { ropeTable } from "../nn/rope.ts";
import { uploadFloats } from "./load_weights.ts";
import { TRANSFER_BYTES } from "./run_plan.ts";
import type { Session } from "./session.ts";

/** Bytes of ones at the end of the transfer block, for norms. */
const ONES = 1 << 16;

/**
 * Fills every tensor with bf16 numbers of about 0.02, each from its own place in one random block, and norms with ones: the
 * same wherever the weights are.
 */
export async function randomWeights({ executor, run }: Session): Promise<void> {
  const { transfer } = run.staging;
  const block = executor.hostView(transfer, Uint16Array);
  const random = (TRANSFER_BYTES - ONES) / 2;
  let state = 1;
  for (let at = 0; at < random; at++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    // Sign and mantissa at random, exponent of numbers between 2^-7 and 2^-5.
    block[at] = ((state >>> 16) & 0x807f) | ((120 + ((state >>> 8) & 1)) << 7);
  }
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
  const { cos, sin } = run.weights;
  const table = ropeTable(run.spec.config.rope, run.spec.config.headDim, cos.shape[0] as number);
  await uploadFloats(executor, transfer, cos, 0, table.cos);
  await uploadFloats(executor, transfer, sin, 0, table.sin);
}
