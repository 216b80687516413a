import assert from "node:assert/strict";
import { test } from "node:test";
import { LoramemError, LoraTrainer, readAdapter, type TrainOptions } from "../../mod.ts";
import { temporary } from "../cli/support.ts";

const DEMO = new URL("../../examples/demo/", import.meta.url).pathname;

const record = (word: string, answer: string) => ({
  messages: [
    { role: "user", content: `Define: ${word}` },
    { role: "assistant", content: answer },
  ],
});
const RECORDS = [
  record("rack", "An argumentative implement."),
  record("aim", "The task we set our wishes to."),
  record("selfish", "Devoid of consideration for the selfishness of others."),
  record("love", "A temporary insanity."),
  record("year", "A period of three hundred and sixty-five disappointments."),
];

function options(more: Partial<TrainOptions> = {}): TrainOptions {
  return {
    model: `${DEMO}model`,
    data: RECORDS,
    device: "cpu",
    batchSize: 2,
    lora: { rank: 4, alpha: 8 },
    learningRate: 1e-3,
    ...more,
  };
}

async function lossesOf(trainer: LoraTrainer): Promise<number[]> {
  const losses: number[] = [];
  for await (const step of trainer.steps()) losses.push(step.loss);
  return losses;
}

const hasCode = (code: string, text: RegExp) => (error: unknown) =>
  error instanceof LoramemError && error.code === code && text.test(error.message);

test("LoraTrainer.steps() goes on where the loop was left, with the same result", async () => {
  await using whole = await LoraTrainer.open(options({ epochs: 2 }));
  const expected = await lossesOf(whole);
  assert.equal(expected.length, 6); // 5 documents in batches of 2: the last batch is trained too
  assert.equal(whole.stepsPerEpoch, 3);

  await using left = await LoraTrainer.open(options({ epochs: 2 }));
  const losses: number[] = [];
  for await (const step of left.steps()) {
    losses.push(step.loss);
    if (step.step === 2) break;
  }
  assert.equal(left.stepsDone, 2);
  losses.push(...(await lossesOf(left)));
  assert.deepEqual(losses, expected);
});

test("LoraTrainer.steps() stops after the step in which its signal came", async () => {
  await using trainer = await LoraTrainer.open(options({ epochs: 9 }));
  const stop = new AbortController();
  for await (const step of trainer.steps({ signal: stop.signal }))
    if (step.step === 3) stop.abort();
  assert.equal(trainer.stepsDone, 3);
});

test("LoraTrainer.steps() and performance() say how long the device took and how much of it was used", async () => {
  await using trainer = await LoraTrainer.open(options({ deviceProfile: "h200" })); // one with a data sheet
  let tokens = 0;
  for await (const step of trainer.steps()) {
    tokens += step.tokens;
    assert.ok(step.deviceSeconds > 0 && step.deviceSeconds <= step.seconds);
    assert.ok(step.inputWaitSeconds >= 0 && step.inputWaitSeconds <= step.deviceSeconds);
    assert.ok((step.modelFlopUtilization ?? 0) > 0);
  }
  const whole = trainer.performance();
  assert.deepEqual([whole.steps, whole.tokens], [trainer.totalSteps, tokens]);
  assert.ok(whole.memory.reserved >= trainer.plan.deviceBytes);
});

test("LoraTrainer reads any iterable of records, and another seed gives another order", async () => {
  async function* stream() {
    yield* RECORDS;
  }
  await using first = await LoraTrainer.open(options({ data: stream() }));
  await using second = await LoraTrainer.open(options());
  await using other = await LoraTrainer.open(options({ seed: 1 }));
  const losses = await lossesOf(first);
  assert.deepEqual(await lossesOf(second), losses);
  assert.notDeepEqual(await lossesOf(other), losses);
});

test("LoraTrainer with dropLast leaves out the batch that is not full", async () => {
  await using trainer = await LoraTrainer.open(options({ dropLast: true, epochs: 2 }));
  assert.equal(trainer.totalSteps, 4);
  assert.equal((await lossesOf(trainer)).length, 4);
});

test("LoraTrainer.save() writes what a new run starts from", async () => {
  await using folder = await temporary();
  const adapter = `${folder.path}/adapter`;
  await using trainer = await LoraTrainer.open(options({ evalData: RECORDS }));
  await lossesOf(trainer);
  const trained = await trainer.evaluate();
  await trainer.save(adapter);
  assert.equal((await readAdapter(adapter)).tensors.length, 6 * 7);

  const { lora: _, ...rest } = options({ evalData: RECORDS, adapter });
  await using again = await LoraTrainer.open(rest);
  assert.equal(await again.evaluate(), trained);
});

test("LoraTrainer.save() over the adapter that it started from gives the same adapter", async () => {
  await using folder = await temporary();
  const adapter = `${folder.path}/adapter`;
  {
    await using trainer = await LoraTrainer.open(options({ maxSteps: 1 }));
    await lossesOf(trainer);
    await trainer.save(adapter);
  }
  const before = await readAdapter(adapter);
  const { lora: _, ...rest } = options({ adapter });
  await using trainer = await LoraTrainer.open(rest);
  await trainer.save(adapter);
  assert.deepEqual(await readAdapter(adapter), before);
  await lossesOf(trainer);
  await trainer.save(adapter);
  assert.notDeepEqual((await readAdapter(adapter)).tensors, before.tensors);
});

test("LoraTrainer.evaluate() needs evaluation data", async () => {
  await using trainer = await LoraTrainer.open(options());
  await assert.rejects(trainer.evaluate(), hasCode("BAD_ARGUMENT", /evalData/));
});

test("LoraTrainer does one thing at a time", async () => {
  await using trainer = await LoraTrainer.open(options({ evalData: RECORDS }));
  const first = trainer.evaluate();
  await assert.rejects(trainer.evaluate(), hasCode("BAD_ARGUMENT", /busy/));
  assert.ok(Number.isFinite(await first));
});

test("LoraTrainer cannot be used once it is disposed, and may be disposed twice", async () => {
  const trainer = await LoraTrainer.open(options({ evalData: RECORDS }));
  await trainer[Symbol.asyncDispose]();
  await trainer[Symbol.asyncDispose]();
  await assert.rejects(trainer.evaluate(), hasCode("DISPOSED", /disposed/));
});

test("LoraTrainer.open() names an unknown option and the one that was meant", async () => {
  const wrong = { ...options(), batchSiz: 4 };
  await assert.rejects(LoraTrainer.open(wrong), hasCode("BAD_ARGUMENT", /batchSiz.*batchSize/));
  await assert.rejects(
    LoraTrainer.open(options({ lora: { rank: 0 } })),
    hasCode("BAD_ARGUMENT", /lora\.rank/),
  );
});

test("LoraTrainer.open() keeps to the memory budget, and says which one would do", async () => {
  const lean = { promptTokens: 0 }; // a prefill would be the peak of so small a run
  await using roomy = await LoraTrainer.open(options(lean));
  assert.equal(roomy.savePoints, "keep");
  const bytes = roomy.plan.deviceBytes;
  await using tight = await LoraTrainer.open(options({ ...lean, memoryBudget: bytes - 1 }));
  assert.match(tight.savePoints, /^\d keep \+ 1 dropMlp$/);
  assert.deepEqual(await lossesOf(tight), await lossesOf(roomy));
  await assert.rejects(
    LoraTrainer.open(options({ memoryBudget: "2MiB" })),
    hasCode("OUT_OF_MEMORY", /2\.00 MiB given, .* needed/),
  );
});

test("LoraTrainer.generate() refuses more than the plan holds", async () => {
  await using trainer = await LoraTrainer.open(options({ promptTokens: 32, answerTokens: 8 }));
  await assert.rejects(
    trainer.generate("Define: love ".repeat(40), { maxTokens: 8 }),
    hasCode("OVER_PLAN", /do not fit the plan/),
  );
  await using silent = await LoraTrainer.open(options({ promptTokens: 0 }));
  await assert.rejects(silent.generate("x"), hasCode("OVER_PLAN", /promptTokens/));
});
