import assert from "node:assert/strict";
import { test } from "node:test";
import { Device, LoramemError } from "../../src/api/mod.ts";

// Mutants: take the time of begin() and end() from the host's clock; swap the events of elapsed().
test("PerformanceMonitor times what the stream did, not what the host did", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [20_000] });
  await using stream = device.createStream();
  using buffer = device.createBuffer(4096);
  using monitor = device.createPerformanceMonitor({ peakFlops: 1e9 });
  monitor.begin(stream);
  stream.fill(buffer, 1); // 20 ms late
  monitor.end(stream, { tokens: 100, flops: 1e6 });
  assert.equal(monitor.take(), null, "not ended, and nobody waits");
  await stream.done();
  await new Promise((resolve) => setTimeout(resolve, 30)); // the host dawdles
  const step = monitor.take();
  assert.ok(step !== null);
  assert.ok(step.seconds >= 0.019, `${step.seconds} s`);
  assert.equal(step.tokensPerSecond, 100 / step.seconds);
  assert.equal(step.modelFlopUtilization, 1e6 / step.seconds / 1e9);
  assert.equal(monitor.take(), null);

  for (let index = 0; index < 2; index++) {
    monitor.begin(stream);
    monitor.end(stream, { tokens: 50 });
  }
  await stream.done();
  while (monitor.take() !== null);
  const { steps, tokens, seconds, modelFlopUtilization, memory } = monitor.summary();
  assert.deepEqual([steps, tokens], [3, 200]);
  assert.ok(seconds >= step.seconds);
  assert.equal(modelFlopUtilization, null, "the arithmetic of two steps is not known");
  assert.deepEqual([memory.reserved, memory.driver], [device.stats().reserved, null]);
});

test("PerformanceMonitor leaves out steps that begin while too many are under way", async () => {
  await using device = await Device.open("sim", { threads: 1, delays: [5000] });
  await using stream = device.createStream();
  using buffer = device.createBuffer(4096);
  using monitor = device.createPerformanceMonitor();
  for (let index = 0; index < 7; index++) {
    monitor.begin(stream);
    stream.fill(buffer, index);
    monitor.end(stream, { tokens: 1 });
  }
  await stream.done();
  while (monitor.take() !== null);
  assert.equal(monitor.summary().steps, 4);
  assert.equal(monitor.summary().modelFlopUtilization, null);
});

test("PerformanceMonitor refuses wrong calls", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  const bad = (text: RegExp) => (error: unknown) =>
    error instanceof LoramemError && error.code === "BAD_ARGUMENT" && text.test(error.message);
  for (const peakFlops of [0, -1, Number.NaN, "fast" as never]) {
    assert.throws(() => device.createPerformanceMonitor({ peakFlops }), bad(/peakFlops must be/));
  }
  const monitor = device.createPerformanceMonitor();
  assert.throws(() => monitor.end(stream, { tokens: 1 }), bad(/no step has begun/));
  monitor.begin(stream);
  assert.throws(() => monitor.begin(stream), bad(/has begun already/));
  assert.throws(() => monitor.end(stream, { tokens: Number.NaN }), bad(/tokens must be/));
  monitor.end(stream, { tokens: 1 });
  monitor[Symbol.dispose]();
  monitor[Symbol.dispose]();
  assert.throws(() => monitor.begin(stream), { code: "DISPOSED" });
});
