/** `loramem inspect` where there is no native library. */
import assert from "node:assert/strict";
import { copyFile, truncate } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { DEMO, type Result, run, temporary } from "./support.ts";

/** A library that cannot be opened: whoever tries fails. */
const NO_LIBRARY = { LORAMEM_LIB: "/nowhere/libloramem.so" };

function inspect(...args: string[]): Promise<Result> {
  return run("cli.ts", ["inspect", ...args], { env: NO_LIBRARY });
}

test("inspect prints what a model holds and that it is sound", async () => {
  const { code, stdout, stderr } = await inspect(join(DEMO, "model"), "--values");
  assert.equal(code, 0, stderr);
  assert.match(stdout, /model, 1 file, 56 tensors/);
  assert.match(stdout, /model\.norm\.weight +BF16 \[256\] {2}512 B {2}0 NaN, 0 infinite/);
  assert.match(stdout, /\nSound\n$/);
});

test("inspect ends with status 1 and names the fault of a file that was cut", async () => {
  await using folder = await temporary();
  const file = join(folder.path, "cut.safetensors");
  await copyFile(join(DEMO, "model/model.safetensors"), file);
  await truncate(file, 100_000);
  const { code, stdout, stderr } = await inspect(file);
  assert.equal(code, 1, stdout); // mutant: the exit status is left alone
  assert.equal(stderr, "");
  assert.match(stdout, /Fault: openSafetensors: data_offsets .* reach beyond .*cut\.safetensors/);
  assert.match(stdout, /\nNot sound: 1 found\n$/);
});

test("inspect --json prints one object with sound, files, tensors and faults", async () => {
  await using folder = await temporary();
  const good = JSON.parse((await inspect(join(DEMO, "model"), "--json")).stdout);
  assert.deepEqual([good.kind, good.sound, good.faults], ["model", true, []]);
  assert.deepEqual(good.files[0].tensors.at(-1).shape, [256]);
  const file = join(folder.path, "short.safetensors");
  await copyFile(join(DEMO, "model/model.safetensors"), file);
  await truncate(file, 7);
  const { code, stdout } = await inspect(file, "--json");
  const bad = JSON.parse(stdout);
  assert.equal(code, 1);
  assert.deepEqual([bad.sound, bad.faults[0].code, bad.faults[0].file], [false, "BAD_FILE", file]);
  assert.match(bad.faults[0].message, /7 bytes/);
});

test("inspect names a path that is not there", async () => {
  const { code, stderr } = await inspect("nowhere");
  assert.equal(code, 1);
  assert.match(stderr, /error: inspect: no such file or folder: nowhere/);
});
