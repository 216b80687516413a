import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import {
  chmodSync,
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import process from "node:process";
import { test } from "node:test";
import { hostView } from "../../src/api/memory/internal.ts";
import { crc32c, Device, type FileExtent } from "../../src/api/mod.ts";
import { SLOW, temporaryFolder } from "../ffi/support.ts";
import {
  descriptorsInto,
  fillPattern,
  openRing,
  pattern,
  readFileLog,
  residentBytes,
} from "./file_support.ts";

const GIB = 2 ** 30;

// memory-io 56, 57: misaligned tensors, and an alignment "fix" that shifted weights. Mutants: in_slot() that forgets the place in
// its block; packExtents() without memoryOffset; a checksum of the wrong run.
test(
  "DeviceFile.read() and write() keep bytes and checksums at every odd offset",
  SLOW,
  async () => {
    using folder = temporaryFolder();
    await using rig = await openRing();
    const { device, ring } = rig;
    using host = device.createPinnedBuffer(1 << 17);
    using x = device.createBuffer(1 << 17);
    const bytes = 40_000;
    for (const direct of ["auto", "never"] as const) {
      const path = join(folder.path, direct);
      await using file = await ring.open(path, { mode: "create", direct });
      for (let odd = 1; odd < 256; odd += direct === "auto" ? 1 : 17) {
        hostView(x, Uint8Array, odd, bytes).set(pattern(odd, bytes));
        const extent: FileExtent = { offset: odd, bytes, memory: x, memoryOffset: odd };
        const written = await file.write([extent], { checksums: true });
        hostView(x, Uint8Array).fill(0);
        host.view(Uint8Array).fill(0);
        const read = await file.read(
          [extent, { offset: odd + 1, bytes: bytes - 1, memory: host, memoryOffset: 256 - odd }],
          { checksums: true },
        );
        const expected = pattern(odd, bytes);
        assert.deepEqual(hostView(x, Uint8Array, odd, bytes), expected);
        assert.deepEqual(host.view(Uint8Array, 256 - odd, bytes - 1), expected.subarray(1));
        assert.equal(hostView(x, Uint8Array)[odd - 1], 0);
        assert.equal(hostView(x, Uint8Array)[odd + bytes], 0);
        const crc = crc32c(expected);
        assert.deepEqual([written.checksums, read.checksums[0]], [[crc], crc]);
      }
      assert.equal(file.bytes, 255 + bytes - ((255 - 1) % (direct === "auto" ? 1 : 17)));
    }
  },
);

// memory-io 48: more than 2^31 and 2^32 bytes. Mutants: 32-bit offsets anywhere; one call for a whole extent.
test("DeviceFile goes beyond 4 GiB in sparse files", SLOW, async () => {
  using folder = temporaryFolder();
  await using rig = await openRing();
  const { device, ring } = rig;
  const path = join(folder.path, "sparse");
  writeFileSync(path, "");
  truncateSync(path, 5 * GIB + 3);
  await using file = await ring.open(path, { mode: "update" });
  assert.equal(file.bytes, 5 * GIB + 3);
  using x = device.createBuffer(100_000);
  using host = device.createPinnedBuffer(100_000);
  const places = [2 * GIB - 50_001, 4 * GIB - 49_999, 5 * GIB + 3 - 100_000];
  for (const offset of places) {
    hostView(x, Uint8Array).set(pattern(offset, x.bytes));
    await file.write([{ offset, bytes: x.bytes, memory: x }]);
  }
  hostView(x, Uint8Array).fill(1);
  for (const offset of places) {
    await file.read([{ offset, bytes: host.bytes, memory: host }]);
    assert.deepEqual(host.view(Uint8Array), pattern(offset, host.bytes));
  }
  assert.equal(statSync(path).size, 5 * GIB + 3);
  assert.ok(statSync(path).blocks * 512 < 1 << 21);
});

// memory-io 47: DeepSpeed#3506: a tensor larger than the buffers. Mutant: lm_piece_cut() that takes a whole extent.
test("DeviceFile moves an extent larger than the ring, and says how far it is", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing();
  const { device, ring } = rig;
  using x = device.createBuffer(3_000_001);
  const data = pattern(7, x.bytes);
  hostView(x, Uint8Array).set(data);
  await using file = await ring.open(join(folder.path, "larger"), { mode: "create" });
  const progress: number[] = [];
  const options = { onProgress: (bytes: number) => progress.push(bytes), checksums: true };
  const written = await file.write([{ offset: 5, bytes: x.bytes, memory: x }], options);
  hostView(x, Uint8Array).fill(0);
  const read = await file.read([{ offset: 5, bytes: x.bytes, memory: x }], options);
  assert.ok(Buffer.compare(hostView(x, Uint8Array), data) === 0);
  assert.deepEqual([written.checksums, read.checksums], [[crc32c(data)], [crc32c(data)]]);
  assert.deepEqual([read.bytes, progress.at(-1), ring.stats().freeSlots], [x.bytes, x.bytes, 3]);
});

// memory-io 49: kvikio#126, #410. Mutant: `io` that says what was asked for instead of what is.
test("DeviceFile.io says which way is used, on a disk, in memory, and where O_DIRECT is refused", async () => {
  using folder = temporaryFolder();
  {
    await using rig = await openRing();
    const path = join(folder.path, "disk");
    writeFileSync(path, pattern(0, 50_000));
    await using buffered = await rig.ring.open(path, { mode: "read", direct: "never" });
    assert.equal(buffered.io, "buffered");
    using x = rig.device.createBuffer(50_000);
    await buffered.read([{ offset: 0, bytes: 50_000, memory: x }]);
    const { readBuffered, readDirect, readCached, fallbacks } = rig.ring.stats();
    assert.deepEqual([readBuffered, readDirect, readCached, fallbacks], [50_000, 0, 0, 0]);
  }
  if (existsSync("/dev/shm")) {
    const memory = mkdtempSync("/dev/shm/loramem-");
    try {
      await using rig = await openRing();
      await using file = await rig.ring.open(join(memory, "x"), { mode: "create", bytes: 50_000 });
      const data = pattern(3, 45_000);
      await file.write([{ offset: 3, bytes: 45_000, memory: data }]);
      await file.sync();
      const back = new Uint8Array(45_000);
      await file.read([{ offset: 3, bytes: 45_000, memory: back }]);
      assert.deepEqual(back, data);
      await file.publish(join(memory, "y"));
      assert.equal(statSync(join(memory, "y")).size, 50_000);
    } finally {
      rmSync(memory, { recursive: true });
    }
  }
  // The third call of a life is open with O_DIRECT.
  await using rig = await openRing("sim", { files: { failAt: 3, error: "EINVAL" } });
  await using file = await rig.ring.open(join(folder.path, "refused"), { mode: "create" });
  assert.deepEqual([file.io, rig.ring.stats().fallbacks], ["buffered", 1]);
  await file.write([{ offset: 0, bytes: 50_000, memory: pattern(0, 50_000) }]);
  assert.equal(rig.ring.stats().writeBuffered, 50_000);
});

// Mutant: the page cache is not asked, or what it holds is read from the disk all the same.
test("DeviceFile.read() takes from the page cache what is there", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing();
  const path = join(folder.path, "warm");
  writeFileSync(path, pattern(0, 100_000));
  readFileSync(path);
  await using file = await rig.ring.open(path, { mode: "read" });
  using x = rig.device.createBuffer(100_000);
  await file.read([{ offset: 0, bytes: 100_000, memory: x }]);
  assert.deepEqual(hostView(x, Uint8Array), pattern(0, 100_000));
  const { readCached, readDirect, readBuffered } = rig.ring.stats();
  if (file.io === "direct") assert.ok(readCached >= 90_000, `${readCached} of the page cache`);
  else assert.deepEqual([readDirect, readBuffered], [0, 100_000]);
});

// llm.c test: 4 sizes up to 500 KB; ours also 0 bytes and none at all. Mutant: next_run() that stops at an empty extent.
test("DeviceFile.write() and read() take empty extents, none, and host bytes among others", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing();
  const { device, ring } = rig;
  using x = device.createBuffer(70_000);
  using host = device.createPinnedBuffer(70_000);
  hostView(x, Uint8Array).set(pattern(0, 70_000));
  fillPattern(host);
  await using file = await ring.open(join(folder.path, "mixed"), { mode: "create" });
  const { bytes, checksums } = await file.write([], { checksums: true });
  assert.deepEqual([bytes, checksums, (await file.read([])).bytes], [0, [], 0]);
  const extents: FileExtent[] = [
    { offset: 0, bytes: 8, memory: pattern(0, 8) },
    { offset: 8, bytes: 0, memory: x },
    { offset: 8, bytes: 0, memory: new Uint8Array(0) },
    { offset: 8, bytes: 20_001, memory: x, memoryOffset: 8 },
    { offset: 99_999_999, bytes: 0, memory: host },
    { offset: 20_009, bytes: 5, memory: pattern(20_000, 20), memoryOffset: 9 },
    { offset: 20_014, bytes: 40_000, memory: host, memoryOffset: 20_014 },
  ];
  const report = await file.write(extents, { checksums: true });
  assert.equal(report.bytes, 60_014);
  assert.equal(file.bytes, 60_014);
  const expected = pattern(0, 60_014);
  assert.deepEqual(new Uint8Array(readFileSync(file.path)), expected);
  const crcs = extents.map(({ offset, bytes }) => crc32c(expected.slice(offset, offset + bytes)));
  assert.deepEqual(report.checksums, crcs);
  const header = new Uint8Array(20).fill(7);
  const read = await file.read(
    [
      { offset: 1, bytes: 3, memory: header, memoryOffset: 2 },
      { offset: 60_000, bytes: 14, memory: header, memoryOffset: 6 },
    ],
    { checksums: true },
  );
  assert.deepEqual(header, Uint8Array.of(7, 7, ...pattern(1, 3), 7, ...pattern(60_000, 14)));
  assert.deepEqual(read.checksums, [crc32c(pattern(1, 3)), crc32c(pattern(60_000, 14))]);
});

// torchtune#1867: memory disposed while a transfer uses it. Mutant: leave out holdNow, or its call in the end.
test("DeviceFile lets memory be disposed while it is moved, and gives it back afterwards", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing("sim", { delays: [3000, 3000] });
  const { device, ring } = rig;
  await using stream = device.createStream();
  await using file = await ring.open(join(folder.path, "held"), { mode: "create" });
  const pool = device.createPool();
  const block = pool.alloc(200_000, { stream });
  const buffer = device.createBuffer(200_000);
  const host = device.createPinnedBuffer(200_000);
  hostView(block, Uint8Array).fill(1);
  hostView(buffer, Uint8Array).fill(2);
  host.view(Uint8Array).fill(3);
  const writing = file.write(
    [block, buffer, host].map((memory, i) => ({ offset: i * 200_000, bytes: 200_000, memory })),
  );
  for (const memory of [block, buffer, host, pool]) memory.dispose();
  assert.throws(() => stream.fill(buffer, 9), { code: "DISPOSED" });
  const other = device.createBuffer(200_000); // must not be any of them
  hostView(other, Uint8Array).fill(4);
  await writing;
  const found = new Uint8Array(readFileSync(file.path));
  const wanted = [1, 2, 3].flatMap((value) => Array(200_000).fill(value));
  assert.deepEqual(found, Uint8Array.from(wanted));
  other.dispose();
  await stream.done();
  const { device: memory, pinned } = device.memoryStats();
  assert.deepEqual([memory.current, pinned.count], [0, 1]); // the ring
});

// memory-io 52: what is published is whole; what is not is gone. Mutants: publish without rename; close that does not remove.
test("DeviceFile.publish() replaces what was there; an unpublished file is removed", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing();
  const path = join(folder.path, "target");
  const link = join(folder.path, "link");
  writeFileSync(path, "old");
  symlinkSync(path, link);
  {
    await using file = await rig.ring.open(`${link}.tmp`, { mode: "create" });
    await file.write([{ offset: 0, bytes: 3, memory: pattern(0, 3) }]);
  }
  assert.equal(existsSync(`${link}.tmp`), false);
  {
    await using file = await rig.ring.open(`${link}.tmp`, { mode: "create" });
    await file.write([{ offset: 0, bytes: 3, memory: pattern(0, 3) }]);
    await file.publish(link);
    assert.equal(file.path, link);
    await assert.rejects(file.publish(`${link}2`), { code: "BAD_ARGUMENT", message: /published/ });
  }
  assert.deepEqual(new Uint8Array(readFileSync(link)), pattern(0, 3));
  assert.equal(lstatSync(link).isSymbolicLink(), false);
  assert.equal(readFileSync(path, "utf8"), "old"); // the target of the link is somebody else's
  symlinkSync(path, `${link}3`);
  await using through = await rig.ring.open(`${link}3`, { mode: "update" });
  await through.write([{ offset: 1, bytes: 1, memory: Uint8Array.of(65) }]);
  await through.dispose();
  assert.equal(readFileSync(path, "utf8"), "oAd");
  await assert.rejects(rig.ring.open(`${link}3`, { mode: "create" }), {
    code: "IO",
    message: /there already/,
  });
});

// Mutants: bytes that are asked for too late, or not at all; fallocate that fills the disk before it fails.
test("FileRing.open() asks the disk for the whole size at once", async () => {
  using folder = temporaryFolder();
  const path = join(folder.path, "large");
  const log = join(folder.path, "log");
  await using rig = await openRing("sim", { files: { log } });
  await assert.rejects(rig.ring.open(path, { mode: "create", bytes: 2 ** 43 }), {
    code: "IO",
    message: /^FileRing\.open: the disk is full: .*\(ENOSPC, fallocate\): free some space/,
  });
  assert.ok(readFileLog(log).every(({ call }) => call !== "fallocate"));
  assert.equal(existsSync(path), false);
  await using file = await rig.ring.open(path, { mode: "create", bytes: 10_000_000 });
  assert.equal(file.bytes, 10_000_000);
  assert.ok(statSync(path).blocks * 512 >= 10_000_000);
  await using sim = await openRing("sim", { files: { failAt: 5, error: "EOPNOTSUPP" } });
  await using sparse = await sim.ring.open(`${path}2`, { mode: "create", bytes: 10_000_000 });
  assert.equal(statSync(sparse.path).size, 10_000_000);
  await using full = await openRing("sim", { files: { failAt: 5, error: "ENOSPC" } });
  await assert.rejects(full.ring.open(`${path}3`, { mode: "create", bytes: 10_000_000 }), {
    details: { file: `${path}3`, errno: "ENOSPC", offset: 10_000_000 },
  });
  assert.equal(existsSync(`${path}3`), false);
});

test("FileRing.open() names what is wrong with a path", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing();
  const { ring } = rig;
  const missing = join(folder.path, "none/x");
  await assert.rejects(ring.open(missing, { mode: "read" }), {
    code: "IO",
    message: `FileRing.open: no such file or folder: ${missing} (ENOENT, open): check the path`,
    details: { file: missing, errno: "ENOENT", offset: 0 },
  });
  await assert.rejects(ring.open(folder.path, { mode: "read" }), {
    code: "IO",
    message: /folder, not a file/,
  });
  const locked = join(folder.path, "locked");
  mkdirSync(locked);
  chmodSync(locked, 0o500);
  if (process.getuid?.() !== 0) {
    await assert.rejects(ring.open(join(locked, "x"), { mode: "create" }), {
      code: "IO",
      message: /permission denied/,
    });
  }
  // A folder that nobody can write to, root included.
  await assert.rejects(ring.open("/proc/loramem", { mode: "create" }), { code: "IO" });
  await assert.rejects(ring.makeFolder("/proc/loramem/x"), { code: "IO" });
});

test("DeviceFile and FileRing check their arguments", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing();
  const { device, ring } = rig;
  const bad = (promise: Promise<unknown>, message: RegExp) =>
    assert.rejects(promise, { code: "BAD_ARGUMENT", message });
  const path = join(folder.path, "x");
  for (const options of [{ slots: 0 }, { slotBytes: 4097 }, { slotBytes: 0 }, { threads: 257 }]) {
    assert.throws(() => device.createFileRing(options), { code: "BAD_ARGUMENT" });
  }
  await bad(ring.open("", { mode: "read" }), /path must be a text/);
  await bad(ring.open("a\0b", { mode: "read" }), /path must be a text/);
  await bad(ring.open(path, { mode: "append" as "read" }), /mode must be/);
  await bad(ring.open(path, { mode: "read", bytes: 5 }), /bytes is for "create" only/);
  await bad(ring.open(path, { mode: "create", direct: "always" as "auto" }), /direct must be/);
  await using file = await ring.open(path, { mode: "create" });
  using x = device.createBuffer(100);
  await using other = await Device.open("cpu", { threads: 1 });
  using foreign = other.createBuffer(100);
  await using foreignStream = other.createStream();
  const ok = { offset: 0, bytes: 10, memory: x };
  await bad(file.write([{ ...ok, offset: -1 }]), /extents\[0\]\.offset must be/);
  await bad(
    file.write([ok, { ...ok, bytes: 101 }]),
    /extents\[1\] leaves its memory: 101 bytes from byte 0 on, it has 100/,
  );
  await bad(file.read([{ ...ok, memoryOffset: 91 }]), /leaves its memory/);
  await bad(
    file.read([{ ...ok, memory: new ArrayBuffer(10) as unknown as Uint8Array }]),
    /must be a DeviceBuffer/,
  );
  await bad(file.read([{ ...ok, memory: foreign }]), /belongs to another device/);
  await bad(file.read([ok], { stream: foreignStream }), /belongs to another device/);
  await bad(file.read([{ ...ok, offset: Number.MAX_SAFE_INTEGER, bytes: 5 }]), /bytes must be/);
  await using reading = await ring.open(path, { mode: "read" });
  await bad(reading.write([ok]), /opened for reading/);
  await bad(reading.publish(`${path}2`), /not made here/);
});

// memory-io 46: a file that is too short is an error at the read. Mutant: the end of the file taken for success.
test("DeviceFile.read() says where a file ends", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing();
  const path = join(folder.path, "short");
  writeFileSync(path, pattern(0, 30_000));
  await using file = await rig.ring.open(path, { mode: "read" });
  using x = rig.device.createBuffer(50_000);
  await assert.rejects(file.read([{ offset: 10, bytes: 40_000, memory: x }]), {
    code: "IO",
    message: `DeviceFile.read: the file ends at byte 30000: ${path}: it was cut or is still being written`,
    details: { file: path, offset: 30_000 },
  });
  await file.read([{ offset: 10, bytes: 29_990, memory: x }]);
  assert.deepEqual(hostView(x, Uint8Array, 0, 29_990), pattern(10, 29_990));
});

test("DeviceFile stops at a signal and goes on afterwards", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing("sim", { delays: [2000, 2000] });
  const { device, ring } = rig;
  await using file = await ring.open(join(folder.path, "stopped"), { mode: "create" });
  using x = device.createBuffer(4 << 20);
  const extent = { offset: 0, bytes: x.bytes, memory: x };
  const stop = new AbortController();
  const writing = file.write([extent], { signal: stop.signal });
  stop.abort(new Error("enough"));
  await assert.rejects(writing, (error: Error & { code?: string }) => {
    assert.equal(error.code, "CANCELLED");
    assert.equal((error.cause as Error).message, "enough");
    return true;
  });
  await assert.rejects(file.read([extent], { signal: stop.signal }), { code: "CANCELLED" });
  const { freeSlots, slots, requests } = ring.stats();
  assert.deepEqual([freeSlots, requests], [slots, 0]);
  assert.equal((await file.write([{ ...extent, bytes: 1000 }])).bytes, 1000);
});

// Mutant: lm_ring_submit_after that does not wait.
test("DeviceFile.write() takes what its stream produces, without blocking the event loop", async () => {
  using folder = temporaryFolder();
  await using rig = await openRing("sim", { delays: [0, 0, 30_000] });
  const { device, ring } = rig;
  await using stream = device.createStream(); // the ring has the first two
  await using file = await ring.open(join(folder.path, "after"), { mode: "create" });
  using x = device.createBuffer(100_000);
  hostView(x, Uint8Array).fill(1);
  stream.fill(x, 2);
  const writing = file.write([{ offset: 0, bytes: x.bytes, memory: x }], { stream });
  let turns = 0;
  const timer = setInterval(() => turns++, 1);
  await writing;
  clearInterval(timer);
  assert.ok(turns > 0);
  assert.ok(new Uint8Array(readFileSync(file.path)).every((byte) => byte === 2));
});

// memory-io 58, fastsafetensors#94: twice the shard stays after close. Mutants: a slot, descriptor or request that stays.
test("FileRing gives memory, descriptors and resident bytes back", SLOW, async () => {
  using folder = temporaryFolder();
  await using device = await Device.open("cpu", { threads: 1 });
  const path = join(folder.path, "baseline");
  writeFileSync(path, new Uint8Array(32 << 20));
  const round = async () => {
    using x = device.createBuffer(1 << 20);
    await using ring = device.createFileRing();
    await using file = await ring.open(path, { mode: "read" });
    for (let at = 0; at < 32 << 20; at += 1 << 20) {
      await file.read([{ offset: at, bytes: 1 << 20, memory: x }]);
    }
    await using made = await ring.open(`${path}.tmp`, { mode: "create", bytes: 4 << 20 });
    await made.write([{ offset: 0, bytes: 1 << 20, memory: x }]);
    assert.ok(descriptorsInto(folder.path).length >= 2);
  };
  await round();
  const before = residentBytes();
  for (let i = 0; i < 10; i++) await round();
  assert.deepEqual(descriptorsInto(folder.path), []);
  const { reserved, pinned, driverAllocs, driverFrees } = device.stats();
  assert.deepEqual([reserved, pinned, driverAllocs - driverFrees], [0, 0, 0]);
  assert.ok(residentBytes() - before < 48 << 20, `${residentBytes() - before} more bytes`); // one ring has 64 MiB
  assert.equal(existsSync(`${path}.tmp`), false);
});

// Mutant: leave disposeRings out of Device.dispose.
test("Device.dispose() closes rings and files, also while they are busy", async () => {
  using folder = temporaryFolder();
  const device = await Device.open("sim", { threads: 1, delays: [1000, 1000] });
  const ring = device.createFileRing({ slots: 2, slotBytes: 4096 });
  const file = await ring.open(join(folder.path, "x"), { mode: "create" });
  const x = device.createBuffer(100_000);
  const writing = file.write([{ offset: 0, bytes: x.bytes, memory: x }]);
  await device.dispose();
  assert.equal((await writing).bytes, 100_000);
  assert.ok(file.disposed && ring.disposed);
  assert.deepEqual([existsSync(file.path), descriptorsInto(folder.path)], [false, []]);
  await assert.rejects(file.sync(), { code: "DISPOSED" });
  await assert.rejects(ring.open(file.path, { mode: "read" }), { code: "DISPOSED" });
});
