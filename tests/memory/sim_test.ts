import assert from "node:assert/strict";
import { copyFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { hostView } from "../../src/api/memory/internal.ts";
import { Device, type DeviceOptions, kernels, LoramemError } from "../../src/api/mod.ts";
import { pointerOf } from "../../src/ffi/handle.ts";
import { native } from "../../src/ffi/load.ts";
import { runFile, SLOW, temporaryFolder } from "../ffi/support.ts";
import { ROOT } from "../help.ts";

test('Device.open("sim") delays one stream and keeps its order', async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [30_000, 0] });
  assert.equal(device.kind, "sim");
  await using slow = device.createStream();
  await using fast = device.createStream();
  using x = device.createBuffer(4096);
  slow.fill(x, 1);
  fast.fill(x, 2);
  await fast.done();
  assert.deepEqual([hostView(x, Uint8Array)[0], slow.query()], [2, false]);
  await slow.done();
  assert.equal(hostView(x, Uint8Array)[0], 1);
  using event = device.createEvent();
  slow.fill(x, 3);
  slow.record(event);
  fast.waitEvent(event);
  fast.fill(x, 4);
  await fast.done();
  assert.equal(hostView(x, Uint8Array)[0], 4);
});

test('Device.open("sim") takes options per handle, never for the process', async () => {
  await using failing = await Device.open("sim", { threads: 1, failAt: 1 });
  await using plain = await Device.open("sim", { threads: 1 });
  plain.createBuffer(4096).dispose();
  assert.throws(() => failing.createBuffer(4096), {
    code: "OUT_OF_MEMORY",
    message: "Device.createBuffer: mem_reserve: simulated failure of call 1",
  });
  failing.createBuffer(4096).dispose();
});

test('Device.open() checks the options of "sim" and takes them for nothing else', async () => {
  const bad: DeviceOptions[] = [
    { failAt: 0 },
    { failAt: 1.5 },
    { faultAt: -1 },
    { heapFailAt: 2 ** 32 },
    { pinnedLimit: Number.NaN },
    { driverDelay: "1" as never },
    { delays: [] },
    { delays: [-1] },
    { delays: Array.from({ length: 17 }, () => 0) },
    { delays: 5 as never },
  ];
  for (const options of bad) {
    await assert.rejects(
      Device.open("sim", options),
      { code: "BAD_ARGUMENT", message: /^Device\.open: / },
      JSON.stringify(options),
    );
  }
  await assert.rejects(Device.open("cpu", { failAt: 1 }), {
    code: "BAD_ARGUMENT",
    message: /"sim" only: the device is "cpu"/,
  });
  await assert.rejects(Device.open("sim:fail_at=1" as "sim"), { code: "BAD_ARGUMENT" });
});

test("release library has no simulated device and says so", SLOW, async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  assert.ok(!device.disposed);
  using folder = temporaryFolder();
  const library = join(folder.path, "libloramem.so");
  copyFileSync(native().path, library);
  const program = join(folder.path, "program.ts");
  const { writeFileSync } = await import("node:fs");
  writeFileSync(
    program,
    `import { Device } from ${JSON.stringify(join(ROOT, "mod.ts"))};
     try { await Device.open("sim"); } catch (error) { console.log(error.code, error.message); }`,
  );
  const { stdout, stderr } = runFile(program, { env: { LORAMEM_LIB: library } });
  assert.match(
    stdout,
    /^DEVICE Device\.open: lm_ctx_open: this build has no simulated device: libloramem_sim\.so is not beside the library: /,
    stderr,
  );
});

/** What a program may do with a device, step by step; throws where the device fails. */
async function live(device: Device): Promise<void> {
  await using a = device.createStream();
  await using b = device.createStream();
  using event = device.createEvent();
  using buffer = device.createBuffer(4096, { label: "x" });
  using host = device.createPinnedBuffer(4096);
  using managed = device.createManagedBuffer(4096);
  using pinnedPool = device.createPinnedPool({ limit: 1 << 20 });
  using slot = pinnedPool.acquire(4096, { fallback: "error" });
  using pool = device.createPool({ limit: 2 << 20 });
  using arena = device.createScratchArena(4096, { stream: a });
  {
    using _scope = arena.scope();
    using block = pool.alloc(2 << 20, { stream: a });
    a.fill(buffer, 0);
    a.copy(block, buffer, { bytes: 4096 });
    a.copy(arena.alloc(4096), slot);
    kernels.scale(buffer.as("f32", [1024]), buffer.as("f32", [1024]), 2, { stream: a });
  }
  managed.advise("read-mostly");
  managed.prefetch("device", { stream: a });
  using next = pool.alloc(2 << 20, { stream: b }); // the block of a, after its work
  b.fill(next, 1);
  a.record(event);
  b.waitEvent(event);
  using graph = a.capture(() => a.copy(host, buffer));
  graph.launch(a);
  await a.done();
  await event.done();
  await b.done();
  device.snapshot();
  assert.equal(host.view(Uint8Array)[4095], 0);
}

async function expectEmpty(device: Device, what: string): Promise<void> {
  const { reserved, pinned, driverAllocs, driverFrees } = device.stats();
  assert.deepEqual([reserved, pinned, driverAllocs - driverFrees], [0, 0, 0], what);
  assert.equal(device.memoryStats().managed.count, 0, what);
}

/** Whether something failed, and was reported or mended as it should; then the device must be empty and usable. */
async function failsCleanly(device: Device, what: string, text: RegExp): Promise<boolean> {
  let failed = true;
  try {
    await live(device);
    // A pool that is refused memory looks again before it gives up.
    failed = native().fn.lm_last_error(pointerOf(device), new Uint8Array(0), 0n) !== 0;
  } catch (error) {
    const cause = error instanceof SuppressedError ? error.error : error;
    assert.ok(cause instanceof LoramemError, `${what}: ${String(error)}`);
    assert.match(cause.message, text, what);
  }
  await expectEmpty(device, what);
  if (failed) await live(device);
  await device.dispose();
  return failed;
}

// Mutant: raise ctx->recordings in lm_graph_begin before the backend has begun.
test(
  "life cycle that fails at any call of the device leaks nothing, names the call and can be repeated",
  SLOW,
  async () => {
    let k = 1;
    for (; ; k++) {
      const device = await Device.open("sim", { threads: 1, failAt: k });
      const text =
        /simulated failure of call \d+|out of memory: requested=|page-locked host memory/;
      if (!(await failsCleanly(device, `failAt ${k}`, text))) break;
    }
    assert.ok(k > 25, `only ${k - 1} calls can fail`);
  },
);

// Mutant: leave out lm_memory_give after a failed lm_range_add in lm_device_memory_reserve.
test(
  "life cycle that fails at any heap allocation leaks nothing and can be repeated",
  SLOW,
  async () => {
    let failures = 0;
    for (let k = 1; ; k++) {
      let device: Device;
      try {
        device = await Device.open("sim", { threads: 1, heapFailAt: k });
      } catch (error) {
        assert.match(String(error), /memory/);
        failures++;
        continue;
      }
      const before = device.stats().heapAllocs;
      const failed = await failsCleanly(device, `heapFailAt ${k}`, /memory/);
      if (failed) failures++;
      else if (before >= k) continue;
      else {
        // Allocations that are not needed, such as a list for a report, may fail without a trace.
        const reached = await Device.open("sim", { threads: 1 });
        await live(reached);
        const most = reached.stats().heapAllocs;
        await reached.dispose();
        if (k > most) break;
      }
    }
    assert.ok(failures > 15, `only ${failures} failures`);
  },
);

test(
  "fault on a stream is reported by done(), and everything can be given back",
  SLOW,
  async () => {
    for (let faultAt = 1; faultAt <= 4; faultAt++) {
      const device = await Device.open("sim", { threads: 1, faultAt });
      const failed = await live(device).then(
        () => false,
        () => true,
      );
      assert.ok(failed, `faultAt ${faultAt}`);
      await expectEmpty(device, `faultAt ${faultAt}`);
      await device.dispose();
    }
  },
);
