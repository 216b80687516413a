/** Checkpoints from the command line: stopped and resumed runs, and two in one folder. */
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { DEMO, run, temporary } from "./support.ts";

const FLAGS = [
  ...["--model", join(DEMO, "model"), "--data", join(DEMO, "valid.jsonl"), "--device", "cpu"],
  ...["--threads", "1", "--rank", "4", "--prompt-tokens", "0", "--batch-size", "1"],
];
const SAVES = ["--max-steps", "6", "--save-every", "2"];

const train = (out: string, ...flags: string[]) =>
  run("cli.ts", ["train", ...FLAGS, "--out", out, ...flags]);
const adapterOf = (out: string) => readFile(join(out, "adapter", "adapter_model.safetensors"));
const checkpointsIn = async (out: string) =>
  (await readdir(out)).filter((name) => name.startsWith("checkpoint-")).sort();

test("train --save-every writes checkpoints, and --resume goes on from one to the same adapter", async () => {
  await using folder = await temporary();
  const [first, second] = [join(folder.path, "first"), join(folder.path, "second")];
  const whole = await train(first, ...SAVES, "--keep-last", "3");
  assert.equal(whole.code, 0, whole.stderr);
  assert.match(whole.stdout, /Checkpoint .*checkpoint-2\.safetensors written \(1\.\d\d MiB\)/);
  assert.match(whole.stdout, /host +\d+ B .*page-locked host memory: .*the state that is saved/);
  assert.deepEqual(
    await checkpointsIn(first),
    [2, 4, 6].map((step) => `checkpoint-${step}.safetensors`),
  );
  const { options } = JSON.parse(await readFile(join(first, "run.json"), "utf8"));
  assert.deepEqual([options.saveEvery, options.keepLast], [2, 3]);

  const resumed = await train(
    second,
    ...SAVES,
    "--resume",
    join(first, "checkpoint-4.safetensors"),
  );
  assert.equal(resumed.code, 0, resumed.stderr);
  assert.match(resumed.stdout, /Resumed after step 4 from .*checkpoint-4/);
  assert.match(resumed.stdout, /step 6\/6/);
  assert.deepEqual(await adapterOf(second), await adapterOf(first));

  const again = await train(first, ...SAVES);
  assert.equal(again.code, 1);
  assert.match(again.stderr, /earlier run: .*checkpoint-6.*resume to "auto"/);
  const other = await train(first, ...SAVES, "--resume", "auto", "--learning-rate", "1e-3");
  assert.equal(other.code, 1);
  assert.match(other.stderr, /learningRate is 0\.001, the checkpoint has 0\.0002/);
});

test("train saves a checkpoint where it is stopped, and goes on from there", async () => {
  await using folder = await temporary();
  const [out, plain] = [join(folder.path, "out"), join(folder.path, "plain")];
  const saves = ["--save-every", "3", "--keep-last", "1", "--resume", "auto"];
  const flags = ["--max-steps", "40", ...saves];
  let sent = false;
  const stopped = await run("cli.ts", ["train", ...FLAGS, "--out", out, ...flags], {
    onOutput: (text, kill) => {
      if (sent || !text.includes("Checkpoint ")) return;
      sent = true;
      kill("SIGINT");
    },
  });
  assert.equal(stopped.code, 130, stopped.stdout);
  const step = /Stopped after step (\d+) of 40; --resume auto goes on/.exec(stopped.stdout)?.[1];
  assert.deepEqual(await checkpointsIn(out), [`checkpoint-${step}.safetensors`]);
  const resumed = await train(out, ...flags);
  assert.equal(resumed.code, 0, resumed.stderr);
  assert.match(resumed.stdout, new RegExp(`Resumed after step ${step} `));
  const whole = await train(plain, "--max-steps", "40");
  assert.equal(whole.code, 0, whole.stderr);
  assert.deepEqual(await adapterOf(out), await adapterOf(plain));
});

test("train refuses a folder that another run is using, and says which process has it", async () => {
  await using folder = await temporary();
  const out = join(folder.path, "out");
  let second: ReturnType<typeof train> | undefined;
  const first = await run("cli.ts", ["train", ...FLAGS, "--out", out, "--max-steps", "5000"], {
    onOutput: (text, kill) => {
      if (second !== undefined || !text.includes("Predicted step")) return;
      second = train(out, ...SAVES);
      void second.then(() => kill("SIGINT"));
    },
  });
  // Mutant: the lock is not taken, and both write.
  const refused = await second;
  assert.equal(refused?.code, 1);
  assert.match(
    refused?.stderr ?? "",
    /process \d+ holds the lock: .*run\.lock: wait for it to end/,
  );
  assert.equal(first.code, 130, first.stderr);
  assert.deepEqual(await checkpointsIn(out), []);
  // The lock ends with its run.
  const third = await train(out, ...SAVES);
  assert.equal(third.code, 0, third.stderr);
});

test("train that fails to start leaves no run folder behind", async () => {
  await using folder = await temporary();
  const out = join(folder.path, "deep", "out");
  const { code, stderr } = await train(out, ...SAVES, "--memory-budget", "1MiB");
  assert.equal(code, 1);
  assert.match(stderr, /memory budget/);
  assert.ok(!existsSync(join(folder.path, "deep")));
});
