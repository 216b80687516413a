/**
 * Public failures of other allocators, each as a schedule on the simulated device. A comment names the report, and the
 * mutant of ours that makes the test fail.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import { addressOf, hostView } from "../../src/api/memory/internal.ts";
import { Device, type DeviceBuffer, kernels, type Stream } from "../../src/api/mod.ts";
import { native } from "../../src/ffi/load.ts";
import { SLOW } from "../ffi/support.ts";

const MIB = 1 << 20;

function address(buffer: DeviceBuffer): bigint {
  return native().runtime.address(addressOf(buffer));
}

// pytorch#35901. Mutant: let find() begin with lm_pool_grow, and find_place see nothing but unbacked addresses.
test("MemoryPool gives a repeated step the same addresses and takes nothing new", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [20] });
  await using stream = device.createStream();
  using pool = device.createPool();
  const sizes = [100_000, 5_000, 700_000, 256, 3 * MIB, 41_000, 5_000];
  let first: bigint[] = [];
  let calls = 0;
  for (let step = 1; step <= 100; step++) {
    const blocks = sizes.map((bytes) => pool.alloc(bytes, { stream }));
    for (const block of blocks) stream.fill(block, step, { bytes: 16 });
    const at = blocks.map(address);
    for (const block of blocks.reverse()) block.dispose();
    if (step === 1) [first, calls] = [at, device.stats().driverAllocs];
    assert.deepEqual(at, first, `step ${step}`);
  }
  assert.equal(device.stats().driverAllocs, calls);
  assert.equal(device.stats().driverFrees, 0, "nccl#48: nothing is freed inside steps either");
});

// pytorch#71616. Mutant: let lm_settle stop at the first owner whose oldest block has not passed.
test("MemoryPool reuses blocks of a fast stream while a slow one stands still", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [100_000, 0, 0] });
  await using slow = device.createStream();
  await using fast = device.createStream();
  await using third = device.createStream();
  using pool = device.createPool({ limit: 4 * MIB });
  const stalled = pool.alloc(MIB, { stream: slow });
  slow.fill(stalled, 1);
  stalled.dispose();
  const done = pool.alloc(2 * MIB, { stream: fast });
  const at = address(done);
  fast.fill(done, 1);
  done.dispose();
  await fast.done();
  using next = pool.alloc(2 * MIB, { stream: third });
  assert.equal(address(next), at);
  assert.deepEqual([slow.query(), pool.stats().retries], [false, 0]);
});

// pytorch#189504, #19222. Mutant: leave out step 5 of find_with_effort; then the host waits.
test("MemoryPool at its limit uses a block whose work still runs, and counts one retry", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [20_000, 0] });
  await using slow = device.createStream();
  await using other = device.createStream();
  using pool = device.createPool({ limit: 2 * MIB });
  using host = device.createPinnedBuffer(2 * MIB);
  const first = pool.alloc(2 * MIB, { stream: slow });
  slow.fill(first, 1);
  slow.copy(host, first);
  first.dispose();
  using second = pool.alloc(2 * MIB, { stream: other });
  assert.equal(slow.query(), false, "the host has not waited");
  other.fill(second, 2);
  await other.done();
  assert.deepEqual([pool.stats().retries, pool.stats().failures], [1, 0]);
  assert.equal(host.view(Uint8Array)[2 * MIB - 1], 1, "the copy came before the second fill");
  assert.equal(hostView(second, Uint8Array)[0], 2);
});

// pytorch#196258. Mutant: let lm_pool_trim wait for every device of the process.
test("MemoryPool.trim() of one device leaves the queued work of another alone", async () => {
  await using busy = await Device.open("sim", { threads: 1, delays: [50_000] });
  await using device = await Device.open("sim", { threads: 1 });
  await using slow = busy.createStream();
  await using stream = device.createStream();
  using x = busy.createBuffer(4096);
  using pool = device.createPool();
  pool.alloc(MIB, { stream }).dispose();
  slow.fill(x, 1);
  pool.trim();
  assert.deepEqual([pool.stats().reserved, slow.query()], [0, false]);
  await slow.done();
});

// rmm#2039. Mutant: let lm_run_find with LM_ANYBODY take only blocks of nobody.
test("MemoryPool serves two streams in turn at 95 % of its limit", SLOW, async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [0, 5] });
  await using a = device.createStream();
  await using b = device.createStream();
  using pool = device.createPool({ limit: 8 * MIB });
  const last: (DeviceBuffer | undefined)[] = [undefined, undefined];
  for (let i = 0; i < 10_000; i++) {
    const stream = i % 2 === 0 ? a : b;
    last[i % 2]?.dispose();
    const block = pool.alloc(3 * MIB + (i % 5) * 200_000, { stream });
    stream.fill(block, i % 256, { bytes: 256 });
    last[i % 2] = block;
  }
  assert.equal(pool.stats().failures, 0);
  for (const block of last) block?.dispose();
});

// cub#705. Mutant: leave out `pool->stats.reserved -=` in commit() of pool_pages.c.
test("MemoryPool.alloc() of an impossible size is one typed error that leaks nothing and ends", async () => {
  await using device = await Device.open("sim", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  const { memoryTotal } = device.info() as unknown as { memoryTotal: number };
  for (const bytes of [memoryTotal + 1, 2 ** 52, Number.MAX_SAFE_INTEGER]) {
    assert.throws(() => pool.alloc(bytes, { stream }), { code: "OUT_OF_MEMORY" });
  }
  const { failures, reserved, current, driverCalls } = pool.stats();
  assert.deepEqual([failures, reserved, current, driverCalls], [3, 0, 0, 0]);
  pool.alloc(1, { stream }).dispose(); // mlx#2821: the device goes on
  await stream.done();
});

// pytorch#190348. Mutant: leave out drop_pinned in lm_graph_destroy.
test("capture that is abandoned at any operation gives everything back", async () => {
  await using device = await Device.open("sim", { threads: 1 });
  await using stream = device.createStream();
  using pinned = device.createPinnedPool();
  using x = device.createBuffer(4096);
  for (let stop = 0; stop <= 4; stop++) {
    const before = device.memoryStats();
    const host = pinned.acquire(4096);
    let step = 0;
    const next = () => {
      if (step++ === stop) throw new RangeError("planted");
    };
    const record = () => {
      next();
      stream.fill(x, 1);
      next();
      stream.copy(host, x);
      next();
      kernels.scale(x.as("f32", [1024]), x.as("f32", [1024]), 2, { stream });
      next();
      stream.copy(x, host);
      next();
    };
    assert.throws(() => stream.capture(record), RangeError);
    host.dispose();
    assert.equal(pinned.stats().count, 0);
    pinned.trim();
    const after = device.memoryStats();
    assert.equal(after.pinned.current, 0, `stopped at ${stop}`);
    assert.equal(after.device.current, before.device.current);
  }
  stream.fill(x, 1);
  await stream.done();
});

// cubecl#1612, candle#3352. Mutant: pass `recordable` to lm_stream_check in lm_pool_alloc.
test("memory taken or given back while a stream records is an error, not a part of the graph", async () => {
  await using device = await Device.open("sim", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  using pinned = device.createPinnedPool();
  const block = pool.alloc(4096, { stream });
  const tries: (() => unknown)[] = [
    () => pool.alloc(4096, { stream }),
    () => block.dispose(),
    () => device.createBuffer(4096),
    () => device.createManagedBuffer(4096),
    () => device.createPinnedBuffer(4096),
    () => pinned.acquire(4096),
    () => pool.trim(),
  ];
  using _graph = stream.capture(() => {
    stream.fill(block, 1);
    for (const use of tries) {
      assert.throws(use, { code: "BAD_ARGUMENT", message: /records a graph/ }, String(use));
    }
  });
  block.dispose();
});

// pytorch#147168, #124260. Mutant: call find() for LM_NOBODY instead of the owner in lm_pool_alloc.
test("MemoryPool: the peak does not depend on how far the host is ahead", async () => {
  const peaks: number[] = [];
  for (const delay of [0, 1000, 10_000]) {
    await using device = await Device.open("sim", { threads: 1, delays: [delay] });
    await using stream = device.createStream();
    using pool = device.createPool();
    let kept: DeviceBuffer | undefined;
    for (let layer = 0; layer < 8; layer++) {
      const x = pool.alloc(MIB + layer * 4096, { stream });
      const scratch = pool.alloc(MIB / 2, { stream });
      stream.fill(x, layer);
      stream.fill(scratch, layer);
      scratch.dispose();
      kept?.dispose();
      kept = x;
      if (delay === 0) await stream.done(); // not ahead at all
    }
    kept?.dispose();
    peaks.push(pool.stats().peak, pool.stats().reserved);
    await stream.done();
  }
  assert.deepEqual(peaks.slice(2), [...peaks.slice(0, 2), ...peaks.slice(0, 2)]);
});

// torchrec#4231, ROCm/pytorch#3194. Mutant: leave out followStream in BlockCell of src/api/memory/pool.ts.
test("DeviceBuffer.dispose(): a block is not reused before a copy of another stream has read it", async () => {
  await using device = await Device.open("sim", { threads: 1, debug: true, delays: [0, 10_000] });
  await using home = device.createStream();
  await using copies = device.createStream();
  using pool = device.createPool({ limit: 2 * MIB });
  using host = device.createPinnedBuffer(MIB);
  using ready = device.createEvent();
  const block = pool.alloc(MIB, { stream: home });
  home.fill(block, 3);
  home.record(ready);
  copies.waitEvent(ready);
  copies.copy(host, block); // late
  block.dispose(); // and poisoned with 0xFF
  using next = pool.alloc(MIB, { stream: home });
  home.fill(next, 9);
  await home.done();
  await copies.done();
  assert.ok(host.view(Uint8Array).every((byte) => byte === 3));
});

// trl#5700. Mutant: leave out `this.#used = offset` in ScratchArena.#release.
test("memory is flat over 1,000 passes, half of which throw", SLOW, async () => {
  await using device = await Device.open("sim", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  using pinned = device.createPinnedPool();
  using arena = device.createScratchArena(MIB, { stream, pool });
  const pass = (step: number, into: Stream) => {
    using _scope = arena.scope();
    using block = pool.alloc(100_000 + (step % 7) * 1000, { stream: into });
    using host = pinned.acquire(50_000);
    into.copy(arena.alloc(50_000), host);
    into.fill(block, 1, { bytes: 256 });
    if (step % 2 === 1) throw new RangeError("planted");
  };
  let held: unknown;
  for (let step = 0; step < 1000; step++) {
    if (step % 2 === 1) assert.throws(() => pass(step, stream), RangeError);
    else pass(step, stream);
    await stream.done();
    const { reserved, pinned: locked } = device.stats();
    const now = [
      reserved,
      locked,
      pool.stats().liveBlocks,
      arena.stats().used,
      pinned.stats().count,
    ];
    if (step === 20) held = now;
    if (step > 20) assert.deepEqual(now, held, `step ${step}`);
  }
});

// cmssw#45368. Mutant: leave out the memset in hand_out.
test("page-locked memory is ready for the host when it is handed out", async () => {
  await using device = await Device.open("sim", { threads: 1, debug: true, delays: [5000, 5000] });
  await using _stream = device.createStream();
  using pool = device.createPinnedPool();
  for (let round = 1; round <= 20; round++) {
    using host = pool.acquire(4096);
    if (round > 1) assert.ok(host.view(Uint8Array).every((byte) => byte === 0xff));
    host.view(Uint8Array).fill(round);
    await new Promise((resolve) => setTimeout(resolve, 1));
    assert.ok(host.view(Uint8Array).every((byte) => byte === round));
  }
});

// torchtitan#2581. Mutant: let MemoryPool.alloc fall back on the last stream that was made.
test("there is no current stream: every call that enqueues names its own", async () => {
  await using device = await Device.open("sim", { threads: 1 });
  await using _only = device.createStream(); // a default could take this one
  using pool = device.createPool();
  using table = device.createManagedBuffer(64);
  const missing: (() => unknown)[] = [
    () => pool.alloc(64, {} as never),
    () => device.createScratchArena(64, {} as never),
    () => table.prefetch("device", {} as never),
    () => kernels.scale(table.as("f32", [4]), table.as("f32", [4]), 2, {} as never),
  ];
  for (const use of missing) assert.throws(use, { code: "BAD_ARGUMENT", message: /stream/ });
});

// bun#5490. Mutant: wait for the stream in lm_mem_copy whatever the memory.
test("no call but done() waits for the device", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [200_000, 0] });
  await using slow = device.createStream();
  await using other = device.createStream();
  const pool = device.createPool({ limit: 4 * MIB });
  const pinned = device.createPinnedPool();
  using back = device.createPinnedBuffer(4096);
  using event = device.createEvent();
  const host = pinned.acquire(4096);
  const block = pool.alloc(4096, { stream: slow });
  slow.copy(block, host);
  slow.record(event);
  other.waitEvent(event);
  other.fill(back, 1);
  block.dispose();
  host.dispose();
  pinned.acquire(4096).dispose();
  pool.stats();
  pinned.trim();
  device.snapshot();
  device.memoryStats();
  pool.dispose();
  pinned.dispose();
  assert.deepEqual([slow.query(), other.query(), event.query()], [false, false, false]);
  await other.done();
  assert.equal(back.view(Uint8Array)[0], 1);
});

// bun#32055. Mutant: keep the address of the out-parameter's memory instead of lending the memory.
test("out-parameters of a million calls in a hot loop are all read back", SLOW, async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  let wrong = 0;
  for (let i = 1; i <= 1_000_000; i++) {
    pool.alloc(1000, { stream }).dispose();
    if (pool.stats().allocs !== i) wrong++;
  }
  assert.equal(wrong, 0);
});
