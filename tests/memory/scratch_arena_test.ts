import assert from "node:assert/strict";
import { test } from "node:test";
import { addressOf, hostView } from "../../src/api/memory/internal.ts";
import { Device, type DeviceBuffer, kernels } from "../../src/api/mod.ts";
import { native } from "../../src/ffi/load.ts";

function address(buffer: DeviceBuffer): bigint {
  return native().runtime.address(addressOf(buffer));
}

test("ScratchArena.alloc() bumps by 256 bytes and counts the high-water mark", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using arena = device.createScratchArena(4096, { stream, label: "acts" });
  const a = arena.alloc(1);
  const b = arena.alloc(257);
  const c = arena.alloc(256, { label: "c" });
  assert.equal(address(a) % 256n, 0n);
  assert.equal(address(b) - address(a), 256n);
  assert.equal(address(c) - address(b), 512n);
  assert.deepEqual([a.bytes, b.bytes, c.label], [1, 257, "c"]);
  assert.deepEqual(arena.stats(), { bytes: 4096, used: 1024, peak: 1024, scopes: 0 });
});

test("ScratchArena.scope() gives back what was allocated inside, also when it is left by an error", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using arena = device.createScratchArena(4096, { stream });
  const kept = arena.alloc(256);
  for (let round = 0; round < 1000; round++) {
    const leave = () => {
      using _outer = arena.scope();
      const first = arena.alloc(512);
      assert.equal(address(first) - address(kept), 256n, "the same memory every time");
      {
        using inner = arena.scope();
        arena.alloc(1024);
        assert.equal(arena.stats().scopes, 2);
        inner.dispose(); // and once more at the end of the block
      }
      assert.equal(arena.stats().used, 768);
      if (round % 2 === 0) throw new RangeError("planted");
    };
    if (round % 2 === 0) assert.throws(leave, RangeError);
    else leave();
    assert.deepEqual(arena.stats(), { bytes: 4096, used: 256, peak: 1792, scopes: 0 });
  }
  arena.resetPeaks();
  assert.equal(arena.stats().peak, 256);
});

test("ScratchArena: an outer scope that ends takes its inner scopes with it", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using arena = device.createScratchArena(4096, { stream });
  const outer = arena.scope();
  const a = arena.alloc(256);
  const inner = arena.scope();
  const b = arena.alloc(256, { label: "b" });
  outer.dispose();
  assert.deepEqual([a.disposed, b.disposed, arena.stats().used], [true, true, 0]);
  const c = arena.alloc(512);
  inner.dispose(); // ended already: c stays
  assert.equal(c.disposed, false);
  assert.throws(() => stream.fill(b, 1), {
    code: "DISPOSED",
    message: /^DeviceBuffer "b": it was disposed/,
  });
});

test("ScratchArena.alloc() says by how much the arena is too small", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using arena = device.createScratchArena(1000, { stream, label: "acts" });
  arena.alloc(300, { label: "logits" });
  arena.alloc(488); // the arena ends here, no multiple of 256
  assert.equal(arena.stats().used, 1000);
  arena.reset();
  arena.alloc(300, { label: "logits" });
  assert.throws(() => arena.alloc(489, { label: "ds" }), {
    code: "OUT_OF_MEMORY",
    message:
      /^ScratchArena\.alloc: "acts" is full: requested=489 label="ds" free=488 used=512 bytes=1000: make it at least 1001 bytes/,
    details: {
      requested: 489,
      largestFree: 488,
      totalFree: 488,
      fragmentation: 0,
      owners: [{ label: "logits", bytes: 300 }],
    },
  });
  for (const bytes of [0, -1, 1.5, 2 ** 53, "1"]) {
    assert.throws(() => arena.alloc(bytes as number), { code: "BAD_ARGUMENT" });
  }
});

test("ScratchArena buffers hold tensors, and copies of a whole arena may be taken", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  using arena = device.createScratchArena(1 << 16, { stream, pool, label: "layer" });
  assert.equal(pool.stats().liveBlocks, 1);
  using scope = arena.scope();
  const x = arena.alloc(4096);
  const y = arena.alloc(4096);
  stream.fill(x, 0);
  kernels.add(x.as("f32", [1024]), x.as("f32", [1024]), x.as("f32", [1024]), { stream });
  stream.fill(y, 7);
  stream.copy(x, y);
  await stream.done();
  assert.ok(hostView(x, Uint8Array).every((byte) => byte === 7));
  scope.dispose();
  arena.dispose();
  arena.dispose();
  assert.equal(pool.stats().liveBlocks, 0);
  assert.throws(() => arena.alloc(1), { code: "DISPOSED", message: /"layer"/ });
  assert.throws(() => arena.scope(), { code: "DISPOSED" });
});

// Mutant: leave out followStream in ScratchArena.#release.
test("ScratchArena reuses memory only after what another stream still reads from it", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using home = device.createStream();
  await using other = device.createStream();
  using arena = device.createScratchArena(1 << 22, { stream: home });
  using host = device.createPinnedBuffer(1 << 22);
  for (let round = 0; round < 10; round++) {
    using filled = device.createEvent();
    {
      using scope = arena.scope();
      const x = arena.alloc(1 << 22);
      home.fill(x, round);
      home.record(filled);
      other.waitEvent(filled);
      other.copy(host, x);
      scope.dispose();
    }
    {
      using scope = arena.scope();
      home.fill(arena.alloc(1 << 22), 255);
      scope.dispose();
    }
    await other.done();
    assert.ok(
      host.view(Uint8Array).every((byte) => byte === round),
      `round ${round}`,
    );
  }
});

test("Device.createScratchArena() checks its arguments", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using other = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  await using foreign = other.createStream();
  using pool = other.createPool();
  const bad: (() => unknown)[] = [
    () => device.createScratchArena(0, { stream }),
    () => device.createScratchArena(4096, undefined as never),
    () => device.createScratchArena(4096, { stream: foreign }),
    () => device.createScratchArena(4096, { stream, pool }),
  ];
  for (const use of bad) assert.throws(use, { code: "BAD_ARGUMENT" });
});
