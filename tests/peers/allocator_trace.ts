/**
 * Bytes that allocators hold over the lower bound on allocation traces of LoRA steps: ours, and where PyTorch and a GPU are
 * there PyTorch's caching allocator, the same with expandable segments, and `cudaMallocAsync`. Prints a table.
 *
 *     bun tests/peers/allocator_trace.ts [--device cuda:0] [--python python3] [--out table.json]
 */
import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { Device, type DeviceKind } from "../../src/api/mod.ts";
import { lowerBound, plannedTrace, replay, type Trace, traces } from "../memory/traces.ts";

interface Held {
  readonly allocator: string;
  readonly trace: string;
  readonly reserved: number;
}

const { values } = parseArgs({
  args: process.argv.slice(2),
  options: {
    device: { type: "string", default: "auto" },
    python: { type: "string" },
    out: { type: "string" },
  },
});

/** The peers, in processes of their own. */
function peers(python: string, all: readonly Trace[]): Held[] {
  const folder = mkdtempSync(join(tmpdir(), "loramem-traces-"));
  try {
    const file = join(folder, "traces.json");
    writeFileSync(file, JSON.stringify(all));
    const script = fileURLToPath(new URL("allocator_trace.py", import.meta.url));
    const { stdout, stderr } = spawnSync(python, [script, file], { encoding: "utf8" });
    if (stderr) console.error(stderr);
    return stdout.split("\n").flatMap((line) => (line.startsWith("{") ? [JSON.parse(line)] : []));
  } finally {
    rmSync(folder, { recursive: true });
  }
}

await using device = await Device.open(values.device as DeviceKind);
const all = [...traces(), plannedTrace("Qwen2.5-0.5B", "checkpoint", 3)];
const held: Held[] = [];
for (const trace of all) {
  await using stream = device.createStream();
  using pool = device.createPool();
  const reserved = replay(trace, pool, stream);
  held.push({ allocator: "loramem", trace: trace.name, reserved });
  await stream.done();
}
if (values.python !== undefined) held.push(...peers(values.python, all));

const allocators = [...new Set(held.map(({ allocator }) => allocator))];
const table = all.map((trace) => {
  const least = lowerBound(trace);
  const over = allocators.map((allocator) => {
    const one = held.find((row) => row.allocator === allocator && row.trace === trace.name);
    return [allocator, one ? Number((100 * (one.reserved / least - 1)).toFixed(1)) : null] as const;
  });
  return { trace: trace.name, least, percentOver: Object.fromEntries(over) };
});
console.log(
  `${"% over the least".padEnd(36)}${allocators.map((name) => name.padStart(27)).join("")}`,
);
for (const { trace, percentOver } of table) {
  const cells = allocators.map((name) => String(percentOver[name] ?? "-").padStart(27));
  console.log(trace.padEnd(36) + cells.join(""));
}
if (values.out !== undefined) writeFileSync(values.out, `${JSON.stringify(table, null, 2)}\n`);
