import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import process from "node:process";
import { test } from "node:test";
import { crc32c, Device, FileLock, type LoramemError } from "../../src/api/mod.ts";
import { DENO, SLOW, temporaryFolder } from "../ffi/support.ts";
import { ROOT } from "../help.ts";
import { descriptorsInto } from "./file_support.ts";

// Two runs in one folder. Mutants: no flock at all; the process id not written, or read from where there is none.
test("FileLock.acquire() is exclusive and names the holder", async () => {
  using folder = temporaryFolder();
  await using device = await Device.open("cpu", { threads: 1 });
  const path = join(folder.path, "lock");
  {
    using lock = FileLock.acquire(device, path);
    assert.equal(lock.path, path);
    assert.equal(readFileSync(path, "utf8"), `${process.pid}\n`);
    assert.throws(() => FileLock.acquire(device, path), {
      code: "BUSY",
      message: `FileLock.acquire: process ${process.pid} holds the lock: ${path}: wait for it to end, or choose another folder`,
      details: { file: path, pid: process.pid },
    });
  }
  writeFileSync(path, "123456789012345678901234567890"); // longer than what is written now
  using _again = FileLock.acquire(device, path);
  assert.equal(readFileSync(path, "utf8"), `${process.pid}\n`);
  assert.throws(() => FileLock.acquire(device, join(folder.path, "none/lock")), {
    code: "IO",
    message: /ENOENT/,
  });
  assert.throws(() => FileLock.acquire(device, ""), { code: "BAD_ARGUMENT" });
});

test("FileLock.acquire() leaves nothing open when a file call fails", async () => {
  using folder = temporaryFolder();
  const path = join(folder.path, "lock");
  for (let failAt = 1; failAt <= 4; failAt++) {
    await using device = await Device.open("sim", { threads: 1, files: { failAt } });
    assert.throws(() => FileLock.acquire(device, path), { code: "IO", message: /EIO/ });
    assert.deepEqual(descriptorsInto(folder.path), []);
    FileLock.acquire(device, path).dispose();
  }
});

// Mutant: a lock file that exists is taken for a lock that is held.
test("FileLock of a process that was killed is free at once", SLOW, async () => {
  using folder = temporaryFolder();
  await using device = await Device.open("cpu", { threads: 1 });
  const path = join(folder.path, "lock");
  const program = join(folder.path, "program.ts");
  writeFileSync(
    program,
    `import { Device, FileLock } from ${JSON.stringify(join(ROOT, "mod.ts"))};
    const device = await Device.open("cpu", { threads: 1 });
    globalThis.lock = FileLock.acquire(device, ${JSON.stringify(path)});
    console.log("locked");
    setInterval(() => {}, 1000);`,
  );
  const child = spawn(process.execPath, [...(DENO ? ["run", "-A"] : []), program]);
  await new Promise((resolve) => child.stdout.once("data", resolve));
  assert.throws(
    () => FileLock.acquire(device, path),
    (error: LoramemError) => error.is("BUSY") && error.details.pid === child.pid,
  );
  const ended = new Promise((resolve) => child.once("exit", resolve));
  child.kill("SIGKILL");
  await ended;
  using lock = FileLock.acquire(device, path);
  assert.equal(lock.disposed, false);
});

// RFC 3720, appendix B.4.
test("crc32c() gives the published values, in one piece or several", async () => {
  await using _device = await Device.open("cpu", { threads: 1 });
  const digits = new TextEncoder().encode("123456789");
  assert.equal(crc32c(digits), 0xe3069283);
  assert.equal(crc32c(digits.slice(4), crc32c(digits.slice(0, 4))), 0xe3069283);
  assert.equal(crc32c(new Uint8Array(32)), 0x8a9136aa);
  assert.equal(crc32c(new Uint8Array(32).fill(255)), 0x62a8ab43);
  assert.equal(crc32c(new Uint8Array(0)), 0);
  assert.throws(() => crc32c([1] as unknown as Uint8Array<ArrayBuffer>), { code: "BAD_ARGUMENT" });
  assert.throws(() => crc32c(digits, -1), { code: "BAD_ARGUMENT" });
});
