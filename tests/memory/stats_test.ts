import assert from "node:assert/strict";
import { test } from "node:test";
import { Device } from "../../src/api/mod.ts";

test("Device.memoryStats() counts each class in pages and as asked for", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using buffer = device.createBuffer(5000);
  const host = device.createPinnedBuffer(100);
  using managed = device.createManagedBuffer(9000);
  const stats = device.memoryStats();
  const one = { count: 1, allocs: 1, frees: 0, failures: 0 };
  assert.deepEqual(stats.device, { ...one, current: 8192, peak: 8192, requested: buffer.bytes });
  assert.deepEqual(stats.pinned, { ...one, current: 4096, peak: 4096, requested: 100 });
  assert.deepEqual(stats.managed, {
    ...one,
    current: 12288,
    peak: 12288,
    requested: managed.bytes,
  });
  assert.equal(stats.pageable.allocs, 0);
  host.dispose();
  assert.throws(() => device.createBuffer(2 ** 50), { code: "OUT_OF_MEMORY" });
  const later = device.memoryStats();
  assert.deepEqual([later.pinned.current, later.pinned.frees, later.pinned.peak], [0, 1, 4096]);
  assert.equal(later.device.failures, 1);
});

// Mutant: leave out one of the assignments in lm_ctx_reset_peaks or lm_pool_reset_peaks.
test("Device.resetPeaks() lets every peak start again from what is held", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  using kept = pool.alloc(1000, { stream });
  pool.alloc(1 << 20, { stream }).dispose();
  device.createBuffer(1 << 16).dispose();
  device.createPinnedBuffer(1 << 16).dispose();
  const before = device.stats();
  assert.ok(before.reservedPeak > before.reserved && before.pinnedPeak > 0);
  assert.ok(pool.stats().peak > 1 << 20);
  device.resetPeaks();
  const { reserved, reservedPeak, pinnedPeak } = device.stats();
  assert.deepEqual([reservedPeak, pinnedPeak], [reserved, 0]);
  assert.equal(pool.stats().peak, 1024);
  const { device: memory, pinned } = device.memoryStats();
  assert.deepEqual([memory.peak, pinned.peak], [memory.current, 0]);
  kept.dispose();
  pool.resetPeaks();
  assert.equal(pool.stats().peak, 0);
});

test("MemoryPool.stats() measures fragmentation and counts driver calls", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool({ limit: 2 << 20 });
  const blocks = Array.from({ length: 8 }, () => pool.alloc(1 << 18, { stream }));
  assert.deepEqual([pool.stats().totalFree, pool.stats().fragmentation], [0, 0]);
  for (const [i, block] of blocks.entries()) if (i % 2 === 0) block.dispose();
  const { totalFree, largestFree, fragmentation, driverCalls } = pool.stats();
  assert.deepEqual([totalFree, largestFree, fragmentation], [1 << 20, 1 << 18, 0.75]);
  assert.equal(driverCalls, 1);
  for (const block of blocks) block.dispose();
  assert.deepEqual([pool.stats().fragmentation, pool.stats().retries], [0, 0]);
  await stream.done();
  pool.trim();
  assert.equal(pool.stats().driverCalls, 2);
});

test("Device.snapshot() is JSON with owners, states and times", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [0, 30_000] });
  await using stream = device.createStream();
  await using slow = device.createStream();
  using weights = device.createBuffer(4096, { label: "weights \\ α" });
  using host = device.createPinnedBuffer(100, { label: "ring" });
  using table = device.createManagedBuffer(100, { label: "table" });
  using pool = device.createPool({ label: "p" });
  using live = pool.alloc(1000, { stream, label: "live" });
  const pending = pool.alloc(1000, { stream: slow, label: "pending" });
  slow.fill(pending, 1);
  pending.dispose();
  const snapshot = device.snapshot();
  assert.deepEqual(JSON.parse(JSON.stringify(snapshot)), snapshot);
  assert.deepEqual([snapshot.kind, snapshot.debug], ["sim", false]);
  assert.deepEqual(
    snapshot.memory.map((entry) => [entry.class, entry.label, entry.bytes]).sort(),
    [
      ["device", weights.label, 4096],
      ["managed", table.label, 100],
      ["pinned", host.label, 100],
      ["pool", "", 2 << 20],
    ].sort(),
  );
  for (const { ageMs } of snapshot.memory) assert.ok(ageMs >= 0 && ageMs <= snapshot.timeMs + 10);
  assert.equal(snapshot.pools[0]?.label, 'MemoryPool "p"');
  const blocks = snapshot.pools[0]?.segments[0]?.blocks ?? [];
  assert.deepEqual(
    blocks.map(({ offset, bytes, state, label, requested }) => [
      offset,
      bytes,
      state,
      label,
      requested,
    ]),
    [
      [0, 1024, "live", live.label, 1000],
      [1024, 1024, "pending", undefined, undefined],
      [2048, (2 << 20) - 2048, "free", undefined, undefined],
    ],
  );
  await slow.done();
  const after = device.snapshot().pools[0]?.segments[0]?.blocks ?? [];
  assert.deepEqual(
    after.map(({ state }) => state),
    ["live", "free"],
  );
  pool.dispose();
  assert.deepEqual(device.snapshot().pools, []);
});

test("Device.snapshot() grows with what it holds", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  for (let i = 0; i < 500; i++) pool.alloc(256, { stream, label: `block ${i}` });
  for (let i = 0; i < 100; i++) device.createBuffer(1, { label: `buffer ${i}` });
  const { pools, memory } = device.snapshot();
  const live = pools.flatMap(({ segments }) => segments.flatMap(({ blocks }) => blocks));
  assert.equal(live.filter(({ state }) => state === "live").length, 500);
  assert.equal(memory.filter((entry) => entry.class === "device").length, 100);
});
