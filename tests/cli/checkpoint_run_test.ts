/** Checkpoints from the command line: stopped and resumed runs, two in one folder, and a disk that is full. */
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync } from "node:fs";
import { readdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import process from "node:process";
import { test } from "node:test";
import { DEMO, ROOT, run, temporary } from "./support.ts";

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
  const flags = ["--max-steps", "40", "--save-every", "1000", "--resume", "auto"];
  let sent = false;
  const stopped = await run("cli.ts", ["train", ...FLAGS, "--out", out, ...flags], {
    onOutput: (text, kill) => {
      if (sent || !text.includes("step 1/")) return;
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
      if (second !== undefined || !text.includes("step 1/")) return;
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

/** Whether this process may mount in a namespace of its own. */
const mounts = spawnSync("unshare", ["-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]).status === 0;

test("train goes on where the disk is full, and the checkpoints before it are intact", {
  skip: !mounts,
}, async () => {
  await using folder = await temporary();
  const out = join(folder.path, "small");
  const plain = join(folder.path, "plain");
  const script = join(folder.path, "script");
  const program = [
    "Bun" in globalThis ? "run" : "run -A --no-check",
    join(ROOT, "cli.ts"),
    "train",
  ];
  const command = [
    ...[process.execPath, ...program, ...FLAGS, "--out", out, ...SAVES],
    ...["--save-every", "1", "--keep-last", "2", "--resume", "auto"],
  ].join(" ");
  // Room for two checkpoints of 1.3 MiB and the adapter.
  await writeFile(
    script,
    `mkdir ${out} && mount -t tmpfs -o size=3300k none ${out} || exit 9
     ${command} && ls ${out} && rm -r ${out}/checkpoint-1.safetensors ${out}/adapter && ${command} && cp -r ${out}/adapter ${plain}-small`,
  );
  const { status, stdout, stderr } = spawnSync("unshare", ["-Urm", "sh", script], {
    cwd: ROOT,
    env: { ...process.env, NO_COLOR: "1" },
    encoding: "utf8",
  });
  assert.equal(status, 0, stdout + stderr);
  const [before, after] = stdout.split("Resumed after step 2") as [string, string];
  // Mutant: the run ends at the first save that fails, or loses what it had.
  assert.equal(
    before.match(/Checkpoint not written, the run goes on: .*the disk is full/g)?.length,
    4,
  );
  assert.match(before, /step 6\/6/);
  assert.match(before, /checkpoint-1\.safetensors\ncheckpoint-2\.safetensors\n/);
  assert.match(after, /Checkpoint .*checkpoint-3\.safetensors written/);
  const whole = await train(plain, ...SAVES);
  assert.equal(whole.code, 0, whole.stderr);
  assert.deepEqual(
    await readFile(join(`${plain}-small`, "adapter_model.safetensors")),
    await adapterOf(plain),
  );
});
