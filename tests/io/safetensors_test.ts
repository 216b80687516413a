import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import { spawnSync } from "node:child_process";
import { mkdir, readdir, readFile, symlink, truncate, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import fc from "fast-check";
import { type Dtype, tensorBytes } from "../../src/api/io/dtype.ts";
import {
  openSafetensors,
  type TensorData,
  writeSafetensors,
} from "../../src/api/io/safetensors.ts";
import { GOLDEN, rejects, safetensors, withScratch } from "./scratch.ts";

const f32 = (name: string, ...values: number[]): TensorData => ({
  name,
  dtype: "F32",
  shape: [values.length],
  data: new Uint8Array(new Float32Array(values).buffer),
});

/** Writes shards and the index that lists their tensors, edited by `edit`. */
async function writeShards(
  dir: string,
  shards: Record<string, TensorData[]>,
  edit: (map: Record<string, string>) => void = () => {},
): Promise<void> {
  const map: Record<string, string> = {};
  for (const [file, tensors] of Object.entries(shards)) {
    await writeSafetensors(join(dir, file), tensors, { format: "pt" });
    for (const { name } of tensors) map[name] = file;
  }
  edit(map);
  const index = JSON.stringify({ metadata: { total_size: 1 }, weight_map: map });
  await writeFile(join(dir, "model.safetensors.index.json"), index);
}

for (const name of ["llama", "llama3-rope-tied", "qwen2"]) {
  test(`openSafetensors() reads the golden model ${name}`, async () => {
    await using file = await openSafetensors(join(GOLDEN, name, "model"));
    assert.equal(file.metadata.get("format"), "pt");
    const raw = await readFile(join(GOLDEN, name, "model/model.safetensors"));
    assert.ok(file.tensors.size > 10);
    for (const entry of file.tensors.values()) {
      assert.equal(entry.dtype, name === "llama" ? "F32" : "BF16");
      const bytes = new Uint8Array(entry.bytes);
      await file.read(entry, bytes);
      assert.deepEqual(
        bytes,
        new Uint8Array(raw.subarray(entry.offset, entry.offset + entry.bytes)),
      );
    }
  });
}

test("openSafetensors() accepts empty tensors, scalars, packed dtypes and padded headers", () =>
  withScratch(async (dir) => {
    const file = join(dir, "x.safetensors");
    const header = {
      scalar: { dtype: "I64", shape: [], data_offsets: [0, 8] },
      empty: { dtype: "F32", shape: [0, 7], data_offsets: [8, 8] },
      packed: { dtype: "F4", shape: [3, 2], data_offsets: [8, 11] },
      six: { dtype: "F6_E3M2", shape: [4], data_offsets: [11, 14] },
    };
    await writeFile(file, safetensors(`${JSON.stringify(header)}   `, 14));
    await using open = await openSafetensors(file);
    assert.deepEqual(
      [...open.tensors.values()].map(({ bytes }) => bytes),
      [8, 0, 3, 3],
    );
    await open.read(open.tensors.get("empty")!, new Uint8Array(0));
  }));

test("openSafetensors() takes only the shards that the index names", () =>
  withScratch(async (dir) => {
    await writeShards(dir, { "a.safetensors": [f32("x", 1, 2)], "b.safetensors": [f32("y", 3)] });
    // Strays of real folders: broken on purpose, so that opening one of them would fail.
    for (const stray of ["consolidated", "adapter_model", "model"]) {
      await writeFile(join(dir, `${stray}.safetensors`), "stray");
    }
    await using file = await openSafetensors(dir);
    assert.deepEqual([...file.tensors.keys()].sort(), ["x", "y"]);
    const y = new Float32Array(1);
    await file.read(file.tensors.get("y")!, new Uint8Array(y.buffer));
    assert.equal(y[0], 3);
    assert.equal(file.tensors.get("y")!.file, join(dir, "b.safetensors"));
  }));

test("openSafetensors() takes model.safetensors alone from a folder without index", () =>
  withScratch(async (dir) => {
    await writeSafetensors(join(dir, "model.safetensors"), [f32("x", 1)]);
    await writeFile(join(dir, "adapter_model.safetensors"), "stray");
    await writeFile(join(dir, "pytorch_model.bin"), "stray");
    await using file = await openSafetensors(dir);
    assert.deepEqual([...file.tensors.keys()], ["x"]);
  }));

test("openSafetensors() names a shard that is missing", () =>
  withScratch(async (dir) => {
    await writeShards(dir, { "a.safetensors": [f32("x", 1)] }, (map) => {
      map.y = "gone.safetensors";
    });
    await rejects(
      () => openSafetensors(dir),
      "BAD_FILE",
      /names a missing shard.*gone\.safetensors/,
    );
  }));

test("openSafetensors() names a tensor that its shard lacks", () =>
  withScratch(async (dir) => {
    await writeShards(dir, { "a.safetensors": [f32("x", 1)] }, (map) => {
      map.y = "a.safetensors";
    });
    await rejects(() => openSafetensors(dir), "BAD_FILE", /a\.safetensors, tensor "y"/, /promises/);
  }));

test("openSafetensors() names a tensor that the index lacks", () =>
  withScratch(async (dir) => {
    await writeShards(dir, { "a.safetensors": [f32("x", 1), f32("z", 1)] }, (map) => {
      delete map.z;
    });
    await rejects(() => openSafetensors(dir), "BAD_FILE", /a\.safetensors, tensor "z"/, /nowhere/);
  }));

test("openSafetensors() names a tensor that is in another shard than the index says", () =>
  withScratch(async (dir) => {
    const shards = { "a.safetensors": [f32("x", 1)], "b.safetensors": [f32("y", 1), f32("z", 1)] };
    await writeShards(dir, shards, (map) => {
      map.z = "a.safetensors";
    });
    await rejects(() => openSafetensors(dir), "BAD_FILE", /b\.safetensors, tensor "z"/);
  }));

test("openSafetensors() refuses an index that points outside its folder", async () => {
  for (const target of ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", 7, null]) {
    await withScratch(async (dir) => {
      const index = JSON.stringify({ weight_map: { x: target } });
      await writeFile(join(dir, "model.safetensors.index.json"), index);
      await rejects(() => openSafetensors(dir), "BAD_FILE", /index points to/, /tensor "x"/);
    });
  }
});

test("openSafetensors() refuses an index that is malformed", async () => {
  for (const text of [
    "",
    "[]",
    "{}",
    '{"weight_map":[]}',
    '{"weight_map":{}}',
    '{"a":1,"a":1}',
    "{",
  ]) {
    await withScratch(async (dir) => {
      await writeFile(join(dir, "model.safetensors.index.json"), text);
      await rejects(() => openSafetensors(dir), "BAD_FILE", /the index/, /index\.json/);
    });
  }
});

test("openSafetensors() explains how to convert a folder with a pickle only", () =>
  withScratch(async (dir) => {
    await writeFile(join(dir, "pytorch_model.bin"), "pickle");
    await rejects(() => openSafetensors(dir), "BAD_FILE", /pickle/, /save_pretrained/);
  }));

test("openSafetensors() refuses what is missing or not a file", () =>
  withScratch(async (dir) => {
    await rejects(() => openSafetensors(dir), "BAD_FILE", /holds no weights/);
    await rejects(() => openSafetensors(join(dir, "gone")), "BAD_FILE", /no such file/);
    await writeFile(join(dir, "file"), "");
    await rejects(() => openSafetensors(join(dir, "file/x")), "IO", /ENOTDIR/);
    await mkdir(join(dir, "model.safetensors"));
    await rejects(() => openSafetensors(dir), "BAD_FILE", /not a regular file/);
  }));

test("openSafetensors() refuses a named pipe without waiting for it", () =>
  withScratch(async (dir) => {
    const pipe = join(dir, "model.safetensors");
    assert.equal(spawnSync("mkfifo", [pipe]).status, 0);
    await rejects(() => openSafetensors(dir), "BAD_FILE", /not a regular file/);
  }));

test("openSafetensors() follows symbolic links, as download caches use them", () =>
  withScratch(async (dir) => {
    await writeSafetensors(join(dir, "blob"), [f32("x", 1)]);
    await symlink("blob", join(dir, "model.safetensors"));
    await using file = await openSafetensors(dir);
    assert.equal(file.tensors.size, 1);
  }));

test("TensorFile.read() reads parts into a view and leaves the rest of it alone", () =>
  withScratch(async (dir) => {
    const path = join(dir, "x.safetensors");
    await writeSafetensors(path, [
      { name: "x", dtype: "U8", shape: [6], data: Uint8Array.of(0, 1, 2, 3, 4, 5) },
    ]);
    await using file = await openSafetensors(path);
    const entry = file.tensors.get("x")!;
    const memory = new Uint8Array(8).fill(99);
    await Promise.all([
      file.read(entry, memory.subarray(1, 3), 4),
      file.read(entry, memory.subarray(4, 7), 1),
    ]);
    assert.deepEqual([...memory], [99, 4, 5, 99, 1, 2, 3, 99]);
    for (const [size, at] of [
      [7, 0],
      [1, 6],
      [2, 5],
      [1, -1],
      [1, 0.5],
      [1, Number.NaN],
    ] as const) {
      await rejects(
        () => file.read(entry, new Uint8Array(size), at),
        "BAD_ARGUMENT",
        /outside the tensor/,
      );
    }
    await rejects(
      () => file.read({ ...entry }, new Uint8Array(1)),
      "BAD_ARGUMENT",
      /not of this file/,
    );
  }));

test("TensorFile.read() reports a file that shrank", () =>
  withScratch(async (dir) => {
    const path = join(dir, "x.safetensors");
    await writeSafetensors(path, [
      { name: "x", dtype: "U8", shape: [100], data: new Uint8Array(100) },
    ]);
    await using file = await openSafetensors(path);
    const entry = file.tensors.get("x")!;
    await truncate(path, entry.offset + 50);
    await rejects(
      () => file.read(entry, new Uint8Array(100)),
      "BAD_FILE",
      /became shorter/,
      /tensor "x"/,
    );
  }));

test("TensorFile.close() waits for reads, may be called twice and ends reading", () =>
  withScratch(async (dir) => {
    const path = join(dir, "x.safetensors");
    const data = new Uint8Array(20_000_000).fill(7); // more than one call moves
    await writeSafetensors(path, [{ name: "x", dtype: "U8", shape: [data.byteLength], data }]);
    const file = await openSafetensors(path);
    const entry = file.tensors.get("x")!;
    const into = new Uint8Array(data.byteLength);
    const reading = file.read(entry, into);
    await Promise.all([file.close(), file.close()]);
    assert.equal(Buffer.compare(into, data), 0);
    await reading;
    await rejects(() => file.read(entry, into), "DISPOSED", /is closed/);
  }));

test("writeSafetensors() writes the layout that the specification asks for", () =>
  withScratch(async (dir) => {
    const path = join(dir, "x.safetensors");
    const byte = (name: string): TensorData => ({
      name,
      dtype: "U8",
      shape: [1],
      data: Uint8Array.of(9),
    });
    await writeSafetensors(path, [byte("b"), f32("z", 1), byte("a"), f32("y", 2)], {
      format: "pt",
    });
    const bytes = await readFile(path);
    const length = Number(bytes.readBigUInt64LE(0));
    assert.equal(length % 8, 0);
    const text = bytes.subarray(8, 8 + length).toString();
    assert.match(text, /^\{.*\} *$/);
    const header = JSON.parse(text);
    assert.deepEqual(Object.keys(header), ["__metadata__", "y", "z", "a", "b"]);
    assert.deepEqual(header.z, { dtype: "F32", shape: [1], data_offsets: [4, 8] });
    assert.deepEqual([...bytes.subarray(-2)], [9, 9]);
    assert.deepEqual(await readdir(dir), ["x.safetensors"]);
  }));

test("writeSafetensors() and openSafetensors() keep any tensors", async () => {
  const dtype = fc.constantFrom<Dtype>(
    "BOOL",
    "U8",
    "BF16",
    "F16",
    "F32",
    "F64",
    "I64",
    "C64",
    "F8_E4M3",
  );
  const tensor = fc.record({
    name: fc.oneof(fc.string({ unit: "grapheme" }), fc.constantFrom("__proto__", "1", "")),
    dtype,
    shape: fc.array(fc.nat(4), { maxLength: 3 }),
  });
  const tensors = fc.uniqueArray(tensor, { selector: ({ name }) => name, maxLength: 6 });
  await withScratch(async (dir) => {
    const path = join(dir, "x.safetensors");
    await fc.assert(
      fc.asyncProperty(tensors, async (list) => {
        const data = list.map(({ dtype, shape }, i) =>
          new Uint8Array(tensorBytes(dtype, shape)!).fill(i),
        );
        await writeSafetensors(
          path,
          list.map((info, i) => ({ ...info, data: data[i]! })),
        );
        await using file = await openSafetensors(path);
        assert.equal(file.tensors.size, list.length);
        for (const [i, { name, dtype, shape }] of list.entries()) {
          const entry = file.tensors.get(name)!;
          assert.deepEqual([entry.dtype, entry.shape], [dtype, shape]);
          const bytes = new Uint8Array(entry.bytes);
          await file.read(entry, bytes);
          assert.deepEqual(bytes, data[i]);
        }
      }),
      { numRuns: 100 },
    );
  });
});

test("writeSafetensors() may overwrite the file that is being read", () =>
  withScratch(async (dir) => {
    const path = join(dir, "x.safetensors");
    await writeSafetensors(path, [f32("x", 1, 2, 3)]);
    await using old = await openSafetensors(path);
    const entry = old.tensors.get("x")!;
    const data = new Uint8Array(entry.bytes);
    await old.read(entry, data);
    await writeSafetensors(path, [{ ...entry, data }, f32("y", 4)]);
    const again = new Uint8Array(entry.bytes);
    await old.read(entry, again);
    assert.deepEqual(again, data);
    await using file = await openSafetensors(path);
    await file.read(file.tensors.get("x")!, again);
    assert.deepEqual(again, data);
  }));

test("writeSafetensors() refuses bad tensors and leaves the old file", () =>
  withScratch(async (dir) => {
    const path = join(dir, "x.safetensors");
    await writeFile(path, "old");
    const x = f32("x", 1);
    const bad: readonly [TensorData[], RegExp][] = [
      [[x, x], /name is taken/],
      [[{ ...x, name: "__metadata__" }], /name is taken/],
      [[{ ...x, shape: [2] }], /do not fit/],
      [[{ ...x, shape: [-1, -1] }], /do not fit/],
      [[{ ...x, dtype: "F31" as Dtype }], /do not fit/],
    ];
    for (const [tensors, message] of bad) {
      await rejects(() => writeSafetensors(path, tensors), "BAD_ARGUMENT", message);
    }
    assert.equal(await readFile(path, "utf8"), "old");
    assert.deepEqual(await readdir(dir), ["x.safetensors"]);
  }));
