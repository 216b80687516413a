/** Kills runs of the command line at random moments, and lets others go on from there. */
import assert from "node:assert/strict";
import { readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { DEMO, type RunOptions, run, temporary } from "./support.ts";

const STEPS = 16;

const FLAGS = [
  ...["--model", join(DEMO, "model"), "--data", join(DEMO, "valid.jsonl")],
  ...["--threads", "1", "--rank", "4", "--prompt-tokens", "0", "--batch-size", "1"],
  ...["--algorithms", "estimated"], // a run that was killed before its first checkpoint starts again, and would time again
  ...["--max-steps", String(STEPS), "--save-every", "1", "--keep-last", "2", "--resume", "auto"],
];

const train = (device: string, out: string, options: RunOptions = {}) =>
  run("cli.ts", ["train", ...FLAGS, "--device", device, "--out", out], options);

/** Printed after every save. */
const SAVED = "Checkpoint ";

/** Adapter and last checkpoint of a finished run. */
async function resultOf(out: string): Promise<Uint8Array[]> {
  return [
    await readFile(join(out, "adapter", "adapter_model.safetensors")),
    await readFile(join(out, `checkpoint-${STEPS}.safetensors`)),
  ];
}

/**
 * Starts runs in one folder and kills each at a random moment of its life, until one ends; then again in a new folder.
 * Every run that ends must have gone on to the bits of a run that nobody killed.
 *
 * @returns How many were killed and how many of those had been resumed, how many ended.
 */
export async function killRuns(
  device: string,
  kills: number,
): Promise<{ readonly killed: number; readonly resumed: number; readonly ended: number }> {
  await using reference = await temporary();
  const start = performance.now();
  let firstSave = 0;
  const whole = await train(device, reference.path, {
    onOutput(text) {
      if (firstSave === 0 && text.includes(SAVED)) firstSave = performance.now();
    },
  });
  assert.equal(whole.code, 0, whole.stderr);
  const end = performance.now();
  /** Every other one at any moment of its life, and else from its first save on, where it does not wait for its start. */
  const moment = (kill: number): RunOptions =>
    kill % 2 === 0
      ? { killAfter: Math.random() * (end - start) }
      : { killAfter: Math.random() * (end - firstSave), killFrom: SAVED };
  const expected = await resultOf(reference.path);
  const counts = { killed: 0, resumed: 0, ended: 0 };
  while (counts.killed < kills) {
    await using folder = await temporary();
    let newest = 0;
    for (;;) {
      const enough = counts.killed >= kills;
      const ended = await train(device, folder.path, enough ? {} : moment(counts.killed));
      const step = /Resumed after step (\d+)/.exec(ended.stdout)?.[1];
      if (step !== undefined) counts.resumed++;
      // Mutants: a checkpoint counts before it is on the disk; the older ones go first. Nothing is ever damaged or lost.
      assert.doesNotMatch(ended.stdout, /skipped|not written/, ended.stdout);
      if (step !== undefined) assert.ok(Number(step) >= newest, `${step} after ${newest}`);
      newest = await newestOf(folder.path, newest);
      if (ended.code === 0) break;
      // Killed, or refused: an earlier run's lock must not outlive it.
      assert.equal(ended.stderr, "", ended.stderr);
      counts.killed++;
    }
    counts.ended++;
    assert.deepEqual(await resultOf(folder.path), expected);
    const left = (await readdir(folder.path)).filter((name) => name.startsWith(".checkpoint"));
    assert.deepEqual(left, []);
  }
  return counts;
}

/** Step of the newest checkpoint; at least one is there once there was one. */
async function newestOf(folder: string, before: number): Promise<number> {
  const steps = (await readdir(folder)).flatMap((name) =>
    Number(/^checkpoint-(\d+)\./.exec(name)?.[1] ?? 0),
  );
  const newest = Math.max(0, ...steps);
  assert.ok(newest >= before, `checkpoint ${before} is lost`);
  return newest;
}
