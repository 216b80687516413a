import assert from "node:assert/strict";
import { test } from "node:test";
import { Device } from "../../src/api/mod.ts";
import { SLOW } from "../ffi/support.ts";

const MIB = 1 << 20;

// Mutant: leave out collectGarbage, or the macrotask, in MemoryPool.allocAsync.
test(
  "MemoryPool.allocAsync() under pressure gets what dropped buffers still held",
  SLOW,
  async () => {
    await using device = await Device.open("cpu", { threads: 1 });
    await using stream = device.createStream();
    using pool = device.createPool({ limit: 64 * MIB });
    const drop = () => {
      for (let i = 0; i < 32; i++) pool.alloc(2 * MIB, { stream, label: "dropped" });
    };
    drop();
    await new Promise((resolve) => setTimeout(resolve, 1));
    if (pool.stats().liveBlocks === 32) {
      assert.throws(() => pool.alloc(16 * MIB, { stream }), { code: "OUT_OF_MEMORY" });
    }
    // A conservative collector may keep some of the blocks alive, never most of them.
    using block = await pool.allocAsync(16 * MIB, { stream, label: "wanted" });
    assert.equal(block.bytes, 16 * MIB);
    assert.ok(pool.stats().liveBlocks < 16);
  },
);

test("MemoryPool.allocAsync() tries once more and then rejects; other errors come at once", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool({ limit: 2 * MIB });
  using held = pool.alloc(2 * MIB, { stream, label: "held" });
  await assert.rejects(pool.allocAsync(MIB, { stream }), {
    code: "OUT_OF_MEMORY",
    message: /^MemoryPool\.alloc: .*largest owners:\n {2}2097152 bytes in 1 blocks: held/s,
  });
  assert.equal(pool.stats().failures, 2);
  await assert.rejects(pool.allocAsync(0, { stream }), { code: "BAD_ARGUMENT" });
  assert.equal(pool.stats().failures, 2);
  held.dispose();
  using block = await pool.allocAsync(MIB, { stream });
  assert.equal(block.bytes, MIB);
});
