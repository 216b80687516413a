/**
 * Bytes that our pool holds over the lower bound on allocation traces of LoRA steps, and the traces for others:
 *
 *     bun tests/peers/allocator_trace.ts [--device cuda:0] --out traces.json
 *     python3 tests/peers/allocator_trace.py traces.json
 */
import { writeFileSync } from "node:fs";
import process from "node:process";
import { parseArgs } from "node:util";
import { Device, type DeviceKind } from "../../src/api/mod.ts";
import { lowerBound, plannedTrace, replay, traces } from "../memory/traces.ts";

const { values } = parseArgs({
  args: process.argv.slice(2),
  options: { device: { type: "string", default: "auto" }, out: { type: "string" } },
});
await using device = await Device.open(values.device as DeviceKind);
const all = [...traces(), plannedTrace("Qwen2.5-0.5B", "checkpoint", 3)];
for (const trace of all) {
  await using stream = device.createStream();
  using pool = device.createPool();
  const least = lowerBound(trace);
  const reserved = replay(trace, pool, stream);
  const excess = (100 * (reserved / least - 1)).toFixed(1);
  console.log(JSON.stringify({ allocator: "loramem", trace: trace.name, least, reserved, excess }));
  await stream.done();
}
if (values.out !== undefined) writeFileSync(values.out, JSON.stringify(all));
