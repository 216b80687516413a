/** `loramem doctor`, and the profile that it measures. */
import assert from "node:assert/strict";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { Device } from "../../src/api/mod.ts";
import { DEMO, run, temporary } from "./support.ts";

const PLAN = ["plan", "--model", join(DEMO, "model"), "--tokens-per-micro-batch", "64"];
const ON_CPU = [...PLAN, "--device", "cpu"];

test("doctor names library, devices, limits and the profile that would be used", async () => {
  await using folder = await temporary();
  const env = { XDG_CONFIG_HOME: folder.path };
  const { code, stdout, stderr } = await run("cli.ts", ["doctor"], { env });
  assert.equal(code, 0, stderr);
  for (const part of [
    /^Library: .*libloramem\.so$/m,
    /^Device cpu: .+, .+iB, .+iB free$/m,
    /^ {2}\d+ threads, instructions: \w+$/m,
    /^ {2}Profile: CPU, 2 threads with AVX-512 \(measured\): products .* TFLOP\/s/m,
    /^Locked memory: .+/m,
    /^Memory limit of the control group: .+/m,
  ]) {
    assert.match(stdout, part);
  }
  assert.match(stdout, /^(No GPU: .+|Device cuda:0: .+)$/m);
});

test("doctor says what to do where the library cannot be opened", async () => {
  const env = { LORAMEM_LIB: "/nowhere/libloramem.so" };
  const { code, stderr } = await run("cli.ts", ["doctor"], { env });
  assert.equal(code, 1);
  assert.match(stderr, /\/nowhere\/libloramem\.so \(LORAMEM_LIB\)/);
});

// Mutants: readOwnProfile() gives null; profileOfDevice() takes a profile of any device.
test("doctor --calibrate measures the device, and plan and train use what it wrote", async () => {
  await using folder = await temporary();
  const env = { XDG_CONFIG_HOME: folder.path };
  const measured = await run("cli.ts", ["doctor", "--calibrate", "--device", "cpu"], { env });
  assert.equal(measured.code, 0, measured.stderr);
  const file = join(folder.path, "loramem", "profile-cpu.json");
  assert.ok(measured.stdout.includes(`Written to ${file}`));
  const profile = JSON.parse(await readFile(file, "utf8"));
  await using device = await Device.open("cpu");
  assert.equal(profile.device, device.info().name);
  for (const rate of [profile.matrix, profile.attention]) {
    assert.ok(rate.single > 1e6 && rate.half > 1e6);
  }
  assert.ok(profile.bandwidth > 1e6 && profile.link > 1e6);
  assert.ok(profile.launch > 0 && profile.launch < 1);

  const title = "measured on this machine";
  assert.match(
    (await run("cli.ts", ["doctor"], { env })).stdout,
    new RegExp(`Profile: .*${title}`),
  );
  const plan = await run("cli.ts", ON_CPU, { env });
  assert.match(plan.stdout, new RegExp(`Predicted step: .*${title}`));
  const asked = await run("cli.ts", [...ON_CPU, "--device-profile", "a100"], { env });
  assert.match(asked.stdout, /Predicted step: .*NVIDIA A100/);
  // A plan for a GPU knows nothing of the CPU.
  assert.match((await run("cli.ts", PLAN, { env })).stdout, /Predicted step: .*NVIDIA H200/);

  const train = ["train", "--model", join(DEMO, "model"), "--data", join(DEMO, "valid.jsonl")];
  train.push("--device", "cpu", "--max-steps", "1", "--out", join(folder.path, "out"));
  const trained = await run("cli.ts", train, { env });
  assert.match(trained.stdout, new RegExp(`Predicted step: .*${title}`), trained.stderr);
  // Measured on another device: of no use to a training.
  await writeFile(file, JSON.stringify({ ...profile, device: "another" }));
  train[train.length - 1] = join(folder.path, "out2");
  const other = await run("cli.ts", train, { env });
  assert.match(other.stdout, /Predicted step: .*CPU, 2 threads with AVX-512/, other.stderr);
});

test("plan refuses a measured profile that was damaged, and names the file", async () => {
  await using folder = await temporary();
  const env = { XDG_CONFIG_HOME: folder.path };
  const file = join(folder.path, "loramem");
  await mkdir(file);
  await writeFile(join(file, "profile-cpu.json"), '{"name": "cpu", "title": "x"');
  const { code, stderr } = await run("cli.ts", ON_CPU, { env });
  assert.equal(code, 1);
  assert.match(stderr, /not a device profile: .*profile-cpu\.json: name is undefined/);
});
