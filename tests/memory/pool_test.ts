import assert from "node:assert/strict";
import { test } from "node:test";
import { hostView } from "../../src/api/memory/internal.ts";
import { Device } from "../../src/api/memory/mod.ts";
import { SLOW } from "../ffi/support.ts";

test("MemoryPool.alloc() hands out blocks and stats() counts them", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool({ limit: 1 << 20, label: "activations" });
  assert.equal(pool.stats().limit, 1 << 20);
  const a = pool.alloc(1000, { stream, label: "a" });
  const b = pool.alloc(1, { stream });
  const during = pool.stats();
  assert.equal(during.liveBlocks, 2);
  assert.equal(during.requested, 1001);
  assert.equal(during.current, 1024 + 256);
  assert.equal(during.allocs, 2);
  a.dispose();
  b.dispose();
  a.dispose();
  const after = pool.stats();
  assert.equal(after.liveBlocks, 0);
  assert.equal(after.current, 0);
  assert.equal(after.frees, 2);
  assert.equal(after.peak, 1024 + 256);
});

test("MemoryPool.alloc() uses freed blocks again without asking the system", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  pool.alloc(1 << 16, { stream }).dispose();
  const { driverAllocs } = device.stats();
  for (let round = 0; round < 100; round++) pool.alloc(1 << 16, { stream }).dispose();
  assert.equal(device.stats().driverAllocs, driverAllocs);
});

test("MemoryPool.alloc() reports what did not fit, and works afterwards", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool({ limit: 1 << 20 });
  using half = pool.alloc(1 << 19, { stream, label: "half" });
  const alloc = () => pool.alloc(1 << 20, { stream, label: "x" });
  assert.throws(alloc, (error: { code: string; details: Record<string, number> }) => {
    assert.equal(error.code, "OUT_OF_MEMORY");
    assert.equal(error.details.requested, 1 << 20);
    const { largestFree, totalFree, fragmentation } = error.details;
    assert.ok((largestFree ?? -1) >= 0 && (largestFree ?? 0) <= (totalFree ?? -1));
    assert.ok((fragmentation ?? -1) >= 0 && (fragmentation ?? 2) <= 1);
    return true;
  });
  assert.equal(pool.stats().failures, 1);
  half.dispose();
  pool.alloc(1 << 19, { stream }).dispose();
});

test("MemoryPool.alloc() checks its arguments", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using other = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  await using foreign = other.createStream();
  using pool = device.createPool();
  for (const bytes of [0, -1, 0.5, Number.NaN, 2 ** 53, "1"]) {
    assert.throws(() => pool.alloc(bytes as number, { stream }), { code: "BAD_ARGUMENT" });
  }
  assert.throws(() => pool.alloc(1, undefined as never), {
    code: "BAD_ARGUMENT",
    message: /pass \{ stream \}/,
  });
  assert.throws(() => pool.alloc(1, { stream: foreign }), {
    code: "BAD_ARGUMENT",
    message: /another device/,
  });
  for (const limit of [-1, 1.5, "x"]) {
    assert.throws(() => device.createPool({ limit: limit as number }), { code: "BAD_ARGUMENT" });
  }
});

test(
  "MemoryPool.dispose() makes its blocks unusable; disposing them later does nothing",
  SLOW,
  async () => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using stream = device.createStream();
    const pool = device.createPool({ label: "p" });
    const block = pool.alloc(64, { stream, label: "b" });
    pool.dispose();
    assert.throws(() => stream.fill(block, 0), {
      code: "DISPOSED",
      message: /^DeviceBuffer "b": its MemoryPool "p" was disposed/,
    });
    block.dispose();
    block.dispose();
  },
);

test(
  "DeviceBuffer.dispose() of a block waits in stream order for every stream that used it",
  SLOW,
  async () => {
    await using device = await Device.open("cpu");
    await using home = device.createStream();
    await using foreign = device.createStream();
    using pool = device.createPool({ limit: 1 << 22 });
    using host = device.createPinnedBuffer(1 << 22);
    for (let round = 0; round < 20; round++) {
      const first = pool.alloc(1 << 22, { stream: home });
      using filled = device.createEvent();
      home.fill(first, round);
      home.record(filled);
      foreign.waitEvent(filled);
      foreign.copy(host, first);
      first.dispose();
      // The pool holds one such block: the second one is the same memory, to be written after the copy.
      const second = pool.alloc(1 << 22, { stream: home });
      home.fill(second, 255);
      second.dispose();
      await foreign.done();
      assert.ok(
        host.view(Uint8Array).every((byte) => byte === round),
        `round ${round}`,
      );
      await home.done();
    }
  },
);

test("DeviceBuffer.dispose() of a block whose stream is gone gives it back", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using other = device.createStream();
  using pool = device.createPool();
  const stream = device.createStream();
  const used = pool.alloc(64, { stream });
  const unused = pool.alloc(64, { stream });
  other.fill(used, 1);
  await stream.dispose();
  used.dispose();
  unused.dispose();
  assert.equal(pool.stats().liveBlocks, 0);
});

test("MemoryPool.trim() gives unused memory back to the system", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  const block = pool.alloc(1 << 24, { stream });
  stream.fill(block, 1);
  assert.equal(hostView(block, Uint8Array).length, 1 << 24);
  const { reserved } = pool.stats();
  assert.ok(reserved >= 1 << 24);
  block.dispose();
  await stream.done();
  pool.trim();
  assert.ok(pool.stats().reserved < reserved);
});
