/**
 * The same run twice at real model shapes on a GPU, the second one with the algorithms that the first one timed: the
 * adapters must be equal bit by bit.
 *
 *     bun bench/gpu_repeat.ts [result.json]
 */
import { createHash } from "node:crypto";
import process from "node:process";
import { Device } from "../src/api/memory/mod.ts";
import { exportAdapters } from "../src/api/train/adapter_state.ts";
import { SETTINGS } from "./demo_session.ts";
import { documentsOf, openShape, SHAPES, type Shape, specOfShape } from "./gpu_model.ts";
import { writeResult } from "./results.ts";

const STEPS = 50;

/** Trains for some steps; gives a hash of the adapters, and what was chosen. */
async function train(shape: Shape, algorithms: string) {
  await using device = await Device.open("cuda:0");
  const spec = specOfShape(shape, "keep");
  const session = await openShape(device, spec, "keep", algorithms);
  const documents = documentsOf(shape, spec);
  let loss = 0;
  for (let step = 0; step < STEPS; step++) {
    ({ loss } = await session.trainStep(documents, SETTINGS));
  }
  const hash = createHash("sha256");
  for (const { path, a, b } of await exportAdapters(session.executor, session.run))
    hash.update(path).update(a).update(b);
  const chosen = session.executor.algorithms;
  await session.dispose();
  return { loss, chosen, hash: hash.digest("hex").slice(0, 16) };
}

const rows: Record<string, unknown>[] = [];
for (const shape of SHAPES) {
  const [model, count, tokens] = shape;
  const first = await train(shape, "timed");
  const second = await train(shape, first.chosen);
  const timed = await train(shape, "timed");
  const equal = first.hash === second.hash && first.loss === second.loss;
  rows.push({
    model,
    batch: `${count} x ${tokens}`,
    steps: STEPS,
    equal,
    equalTimedAgain: first.hash === timed.hash,
    hash: first.hash,
    algorithms: first.chosen.split("\n"),
  });
  console.log(
    `${model}: ${equal ? "the same bits" : "OTHER BITS"} after ${STEPS} steps, loss ${first.loss} and ${second.loss}; ` +
      `timed again: ${first.hash === timed.hash ? "the same" : "other"} bits`,
  );
  for (const line of first.chosen.split("\n")) console.log(`  ${line.slice(0, 90)}`);
}
const file = process.argv[2];
if (file !== undefined) await writeResult(file, { bench: "gpu_repeat", rows });
