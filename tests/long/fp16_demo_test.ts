import assert from "node:assert/strict";
import { test } from "node:test";
import { LoraTrainer } from "../../mod.ts";
import { DEMO } from "../cli/support.ts";

test("LoraTrainer ends an epoch of the demo in fp16 within 0.02 of fp32's evaluation loss, through an overflow", {
  timeout: 900_000,
}, async () => {
  const run = async (more: { precision: "fp32" | "fp16"; initLossScale?: number }) => {
    await using trainer = await LoraTrainer.open({
      model: `${DEMO}/model`,
      data: `${DEMO}/train.jsonl`,
      evalData: `${DEMO}/valid.jsonl`,
      device: "cpu",
      learningRate: 2e-3,
      promptTokens: 0,
      ...more,
    });
    let skipped = 0;
    for await (const step of trainer.steps()) skipped += Number(step.skipped);
    return { loss: await trainer.evaluate(), skipped };
  };
  const single = await run({ precision: "fp32" });
  const half = await run({ precision: "fp16" });
  assert.equal(half.skipped, 0);
  assert.ok(Math.abs(half.loss - single.loss) < 0.02, `${half.loss} beside ${single.loss}`);
  // Scaled gradients of this run overflow f16 until the scale has come down.
  const high = await run({ precision: "fp16", initLossScale: 2 ** 24 });
  assert.ok(high.skipped > 0 && high.skipped < 12, `${high.skipped} skipped`);
  assert.ok(Math.abs(high.loss - single.loss) < 0.05, `${high.loss} beside ${single.loss}`);
});
