import assert from "node:assert/strict";
import { freemem } from "node:os";
import { test } from "node:test";
import { addressOf } from "../../src/api/memory/internal.ts";
import { Device, kernels, type PinnedBuffer } from "../../src/api/mod.ts";
import { native } from "../../src/ffi/load.ts";

const PAGE = 4096;
const MIB = 1 << 20;

function address(buffer: PinnedBuffer): bigint {
  return native().runtime.address(addressOf(buffer));
}

// Mutant: round `bytes` in lm_pinned_pool_acquire to a power of two.
test("PinnedPool.acquire() locks whole pages, not powers of two, and uses them again", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using pool = device.createPinnedPool({ limit: MIB });
  const first = pool.acquire(5 * PAGE - 1, { label: "batch" });
  assert.deepEqual([first.bytes, first.label, first.pinned], [5 * PAGE - 1, "batch", true]);
  assert.equal(pool.stats().locked, 5 * PAGE);
  const at = address(first);
  first.dispose();
  for (let round = 0; round < 100; round++) {
    using again = pool.acquire(3 * PAGE + round);
    assert.equal(address(again), at);
  }
  const { locked, current, acquires, releases, reuses, driverCalls, peak, requested } =
    pool.stats();
  assert.deepEqual([locked, current, requested, peak], [5 * PAGE, 0, 0, 5 * PAGE]);
  assert.deepEqual([acquires, releases, reuses, driverCalls], [101, 101, 100, 1]);
  assert.equal(device.stats().driverAllocs, 1, "no page is locked after the first time");
});

// Mutant: let take_idle in find() accept any larger buffer.
test("PinnedPool.acquire() takes the buffer that fits best and wastes at most half of it", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using pool = device.createPinnedPool({ limit: MIB });
  const sizes = [2, 4, 8, 32].map((pages) => pool.acquire(pages * PAGE));
  const at = sizes.map(address);
  for (const buffer of sizes) buffer.dispose();
  using three = pool.acquire(3 * PAGE);
  using five = pool.acquire(5 * PAGE);
  assert.deepEqual([address(three), address(five)], [at[1], at[2]]);
  using nine = pool.acquire(9 * PAGE); // 32 pages would waste more than half
  assert.equal(at.includes(address(nine)), false);
  assert.equal(pool.stats().driverCalls, 5);
});

// #130785, #275. Mutant: let at_rest() return true.
test("PinnedPool.acquire() never hands out a buffer that an unfinished copy still uses", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [20_000, 0] });
  await using slow = device.createStream();
  using pool = device.createPinnedPool({ limit: MIB });
  using target = device.createBuffer(PAGE);
  using back = device.createPinnedBuffer(PAGE);
  const source = pool.acquire(PAGE);
  const at = address(source);
  source.view(Uint8Array).fill(7);
  slow.copy(target, source);
  source.dispose(); // early: the copy has not begun
  using other = pool.acquire(PAGE);
  assert.notEqual(address(other), at);
  other.view(Uint8Array).fill(9);
  slow.copy(back, target);
  await slow.done();
  assert.ok(back.view(Uint8Array).every((byte) => byte === 7));
  using again = pool.acquire(PAGE);
  assert.equal(address(again), at, "now it has ended");
});

// cupy#4775. Mutant: leave `limit` at UINT64_MAX in lm_pinned_pool_create.
test("PinnedPool has a cap of its own: by default a quarter of the available memory, at most 2 GiB", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using pool = device.createPinnedPool();
  const { limit } = pool.stats();
  assert.ok(limit <= 2 ** 31 && limit > 0);
  assert.ok(limit === 2 ** 31 || limit <= freemem() + 2 ** 33);
  for (const bad of [0, -1, 0.5, "1"]) {
    assert.throws(() => device.createPinnedPool({ limit: bad as number }), {
      code: "BAD_ARGUMENT",
    });
  }
});

// Mutant: skip make_room in find().
test("PinnedPool at its cap gives idle buffers back for one that fits, then hands out pageable memory", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using pool = device.createPinnedPool({ limit: 8 * PAGE });
  for (const buffer of [pool.acquire(PAGE), pool.acquire(2 * PAGE)]) buffer.dispose();
  using large = pool.acquire(8 * PAGE);
  assert.deepEqual([large.pinned, pool.stats().locked], [true, 8 * PAGE]);
  using more = pool.acquire(PAGE, { label: "more" });
  assert.equal(more.pinned, false);
  const { pageable, fallbacks, locked } = pool.stats();
  assert.deepEqual([pageable, fallbacks, locked], [PAGE, 1, 8 * PAGE]);
  assert.equal(device.memoryStats().pageable.current, PAGE);
  assert.throws(() => pool.acquire(PAGE, { fallback: "error" }), {
    code: "OUT_OF_MEMORY",
    message: /page-locked host memory: requested=4096 locked=32768 limit=32768/,
    details: { requested: PAGE },
  });
  assert.equal(pool.stats().failures, 1);
  more.dispose();
  assert.equal(device.memoryStats().pageable.current, 0, "pageable memory is not kept");
});

// WSL#14078 and six more. Mutant: return the failed pin from find() instead of going on to pageable memory.
test("PinnedPool.ring() on a system that locks 64 MiB gives a smaller ring, then pageable memory, with the same result", async () => {
  const sums: number[] = [];
  for (const pinnedLimit of [undefined, 64 * MIB, 1]) {
    const sim = pinnedLimit === undefined ? {} : { pinnedLimit };
    await using device = await Device.open("sim", { threads: 1, ...sim });
    await using stream = device.createStream();
    using pool = device.createPinnedPool({ limit: 256 * MIB });
    const ring = pool.ring(5, 15 * MIB);
    const locked = ring.filter((buffer) => buffer.pinned).length;
    if (pinnedLimit === undefined) assert.deepEqual([ring.length, locked], [5, 5]);
    else if (pinnedLimit > 1) assert.deepEqual([ring.length, locked], [4, 4]);
    else assert.deepEqual([ring.length, locked, pool.stats().fallbacks], [2, 0, 2]);
    if (pinnedLimit !== undefined) {
      assert.throws(() => pool.acquire(MIB * 15, { fallback: "error" }), {
        code: "OUT_OF_MEMORY",
        message: /page-locked host memory/,
      });
    }
    using x = device.createBuffer(4096);
    stream.fill(x, 0);
    for (let batch = 0; batch < 10; batch++) {
      const slot = ring[batch % ring.length];
      assert.ok(slot !== undefined);
      await stream.done();
      slot.view(Float32Array, 0, 1024).fill(batch);
      using y = device.createBuffer(4096);
      stream.copy(y, slot, { bytes: 4096 });
      kernels.add(x.as("f32", [1024]), x.as("f32", [1024]), y.as("f32", [1024]), { stream });
    }
    using back = device.createPinnedPool().acquire(4096);
    stream.copy(back, x);
    await stream.done();
    sums.push(back.view(Float32Array)[1023] ?? -1);
    for (const buffer of ring) buffer.dispose();
  }
  assert.deepEqual(sums, [45, 45, 45]);
});

// Soup#989, FreeToken#233. Mutant: keep the failed pin's status as that of the next call.
test("failed page-lock does not spoil the next launch", async () => {
  await using device = await Device.open("sim", { threads: 1, failAt: 3 });
  await using stream = device.createStream();
  using x = device.createBuffer(4096);
  assert.throws(() => device.createPinnedBuffer(4096), {
    code: "OUT_OF_MEMORY",
    message: /pinned_reserve: simulated failure of call 3/,
  });
  stream.fill(x, 0);
  kernels.scale(x.as("f32", [1024]), x.as("f32", [1024]), 2, { stream });
  await stream.done();
  assert.equal(device.memoryStats().pinned.failures, 1);
  device.createPinnedBuffer(4096).dispose();
});

// ninfer-3090#38. Mutant: leave out the wait in enqueued() of csrc/core/memory.c.
test("copies from pageable memory have read it when they return", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [50] });
  await using stream = device.createStream();
  using pool = device.createPinnedPool({ limit: 1 });
  using target = device.createBuffer(MIB);
  using back = device.createPinnedBuffer(MIB);
  using source = pool.acquire(MIB);
  assert.equal(source.pinned, false);
  for (let round = 0; round < 200; round++) {
    source.view(Uint8Array).fill(round);
    stream.copy(target, source);
    source.view(Uint8Array).fill(255); // at once
    if (round % 40 !== 39) continue;
    stream.copy(back, target);
    await stream.done();
    assert.ok(
      back.view(Uint8Array).every((byte) => byte === round),
      `round ${round}`,
    );
  }
  assert.throws(() => stream.capture(() => stream.copy(target, source)), {
    code: "BAD_ARGUMENT",
    message: /pageable/,
  });
});

// torchtune#2076. Mutant: never keep a buffer in lm_pinned_return.
test("PinnedPool locks nothing after the first round of a ring", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [100] });
  await using stream = device.createStream();
  using pool = device.createPinnedPool();
  using target = device.createBuffer(MIB);
  let calls = 0;
  for (let round = 0; round < 50; round++) {
    for (const buffer of pool.ring(4, MIB)) {
      stream.copy(target, buffer);
      buffer.dispose();
    }
    await stream.done();
    if (round === 0) calls = pool.stats().driverCalls;
  }
  assert.equal(pool.stats().driverCalls, calls);
  pool.trim();
  assert.equal(pool.stats().locked, 0);
});

test("PinnedPool.dispose() leaves buffers that are out usable", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  const pool = device.createPinnedPool();
  const out = pool.acquire(PAGE);
  pool.acquire(PAGE).dispose();
  pool.dispose();
  assert.equal(device.stats().pinned, PAGE);
  stream.fill(out, 3);
  await stream.done();
  assert.equal(out.view(Uint8Array)[PAGE - 1], 3);
  out.dispose();
  assert.equal(device.stats().pinned, 0);
  assert.throws(() => pool.acquire(1), { code: "DISPOSED" });
});

test("PinnedPool keeps a buffer that a graph copies from, also when it was disposed", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPinnedPool();
  using target = device.createBuffer(PAGE);
  const source = pool.acquire(PAGE);
  const graph = stream.capture(() => stream.copy(target, source));
  const at = address(source);
  source.dispose();
  const other = pool.acquire(PAGE);
  assert.notEqual(address(other), at);
  graph.dispose();
  using again = pool.acquire(PAGE);
  assert.equal(address(again), at);
  other.dispose();
});

test("PinnedPool checks its arguments and keeps write-combined memory apart", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using pool = device.createPinnedPool();
  pool.acquire(PAGE, { writeCombined: true }).dispose();
  pool.acquire(PAGE).dispose();
  assert.equal(pool.stats().driverCalls, 2);
  const bad: (() => unknown)[] = [
    () => pool.acquire(0),
    () => pool.acquire(1.5),
    () => pool.acquire(1, { fallback: "none" as never }),
    () => pool.ring(1, PAGE),
    () => pool.ring(3, PAGE, { least: 0 }),
    () => pool.ring(2, 0),
  ];
  for (const use of bad) assert.throws(use, { code: "BAD_ARGUMENT" });
  const ring = pool.ring(1, PAGE, { least: 1 });
  assert.equal(ring.length, 1);
  for (const buffer of ring) buffer.dispose();
});
