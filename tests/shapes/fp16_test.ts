/** Training in fp16 with a gradient scaler beside bf16: overflows are skipped, and the host does nothing more for it. */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { Precision } from "../../src/api/amp/precision.ts";
import type { ScalerSettings } from "../../src/api/kernels/mod.ts";
import type { Session } from "../../src/api/train/session.ts";
import { native } from "../../src/ffi/load.ts";
import { KINDS } from "../train/support.ts";
import { markovBatch } from "./markov.ts";
import { openShape, SETTINGS, SHAPES } from "./session.ts";

const { documents, tokens } = SHAPES.small;

/** Steps that are applied; a batch whose update was skipped comes again. */
const STEPS = { cpu: 6, "cuda:0": 50 } as const;

function batchOf(session: Session, step: number) {
  const { vocabSize } = session.run.spec.config;
  return markovBatch({ vocabSize, documents, tokens, seed: 0, step });
}

/** Counts every call into the library until it is disposed. */
function countCalls(): Disposable & { readonly calls: Record<string, number> } {
  const fn = native().fn as unknown as Record<string, (...args: unknown[]) => unknown>;
  const originals = Object.entries(fn);
  const calls: Record<string, number> = {};
  for (const [name, original] of originals) {
    fn[name] = (...args) => {
      calls[name] = (calls[name] ?? 0) + 1;
      return original(...args);
    };
  }
  return {
    calls,
    [Symbol.dispose]() {
      for (const [name, original] of originals) fn[name] = original;
    },
  };
}

async function train(
  device: (typeof KINDS)[number],
  precision: Precision,
  scaler: ScalerSettings = {},
) {
  await using opened = await openShape("small", { device, precision, scaler });
  const { session } = opened;
  const losses: number[] = [];
  let skipped = 0;
  while (losses.length < STEPS[device]) {
    const step = await session.trainStep(batchOf(session, losses.length), SETTINGS);
    if (step.skipped) skipped++;
    else losses.push(step.loss);
    assert.ok(skipped < 64);
  }
  // Everything that the host does with the device, waiting included, is such a call.
  using counted = countCalls();
  await session.trainStep(batchOf(session, losses.length), SETTINGS);
  return { loss: losses.at(-1) ?? Number.NaN, skipped, calls: counted.calls };
}

for (const device of KINDS) {
  test(`Session ends in fp16, through overflows, where bf16 ends, with no call of the library more: ${device}`, {
    timeout: 120_000,
  }, async () => {
    const bf16 = await train(device, "bf16");
    const fp16 = await train(device, "fp16", { initScale: 2 ** 32 });
    assert.equal(bf16.skipped, 0);
    assert.ok(fp16.skipped > 0, "an overflow was skipped");
    assert.ok(Math.abs(fp16.loss - bf16.loss) < 0.02, `${fp16.loss}, bf16 ${bf16.loss}`);
    assert.ok((bf16.calls.lm_mem_copy ?? 0) > 0, JSON.stringify(bf16.calls));
    assert.deepEqual(fp16.calls, bf16.calls);
  });
}
