/** What the driver says that a run takes: on a GPU its figure is the plan, and it does not move. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Device } from "../../src/api/memory/mod.ts";
import { exportAdapters } from "../../src/api/train/adapter_state.ts";
import { planRun } from "../../src/api/train/run_plan.ts";
import { Session } from "../../src/api/train/session.ts";
import { markovBatch } from "../shapes/markov.ts";
import {
  loadShape,
  SETTINGS,
  SHAPES,
  type ShapeName,
  type ShapeSetup,
  shapeSpec,
} from "../shapes/session.ts";
import { KINDS } from "../train/support.ts";

/** The driver gives memory out in pages of this size. */
const PAGE = 2 << 20;

/** Reservations of a run on the device: weights, trainable, activations. */
const RESERVATIONS = 3;

/** Shape, and how it is run. */
const CONFIGURATIONS: readonly (readonly [ShapeName, Omit<ShapeSetup, "device">])[] = [
  ["small", { policy: "keep", precision: "bf16" }],
  ["small", { policy: "dropMlp", precision: "bf16" }],
  ["small", { policy: "checkpoint", precision: "bf16" }],
  ["small", { policy: "keep", precision: "fp16" }],
  ["small", { policy: "checkpoint", precision: "fp16" }],
  ["small", { policy: "keep", precision: "fp32" }],
  ["small", { policy: "dropMlp", precision: "fp32" }],
  ["0.5B", { policy: "checkpoint", precision: "bf16" }],
];

/** Bytes that are held: as the driver says, on the CPU as the library counts. */
function held(device: Device): number {
  if (device.kind === "cpu") return device.stats().reserved;
  const { memoryTotal, memoryFree } = device.info();
  return Number(memoryTotal) - Number(memoryFree);
}

function commit(device: Device, shape: ShapeName, setup: ShapeSetup): Session {
  const run = planRun(shapeSpec(SHAPES[shape], setup), setup.policy ?? "keep");
  return Session.commit(device, run, setup.mode ?? "graph");
}

function batchOf(session: Session, shape: ShapeName, step: number) {
  const { documents, tokens } = SHAPES[shape];
  const { vocabSize } = session.run.spec.config;
  return markovBatch({ vocabSize, documents, tokens, seed: 0, step });
}

/** Steps that show whether the figure moves. */
function stepsOf(kind: string, shape: ShapeName): number {
  if (kind === "cpu") return 2;
  return shape === "small" ? 200 : 20;
}

for (const kind of KINDS) {
  for (const [shape, options] of CONFIGURATIONS) {
    if (kind === "cpu" && (shape !== "small" || options.policy !== "keep")) continue;
    const what = `${shape}, ${options.policy}, ${options.precision}`;
    test(`Session.commit() takes what was planned, and the driver's figure then stays: ${kind}, ${what}`, {
      timeout: 60_000,
    }, async () => {
      await using device = await Device.open(kind);
      // Modules, library handles and the workspace of a stream come with the first run of a process, not with the plan.
      await commit(device, "small", { device: kind, ...options }).dispose();

      const before = held(device);
      const eager = commit(device, shape, { device: kind, ...options, mode: "eager" });
      const taken = held(device) - before;
      const { deviceBytes } = eager.run.plan;
      await eager.dispose();
      assert.ok(
        Math.abs(taken - deviceBytes) <= RESERVATIONS * PAGE,
        `the driver says ${taken}, the plan ${deviceBytes}`,
      );

      const session = commit(device, shape, { device: kind, ...options });
      const { executor, run } = session;
      await loadShape(session);
      const figures = new Set<number>();
      for (let step = 0; step < stepsOf(kind, shape); step++) {
        await session.trainStep(batchOf(session, shape, step), SETTINGS);
        figures.add(held(device) - before);
      }
      await exportAdapters(executor, run); // what a save does on the device
      figures.add(held(device) - before);
      await session.dispose();
      assert.equal(figures.size, 1, `bytes held while training: ${[...figures]}`);
      const [running = 0] = figures;
      console.log(
        `${what}: plan ${deviceBytes}, held after commit ${taken}, with graphs ${running}`,
      );
    });
  }
}
