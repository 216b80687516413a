/**
 * The same seed gives the same adapters, bit for bit, in the mode whose speed is reported, at shapes that take every fast
 * kernel. LORAMEM_SHAPES names larger ones, such as "0.5B,1B,8B".
 */
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import process from "node:process";
import { test } from "node:test";
import { exportAdapters } from "../../src/api/train/adapter_state.ts";
import { KINDS } from "../train/support.ts";
import { markovBatch } from "./markov.ts";
import {
  freeBytes,
  openShape,
  SETTINGS,
  SHAPES,
  type ShapeName,
  type ShapeSetup,
} from "./session.ts";

const NAMES = (process.env.LORAMEM_SHAPES ?? "small").split(",") as ShapeName[];

/** Steps after which adapters are compared, and to which one run goes on with its memory watched. */
const stepsOn = (device: string) => (device === "cpu" ? [4, 8] : [50, 200]) as [number, number];

/** Losses of a run and a hash of the adapters after `steps`; then it goes on to `last`. */
async function run(shape: ShapeName, setup: ShapeSetup, steps: number, last = steps) {
  await using opened = await openShape(shape, setup);
  const { session, device } = opened;
  const { documents, tokens } = SHAPES[shape];
  const { vocabSize } = session.run.spec.config;
  const losses: number[] = [];
  const free = new Set<number>();
  const hash = createHash("sha256");
  for (let step = 0; step < last; step++) {
    const batch = markovBatch({ vocabSize, documents, tokens, seed: 0, step });
    losses.push((await session.trainStep(batch, SETTINGS)).loss);
    free.add(freeBytes(device));
    if (step !== steps - 1) continue;
    const adapters = await exportAdapters(session.executor, session.run);
    for (const { a, b } of adapters) hash.update(a).update(b);
  }
  return { losses: losses.slice(0, steps), adapters: hash.digest("hex"), free };
}

for (const shape of NAMES) {
  for (const device of KINDS) {
    if (device === "cpu" && shape !== "small") continue;
    const [steps, last] = stepsOn(device);
    let first: Awaited<ReturnType<typeof run>> | undefined;
    test(`Session gives the same adapters for the same seed after ${steps} steps: ${device}, ${shape}`, {
      timeout: 280_000,
    }, async () => {
      first = await run(shape, { device, policy: "keep" }, steps, last);
      const again = await run(shape, { device, policy: "keep" }, steps);
      assert.deepEqual(again.losses, first.losses);
      assert.equal(again.adapters, first.adapters);
      if (device === "cpu") return;
      for (const { free } of [first, again]) assert.equal(free.size, 1, `${[...free]}`);
      const [from = 0, to = 0] = [first.losses[0], first.losses.at(-1)];
      assert.ok(from - to > 0.2, `it learns: ${from}, ${to}`);
      console.log(`${shape}: ${first.adapters.slice(0, 16)}, loss ${from} to ${to}`);
    });
    test(`Session gives the same adapters for any save points after ${steps} steps: ${device}, ${shape}`, {
      timeout: 280_000,
    }, async () => {
      const leaner = await run(shape, { device, policy: "checkpoint" }, steps);
      assert.deepEqual(leaner.losses, first?.losses);
      assert.equal(leaner.adapters, first?.adapters);
    });
  }
}
