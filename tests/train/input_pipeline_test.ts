import assert from "node:assert/strict";
import { test } from "node:test";
import { exportAdapters } from "../../src/api/train/adapter_state.ts";
import { KINDS, openGolden, readGolden, type SessionSetup } from "./support.ts";

const golden = await readGolden("llama");
/** Steps of four documents each, one document per micro-batch. */
const STEPS = [0, 1, 2, 1].map((first) => [
  ...(golden.batches[first] ?? []),
  ...(golden.batches[(first + 1) % 3] ?? []),
]);

/** Losses of training and evaluation and the adapters of a run; `ahead` = the next step is named beforehand. */
async function train(setup: SessionSetup, ahead: boolean) {
  const dims = { tokensPerMicroBatch: golden.sequence, documentsPerMicroBatch: 1 };
  await using session = await openGolden(golden, { ...setup, dims, threads: 1 });
  const losses: number[] = [];
  for (const [index, documents] of STEPS.entries()) {
    const next = ahead ? (STEPS[index + 1] ?? null) : null;
    losses.push((await session.trainStep(documents, golden.settings, next)).loss);
    // Takes the place of what is on its way already.
    if (index === 1) losses.push(await session.evaluate(golden.batches[2] ?? []));
  }
  const adapters = await exportAdapters(session.executor, session.run);
  return { losses, adapters };
}

// Streams in the order in which they are made: the first computes, the second copies.
// Mutants: leave out the wait for #filled in take(), for #taken or for copied in stage().
test("InputPipeline gives every program its micro-batch, whichever stream is late", async () => {
  const expected = await train({}, false);
  assert.deepEqual(await train({}, true), expected, "nothing is late");
  for (const delays of [
    [0, 20_000],
    [3000, 0],
    [1000, 1500],
  ]) {
    for (const mode of ["graph", "eager"] as const) {
      if (mode === "eager" && (delays[0] ?? 0) > 0) continue; // every op would be late
      const late = await train({ device: "sim", sim: { delays }, mode }, true);
      assert.deepEqual(late, expected, `${mode}, delays ${delays}`);
    }
  }
});

test("Session.trainStep() gives the same bits whether or not the next step was named, on every device", async () => {
  for (const device of KINDS) {
    assert.deepEqual(await train({ device }, true), await train({ device }, false), device);
  }
});

test("Session.trainStep() refuses a next step without labels before it does anything", async () => {
  await using session = await openGolden(golden);
  const unlabelled = STEPS[0]?.map((document) => ({
    ...document,
    labelled: new Uint8Array(document.ids.length),
  }));
  const first = golden.batches[0] ?? [];
  await assert.rejects(session.trainStep(first, golden.settings, unlabelled ?? []), {
    code: "BAD_DATA",
  });
  assert.equal(session.steps, 0);
  const { loss } = await session.trainStep(first, golden.settings);
  assert.ok(Math.abs(loss - (golden.losses[0] ?? 0)) < 1e-4);
});

// Mutants: record `to` before the wait in take(); leave out waited() in evaluate().
test("Session.trainStep() says how long the device waited for input", async () => {
  const documents = golden.batches[0] ?? [];
  const late = 20_000;
  await using session = await openGolden(golden, { device: "sim", sim: { delays: [0, late] } });
  // Their waits are not the step's: together they are longer than it.
  for (let times = 0; times < 12; times++) await session.evaluate(documents);
  await session.trainStep(documents, golden.settings);
  const first = session.times;
  assert.ok(first.inputWaitSeconds >= 0.9e-6 * late, `${first.inputWaitSeconds} s`);
  assert.ok(first.deviceSeconds >= first.inputWaitSeconds);
  assert.equal(first.modelFlopUtilization, null, "the plan has no profile");
  // Several micro-batches, more than there are events.
  await session.trainStep(Array.from({ length: 6 }, () => documents).flat(), golden.settings);
  assert.ok(session.times.inputWaitSeconds > 0);
  assert.equal(session.performance().steps, 2);
});
