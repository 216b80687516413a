/** A run that is resumed ends as the run that was not interrupted, bit for bit. */
import assert from "node:assert/strict";
import { readdir } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import type { TrainOptions } from "../../mod.ts";
import { temporary } from "../cli/support.ts";
import { smallRun, traceRun } from "./checkpoint_support.ts";

/** Every precision; fp16 with a loss scale that overflows at first and then grows. */
const PRECISIONS: readonly Partial<TrainOptions>[] = [
  { precision: "fp32" },
  { precision: "bf16", savePoints: "checkpoint" },
  { precision: "fp16", initLossScale: 2 ** 26, lossScaleInterval: 2 },
];

for (const more of PRECISIONS) {
  test(`LoraTrainer resumes in ${more.precision} from every step to the same bits`, async () => {
    await using folder = await temporary();
    const whole = await traceRun(smallRun(more));
    assert.equal(whole.steps.length, 6);
    // Evaluation and generation in between disturb nothing.
    const saved = await traceRun(
      smallRun({ ...more, runDir: folder.path, saveEvery: 1, keepLast: 9 }),
      {
        after: async (trainer) => {
          await trainer.evaluate();
          await trainer.generate("Define: love");
          return false;
        },
      },
    );
    assert.deepEqual(saved.steps, whole.steps);
    assert.equal(saved.adapter, whole.adapter);
    for (let step = 1; step <= 6; step++) {
      const resume = join(folder.path, `checkpoint-${step}.safetensors`);
      const resumed = await traceRun(smallRun({ ...more, resume }));
      assert.deepEqual(resumed.steps, whole.steps.slice(step), `after step ${step}`);
      assert.equal(resumed.adapter, whole.adapter, `after step ${step}`);
      assert.deepEqual(
        resumed.notices.map(({ kind }) => kind),
        ["resumed"],
      );
    }
  });
}

test("LoraTrainer keeps the last checkpoints and the best", async () => {
  await using folder = await temporary();
  const trace = await traceRun(smallRun({ runDir: folder.path, saveEvery: 2, keepLast: 1 }), {
    after: async (trainer, step) => {
      if (step === 3) await trainer.evaluate();
      return false;
    },
  });
  const names = (await readdir(folder.path)).filter((name) => name !== "run.lock").sort();
  assert.deepEqual(names, ["checkpoint-3.safetensors", "checkpoint-6.safetensors"]);
  assert.equal(trace.notices.filter(({ kind }) => kind === "checkpointSaved").length, 4);
});
