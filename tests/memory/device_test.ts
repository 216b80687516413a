import assert from "node:assert/strict";
import { test } from "node:test";
import { Device } from "../../src/api/memory/mod.ts";

test("Device.open() opens the CPU and describes it", async () => {
  await using device = await Device.open("cpu", { threads: 2 });
  assert.equal(device.kind, "cpu");
  const info = device.info();
  assert.equal(info.kind, "cpu");
  assert.equal(info.threads, 2);
  assert.equal(info.noCuda, undefined);
});

test('Device.open("auto") takes a CUDA device, or says why it did not', async () => {
  await using device = await Device.open();
  if (device.kind === "cpu") assert.match(device.info().noCuda ?? "", /CUDA|cuda/);
  else assert.equal(device.kind, "cuda:0");
});

test("Device.open() rejects unknown devices and thread counts", async () => {
  for (const kind of ["gpu", "cuda", "cuda:-1", "cuda:1e3", "", null, "cpu "]) {
    await assert.rejects(Device.open(kind as "cpu"), { code: "BAD_ARGUMENT" }, String(kind));
  }
  for (const threads of [-1, 1.5, Number.NaN, "2", 4097]) {
    await assert.rejects(Device.open("cpu", { threads: threads as number }), {
      code: "BAD_ARGUMENT",
      message: /^Device\.open: threads must be an integer from 0 to 4096: it is /,
    });
  }
});

test("Device.open() names the device that is missing", async () => {
  await assert.rejects(Device.open("cuda:999"), { code: "DEVICE", message: /^Device\.open: / });
});

test("Device.createBuffer() reserves bytes that stats() counts until dispose()", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  const before = device.stats();
  const buffer = device.createBuffer(100_000, { label: "weights" });
  assert.equal(buffer.bytes, 100_000);
  assert.equal(buffer.label, "weights");
  assert.equal(buffer.device, device);
  const during = device.stats();
  assert.ok(during.reserved - before.reserved >= 100_000);
  assert.equal(during.driverAllocs - before.driverAllocs, 1);
  buffer.dispose();
  buffer.dispose();
  const after = device.stats();
  assert.equal(after.reserved, before.reserved);
  assert.equal(after.driverFrees - before.driverFrees, 1);
  assert.ok(after.reservedPeak >= during.reserved);
});

test("Device.createBuffer() rejects sizes that are no positive safe integers", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  for (const bytes of [0, -1, 1.5, Number.NaN, Number.POSITIVE_INFINITY, 2 ** 53, "8", 8n]) {
    assert.throws(
      () => device.createBuffer(bytes as number),
      { code: "BAD_ARGUMENT" },
      String(bytes),
    );
  }
});

test("Device.createBuffer() reports memory that the system does not have", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  const before = device.stats();
  assert.throws(() => device.createBuffer(2 ** 50), {
    code: "OUT_OF_MEMORY",
    message: /^Device\.createBuffer: /,
    details: { requested: 2 ** 50 },
  });
  assert.equal(device.stats().reserved, before.reserved);
  device.createBuffer(4096).dispose();
});

test("Device that was disposed refuses every use, and so does what lives on it", async () => {
  const device = await Device.open("cpu", { threads: 1 });
  const stream = device.createStream();
  const event = device.createEvent();
  const buffer = device.createBuffer(64);
  const host = device.createPinnedBuffer(64);
  const pool = device.createPool();
  const block = pool.alloc(64, { stream });
  await device.dispose();
  await device.dispose();
  assert.equal(device.disposed, true);
  const uses: Record<string, () => unknown> = {
    info: () => device.info(),
    stats: () => device.stats(),
    createStream: () => device.createStream(),
    createBuffer: () => device.createBuffer(1),
    copy: () => stream.copy(buffer, host),
    query: () => stream.query(),
    event: () => event.query(),
    view: () => host.view(Uint8Array),
    alloc: () => pool.alloc(1, { stream }),
    poolStats: () => pool.stats(),
  };
  for (const [name, use] of Object.entries(uses)) assert.throws(use, { code: "DISPOSED" }, name);
  await assert.rejects(stream.done(), {
    code: "DISPOSED",
    message: /^Stream: its Device "cpu" was disposed/,
  });
  for (const handle of [block, pool, host, buffer, event]) handle.dispose();
  await stream.dispose();
});

test("Device may be disposed before and after what lives on it, in any order", async () => {
  for (let round = 0; round < 24; round++) {
    const device = await Device.open("cpu", { threads: 1 });
    const stream = device.createStream();
    const pool = device.createPool();
    const parts: (() => unknown)[] = [
      () => device.dispose(),
      () => stream.dispose(),
      () => pool.dispose(),
    ];
    const block = pool.alloc(1024, { stream });
    stream.fill(block, 1);
    parts.push(() => block.dispose());
    const order = permutation(parts.length, round);
    for (const index of order) await parts[index]?.();
  }
});

/** The k-th order of 0 .. n - 1. */
function permutation(n: number, k: number): number[] {
  const rest = Array.from({ length: n }, (_, index) => index);
  const order: number[] = [];
  let number = k;
  for (let left = n; left > 0; left--) {
    order.push(...rest.splice(number % left, 1));
    number = Math.floor(number / left);
  }
  return order;
}
