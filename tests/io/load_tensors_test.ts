/** Tensors from files to memory: every byte where it belongs, whatever the file looks like, and nothing left after a failure. */
import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import { existsSync } from "node:fs";
import { chmod, mkdir, open, readFile, rm, symlink, truncate, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import fc from "fast-check";
import {
  type LoadProgress,
  loadTensors,
  type TensorTarget,
} from "../../src/api/io/load_tensors.ts";
import { openSafetensors, type TensorFile } from "../../src/api/io/safetensors.ts";
import { Device, type DeviceBuffer, type SimFileOptions } from "../../src/api/memory/mod.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { KINDS } from "../kernels/rig.ts";
import { rejects, safetensors, withScratch } from "./scratch.ts";

/** A ring so small that most tensors need several turns. */
const SMALL = { slots: 3, slotBytes: 8192, threads: 2 };

/** Bytes that tell where they are in the file. */
function pattern(bytes: number): Uint8Array {
  return Uint8Array.from({ length: bytes }, (_, at) => (at * 167 + (at >> 8) * 13 + 1) & 255);
}

/** A file of U8 tensors `t0`, `t1`, ... whose data begins `shift` bytes into a block of 4096. */
function fileOf(sizes: readonly number[], shift?: number): Uint8Array {
  let end = 0;
  const entries = sizes.map((size, index) => {
    end += size;
    const entry = { dtype: "U8", shape: [size], data_offsets: [end - size, end] };
    return [`t${index}`, entry] as const;
  });
  const json = JSON.stringify(Object.fromEntries(entries));
  const pad = shift === undefined ? 0 : (((shift - 8 - json.length) % 4096) + 4096) % 4096;
  return safetensors(json + " ".repeat(pad), pattern(end));
}

/** A slot for each tensor, 256 bytes aligned, and the memory that holds them all. */
function place(
  device: Device,
  tensors: TensorFile["tensors"],
): { readonly memory: DeviceBuffer; readonly targets: (TensorTarget & { offset: number })[] } {
  let end = 0;
  const places = [...tensors.values()].map((entry) => {
    const offset = end;
    end = Math.ceil((end + entry.bytes) / 256) * 256;
    return { entry, offset };
  });
  const memory = device.createBuffer(Math.max(256, end));
  return { memory, targets: places.map((at) => ({ ...at, memory })) };
}

/** What device memory holds. */
async function contents(device: Device, memory: DeviceBuffer): Promise<Uint8Array> {
  await using stream = device.createStream();
  using host = device.createPinnedBuffer(memory.bytes);
  stream.copy(host, memory);
  await stream.done();
  return host.view(Uint8Array).slice();
}

/** Fails unless every tensor is in its slot. */
function checkSlots(
  found: Uint8Array,
  raw: Uint8Array,
  targets: readonly { readonly entry: TensorTarget["entry"]; readonly offset: number }[],
): void {
  for (const { entry, offset } of targets) {
    const expected = raw.subarray(entry.offset, entry.offset + entry.bytes);
    const same = Buffer.compare(found.subarray(offset, offset + entry.bytes), expected) === 0;
    assert.ok(same, `${entry.name}: other bytes than in the file`);
  }
}

for (const kind of KINDS) {
  test(`loadTensors() brings every byte to its slot on ${kind}, for data that starts at 1 to 255 bytes`, () =>
    withScratch(async (dir) => {
      await using device = await Device.open(kind, { threads: 1 });
      await using ring = device.createFileRing(SMALL);
      const path = join(dir, "x.safetensors");
      for (let shift = 1; shift <= 255; shift++) {
        const raw = fileOf([1, 8191, 3, 4096, 0, 9000, 255], shift);
        await writeFile(path, raw);
        await using file = await openSafetensors(path);
        assert.equal((file.tensors.get("t0")?.offset ?? 0) % 4096, shift);
        const { memory, targets } = place(device, file.tensors);
        assert.ok(targets.every(({ offset }) => offset % 256 === 0));
        await loadTensors(ring, targets); // mutant: entry.offset rounded down to a block
        checkSlots(await contents(device, memory), raw, targets);
        memory.dispose();
      }
    }));

  test(`loadTensors() takes tensors of any size, in any order, to any place on ${kind}`, () =>
    withScratch(async (dir) => {
      await using device = await Device.open(kind, { threads: 1 });
      await using ring = device.createFileRing(SMALL);
      await using stream = device.createStream();
      const path = join(dir, "x.safetensors");
      const size = fc.oneof(fc.nat(300), fc.constantFrom(0, 4096, 8192, 8193), fc.nat(60_000));
      const tensors = fc.array(fc.record({ size, gap: fc.nat(40), order: fc.nat() }), {
        minLength: 1,
        maxLength: 12,
      });
      await fc.assert(
        fc.asyncProperty(tensors, async (list) => {
          const raw = fileOf(list.map(({ size: bytes }) => bytes));
          await writeFile(path, raw);
          await using file = await openSafetensors(path);
          const expected = new Uint8Array(list.reduce((sum, t) => sum + t.gap + t.size, 16));
          expected.fill(0xee);
          using memory = device.createBuffer(expected.length);
          stream.fill(memory, 0xee);
          await stream.done();
          let offset = 0;
          const targets = list.map(({ gap, order }, index) => {
            const entry = file.tensors.get(`t${index}`);
            assert.ok(entry);
            offset += gap;
            expected.set(raw.subarray(entry.offset, entry.offset + entry.bytes), offset);
            const target = { entry, memory, offset, order };
            offset += entry.bytes;
            return target;
          });
          const shuffled = targets.toSorted((a, b) => a.order - b.order);
          const { bytes } = await loadTensors(ring, shuffled);
          assert.equal(
            bytes,
            list.reduce((sum, t) => sum + t.size, 0),
          );
          assert.deepEqual(await contents(device, memory), expected); // mutant: memoryOffset left out
        }),
        { numRuns: 60 },
      );
    }));
}

test("loadTensors() fills page-locked memory as well, at any place", () =>
  withScratch(async (dir) => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using ring = device.createFileRing(SMALL);
    const path = join(dir, "x.safetensors");
    const raw = fileOf([70_000, 11, 200_000], 300);
    await writeFile(path, raw);
    await using file = await openSafetensors(path);
    using memory = device.createPinnedBuffer(400_000);
    for (const first of [300, 301, 4096]) {
      memory.view(Uint8Array).fill(0);
      let offset = first;
      const targets = [...file.tensors.values()].map((entry) => {
        offset += entry.bytes;
        return { entry, memory, offset: offset - entry.bytes };
      });
      await loadTensors(ring, targets);
      const found = memory.view(Uint8Array);
      checkSlots(found, raw, targets);
      assert.ok(found.subarray(0, first).every((byte) => byte === 0)); // mutant: whole blocks are read into place
      assert.ok(found.subarray(offset).every((byte) => byte === 0));
    }
  }));

test("loadTensors() reads shards one after the other, each from its first byte to its last", () =>
  withScratch(async (dir) => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using ring = device.createFileRing(SMALL);
    const files: TensorFile[] = [];
    const raws: Uint8Array[] = [];
    for (const [index, sizes] of [[70_000, 5], [9], [0, 30_000]].entries()) {
      const raw = fileOf(sizes);
      raws.push(raw);
      await writeFile(join(dir, `${index}.safetensors`), raw);
      files.push(await openSafetensors(join(dir, `${index}.safetensors`)));
    }
    const placed = files.map((file) => place(device, file.tensors));
    // The order of the targets is not that of the files.
    const targets = placed.flatMap((at) => at.targets).reverse();
    await loadTensors(ring, targets); // mutant: the first file alone is read
    for (const [index, at] of placed.entries()) {
      checkSlots(await contents(device, at.memory), raws[index] as Uint8Array, at.targets);
    }
    for (const file of files) await file.close();
  }));

test("loadTensors() reports progress that grows to the whole, with a rate", () =>
  withScratch(async (dir) => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using ring = device.createFileRing(SMALL);
    const seen: LoadProgress[] = [];
    const targets: TensorTarget[] = [];
    for (const name of ["a", "b", "c"]) {
      const path = join(dir, `${name}.safetensors`);
      await writeFile(path, fileOf([200_000]));
      await using file = await openSafetensors(path);
      targets.push(...place(device, file.tensors).targets);
    }
    const result = await loadTensors(ring, targets, { onProgress: (now) => seen.push(now) });
    assert.deepEqual(seen.at(-1), result);
    assert.equal(seen.filter(({ bytes }) => bytes === 600_000).length, 1); // mutant: the end is reported twice
    assert.deepEqual([result.bytes, result.totalBytes], [600_000, 600_000]);
    assert.ok(result.bytesPerSecond > 0 && Number.isFinite(result.bytesPerSecond));
    const counts = seen.map(({ bytes }) => bytes);
    assert.deepEqual(
      counts,
      counts.toSorted((a, b) => a - b),
    );
    assert.ok(counts.includes(400_000), counts.join()); // mutant: every file counts from 0 again
  }));

test("loadTensors() reaches tensors beyond 4 GiB of a file", () =>
  withScratch(async (dir) => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using ring = device.createFileRing(SMALL);
    const path = join(dir, "x.safetensors");
    const [large, small] = [5 * 2 ** 30, 20_000];
    const header = safetensors({
      large: { dtype: "U8", shape: [large], data_offsets: [0, large] },
      small: { dtype: "U8", shape: [small], data_offsets: [large, large + small] },
    });
    const handle = await open(path, "w");
    await handle.write(header, 0, header.length, 0);
    await handle.write(pattern(small), 0, small, header.length + large); // a hole before it
    await handle.close();
    await using file = await openSafetensors(path);
    const entry = file.tensors.get("small");
    assert.ok(entry && entry.offset > 2 ** 32);
    using memory = device.createBuffer(small);
    await loadTensors(ring, [{ entry, memory }]); // mutant: offsets of 32 bits
    assert.deepEqual(await contents(device, memory), pattern(small));
  }));

test("loadTensors() follows symbolic links and needs no right to write", () =>
  withScratch(async (dir) => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using ring = device.createFileRing(SMALL);
    await mkdir(join(dir, "blobs"));
    const raw = fileOf([30_000]);
    await writeFile(join(dir, "blobs/hash"), raw, { mode: 0o444 });
    await mkdir(join(dir, "model"));
    await symlink("../blobs/hash", join(dir, "model/model.safetensors"));
    await chmod(join(dir, "model"), 0o555);
    await using file = await openSafetensors(join(dir, "model"));
    const { memory, targets } = place(device, file.tensors);
    await loadTensors(ring, targets); // mutant: lm_file_open with O_NOFOLLOW
    checkSlots(await contents(device, memory), raw, targets);
    memory.dispose();
    await chmod(join(dir, "model"), 0o755);
  }));

test("loadTensors() reads from a file system without O_DIRECT", async () => {
  const shared = existsSync("/dev/shm") ? "/dev/shm" : undefined; // a tmpfs
  if (shared === undefined) return;
  const path = join(shared, `loramem-${crypto.randomUUID()}.safetensors`);
  try {
    const raw = fileOf([50_000, 7]);
    await writeFile(path, raw);
    await using device = await Device.open("cpu", { threads: 1 });
    await using ring = device.createFileRing(SMALL);
    await using file = await openSafetensors(path);
    const { memory, targets } = place(device, file.tensors);
    await loadTensors(ring, targets);
    checkSlots(await contents(device, memory), raw, targets);
    memory.dispose();
  } finally {
    await rm(path, { force: true });
  }
});

test("loadTensors() names a file that became shorter after its header was read", () =>
  withScratch(async (dir) => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using ring = device.createFileRing(SMALL);
    const path = join(dir, "x.safetensors");
    await writeFile(path, fileOf([100_000]));
    await using file = await openSafetensors(path);
    const { targets } = place(device, file.tensors);
    await truncate(path, 50_000);
    await rejects(() => loadTensors(ring, targets), "BAD_FILE", /x\.safetensors/, /50000 bytes/);
  }));

test("loadTensors() stops at its signal, and the ring goes on", () =>
  withScratch(async (dir) => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using ring = device.createFileRing(SMALL);
    const path = join(dir, "x.safetensors");
    const raw = fileOf([3_000_000]);
    await writeFile(path, raw);
    await using file = await openSafetensors(path);
    const { memory, targets } = place(device, file.tensors);
    const aborted = { signal: AbortSignal.abort() };
    await rejects(() => loadTensors(ring, targets, aborted), "CANCELLED"); // mutant: no signal is passed on
    const controller = new AbortController();
    const cancelled = loadTensors(ring, targets, { signal: controller.signal });
    setTimeout(() => controller.abort(), 1);
    await cancelled.catch((error) => assert.equal(error.code, "CANCELLED"));
    assert.equal(ring.stats().freeSlots, SMALL.slots);
    await loadTensors(ring, targets);
    checkSlots(await contents(device, memory), raw, targets);
    memory.dispose();
  }));

/** The most resident memory of this process since the last reset, bytes. */
async function highWaterMark(): Promise<number> {
  const text = await readFile("/proc/self/status", "utf8");
  return 1024 * Number(/VmHWM:\s+(\d+)/.exec(text)?.[1]);
}

test("loadTensors() takes no more host memory than the ring", () =>
  withScratch(async (dir) => {
    await using device = await Device.open("cpu", { threads: 1 });
    const path = join(dir, "x.safetensors");
    const bytes = 128 << 20;
    const handle = await open(path, "w");
    const header = safetensors({ x: { dtype: "U8", shape: [bytes], data_offsets: [0, bytes] } });
    await handle.write(header);
    const part = pattern(1 << 20);
    for (let at = 0; at < bytes; at += part.length) await handle.write(part);
    await handle.close();
    await using file = await openSafetensors(path);
    const { memory, targets } = place(device, file.tensors);
    await using stream = device.createStream();
    stream.fill(memory, 0); // resident from now on
    await stream.done();
    await using ring = device.createFileRing({ slots: 8, slotBytes: 1 << 20, threads: 2 });
    await writeFile("/proc/self/clear_refs", "5"); // resets the mark
    const before = await highWaterMark();
    await loadTensors(ring, targets);
    const growth = (await highWaterMark()) - before;
    assert.ok(growth < 32 << 20, `${growth >> 20} MiB more for a ring of 8 MiB`); // mutant: a tensor in a Uint8Array
    using host = device.createPinnedBuffer(part.length);
    stream.copy(host, memory, { bytes: part.length, srcOffset: bytes - part.length });
    await stream.done();
    assert.deepEqual(host.view(Uint8Array), part);
    memory.dispose();
  }));

/** Loads a file of three tensors on a simulated device whose file calls go wrong. */
async function loadOnSim(path: string, files: SimFileOptions): Promise<LoadProgress> {
  await using device = await Device.open("sim", { threads: 1, files });
  const before = device.stats();
  const ring = device.createFileRing(SMALL);
  try {
    await using file = await openSafetensors(path);
    const { memory, targets } = place(device, file.tensors);
    using _memory = memory;
    const progress = await loadTensors(ring, targets);
    checkSlots(await contents(device, memory), await readFile(path), targets);
    return progress;
  } finally {
    // Whatever happened: no slot, request or file of the ring is in use, and nothing is left when it is gone.
    const { freeSlots, requests, files: open } = ring.stats();
    assert.deepEqual([freeSlots, requests, open], [SMALL.slots, 0, 0]);
    await ring.dispose();
    // The last thread of the ring gives its slots back a moment after the promise.
    const deadline = performance.now() + 5000;
    while (device.stats().pinned > before.pinned && performance.now() < deadline) {
      await new Promise((resolve) => setTimeout(resolve, 1));
    }
    const { reserved, pinned } = device.stats();
    assert.deepEqual({ reserved, pinned }, { reserved: before.reserved, pinned: before.pinned });
  }
}

for (const error of ["EIO", "EOF"] as const) {
  test(`loadTensors() turns ${error} at any file call into one error, and leaves nothing behind`, () =>
    withScratch(async (dir) => {
      const path = join(dir, "x.safetensors");
      await writeFile(path, fileOf([30_000, 9, 70_000]));
      const failures: LoramemError[] = [];
      for (let [failAt, loaded] = [1, 0]; loaded < 3; failAt++) {
        assert.ok(failAt < 200, "every call fails");
        try {
          // This call and all that follow: what goes wrong afterwards must not hide it.
          await loadOnSim(path, { failAt, error, fails: 1000 });
          loaded++;
        } catch (cause) {
          assert.ok(cause instanceof LoramemError, String(cause));
          assert.match(cause.message, /x\.safetensors/);
          assert.doesNotMatch(cause.message, /, close\)/); // mutant: a failing close takes the place of the failure
          failures.push(cause);
          loaded = 0;
        }
      }
      assert.ok(failures.length > 10, `${failures.length} calls failed`);
      for (const { code, message } of failures.slice(3)) {
        if (error === "EIO") assert.equal(code, "IO");
        else assert.match(message, /became shorter.*tensor "t\d"/); // mutant: the tensor is not looked up
      }
    }));
}

for (const files of [
  { most: 700 },
  { failAt: 5, fails: 5, error: "EINTR" },
  { failAt: 3, fails: 1, error: "EINVAL" },
] as const satisfies readonly SimFileOptions[]) {
  test(`loadTensors() goes on after ${JSON.stringify(files)}`, () =>
    withScratch(async (dir) => {
      const path = join(dir, "x.safetensors");
      await writeFile(path, fileOf([30_000, 9, 70_000], 77));
      assert.equal((await loadOnSim(path, files)).bytes, 100_009);
    }));
}
