import assert from "node:assert/strict";
import { test } from "node:test";
import { hostView } from "../../src/api/memory/internal.ts";
import { Device } from "../../src/api/memory/mod.ts";

test("PinnedBuffer.view() looks at one memory, whatever the type", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using host = device.createPinnedBuffer(4096);
  const floats = host.view(Float32Array);
  assert.equal(floats.length, 1024);
  floats.fill(1);
  assert.equal(host.view(Uint32Array, 8, 2)[1], 0x3f800000);
  assert.equal(host.view(Uint8Array, 4096).length, 0);
  assert.equal(host.view(Float64Array, 0, 0).length, 0);
  host.view(Uint8Array)[3] = 0xbf;
  assert.equal(floats[0], -1);
});

test("PinnedBuffer.view() rejects windows outside the buffer", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using host = device.createPinnedBuffer(100);
  assert.equal(host.view(Float32Array).length, 25);
  assert.equal(host.view(Float64Array).length, 12);
  for (const [offset, length] of [
    [4, 25],
    [-4, 1],
    [2, 1],
    [101, 0],
    [0.5, 1],
    [0, -1],
    [0, 1.5],
  ] as const) {
    const use = () => host.view(Float32Array, offset, length);
    assert.throws(
      use,
      { code: "BAD_ARGUMENT", message: /^PinnedBuffer\.view: / },
      `${offset} ${length}`,
    );
  }
});

test("PinnedBuffer.dispose() detaches every view", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  const host = device.createPinnedBuffer(4096);
  const [bytes, floats] = [host.view(Uint8Array), host.view(Float32Array, 16)];
  host.dispose();
  host.dispose();
  assert.equal(bytes.length, 0);
  assert.equal(floats.length, 0);
  assert.equal(bytes.buffer.detached, true);
  assert.throws(() => host.view(Uint8Array), {
    code: "DISPOSED",
    message: /^PinnedBuffer "pinned": /,
  });
});

test("PinnedBuffer that lost its views to a transfer makes new ones", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using host = device.createPinnedBuffer(64);
  host.view(Uint8Array).fill(7);
  const moved = new Uint8Array(host.view(Uint8Array).buffer.transfer());
  assert.equal(moved[63], 7);
  assert.equal(host.view(Uint8Array)[0], 7);
});

test("Device.createPinnedBuffer() counts its bytes and takes write-combined", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  const before = device.stats().pinned;
  using host = device.createPinnedBuffer(8192, { writeCombined: true, label: "ring" });
  assert.ok(device.stats().pinned - before >= 8192);
  assert.equal(host.label, "ring");
  host.view(Uint8Array).fill(1);
  host.dispose();
  assert.equal(device.stats().pinned, before);
  assert.throws(() => device.createPinnedBuffer(0), { code: "BAD_ARGUMENT" });
});

test("DeviceBuffer.as() describes tensors", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using buffer = device.createBuffer(1024);
  const dense = buffer.as("f32", [2, 4, 8]);
  assert.deepEqual([dense.rows, dense.width, dense.pitch, dense.elements], [8, 8, 8, 64]);
  assert.equal(dense.dense, true);
  assert.equal(String(dense), "f32 [2, 4, 8]");
  const wide = buffer.as("bf16", [4, 8], { pitch: 100, offset: 2 });
  assert.deepEqual([wide.rows, wide.width, wide.pitch, wide.offset], [4, 8, 100, 2]);
  assert.equal(wide.dense, false);
  assert.equal(buffer.as("f64", [1, 3], { pitch: 100 }).dense, true);
  assert.equal(buffer.as("i32", [256]).rows, 1);
});

test("DeviceBuffer.as() takes what just fits, and nothing more", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  using buffer = device.createBuffer(1024, { label: "arena" });
  buffer.as("f32", [4, 16], { pitch: 80 }); // (3 * 80 + 16) * 4 = 1024
  buffer.as("f16", [1], { offset: 1022 });
  assert.throws(() => buffer.as("f32", [4, 17], { pitch: 80 }), {
    code: "BAD_ARGUMENT",
    message:
      /leaves the buffer "arena": f32 \[4, 17\] with pitch 80 at byte 0 ends at byte 1028.* 1024/,
  });
  const bad: [string, number[], { offset?: number; pitch?: number }?][] = [
    ["f16", [1], { offset: 1024 }],
    ["f32", [257]],
    ["f32", [1], { offset: 2 }],
    ["f32", [1], { offset: -4 }],
    ["f32", [2, 8], { pitch: 7 }],
    ["f32", []],
    ["f32", [0]],
    ["f32", [1.5]],
    ["f32", [2 ** 31]],
    ["f32", [2 ** 16, 2 ** 16]],
    ["f8", [1]],
    ["toString", [1]],
  ];
  for (const [dtype, shape, options] of bad) {
    const use = () => buffer.as(dtype as "f32", shape, options);
    assert.throws(
      use,
      { code: "BAD_ARGUMENT", message: /^DeviceBuffer\.as: / },
      `${dtype} [${shape}]`,
    );
  }
});

test("hostView() sees the device memory of the CPU until dispose()", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using pool = device.createPool();
  const block = pool.alloc(1000, { stream });
  const reservation = device.createBuffer(1000);
  for (const buffer of [block, reservation]) {
    stream.fill(buffer, 9);
    await stream.done();
    const view = hostView(buffer, Uint8Array);
    assert.equal(view.length, 1000);
    assert.ok(view.every((byte) => byte === 9));
    buffer.dispose();
    assert.equal(view.length, 0);
  }
});
