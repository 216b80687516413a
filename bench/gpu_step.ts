/**
 * A training step at real model shapes on a GPU: tokens per second, planned bytes, the driver's bytes. Random weights of a sensible scale; the data is random, so the loss itself says nothing.
 *
 *     bun bench/gpu_step.ts [result.json [timed|estimated]]
 */
import process from "node:process";
import { Device } from "../src/api/memory/mod.ts";
import type { SavePolicy } from "../src/api/plan/save_points.ts";
import { SETTINGS } from "./demo_session.ts";
import { documentsOf, openShape, SHAPES, specOfShape } from "./gpu_model.ts";
import { writeResult } from "./results.ts";

const POLICIES: readonly SavePolicy[] = ["keep", "checkpoint"];
const [WARM, STEPS] = [3, 10];

const rows: Record<string, unknown>[] = [];
for (const shape of SHAPES) {
  const [model, count, tokens] = shape;
  for (const policy of POLICIES) {
    const spec = specOfShape(shape, policy);
    const documents = documentsOf(shape, spec);
    await using device = await Device.open("cuda:0");
    const free = () => Number(device.info().memoryFree);
    const before = free();
    const session = await openShape(device, spec, policy, process.argv[3] ?? "timed");
    const seconds: number[] = [];
    const driver: number[] = [];
    let loss = 0;
    for (let step = 0; step < WARM + STEPS; step++) {
      const start = performance.now();
      ({ loss } = await session.trainStep(documents, SETTINGS));
      if (step >= WARM) seconds.push((performance.now() - start) / 1000);
      driver.push(before - free());
    }
    const median = seconds.toSorted((a, b) => a - b)[STEPS >> 1] as number;
    const { deviceBytes } = session.run.plan;
    const row = {
      model,
      batch: `${count} x ${tokens}`,
      policy,
      tokensPerSecond: (count * tokens) / median,
      stepMs: median * 1000,
      planGiB: deviceBytes / 2 ** 30,
      driverGiB: (driver.at(-1) ?? 0) / 2 ** 30,
      driverMoved: Math.max(...driver.slice(1)) - Math.min(...driver.slice(1)),
      loss,
    };
    rows.push(row);
    console.log(
      `${model} ${row.batch} ${policy}: ${Math.round(row.tokensPerSecond)} tokens/s, ${row.stepMs.toFixed(1)} ms, ` +
        `plan ${row.planGiB.toFixed(2)} GiB, driver ${row.driverGiB.toFixed(2)} GiB, moved ${row.driverMoved} B, loss ${loss.toFixed(3)}`,
    );
    await session.dispose();
  }
}
const file = process.argv[2];
if (file !== undefined) await writeResult(file, { bench: "gpu_step", rows });
