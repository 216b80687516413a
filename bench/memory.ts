/** Memory primitives with mitata: `bun bench/memory.ts`, `deno run -A bench/memory.ts`. */
import { bench, do_not_optimize, group, run } from "mitata";
import { Device } from "../mod.ts";

await using device = await Device.open("auto");
await using stream = device.createStream();
await using other = device.createStream();
using pool = device.createPool();
using pinned = device.createPinnedPool();
using arena = device.createScratchArena(8 << 20, { stream });
using small = device.createPinnedBuffer(4096);
using large = device.createPinnedBuffer(16 << 20);
using memory = device.createBuffer(16 << 20);
using event = device.createEvent();
pool.alloc(1 << 20, { stream }).dispose();
pinned.acquire(1 << 20).dispose();
console.log(`device: ${device.kind}`);

group("allocate and give back", () => {
  bench("pool 1 MiB", () => pool.alloc(1 << 20, { stream }).dispose());
  bench("scratch 1 MiB in a scope", () => {
    using _scope = arena.scope();
    do_not_optimize(arena.alloc(1 << 20));
  });
  bench("pinned pool 1 MiB", () => pinned.acquire(1 << 20).dispose());
  bench("device buffer 1 MiB", () => device.createBuffer(1 << 20).dispose());
  bench("pinned buffer 1 MiB", () => device.createPinnedBuffer(1 << 20).dispose());
});

group("copies", () => {
  bench("4 KiB to the device, done", async () => {
    stream.copy(memory, small);
    await stream.done();
  });
  bench("16 MiB to the device, done", async () => {
    stream.copy(memory, large);
    await stream.done();
  });
  bench("16 MiB to the host, done", async () => {
    stream.copy(large, memory);
    await stream.done();
  });
});

group("events", () => {
  bench("record", () => stream.record(event));
  bench("record, wait in another stream", () => {
    stream.record(event);
    other.waitEvent(event);
  });
  bench("query", () => do_not_optimize(event.query()));
  bench("stats of the pool", () => do_not_optimize(pool.stats()));
});

await run();
