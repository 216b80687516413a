/** A run that is resumed ends as the run that was not interrupted, bit for bit. */
import assert from "node:assert/strict";
import { readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { LoramemError, LoraTrainer, type TrainOptions } from "../../mod.ts";
import { temporary } from "../cli/support.ts";
import { KINDS } from "../kernels/rig.ts";
import { smallRun, traceRun } from "./checkpoint_support.ts";

/** Every precision; fp16 with a loss scale that overflows at first and then grows. */
const PRECISIONS: readonly Partial<TrainOptions>[] = [
  { precision: "fp32" },
  { precision: "bf16", savePoints: "checkpoint" },
  { precision: "fp16", initLossScale: 2 ** 18, lossScaleInterval: 2 },
];

for (const more of KINDS.flatMap((device) => PRECISIONS.map((one) => ({ ...one, device })))) {
  test(`LoraTrainer resumes in ${more.precision} from every step to the same bits on ${more.device}`, async () => {
    await using folder = await temporary();
    const whole = await traceRun(smallRun(more));
    assert.equal(whole.steps.length, 6);
    assert.equal(
      whole.steps.some(({ skipped }) => skipped),
      more.precision === "fp16",
    );
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
      // Mutants: moments, count of updates, loss scale, epoch or place in it are not restored; the compute copy is stale.
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

test("LoraTrainer.checkpoint() writes one at any step boundary, also after the loop was left", async () => {
  await using folder = await temporary();
  const options = smallRun({ runDir: folder.path, saveEvery: 100 });
  const whole = await traceRun(smallRun());
  for (const stopAfter of [1, 3, 5]) {
    const resume = "auto";
    await traceRun(
      { ...options, resume },
      {
        after: async (trainer, step) => {
          if (step < stopAfter) return false;
          await trainer.checkpoint();
          await trainer.checkpoint(); // twice is fine
          return true;
        },
      },
    );
  }
  const last = await traceRun({ ...options, resume: "auto" });
  assert.deepEqual(last.steps, whole.steps.slice(5));
  assert.equal(last.adapter, whole.adapter);
  await using plain = await LoraTrainer.open(smallRun());
  await assert.rejects(plain.checkpoint(), /open it with runDir and saveEvery/);
});

test("LoraTrainer writes a checkpoint where its signal stops it", async () => {
  // Mutant: only every saveEvery-th step is saved.
  await using folder = await temporary();
  const options = smallRun({ runDir: folder.path, saveEvery: 100, resume: "auto" });
  const stop = new AbortController();
  const stopped = await traceRun(options, {
    signal: stop.signal,
    after: async (_, step) => {
      if (step === 4) stop.abort();
      return false;
    },
  });
  assert.equal(stopped.steps.length, 4);
  const whole = await traceRun(smallRun());
  const resumed = await traceRun(options);
  assert.deepEqual(resumed.steps, whole.steps.slice(4));
  assert.equal(resumed.adapter, whole.adapter);
});

test("LoraTrainer saves the step that a loop was left at when the next loop begins", async () => {
  await using folder = await temporary();
  const options = smallRun({ runDir: folder.path, saveEvery: 2, keepLast: 9 });
  await using trainer = await LoraTrainer.open(options);
  for await (const { step } of trainer.steps()) if (step === 2) break;
  for await (const { step } of trainer.steps()) if (step === 3) break;
  await trainer[Symbol.asyncDispose]();
  const names = (await readdir(folder.path)).filter((name) => name !== "run.lock");
  assert.deepEqual(names, ["checkpoint-2.safetensors"]);
});

test("LoraTrainer refuses a second run in one folder, until the first is disposed", async () => {
  await using folder = await temporary();
  const options = smallRun({ runDir: folder.path });
  const first = await LoraTrainer.open(options);
  await assert.rejects(LoraTrainer.open(options), (error) => {
    return error instanceof LoramemError && error.is("BUSY") && /run\.lock/.test(error.message);
  });
  await first[Symbol.asyncDispose]();
  await using second = await LoraTrainer.open(options);
  assert.equal(second.stepsDone, 0);
});

test("LoraTrainer refuses a run folder that cannot be made, before it reserves memory", async () => {
  await using folder = await temporary();
  await writeFile(join(folder.path, "file"), "in the way");
  for (const runDir of [join(folder.path, "file", "run"), "/proc/loramem-run"]) {
    await assert.rejects(LoraTrainer.open(smallRun({ runDir })), (error) => {
      return error instanceof LoramemError && error.is("IO") && error.message.includes(runDir);
    });
  }
});

for (const device of KINDS) {
  test(`LoraTrainer takes no memory for checkpoints after it was opened on ${device}`, async () => {
    // Mutant: the copy of the state is taken when it is needed.
    await using folder = await temporary();
    await using plain = await LoraTrainer.open(smallRun({ device }));
    const options = smallRun({ device, runDir: folder.path, saveEvery: 1 });
    await using trainer = await LoraTrainer.open(options);
    const { host } = trainer.plan.classes;
    assert.ok(host >= 3 * 4 * trainer.parameters && plain.plan.classes.host === 0);
    assert.deepEqual({ ...trainer.plan.classes, host: 0 }, plain.plan.classes);
    const memory = () => {
      const { reserved, pinned, driverAllocs, driverFrees } = trainer.device.stats();
      return { reserved, pinned, driverAllocs, driverFrees };
    };
    const opened = memory();
    assert.ok(opened.pinned - plain.device.stats().pinned >= host);
    for await (const { step } of trainer.steps()) {
      if (step % 2 === 0) await trainer.checkpoint();
      assert.deepEqual(memory(), opened, `step ${step}`);
    }
    assert.deepEqual(memory(), opened);
  });
}

for (const device of KINDS) {
  test(`LoraTrainer resumes with the algorithms that were timed at first, on ${device}`, async () => {
    // Mutant: they are timed again, and another choice rounds otherwise.
    await using folder = await temporary();
    const options = smallRun({ device, algorithms: "timed", runDir: folder.path, saveEvery: 2 });
    let algorithms = "";
    const whole = await traceRun(
      { ...options, keepLast: 9 },
      {
        after: async (trainer) => {
          algorithms = trainer.algorithms;
          return false;
        },
      },
    );
    for (const step of [2, 4]) {
      const resume = join(folder.path, `checkpoint-${step}.safetensors`);
      const again = await traceRun(smallRun({ device, algorithms: "timed", resume }), {
        after: async (trainer) => {
          assert.equal(trainer.algorithms, algorithms);
          return false;
        },
      });
      assert.deepEqual(again.steps, whole.steps.slice(step));
      assert.equal(again.adapter, whole.adapter);
      assert.deepEqual(
        again.notices.map(({ kind }) => kind),
        ["resumed"],
      );
    }
  });
}
