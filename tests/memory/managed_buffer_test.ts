import assert from "node:assert/strict";
import { test } from "node:test";
import { Device, kernels, type MemoryAdvice } from "../../src/api/mod.ts";

const ADVICE: MemoryAdvice[] = [
  "read-mostly",
  "not-read-mostly",
  "prefer-device",
  "prefer-host",
  "no-preference",
  "accessed-by-device",
  "not-accessed-by-device",
];

test("ManagedBuffer is reached by host and kernels through one memory", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  using table = device.createManagedBuffer(4096, { label: "table" });
  table.view(Float32Array).fill(3);
  for (const advice of ADVICE) table.advise(advice);
  table.prefetch("device", { stream });
  kernels.scale(table.as("f32", [1024]), table.as("f32", [1024]), 2, { stream });
  table.prefetch("host", { stream, offset: 1024, bytes: 1024 });
  table.prefetch("host", { stream, offset: 4096 });
  await stream.done();
  assert.ok(table.view(Float32Array).every((value) => value === 6));
  assert.equal(table.label, "table");
  const view = table.view(Uint8Array);
  table.dispose();
  assert.equal(view.length, 0);
  assert.throws(() => table.advise("read-mostly"), { code: "DISPOSED" });
  assert.equal(device.memoryStats().managed.count, 0);
});

// #44 and six more. Mutant: let has_room of csrc/cpu/host_memory.c return true.
test("ManagedBuffer is refused where it is larger than what is free", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  const free = Number(device.info().memoryFree);
  assert.throws(() => device.createManagedBuffer(free + 1), {
    code: "OUT_OF_MEMORY",
    message: /^Device\.createManagedBuffer: lm_managed_reserve: .*requested=/,
    details: { requested: free + 1 },
  });
  assert.deepEqual(
    [device.memoryStats().managed.count, device.memoryStats().managed.failures],
    [0, 1],
  );
  device.createManagedBuffer(4096).dispose();
});

test("ManagedBuffer checks its arguments", async () => {
  await using device = await Device.open("cpu", { threads: 1 });
  await using other = await Device.open("cpu", { threads: 1 });
  await using stream = device.createStream();
  await using foreign = other.createStream();
  using table = device.createManagedBuffer(4096);
  const bad: (() => unknown)[] = [
    () => device.createManagedBuffer(0),
    () => table.advise("fast" as never),
    () => table.prefetch("cpu" as never, { stream }),
    () => table.prefetch("host", undefined as never),
    () => table.prefetch("host", { stream: foreign }),
    () => table.prefetch("host", { stream, offset: 4097 }),
    () => table.prefetch("host", { stream, offset: 1, bytes: 4096 }),
    () => table.view(Float32Array, 2),
  ];
  for (const use of bad) assert.throws(use, { code: "BAD_ARGUMENT" });
});
