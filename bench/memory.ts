/**
 * What the memory primitives cost, with mitata, on either runtime:
 *
 *     bun bench/memory.ts [--device cuda:0] [--out bench/results/memory.json]
 *     deno run -A bench/memory.ts
 *
 * On a GPU it also runs the C part, `build/tests/cuda_memory` (`cmake --build build --target cuda_benches`), which measures
 * our calls beside those of the CUDA runtime.
 */
import { spawnSync } from "node:child_process";
import process from "node:process";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { bench, do_not_optimize, group, run } from "mitata";
import { adviseMemory, Device, type DeviceKind, GradScaler } from "../mod.ts";
import { writeResult } from "./results.ts";

const { values } = parseArgs({
  args: process.argv.slice(2),
  options: { device: { type: "string", default: "auto" }, out: { type: "string" } },
});
await using device = await Device.open(values.device as DeviceKind);
await using stream = device.createStream();
await using other = device.createStream();
const cuda = device.kind.startsWith("cuda");
const large = (cuda ? 256 : 16) << 20;
const copied = `${large >> 20} MiB`;
using pool = device.createPool();
using pinned = device.createPinnedPool();
using arena = device.createScratchArena(8 << 20, { stream });
using small = device.createPinnedBuffer(4096);
using host = device.createPinnedBuffer(large);
using memory = device.createBuffer(large);
using managed = device.createManagedBuffer(1 << 20);
using event = device.createEvent();
pool.alloc(1 << 20, { stream }).dispose();
pinned.acquire(1 << 20).dispose();

group("allocate and give back", () => {
  bench("pool alloc + dispose, 1 MiB", () => pool.alloc(1 << 20, { stream }).dispose());
  bench("scratch alloc in a scope, 1 MiB", () => {
    using _scope = arena.scope();
    do_not_optimize(arena.alloc(1 << 20));
  });
  bench("pinned pool acquire + dispose, 1 MiB", () => pinned.acquire(1 << 20).dispose());
  bench("device buffer, 1 MiB", () => device.createBuffer(1 << 20).dispose());
  bench("pinned buffer, 1 MiB", () => device.createPinnedBuffer(1 << 20).dispose());
  bench("managed buffer, 1 MiB", () => device.createManagedBuffer(1 << 20).dispose());
});

group("copies", () => {
  bench("4 KiB to the device, done", async () => {
    stream.copy(memory, small, { bytes: 4096 });
    await stream.done();
  });
  bench(`${copied} to the device, done`, async () => {
    stream.copy(memory, host);
    await stream.done();
  });
  bench(`${copied} to the host, done`, async () => {
    stream.copy(host, memory);
    await stream.done();
  });
  bench("managed prefetch to the device, 1 MiB, done", async () => {
    managed.prefetch("device", { stream });
    await stream.done();
  });
});

group("streams and events", () => {
  bench("record", () => stream.record(event));
  bench("record, wait in another stream", () => {
    stream.record(event);
    other.waitEvent(event);
  });
  bench("query an event", () => do_not_optimize(event.query()));
});

group("statistics", () => {
  bench("pool.stats()", () => do_not_optimize(pool.stats()));
  bench("device.memoryStats()", () => do_not_optimize(device.memoryStats()));
  bench("device.snapshot()", () => do_not_optimize(device.snapshot()));
  const use = { bytes: 8 << 20, kernels: false, host: "writes", copies: "often" } as const;
  bench("adviseMemory()", () => do_not_optimize(adviseMemory(use)));
});

const values32 = device.createBuffer(1 << 20);
const gradients = values32.as("f32", [1 << 18]);
const loss = memory.as("f32", [1]);
stream.fill(values32, 0);
using scaler = GradScaler.open(device);
group("gradient scaler", () => {
  bench("scale, check 262,144 gradients, update, done", async () => {
    scaler.scale(loss, loss, { stream });
    scaler.step("all", { gradients }, () => {}, { stream });
    scaler.update({ stream });
    await stream.done();
  });
});

/** A line of the result: the median and the least in nanoseconds, and GB/s where bytes are copied. */
interface Row {
  readonly name: string;
  readonly ns?: number;
  readonly leastNs?: number;
  readonly gbPerSecond?: number;
}

/** The part in C, for a GPU; none where it is not built. */
function rowsInC(): Row[] {
  const program = fileURLToPath(new URL("../build/tests/cuda_memory", import.meta.url));
  const { status, stdout } = spawnSync(program, { encoding: "utf8" });
  if (status !== 0) {
    console.log(`no figures in C: ${stdout || "build them with --target cuda_benches"}`);
    return [];
  }
  const lines = stdout.trim().split("\n");
  return lines.map((line) => JSON.parse(line));
}

console.log(`device: ${device.kind}`);
const { benchmarks } = await run({ format: "quiet" });
const rows: Row[] = benchmarks.flatMap(({ runs, alias }) => {
  const { p50: ns, min: leastNs } = runs[0]?.stats ?? {};
  if (ns === undefined || leastNs === undefined) return [];
  const copies = alias.startsWith(`${copied} to`);
  return [{ name: alias, ns, leastNs, ...(copies ? { gbPerSecond: large / ns } : {}) }];
});
if (cuda) rows.push(...rowsInC());
const cell = (value: number | undefined, digits = 0) => (value?.toFixed(digits) ?? "").padStart(14);
console.log(
  `\n${"".padEnd(50)}${["median ns", "least ns", "GB/s"].map((t) => t.padStart(14)).join("")}`,
);
for (const { name, ns, leastNs, gbPerSecond } of rows) {
  console.log(name.padEnd(50) + cell(ns) + cell(leastNs) + cell(gbPerSecond, 1));
}
if (values.out !== undefined) {
  await writeResult(values.out, { device: device.info(), rows });
}
