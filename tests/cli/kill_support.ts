/** Kills runs of the command line at random moments, and lets others go on from there. */
import assert from "node:assert/strict";
import { readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { DEMO, run, temporary } from "./support.ts";

const STEPS = 16;

const FLAGS = [
  ...["--model", join(DEMO, "model"), "--data", join(DEMO, "valid.jsonl"), "--device", "cpu"],
  ...["--threads", "1", "--rank", "4", "--prompt-tokens", "0", "--batch-size", "1"],
  ...["--max-steps", String(STEPS), "--save-every", "1", "--keep-last", "2", "--resume", "auto"],
];

const train = (out: string, killAfter?: number) =>
  run("cli.ts", ["train", ...FLAGS, "--out", out], killAfter === undefined ? {} : { killAfter });

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
  kills: number,
): Promise<{ readonly killed: number; readonly resumed: number; readonly ended: number }> {
  await using reference = await temporary();
  const start = performance.now();
  const whole = await train(reference.path);
  assert.equal(whole.code, 0, whole.stderr);
  const life = performance.now() - start;
  const expected = await resultOf(reference.path);
  const counts = { killed: 0, resumed: 0, ended: 0 };
  while (counts.killed < kills) {
    await using folder = await temporary();
    let newest = 0;
    for (;;) {
      const enough = counts.killed >= kills;
      const ended = await train(folder.path, enough ? undefined : Math.random() * life);
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
