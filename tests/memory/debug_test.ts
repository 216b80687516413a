import assert from "node:assert/strict";
import { test } from "node:test";
import { addressOf, ctxPtr, hostView, streamPtr } from "../../src/api/memory/internal.ts";
import type { Stream } from "../../src/api/mod.ts";
import { Device, type DeviceBuffer, type LeakReport } from "../../src/api/mod.ts";
import { native } from "../../src/ffi/load.ts";
import { collectGarbage, SLOW } from "../ffi/support.ts";

/** Writes one byte beside a buffer, as a kernel with a wrong size would. */
function writeBeside(buffer: DeviceBuffer, offset: number, stream: Stream): void {
  const { fn } = native();
  const at = fn.lm_ptr_add(addressOf(buffer), BigInt(offset));
  assert.equal(fn.lm_mem_fill(ctxPtr(buffer.device), at, 1, 1n, streamPtr(stream)), 0);
}

// Mutant: leave out the fill with LM_POISON in lm_block_before_free.
test("debug mode fills freed pool blocks with 0xFF, after the copies that read them", async () => {
  await using device = await Device.open("sim", { threads: 1, debug: true, delays: [3000] });
  await using stream = device.createStream();
  using pool = device.createPool();
  using host = device.createPinnedBuffer(1000);
  const block = pool.alloc(1000, { stream, label: "x" });
  stream.fill(block, 5);
  stream.copy(host, block); // has not begun when the block goes
  block.dispose();
  using next = pool.alloc(1000, { stream });
  await stream.done();
  assert.ok(host.view(Uint8Array).every((byte) => byte === 5));
  assert.ok(hostView(next, Uint8Array).every((byte) => byte === 0xff));
});

test("without debug mode a freed block keeps its bytes and has no red zones", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  const block = pool.alloc(1000, { stream });
  stream.fill(block, 5);
  block.dispose();
  using next = pool.alloc(1000, { stream });
  await stream.done();
  assert.equal(hostView(next, Uint8Array)[0], 5);
  assert.equal(pool.stats().current, 1024);
  assert.throws(() => pool.check(), { code: "BAD_ARGUMENT", message: /not in debug mode/ });
  assert.deepEqual([device.debug, device.leaks(), device.snapshot().operations], [false, [], []]);
});

// Mutant: compare only the zone behind in lm_zones_check; copy `after - 1` bytes of it.
test("debug mode finds a byte written on either side of a block, on free and on demand", async () => {
  await using device = await Device.open("cpu", { threads: 1, debug: true });
  await using stream = device.createStream();
  for (const [offset, place] of [
    [-1, /before a block was written: label="x" bytes=1000 offset=-1:/],
    [-256, /before a block was written: label="x" bytes=1000 offset=-256:/],
    [1000, /behind a block was written: label="x" bytes=1000 offset=1000:/],
    [1279, /behind a block was written: label="x" bytes=1000 offset=1279:/],
  ] as const) {
    using pool = device.createPool();
    using fine = pool.alloc(1000, { stream, label: "fine" });
    const block = pool.alloc(1000, { stream, label: "x" });
    pool.check();
    writeBeside(block, offset, stream);
    assert.throws(() => pool.check(), { code: "CORRUPT_MEMORY", message: place });
    assert.throws(() => block.dispose(), {
      code: "CORRUPT_MEMORY",
      message: new RegExp(`^DeviceBuffer\\.dispose: lm_pool_free: memory ${place.source}`),
    });
    assert.equal(pool.stats().liveBlocks, 2, "a damaged block is not used again");
    fine.dispose();
  }
});

test("debug mode accepts every size and every byte inside a block", SLOW, async () => {
  await using device = await Device.open("cpu", { threads: 1, debug: true });
  await using stream = device.createStream();
  using pool = device.createPool();
  for (let bytes = 1; bytes <= 1030; bytes += bytes % 256 > 250 || bytes % 256 < 5 ? 1 : 37) {
    const block = pool.alloc(bytes, { stream });
    assert.equal(native().runtime.address(addressOf(block)) % 256n, 0n);
    stream.fill(block, 1);
    pool.check();
    block.dispose();
  }
  assert.equal(pool.stats().liveBlocks, 0);
});

test("debug mode fills page-locked and scratch memory that is used again with 0xFF", async () => {
  await using device = await Device.open("cpu", { threads: 1, debug: true });
  await using stream = device.createStream();
  using pinned = device.createPinnedPool();
  const first = pinned.acquire(4096);
  first.view(Uint8Array).fill(1);
  first.dispose();
  using again = pinned.acquire(4096);
  assert.ok(again.view(Uint8Array).every((byte) => byte === 0xff));
  using arena = device.createScratchArena(4096, { stream });
  {
    using _scope = arena.scope();
    stream.fill(arena.alloc(4096), 1);
  }
  const buffer = arena.alloc(4096);
  await stream.done();
  assert.ok(hostView(buffer, Uint8Array).every((byte) => byte === 0xff));
});

test("debug mode keeps the last 4,096 operations with numbers, times, sizes and labels", async () => {
  await using device = await Device.open("cpu", { threads: 1, debug: true });
  await using stream = device.createStream();
  using pool = device.createPool();
  using block = pool.alloc(1000, { stream, label: 'a "label"\n' });
  stream.fill(block, 1, { bytes: 10 });
  const few = device.snapshot().operations;
  assert.deepEqual(
    few.map(({ number, op, bytes, stream, label }) => [number, op, bytes, stream, label]),
    [
      [1, "lm_pool_alloc", 1000, 1, 'a "label"\n'],
      [2, "lm_mem_fill", 10, 1, undefined],
    ],
  );
  for (let i = 0; i < 5000; i++) stream.fill(block, 1, { bytes: 1 + (i % 7) });
  const { operations } = device.snapshot();
  assert.equal(operations.length, 4096);
  assert.deepEqual([operations[0]?.number, operations.at(-1)?.number], [5002 - 4095, 5002]);
  for (const [i, { timeMs }] of operations.entries()) {
    assert.ok(timeMs >= (operations[i - 1]?.timeMs ?? 0));
  }
});

test("Device.leaks() and onLeak tell what was not disposed, where it was made, and nothing else", async () => {
  const reports: LeakReport[] = [];
  const device = await Device.open("cpu", {
    threads: 1,
    debug: true,
    onLeak: (report) => void reports.push(report),
  });
  const stream = device.createStream();
  const pool = device.createPool({ label: "p" });
  const forgotten = pool.alloc(100, { stream, label: "forgotten" });
  pool.alloc(100, { stream }).dispose();
  const weights = device.createBuffer(4096, { label: "weights" });
  device.createEvent().dispose();
  for (let i = 0; i < 3000; i++) device.createEvent().dispose();
  await stream.dispose();
  const labels = ['MemoryPool "p"', 'DeviceBuffer "forgotten"', 'DeviceBuffer "weights"'];
  assert.deepEqual(
    device.leaks().map(({ label, bytes }) => [label, bytes]),
    [
      [labels[0], 0],
      [labels[1], 100],
      [labels[2], 4096],
    ],
  );
  await device.dispose();
  await device.dispose();
  assert.equal(reports.length, 1);
  assert.deepEqual([reports[0]?.device, reports[0]?.at], ["cpu", "close"]);
  assert.deepEqual(
    reports[0]?.leaks.map(({ label }) => label),
    labels,
  );
  for (const { stack, ageMs } of reports[0]?.leaks ?? []) {
    assert.match(stack, /debug_test\.ts/);
    assert.ok(ageMs >= 0);
  }
  for (const { collected } of reports[0]?.leaks ?? []) assert.equal(collected, false);
  for (const buffer of [forgotten, weights]) buffer.dispose();
});

// Mutant: leave out `cell.collected = true` in the leak net.
test("Device.leaks() also tells what was left to the garbage collector", SLOW, async () => {
  await using device = await Device.open("cpu", { threads: 1, debug: true });
  for (let i = 0; i < 50; i++) device.createEvent();
  for (let round = 0; round < 3; round++) await collectGarbage();
  const collected = device.leaks().filter((leak) => leak.collected);
  assert.ok(collected.length > 40, `${collected.length}`);
  assert.match(collected[0]?.stack ?? "", /debug_test\.ts/);
});

test("debug device that closes with nothing left reports nothing", async () => {
  let reports = 0;
  await using device = await Device.open("cpu", { debug: true, onLeak: () => void reports++ });
  {
    await using stream = device.createStream();
    using pool = device.createPool();
    using block = pool.alloc(64, { stream });
    stream.fill(block, 1);
  }
  await device.dispose();
  assert.equal(reports, 0);
});

test("Device.open() in debug mode that fails leaves nothing open", async () => {
  await assert.rejects(Device.open("sim", { debug: true, failAt: 1 }), {
    code: "OUT_OF_MEMORY",
    message: /^Device\.open: pinned_reserve: simulated failure of call 1/,
  });
});
