import assert from "node:assert/strict";
import { test } from "node:test";
import { openDemo, readReference } from "../train/demo_reference.ts";

test("LoraTrainer follows PEFT on the demo for three epochs, into over-fitting", {
  timeout: 900_000,
}, async () => {
  const reference = await readReference();
  await using trainer = await openDemo();
  const losses: number[] = [];
  for await (const { step } of trainer.steps()) {
    if (step % trainer.stepsPerEpoch === 0) losses.push(await trainer.evaluate());
  }
  assert.equal(losses.length, 3);
  for (const [epoch, expected] of reference.eval_loss_after_each_epoch.entries()) {
    assert.ok(
      Math.abs((losses[epoch] ?? 0) - expected) < 0.05,
      `${losses} beside ${reference.eval_loss_after_each_epoch}`,
    );
  }
});
