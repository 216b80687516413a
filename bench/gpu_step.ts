/**
 * A training step at real model shapes on a GPU: tokens per second, planned bytes, the driver's bytes, and the same bits
 * twice. Random weights of a sensible scale; the data is random, so the loss itself says nothing.
 *
 *     bun bench/gpu_step.ts [result.json]
 */
import process from "node:process";
import type { Document } from "../src/api/data/conversation.ts";
import { shuffledOrder } from "../src/api/data/order.ts";
import { bytesOf } from "../src/api/graph/value.ts";
import { Device } from "../src/api/memory/mod.ts";
import type { SavePolicy } from "../src/api/plan/save_points.ts";
import { initializeAdapters } from "../src/api/train/adapter_state.ts";
import { planRun, TRANSFER_BYTES } from "../src/api/train/run_plan.ts";
import { Session } from "../src/api/train/session.ts";
import { type MODELS, specOf } from "../tests/plan/models.ts";
import { SETTINGS } from "./demo_session.ts";
import { writeResult } from "./results.ts";

/** Model, documents, tokens of each: the shapes that PEFT was measured at. */
const SHAPES: readonly (readonly [keyof typeof MODELS, number, number])[] = [
  ["Qwen2.5-0.5B", 8, 1024],
  ["Llama-3.2-1B", 4, 2048],
  ["Llama-3.1-8B", 2, 2048],
];
const POLICIES: readonly SavePolicy[] = ["keep", "checkpoint"];
const [WARM, STEPS] = [3, 10];

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

const rows: Record<string, unknown>[] = [];
for (const [model, count, tokens] of SHAPES) {
  for (const policy of POLICIES) {
    const spec = {
      ...specOf(model, {
        tokensPerMicroBatch: count * tokens,
        documentsPerMicroBatch: count,
        prefillTokens: 0,
        contextTokens: 0,
        // As a budget would choose it: under checkpoint the logits are the peak.
        lossChunkTokens: policy === "checkpoint" ? 512 : 1024,
      }),
      programs: ["train", "optimizer"] as const,
    };
    const documents = Array.from({ length: count }, (_, index): Document => {
      const ids = Int32Array.from(
        shuffledOrder(spec.config.vocabSize, 1, index).subarray(0, tokens),
      );
      return { ids, labelled: new Uint8Array(tokens).fill(1).fill(0, 0, 1), where: "random" };
    });
    await using device = await Device.open("cuda:0");
    const free = () => Number(device.info().memoryFree);
    const before = free();
    const session = Session.commit(device, planRun(spec, policy), "graph");
    await randomWeights(session);
    await initializeAdapters(session.executor, session.run, 0);
    const seconds: number[] = [];
    const driver: number[] = [];
    let loss = 0;
    for (let step = 0; step < WARM + STEPS; step++) {
      const start = performance.now();
      ({ loss } = await session.trainStep(documents, SETTINGS));
      if (step >= WARM) seconds.push((performance.now() - start) / 1000);
      driver.push(before - free());
    }
    const median = seconds.toSorted((a, b) => a - b)[STEPS >> 1] as number;
    const { deviceBytes } = session.run.plan;
    const row = {
      model,
      batch: `${count} x ${tokens}`,
      policy,
      tokensPerSecond: (count * tokens) / median,
      stepMs: median * 1000,
      planGiB: deviceBytes / 2 ** 30,
      driverGiB: (driver.at(-1) ?? 0) / 2 ** 30,
      driverMoved: Math.max(...driver.slice(1)) - Math.min(...driver.slice(1)),
      loss,
    };
    rows.push(row);
    console.log(
      `${model} ${row.batch} ${policy}: ${Math.round(row.tokensPerSecond)} tokens/s, ${row.stepMs.toFixed(1)} ms, ` +
        `plan ${row.planGiB.toFixed(2)} GiB, driver ${row.driverGiB.toFixed(2)} GiB, moved ${row.driverMoved} B, loss ${loss.toFixed(3)}`,
    );
    await session.dispose();
  }
}
const file = process.argv[2];
if (file !== undefined) await writeResult(file, { bench: "gpu_step", rows });
