import assert from "node:assert/strict";
import { truncateSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { Device } from "../../src/api/mod.ts";
import { temporaryFolder } from "../ffi/support.ts";

const GIB = 2 ** 30;

// memory-io 48: more than 2^32 bytes in one transfer. Mutants: a 32-bit count in the progress or the report.
test("DeviceFile.read() streams more than 4 GiB through a small ring", {
  timeout: 600_000,
}, async () => {
  using folder = temporaryFolder();
  await using device = await Device.open("cpu", { threads: 1 });
  await using ring = device.createFileRing({ slots: 2, slotBytes: 4 << 20, threads: 2 });
  const path = join(folder.path, "zeros");
  writeFileSync(path, "");
  truncateSync(path, 4 * GIB + 7);
  await using file = await ring.open(path, { mode: "read" });
  using x = device.createBuffer(1 << 20);
  // Every MiB of the file into the same MiB of memory: 4 GiB of extents without 4 GiB of memory.
  const extents = Array.from({ length: 4097 }, (_, i) => {
    const offset = i * 2 ** 20;
    return { offset, bytes: Math.min(2 ** 20, file.bytes - offset), memory: x };
  });
  const progress: number[] = [];
  const report = await file.read(extents, { onProgress: (bytes) => progress.push(bytes) });
  assert.deepEqual([report.bytes, progress.at(-1)], [file.bytes, file.bytes]);
  assert.deepEqual(
    progress,
    progress.toSorted((a, b) => a - b),
  );
  assert.equal(ring.stats().copied, file.bytes);
});
