/**
 * A training step at real model shapes on a GPU: tokens per second, planned bytes, the driver's bytes. Random weights of a
 * sensible scale; the data is random, so the loss itself says nothing.
 *
 *     bun bench/gpu_step.ts [result.json [timed|estimated]]
 */
import process from "node:process";
import type { SavePolicy } from "../src/api/plan/save_points.ts";
import { planRun } from "../src/api/train/run_plan.ts";
import { shapeSpec } from "../tests/shapes/session.ts";
import { shapeDocuments, shapesOf } from "./gpu_shapes.ts";
import { measureRun } from "./random_session.ts";
import { writeResult } from "./results.ts";

const POLICIES: readonly SavePolicy[] = ["keep", "checkpoint"];
const device = "cuda:0";

const rows: Record<string, unknown>[] = [];
for (const shape of shapesOf(device)) {
  const { model, documents, tokens } = shape;
  for (const policy of POLICIES) {
    const spec = shapeSpec(shape, { device });
    // Where memory counts, logits are made in smaller chunks: beside the layer inputs they are the peak.
    const lossChunkTokens = policy === "checkpoint" ? 512 : 1024;
    const run = planRun({ ...spec, dims: { ...spec.dims, lossChunkTokens } }, policy);
    const measured = await measureRun(run, shapeDocuments(shape), {
      device,
      warm: 3,
      steps: 10,
      algorithms: process.argv[3] ?? "timed",
    });
    const row = {
      model,
      batch: `${documents} x ${tokens}`,
      policy,
      tokensPerSecond: measured.tokensPerSecond,
      stepMs: measured.seconds * 1000,
      planGiB: measured.planBytes / 2 ** 30,
      driverGiB: (measured.driverEnd ?? 0) / 2 ** 30,
      driverMoved: measured.driverMoved,
      loss: measured.losses.at(-1) as number,
    };
    rows.push(row);
    console.log(
      `${model} ${row.batch} ${policy}: ${Math.round(row.tokensPerSecond)} tokens/s, ${row.stepMs.toFixed(1)} ms, ` +
        `plan ${row.planGiB.toFixed(2)} GiB, driver ${row.driverGiB.toFixed(2)} GiB, moved ${row.driverMoved} B, loss ${row.loss.toFixed(3)}`,
    );
  }
}
const file = process.argv[2];
if (file !== undefined) await writeResult(file, { bench: "gpu_step", rows });
