/** Runs on a disk that is full and on one that cannot be written: real ones, mounted in a namespace of the test's own. */
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import process from "node:process";
import { test } from "node:test";
import { DEMO, ROOT, temporary } from "./support.ts";

const NAMESPACE = ["unshare", "-Urm"] as const;

/** Whether this process may mount there. */
const mounts =
  spawnSync(NAMESPACE[0], [NAMESPACE[1], "mount", "-t", "tmpfs", "none", "/mnt"]).status === 0;

/** The command of a run of six steps. */
function train(out: string, ...flags: string[]): string {
  return [
    ...[process.execPath, "Bun" in globalThis ? "run" : "run -A --no-check", join(ROOT, "cli.ts")],
    ...["train", "--model", join(DEMO, "model"), "--data", join(DEMO, "valid.jsonl")],
    ...["--device", "cpu", "--threads", "1", "--rank", "4", "--prompt-tokens", "0"],
    ...["--batch-size", "1", "--max-steps", "6", "--out", out, ...flags],
  ].join(" ");
}

/** Runs shell commands, one after the other as long as they succeed, as root of a namespace of their own. */
async function runScript(folder: string, ...commands: string[]) {
  const script = join(folder, "script");
  await writeFile(script, commands.join(" &&\n"));
  return spawnSync(NAMESPACE[0], [NAMESPACE[1], "sh", script], {
    cwd: ROOT,
    env: { ...process.env, NO_COLOR: "1" },
    encoding: "utf8",
  });
}

test("train goes on where the disk is full, and the checkpoints before it are intact", {
  skip: !mounts,
}, async () => {
  await using folder = await temporary();
  const [small, plain, kept] = ["small", "plain", "kept"].map((name) =>
    join(folder.path, name),
  ) as [string, string, string];
  const run = train(small, "--save-every", "1", "--keep-last", "2", "--resume", "auto");
  const { status, stdout, stderr } = await runScript(
    folder.path,
    `mkdir ${small}`,
    `mount -t tmpfs -o size=3300k none ${small}`, // two checkpoints of 1.3 MiB and the adapter
    run,
    `ls ${small}`,
    `rm -r ${small}/checkpoint-1.safetensors ${small}/adapter`,
    run,
    `cp -r ${small}/adapter ${kept}`,
    train(plain),
  );
  assert.equal(status, 0, stdout + stderr);
  const [before, after] = stdout.split("Resumed after step 2") as [string, string];
  // Mutant: the run ends at the first save that fails, or loses what it had.
  const refused = /Checkpoint not written, the run goes on: .*the disk is full/g;
  assert.equal(before.match(refused)?.length, 4);
  assert.match(before, /step 6\/6/);
  assert.match(before, /checkpoint-1\.safetensors\ncheckpoint-2\.safetensors\n/);
  assert.match(after, /Checkpoint .*checkpoint-3\.safetensors written/);
  assert.deepEqual(
    await readFile(join(kept, "adapter_model.safetensors")),
    await readFile(join(plain, "adapter", "adapter_model.safetensors")),
  );
});

test("train resumes from a folder that cannot be written, into another one", {
  skip: !mounts,
}, async () => {
  await using folder = await temporary();
  const [first, second] = ["first", "second"].map((name) => join(folder.path, name)) as [
    string,
    string,
  ];
  const saves = ["--save-every", "4"];
  const { status, stdout, stderr } = await runScript(
    folder.path,
    train(first, ...saves),
    `mount --bind ${first} ${first}`,
    `mount -o remount,ro,bind ${first}`,
    train(second, ...saves, "--resume", `${first}/checkpoint-4.safetensors`),
    `! ${train(first, ...saves, "--resume", "auto")}`,
  );
  assert.equal(status, 0, stdout + stderr);
  assert.match(stdout, /Resumed after step 4/);
  assert.match(stderr, /--out: the folder cannot be written: .*first \(EROFS\)/);
  assert.deepEqual(
    await readFile(join(first, "adapter", "adapter_model.safetensors")),
    await readFile(join(second, "adapter", "adapter_model.safetensors")),
  );
});
