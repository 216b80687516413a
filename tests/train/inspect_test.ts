/** What `inspectFiles()` finds, in sound folders and in ones that were damaged on purpose. */
import assert from "node:assert/strict";
import { cp, readFile, rename, rm, truncate, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { encodeCheckpointHeader } from "../../src/api/io/checkpoint_header.ts";
import { type TensorData, writeSafetensors } from "../../src/api/io/safetensors.ts";
import { inspectFiles } from "../../src/api/train/inspect.ts";
import { DEMO } from "../cli/support.ts";
import { crc32cReference, GOLDEN, rejects, withScratch } from "../io/scratch.ts";

/** The golden model of one file as two shards with an index. */
async function writeShards(dir: string): Promise<void> {
  const model = join(GOLDEN, "llama/model");
  const raw = await readFile(join(model, "model.safetensors"));
  const { files } = await inspectFiles(model);
  const shards: Record<string, TensorData[]> = {
    "model-00001-of-00002.safetensors": [],
    "model-00002-of-00002.safetensors": [],
  };
  const map: Record<string, string> = {};
  let offset = 8 + Number(raw.readBigUInt64LE(0));
  for (const [index, { name, dtype, shape, bytes }] of (files[0]?.tensors ?? []).entries()) {
    const file = Object.keys(shards)[index % 2] as string;
    const data = new Uint8Array(raw.subarray(offset, offset + bytes));
    shards[file]?.push({ name, dtype, shape, data });
    map[name] = file;
    offset += bytes;
  }
  for (const [file, tensors] of Object.entries(shards)) {
    await writeSafetensors(join(dir, file), tensors);
  }
  await cp(join(model, "config.json"), join(dir, "config.json"));
  const index = join(dir, "model.safetensors.index.json");
  await writeFile(index, JSON.stringify({ weight_map: map }));
}

test("inspectFiles() finds the demo model sound, and its tensors in the order of the file", async () => {
  const found = await inspectFiles(join(DEMO, "model"), { values: true });
  assert.deepEqual([found.kind, found.sound, found.remarks], ["model", true, []]);
  const tensors = found.files[0]?.tensors ?? [];
  assert.equal(tensors.length, 56);
  assert.deepEqual(tensors[0], {
    name: "model.embed_tokens.weight",
    dtype: "BF16",
    shape: [4096, 256],
    bytes: 4096 * 256 * 2,
    nan: 0,
    infinite: 0,
    intact: null,
  });
});

test("inspectFiles() finds adapters sound; what cannot be trained here is a remark", async () => {
  const found = await inspectFiles(join(GOLDEN, "llama/adapter0"));
  assert.deepEqual([found.kind, found.sound, found.remarks], ["adapter", true, []]);
  await withScratch(async (dir) => {
    await cp(join(GOLDEN, "llama/adapter0"), dir, { recursive: true });
    const file = join(dir, "adapter_config.json");
    const config = JSON.parse(await readFile(file, "utf8"));
    await writeFile(file, JSON.stringify({ ...config, use_dora: true }));
    const dora = await inspectFiles(dir);
    assert.ok(dora.sound);
    assert.match(dora.remarks[0] ?? "", /DoRA/);
    await writeFile(file, JSON.stringify({ ...config, r: 3 }));
    const other = await inspectFiles(dir); // mutant: sortOut() that drops faults
    assert.ok(!other.sound);
    assert.match(other.faults[0]?.message ?? "", /rank 4 is not in adapter_config\.json/);
  });
});

test("inspectFiles() finds shards sound, and a surplus shard odd", () =>
  withScratch(async (dir) => {
    await writeShards(dir);
    const sound = await inspectFiles(dir);
    assert.deepEqual(sound.faults, []);
    assert.deepEqual([sound.files.length, sound.remarks], [2, []]);
    await writeSafetensors(join(dir, "model-00003-of-00003.safetensors"), []);
    const { sound: still, remarks } = await inspectFiles(dir);
    assert.ok(still);
    assert.match(remarks[0] ?? "", /model-00003-of-00003\.safetensors is no shard of the index/);
  }));

test("inspectFiles() names every damaged, missing and contradicting shard, not the first alone", () =>
  withScratch(async (dir) => {
    await writeShards(dir);
    const [first, second] = [1, 2].map((n) => join(dir, `model-0000${n}-of-00002.safetensors`)) as [
      string,
      string,
    ];
    await truncate(second, 500);
    const saved = `${first}.saved`;
    await rename(first, saved);
    const both = await inspectFiles(dir);
    assert.deepEqual(
      both.faults.map(({ code, details }) => [code, (details as { file?: string }).file]),
      [
        ["BAD_FILE", first],
        ["BAD_FILE", second],
      ],
    ); // mutant: stop at the first shard that cannot be opened
    await rename(saved, first);
    await rm(second);
    await cp(first, second);
    const same = await inspectFiles(dir);
    assert.match(same.faults[0]?.message ?? "", /by the index it is in .*00001-of-00002/);
    assert.ok(same.faults.length > 2, "one fault for each tensor in the wrong place");
  }));

test("inspectFiles() finds a tensor that config.json contradicts, and a damaged config", () =>
  withScratch(async (dir) => {
    await cp(join(GOLDEN, "llama/model"), dir, { recursive: true });
    const file = join(dir, "config.json");
    const config = JSON.parse(await readFile(file, "utf8"));
    await writeFile(file, JSON.stringify({ ...config, vocab_size: config.vocab_size + 1 }));
    const { faults } = await inspectFiles(dir);
    assert.match(faults[0]?.message ?? "", /model\.embed_tokens\.weight is \[/);
    await writeFile(file, "{");
    assert.match((await inspectFiles(dir)).faults[0]?.message ?? "", /not valid JSON/);
    await writeFile(file, JSON.stringify({ ...config, architectures: ["MambaForCausalLM"] }));
    const other = await inspectFiles(dir);
    assert.ok(other.sound, "another architecture is no damage");
    assert.match(other.remarks[0] ?? "", /Mamba/);
  }));

test("inspectFiles() counts NaN and infinity of every float type where asked to", () =>
  withScratch(async (dir) => {
    const file = join(dir, "x.safetensors");
    const halves = (...words: number[]) => new Uint8Array(new Uint16Array(words).buffer);
    const long = new Float32Array(5_000_000); // more than one piece
    long.set([Number.NaN, -Number.NaN], 4_999_998);
    await writeSafetensors(file, [
      { name: "f32", dtype: "F32", shape: [long.length], data: new Uint8Array(long.buffer) },
      { name: "bf16", dtype: "BF16", shape: [3], data: halves(0x7f80, 0xff80, 0x7fc0) },
      { name: "f16", dtype: "F16", shape: [3], data: halves(0x7c00, 0x7bff, 0xfe00) },
      { name: "fine", dtype: "BF16", shape: [2], data: halves(0x7f7f, 0) },
      { name: "i64", dtype: "I64", shape: [1], data: new Uint8Array(8).fill(255) },
    ]);
    assert.ok((await inspectFiles(file)).sound, "values are looked at only where asked for");
    const { files, faults, sound } = await inspectFiles(file, { values: true });
    const counts = files[0]?.tensors.map(({ name, nan, infinite }) => [name, nan, infinite]);
    assert.deepEqual(Object.fromEntries((counts ?? []).map(([name, ...odd]) => [name, odd])), {
      f32: [2, 0], // mutant: count the first piece only
      bf16: [1, 2], // mutant: infinity counted as NaN
      f16: [1, 1],
      fine: [0, 0],
      i64: [null, null],
    });
    assert.ok(!sound);
    assert.deepEqual(faults.map(({ details }) => (details as { tensor?: string }).tensor).sort(), [
      "bf16",
      "f16",
      "f32",
    ]);
  }));

/** A checkpoint of two tensors; gives its bytes. */
async function writeCheckpoint(path: string): Promise<Uint8Array> {
  const master = new Float32Array(64).fill(0.5);
  const data = new Uint8Array([...new Uint8Array(master.buffer), ...new Uint8Array(16)]);
  const sums = [crc32cReference(data.subarray(0, 256)), crc32cReference(data.subarray(256))];
  const tensors = [
    { name: "adapters.master", dtype: "F32", shape: [64], bytes: 256 },
    { name: "optimizer.state", dtype: "I64", shape: [2], bytes: 16 },
  ] as const;
  const header = encodeCheckpointHeader(tensors, { step: 7 }, sums);
  const file = new Uint8Array([...header, ...data]);
  await writeFile(path, file);
  return file;
}

test("inspectFiles() compares the checksums of a checkpoint, header and tensors", () =>
  withScratch(async (dir) => {
    const path = join(dir, "checkpoint-7.safetensors");
    const file = await writeCheckpoint(path);
    const whole = await inspectFiles(path);
    assert.deepEqual([whole.kind, whole.sound], ["checkpoint", true]);
    assert.ok(whole.files[0]?.tensors.every(({ intact }) => intact)); // mutant: checksums are not read
    for (const [at, finding] of [
      [file.length - 1, /checksum differs: .*tensor "optimizer\.state"/],
      [file.length - 17, /checksum differs: .*tensor "adapters\.master"/],
      [4000, /header is damaged/], // a space of the padding
    ] as const) {
      const damaged = file.slice();
      damaged[at] = (damaged[at] as number) ^ 1;
      if (at === 4000) damaged[at] = 9; // a tab is white space, too
      await writeFile(path, damaged);
      const { faults } = await inspectFiles(path);
      assert.equal(faults.length, 1);
      assert.match(faults[0]?.message ?? "", finding);
    }
  }));

test("inspectFiles() takes a folder with checkpoints for a run, the newest first", () =>
  withScratch(async (dir) => {
    for (const step of [9, 10]) await writeCheckpoint(join(dir, `checkpoint-${step}.safetensors`));
    const run = await inspectFiles(dir);
    assert.deepEqual([run.kind, run.sound, run.files.length], ["run", true, 2]);
    assert.match(run.files[0]?.path ?? "", /checkpoint-10/);
    await truncate(join(dir, "checkpoint-9.safetensors"), 4200);
    const { faults } = await inspectFiles(dir);
    assert.match(faults[0]?.message ?? "", /checkpoint-9/);
  }));

test("inspectFiles() throws for a path that is not there", async () => {
  await rejects(() => inspectFiles("nowhere"), "IO", /inspect: no such file or folder: nowhere/);
});
