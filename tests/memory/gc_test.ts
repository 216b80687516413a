import assert from "node:assert/strict";
import { test } from "node:test";
import { Device } from "../../src/api/memory/mod.ts";
import { leakedHandles } from "../../src/ffi/handle.ts";
import { collectGarbage, SLOW } from "../ffi/support.ts";

/** A conservative collector may mistake something on the stack for a reference to one of the last objects. */
const SLACK = 8;

test("100,000 dropped handles are given back by the leak net", SLOW, async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  const before = { ...device.stats(), leaks: leakedHandles().count };
  for (let round = 0; round < 50; round++) {
    for (let i = 0; i < 1700; i++) stream.fill(pool.alloc(256, { stream, label: `block ${i}` }), 1);
    for (let i = 0; i < 200; i++) stream.record(device.createEvent());
    for (let i = 0; i < 50; i++)
      stream.copy(device.createPinnedBuffer(4096), device.createPinnedBuffer(4096));
    await collectGarbage();
  }
  await stream.done();
  await collectGarbage();
  assert.ok(leakedHandles().count - before.leaks >= 100_000 - SLACK);
  assert.ok(pool.stats().liveBlocks <= SLACK, `${pool.stats().liveBlocks} blocks are live`);
  assert.ok(device.stats().pinned - before.pinned <= SLACK * 4096);
});

test("dropped reservations, streams and graphs are given back by the leak net", SLOW, async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using last = device.createStream();
  const before = device.stats().reserved;
  for (let i = 0; i < 50; i++) {
    const stream = device.createStream();
    const buffer = device.createBuffer(1 << 16);
    stream.fill(buffer, i);
    stream.capture(() => stream.fill(buffer, 1)).launch(stream);
  }
  assert.ok(device.stats().reserved - before >= 50 << 16);
  for (let round = 0; round < 3; round++) await collectGarbage();
  await last.done();
  assert.ok(device.stats().reserved - before <= SLACK << 16);
});

test("view keeps the memory of a dropped PinnedBuffer", SLOW, async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  const views: Float32Array[] = [];
  for (let i = 0; i < 50; i++) {
    const view = device.createPinnedBuffer(1 << 14).view(Float32Array);
    views.push(view.fill(i));
  }
  await collectGarbage();
  assert.ok(device.stats().pinned >= 50 << 14);
  for (const [i, view] of views.entries()) assert.ok(view.every((value) => value === i));
});

test("block keeps its pool, and everything keeps its device", SLOW, async () => {
  const blocks = await (async () => {
    const device = await Device.open("cpu", { threads: 1 });
    const stream = device.createStream();
    return [1, 2, 3].map((value) => {
      const block = device.createPool().alloc(1024, { stream, label: `block ${value}` });
      stream.fill(block, value);
      return block;
    });
  })();
  for (let round = 0; round < 3; round++) await collectGarbage();
  for (const block of blocks) assert.equal(block.disposed, false);
  const { device } = blocks[0] as (typeof blocks)[number];
  await using stream = device.createStream();
  using host = device.createPinnedBuffer(1024);
  for (const [index, block] of blocks.entries()) {
    stream.copy(host, block);
    await stream.done();
    assert.ok(host.view(Uint8Array).every((byte) => byte === index + 1));
    block.dispose();
  }
  await device.dispose();
});
