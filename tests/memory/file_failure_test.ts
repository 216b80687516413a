import assert from "node:assert/strict";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { hostView } from "../../src/api/memory/internal.ts";
import { Device, type DeviceOptions, type FileRing, LoramemError } from "../../src/api/mod.ts";
import { leakedHandles } from "../../src/ffi/handle.ts";
import { runFile, SLOW, temporaryFolder } from "../ffi/support.ts";
import { ROOT } from "../help.ts";
import {
  descriptorsInto,
  type FileCall,
  memoryFolder,
  pattern,
  readFileLog,
} from "./file_support.ts";

const BYTES = 50_001;
const OLD = "what was there before";

/** A whole life: make, write, sync, publish, read back, ask, remove, close. */
async function live(device: Device, ring: FileRing, folder: string): Promise<void> {
  await using stream = device.createStream();
  using x = device.createBuffer(BYTES);
  hostView(x, Uint8Array).set(pattern(0, BYTES));
  await ring.makeFolder(join(folder, "run/deep"));
  {
    await using file = await ring.open(join(folder, "x.tmp"), { mode: "create", bytes: BYTES });
    const extents = [
      { offset: 0, bytes: 9, memory: pattern(0, 9) },
      { offset: 9, bytes: BYTES - 9, memory: x, memoryOffset: 9 },
    ];
    const written = await file.write(extents, { stream, checksums: true });
    await file.sync();
    await file.publish(join(folder, "x"));
    hostView(x, Uint8Array).fill(0);
    const read = await file.read([{ ...extents[1], memoryOffset: 9 }] as typeof extents, {
      checksums: true,
    });
    assert.equal(read.checksums[0], written.checksums[1]);
    assert.deepEqual(hostView(x, Uint8Array).subarray(9), pattern(9, BYTES - 9));
  }
  await ring.freeBytes(folder);
  await ring.open(join(folder, "gone"), { mode: "create" }).then((file) => file.dispose());
  await ring.removeFile(join(folder, "x"));
}

/** Lives on one device until something failed, and once more: nothing is left behind. */
async function walk(options: DeviceOptions, folder: string): Promise<LoramemError | undefined> {
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, "x"), OLD);
  let failure: LoramemError | undefined;
  let device: Device | undefined;
  try {
    device = await Device.open("sim", { threads: 1, ...options });
    await using ring = device.createFileRing({ slots: 2, slotBytes: 8192, threads: 2 });
    for (let lives = 0; lives < 2 && failure === undefined; lives++) {
      try {
        await live(device, ring, folder);
      } catch (error) {
        assert.ok(error instanceof LoramemError, String(error));
        failure = error;
        if (lives === 0 && existsSync(join(folder, "x"))) {
          const found = new Uint8Array(readFileSync(join(folder, "x")));
          const whole = [new TextEncoder().encode(OLD), pattern(0, BYTES)];
          assert.ok(
            whole.some(
              (bytes) => bytes.length === found.length && bytes.every((b, i) => b === found[i]),
            ),
          );
        }
      }
    }
    const { freeSlots, slots, requests, files } = ring.stats();
    assert.deepEqual([freeSlots, requests, files], [slots, 0, 0]);
    for (const name of ["x.tmp", "gone"]) {
      if (existsSync(join(folder, name))) await ring.removeFile(join(folder, name));
    }
    writeFileSync(join(folder, "x"), OLD);
    await live(device, ring, folder);
  } catch (error) {
    if (!(error instanceof LoramemError) || failure !== undefined) throw error;
    failure = error; // the device or the ring could not be made
  } finally {
    await device?.dispose();
  }
  assert.deepEqual(descriptorsInto(folder), []);
  return failure;
}

// memory-io 46: DeepSpeed#1070, #1627, #2006, #3376. Mutants: a status that is not looked at; a request that is not destroyed in
// runRequest(); holdNow() that is not undone; a file that stays in FileRing's set.
test(
  "FileRing and DeviceFile failing at any file call report it once and go on",
  SLOW,
  async () => {
    using folder = memoryFolder();
    const log = join(folder.path, "log");
    assert.equal(await walk({ files: { log } }, join(folder.path, "run")), undefined);
    const calls = Math.ceil(readFileLog(log).length / 3);
    assert.ok(calls > 40, `${calls} calls`);
    const before = leakedHandles().count;
    let failures = 0;
    const errors = ["EIO", "ENOSPC", "EINTR", "EOF"] as const;
    for (let failAt = 1; failAt <= calls; failAt++) {
      const error = errors[failAt % 4] ?? "EIO";
      const failure = await walk({ files: { failAt, error } }, join(folder.path, "run"));
      if (failure === undefined) continue;
      failures++;
      assert.ok(failure.is("IO"), failure.message);
      assert.match(failure.message, /^(FileRing|DeviceFile)\.\w+: .+: .+: .+/);
      const { file, errno } = failure.details;
      assert.ok(file?.startsWith(folder.path), failure.message);
      if (error !== "EOF") assert.equal(errno, error);
    }
    assert.ok(failures >= 15, `${failures} failures`);
    assert.equal(leakedHandles().count, before);
  },
);

// Mutants as above, and: submitRequest() that leaves its tag pending where nothing was accepted.
test(
  "FileRing and DeviceFile failing at any call of the device leave nothing behind",
  SLOW,
  async () => {
    using folder = memoryFolder();
    let failures = 0;
    for (let failAt = 1, quiet = 0; quiet < 3; failAt++) {
      const failure = await walk({ failAt }, join(folder.path, "run"));
      quiet = failure === undefined ? quiet + 1 : 0;
      failures += failure === undefined ? 0 : 1;
      if (failure !== undefined)
        assert.match(failure.message, /simulated failure|copy between slot and device/);
    }
    assert.ok(failures >= 15, `${failures} failures`);
  },
);

test("FileRing and DeviceFile failing at any allocation leave nothing behind", SLOW, async () => {
  using folder = memoryFolder();
  let failures = 0;
  for (let heapFailAt = 1, quiet = 0; quiet < 4; heapFailAt++) {
    const failure = await walk({ heapFailAt }, join(folder.path, "run"));
    quiet = failure === undefined ? quiet + 1 : 0;
    failures += failure === undefined ? 0 : 1;
  }
  assert.ok(failures >= 15, `${failures} failures`);
});

/** The calls of a save, by name, those that a full or busy file system adds left out. */
function order(calls: readonly FileCall[]): string[] {
  return calls
    .map(({ call }) => call)
    .filter((call) => !["fstat", "statvfs", "pread", "open"].includes(call))
    .filter((call, i, all) => call !== all[i - 1]);
}

// memory-io 52: the order that makes a save atomic. Mutants: rename before fsync; no fsync of the folder; the log without data.
test("DeviceFile.publish() syncs, renames, and syncs the folder, in this order", async () => {
  using folder = temporaryFolder();
  const log = join(folder.path, "log");
  const path = join(folder.path, "x");
  const data = pattern(3, 40_000);
  {
    await using device = await Device.open("sim", { threads: 1, files: { log } });
    await using ring = device.createFileRing({ slots: 2, slotBytes: 8192, threads: 1 });
    await using file = await ring.open(`${path}.tmp`, { mode: "create", bytes: data.length });
    await file.write([{ offset: 0, bytes: data.length, memory: data }]);
    await file.sync();
    await file.publish(path);
  }
  const calls = readFileLog(log);
  assert.deepEqual(order(calls), [
    "fallocate",
    "pwrite",
    "fdatasync",
    "fsync",
    "rename",
    "fsync",
    "close",
  ]);
  const rename = calls.findIndex(({ call }) => call === "rename");
  assert.deepEqual([calls[rename]?.path, calls[rename]?.to], [`${path}.tmp`, path]);
  const folderOpen = calls.slice(rename).find(({ call }) => call === "open");
  assert.deepEqual(
    [folderOpen?.path, folderOpen?.result],
    [folder.path, calls.slice(rename).find(({ call }) => call === "fsync")?.fd],
  );
  const written = new Uint8Array(data.length);
  for (const { call, offset = 0, data } of calls) if (call === "pwrite") written.set(data, offset);
  assert.deepEqual(written, data);
});

// memory-io 52. Mutant: the file is written under its final name.
test(
  "DeviceFile.publish() leaves the old or the new file when the process is killed at any call",
  SLOW,
  async () => {
    using folder = temporaryFolder();
    const program = join(folder.path, "program.ts");
    const path = join(folder.path, "x");
    writeFileSync(
      program,
      `import process from "node:process";
    import { Device } from ${JSON.stringify(join(ROOT, "mod.ts"))};
    await using device = await Device.open("sim", { threads: 1, files: { killAt: Number(process.env.KILL_AT) } });
    await using ring = device.createFileRing({ slots: 2, slotBytes: 8192, threads: 1 });
    await using file = await ring.open(process.env.TARGET + process.pid, { mode: "create" });
    await file.write([{ offset: 0, bytes: 20000, memory: new Uint8Array(20000).fill(7) }]);
    await file.publish(process.env.TARGET);`,
    );
    const fresh = new Uint8Array(20_000).fill(7);
    let replaced = 0;
    let killed = 0;
    for (let killAt = 4; killAt <= 16; killAt += 2) {
      writeFileSync(path, OLD);
      const { signal } = runFile(program, { env: { KILL_AT: String(killAt), TARGET: path } });
      const found = readFileSync(path);
      if (found.toString() !== OLD) {
        assert.deepEqual(new Uint8Array(found), fresh);
        replaced++;
      }
      if (signal === "SIGKILL") killed++;
    }
    assert.ok(killed >= 3 && replaced >= 1, `${killed} killed, ${replaced} replaced`);
  },
);
