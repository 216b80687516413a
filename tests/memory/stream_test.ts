import assert from "node:assert/strict";
import { test } from "node:test";
import { Device, type PinnedBuffer } from "../../src/api/memory/mod.ts";
import { SLOW } from "../ffi/support.ts";

/** Bytes 0, 1, 2, ... of a host buffer. */
function count(host: PinnedBuffer): Uint8Array {
  const bytes = host.view(Uint8Array);
  for (let i = 0; i < bytes.length; i++) bytes[i] = i;
  return bytes;
}

test("Stream.copy() moves bytes to the device and back", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using host = device.createPinnedBuffer(256);
  using back = device.createPinnedBuffer(256);
  using buffer = device.createBuffer(256);
  const bytes = count(host);
  stream.copy(buffer, host);
  stream.copy(back, buffer);
  await stream.done();
  assert.deepEqual(back.view(Uint8Array), bytes);
});

test("Stream.copy() honours sizes and offsets", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using host = device.createPinnedBuffer(256);
  using back = device.createPinnedBuffer(64);
  using buffer = device.createBuffer(512);
  count(host);
  back.view(Uint8Array).fill(0xee);
  stream.copy(buffer, host, { bytes: 100, dstOffset: 300, srcOffset: 50 });
  stream.copy(back, buffer, { bytes: 3, dstOffset: 1, srcOffset: 399 - 2 });
  stream.copy(back, buffer, { bytes: 0, dstOffset: 64, srcOffset: 512 });
  await stream.done();
  assert.deepEqual([...back.view(Uint8Array, 0, 5)], [0xee, 147, 148, 149, 0xee]);
});

test("Stream.copy() without a size copies what the source holds", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using small = device.createPinnedBuffer(16);
  using large = device.createPinnedBuffer(64);
  count(small);
  stream.copy(large, small, { srcOffset: 4, dstOffset: 52 });
  await stream.done();
  assert.equal(large.view(Uint8Array)[63], 15);
  assert.throws(() => stream.copy(small, large), {
    code: "BAD_ARGUMENT",
    message: /^Stream\.copy: the range leaves dst: 64 bytes from byte 0 on, "pinned" has 16: /,
  });
});

test("Stream.copy() and fill() reject bad ranges, values and objects", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using a = device.createBuffer(64);
  using b = device.createBuffer(64);
  const bad: Record<string, () => void> = {
    tooMany: () => stream.copy(a, b, { bytes: 65 }),
    pastEnd: () => stream.copy(a, b, { bytes: 33, srcOffset: 32 }),
    negative: () => stream.copy(a, b, { bytes: -1 }),
    fraction: () => stream.copy(a, b, { bytes: 1.5 }),
    offset: () => stream.copy(a, b, { bytes: 1, dstOffset: 64 }),
    huge: () => stream.copy(a, b, { bytes: 1, srcOffset: 2 ** 53 }),
    object: () => stream.copy(a, new Uint8Array(64) as never),
    nothing: () => stream.copy(a, undefined as never),
    value: () => stream.fill(a, 256),
    valueFraction: () => stream.fill(a, 0.5),
    fillPastEnd: () => stream.fill(a, 0, { offset: 60, bytes: 5 }),
    event: () => stream.record({} as never),
  };
  for (const [name, use] of Object.entries(bad)) assert.throws(use, { code: "BAD_ARGUMENT" }, name);
});

test("Stream refuses what belongs to another device", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using other = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using mine = device.createBuffer(64);
  using theirs = other.createBuffer(64);
  using event = other.createEvent();
  assert.throws(() => stream.copy(mine, theirs), {
    code: "BAD_ARGUMENT",
    message: /another device/,
  });
  assert.throws(() => stream.waitEvent(event), { code: "BAD_ARGUMENT", message: /another device/ });
});

test("Stream.fill() sets a range of bytes", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using host = device.createPinnedBuffer(16);
  stream.fill(host, 1);
  stream.fill(host, 255, { offset: 4, bytes: 3 });
  stream.fill(host, 2, { offset: 15 });
  await stream.done();
  assert.deepEqual(
    [...host.view(Uint8Array)],
    [1, 1, 1, 1, 255, 255, 255, 1, 1, 1, 1, 1, 1, 1, 1, 2],
  );
});

test("Stream runs its work in order", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using host = device.createPinnedBuffer(1 << 16);
  using buffer = device.createBuffer(1 << 16);
  for (let value = 0; value < 200; value++) stream.fill(buffer, value);
  stream.copy(host, buffer);
  stream.fill(buffer, 255);
  await stream.done();
  assert.equal(stream.query(), true);
  assert.ok(host.view(Uint8Array).every((byte) => byte === 199));
});

test("Stream.done() resolves once per call, each after what came before it", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream({ priority: -1 });
  using host = device.createPinnedBuffer(1 << 20);
  const seen: number[] = [];
  const waits = Array.from({ length: 50 }, (_, index) => {
    stream.fill(host, index);
    return stream.done().then(() => seen.push(index));
  });
  await Promise.all(waits);
  assert.deepEqual(
    seen,
    Array.from({ length: 50 }, (_, index) => index),
  );
});

test("Stream.waitEvent() orders two streams", SLOW, async () => {
  await using device = await Device.open("cpu");
  await using producer = device.createStream();
  await using consumer = device.createStream();
  using buffer = device.createBuffer(1 << 22);
  using host = device.createPinnedBuffer(1 << 22);
  for (let round = 1; round <= 10; round++) {
    using ready = device.createEvent();
    producer.fill(buffer, round);
    producer.record(ready);
    consumer.waitEvent(ready);
    consumer.copy(host, buffer);
    using read = device.createEvent();
    consumer.record(read);
    producer.waitEvent(read);
    producer.fill(buffer, 0);
    await consumer.done();
    assert.ok(host.view(Uint8Array).every((byte) => byte === round));
  }
});

test("Event.done() and query() tell when a point was reached", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using buffer = device.createBuffer(1 << 24);
  using start = device.createEvent();
  using end = device.createEvent();
  assert.equal(end.query(), true); // never recorded
  stream.record(start);
  for (let round = 0; round < 20; round++) stream.fill(buffer, round);
  stream.record(end);
  await end.done();
  assert.equal(end.query(), true);
  assert.equal(start.query(), true);
  await end.done();
  assert.ok(end.elapsed(start) > 0);
  await using other = await Device.open("cpu", { threads: 1 });
  using foreign = other.createEvent();
  assert.throws(() => end.elapsed(foreign), { code: "BAD_ARGUMENT" });
});

test(
  "Stream.capture() records work that Graph.launch() runs any number of times",
  SLOW,
  async () => {
    await using device = await Device.open("cpu");
    await using stream = device.createStream();
    await using other = device.createStream();
    using buffer = device.createBuffer(1024);
    using host = device.createPinnedBuffer(1024);
    host.view(Uint8Array).fill(3);
    using graph = stream.capture(() => {
      stream.copy(buffer, host, { bytes: 512 });
      stream.fill(buffer, 4, { offset: 512 });
      stream.copy(host, buffer, { bytes: 512, srcOffset: 512, dstOffset: 0 });
    });
    assert.equal(graph.nodes, 3);
    await stream.done();
    assert.equal(host.view(Uint8Array)[0], 3, "recording runs nothing");
    graph.launch(stream);
    await stream.done();
    assert.equal(host.view(Uint8Array)[0], 4);
    host.view(Uint8Array).fill(5);
    graph.launch(other);
    graph.launch(other);
    await other.done();
    assert.equal(host.view(Uint8Array)[0], 4);
    assert.equal(host.view(Uint8Array)[1023], 5);
  },
);

test("Stream.capture() ends the recording when the function throws", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using buffer = device.createBuffer(64);
  const fail = () => {
    stream.fill(buffer, 1);
    throw new RangeError("planted");
  };
  assert.throws(() => stream.capture(fail), RangeError);
  using graph = stream.capture(() => stream.fill(buffer, 2));
  assert.equal(graph.nodes, 1);
  assert.throws(() => stream.capture(() => stream.capture(() => {})), { code: "BAD_ARGUMENT" });
  await stream.done();
});

test("Graph.launch() refuses a recording whose memory is gone", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  const buffer = device.createBuffer(64, { label: "gone" });
  using graph = stream.capture(() => stream.fill(buffer, 1));
  buffer.dispose();
  assert.throws(() => graph.launch(stream), { code: "DISPOSED", message: /DeviceBuffer "gone"/ });
});

test("Stream that was disposed refuses every use; its work has ended", async () => {
  await using device = await Device.open("cpu");
  using host = device.createPinnedBuffer(1 << 22);
  const stream = device.createStream();
  for (let value = 0; value <= 20; value++) stream.fill(host, value);
  await stream.dispose();
  await stream.dispose();
  assert.equal(host.view(Uint8Array)[(1 << 22) - 1], 20);
  assert.throws(() => stream.fill(host, 1), {
    code: "DISPOSED",
    message: /^Stream: it was disposed/,
  });
  await assert.rejects(stream.done(), { code: "DISPOSED" });
});

test("Memory may be disposed while enqueued work uses it", async () => {
  await using device = await Device.open("cpu");
  await using stream = device.createStream();
  using pool = device.createPool();
  using result = device.createPinnedBuffer(1 << 20);
  const baseline = device.stats();
  for (let round = 0; round < 20; round++) {
    using source = device.createPinnedBuffer(1 << 20);
    using middle = round % 2 === 0 ? device.createBuffer(1 << 20) : pool.alloc(1 << 20, { stream });
    source.view(Uint8Array).fill(round);
    for (let again = 0; again < 5; again++) stream.copy(middle, source);
    stream.copy(result, middle);
    stream.copy(result, middle, { bytes: 1 << 19, dstOffset: 1 << 19 });
    source.dispose();
    middle.dispose();
    await stream.done();
    assert.ok(
      result.view(Uint8Array).every((byte) => byte === round),
      `round ${round}`,
    );
  }
  pool.dispose();
  await stream.done();
  assert.equal(device.stats().pinned, baseline.pinned);
});
