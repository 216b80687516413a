/**
 * What a call costs the JavaScript thread.
 *
 *     bun bench/launch.ts
 *     deno run -A bench/launch.ts
 *
 * Launches are timed in short bursts with a wait between them, so that a full queue never holds the caller up; everything
 * else is timed by mitata.
 */
import { bench, do_not_optimize, run } from "mitata";
import { Device, kernels } from "../mod.ts";
import { launchPacked, packKernelArgs } from "../src/api/kernels/launch.ts";
import { addressOf } from "../src/api/memory/internal.ts";

const BURST = 200;
const BURSTS = 1000;

await using device = await Device.open("cpu", { threads: 1 });
await using stream = device.createStream();
using buffer = device.createBuffer(4096);
using pool = device.createPool();
const x = buffer.as("f32", [1]);
const fields = { type: 0, y: addressOf(buffer), x: addressOf(buffer), n: 1, factor: 1 };
const packed = packKernelArgs("lm_scale", fields);

/** Nanoseconds per call: the median burst. */
async function burst(call: () => void): Promise<number> {
  const times: number[] = [];
  for (let round = 0; round < BURSTS; round++) {
    const start = performance.now();
    for (let i = 0; i < BURST; i++) call();
    times.push(((performance.now() - start) * 1e6) / BURST);
    await stream.done();
  }
  return times.sort((a, b) => a - b)[BURSTS / 2] as number;
}

const rows: Record<string, () => void> = {
  "launchPacked (enqueues lm_scale)": () => launchPacked(device, "lm_scale", packed, stream),
  "kernels.scale (checks, packs, enqueues)": () => kernels.scale(x, x, 1, { stream }),
  "stream.fill": () => stream.fill(buffer, 0, { bytes: 64 }),
};
for (const [name, call] of Object.entries(rows)) {
  const median = await burst(call);
  console.log(`${name.padEnd(44)}${median.toFixed(0).padStart(8)} ns`);
}

bench("packKernelArgs", () => do_not_optimize(packKernelArgs("lm_scale", fields)));
bench("pool.alloc + dispose", () => pool.alloc(4096, { stream, label: "x" }).dispose());
bench("device.createEvent + dispose", () => device.createEvent().dispose());
bench("buffer.as", () => do_not_optimize(buffer.as("f32", [4, 8])));
await run({ format: "mitata" });
