/** The demo beside PEFT's run: before training and after its first epoch. All three epochs are in tests/long. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { openDemo, readReference } from "./demo_reference.ts";

test("LoraTrainer follows PEFT on the demo: base loss, base answers, loss after the first of three epochs", {
  timeout: 300_000,
}, async () => {
  const reference = await readReference();
  await using trainer = await openDemo();
  assert.equal(trainer.stepsPerEpoch, 99);
  assert.equal(trainer.totalSteps, 297);
  assert.ok(Math.abs((await trainer.evaluate()) - reference.base_eval_loss) < 0.003);
  for (const word of ["love", "money", "cat"]) {
    const answer = await trainer.generate(`Define: ${word}`, { maxTokens: 48 });
    assert.equal(answer.trim(), reference.base_samples[word]);
  }
  for await (const step of trainer.steps()) if (step.step === 99) break;
  const after = await trainer.evaluate();
  assert.ok(Math.abs(after - (reference.eval_loss_after_each_epoch[0] ?? 0)) < 0.05, String(after));
});
