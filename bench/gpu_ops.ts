/**
 * Device time of every op of a training step, by events, where CUPTI cannot be used (bench/gpu_phases.ts): ops run one by one in
 * their order, a few at a time behind a fill that keeps the device busy until they are all enqueued, so that no gap of the host
 * is counted. The sum over all ops beside the replayed step tells how busy the GPU is; two events cost about 2 us per op.
 *
 *     bun bench/gpu_ops.ts [result.json [model ...]]
 */
import process from "node:process";
import type { Op } from "../src/api/graph/program.ts";
import { Device, type Event } from "../src/api/memory/mod.ts";
import type { SavePolicy } from "../src/api/plan/save_points.ts";
import { initializeAdapters } from "../src/api/train/adapter_state.ts";
import { planRun } from "../src/api/train/run_plan.ts";
import { Session } from "../src/api/train/session.ts";
import { SETTINGS } from "./demo_session.ts";
import { type Shape, shapeDocuments, shapeSpec, shapesOf } from "./gpu_shapes.ts";
import { randomWeights } from "./random_session.ts";
import { writeResult } from "./results.ts";

const DEVICE = "cuda:0";
const POLICIES: readonly SavePolicy[] = ["keep", "checkpoint"];
const [WARM, STEPS, GROUP] = [3, 10, 12];
/** What the device does meanwhile: about 2 ms on an H200. */
const [BLOCKER_BYTES, BLOCKERS] = [1 << 30, 8];

async function report(shape: Shape, policy: SavePolicy): Promise<Record<string, unknown>> {
  const [model, count, tokens] = shape;
  const spec = shapeSpec(shape, DEVICE);
  const lossChunkTokens = policy === "checkpoint" ? 512 : 1024;
  const run = planRun({ ...spec, dims: { ...spec.dims, lossChunkTokens } }, policy);
  const documents = shapeDocuments(shape);
  await using device = await Device.open(DEVICE);
  const session = Session.commit(device, run, "graph", {}, "timed");
  try {
    await randomWeights(session);
    await initializeAdapters(session.executor, run, 0);
    const times: number[] = [];
    for (let step = 0; step < WARM + STEPS; step++) {
      await session.trainStep(documents, SETTINGS, documents);
      if (step >= WARM) times.push(session.times.deviceSeconds * 1000);
    }
    const step = times.toSorted((a, b) => a - b)[STEPS >> 1] as number;

    const { executor } = session;
    const { stream } = executor;
    using blocker = device.createBuffer(BLOCKER_BYTES);
    const events = Array.from({ length: GROUP + 1 }, () => device.createEvent());
    const rows = new Map<string, { ms: number; ops: number }>();
    let group: Op[] = [];
    const finish = async () => {
      if (group.length === 0) return;
      await stream.done();
      group.forEach(({ kind, phase }, index) => {
        const key = `${phase} ${kind.name}`;
        const row = rows.get(key) ?? { ms: 0, ops: 0 };
        const ms = (events[index + 1] as Event).elapsed(events[index] as Event);
        rows.set(key, { ms: row.ms + ms, ops: row.ops + 1 });
      });
      group = [];
    };
    const visit = async (op: Op, launch: () => void) => {
      if (group.length === GROUP) await finish();
      if (group.length === 0) {
        for (let fill = 0; fill < BLOCKERS; fill++) stream.fill(blocker, 0);
        stream.record(events[0] as Event);
      }
      launch();
      group.push(op);
      stream.record(events[group.length] as Event);
    };
    const [batch] = session.pack(documents);
    if (batch === undefined) throw new Error("no micro-batch");
    for (const turn of [0, 1]) {
      if (turn === 1) rows.clear(); // the first one warms up
      await session.stage(batch, 1 / batch.labelled);
      await executor.runEach("train", session.headChunks(batch), visit);
      await executor.runEach("optimizer", Number.POSITIVE_INFINITY, visit);
      await finish();
    }
    for (const event of events) event.dispose();
    const sum = [...rows.values()].reduce((total, { ms }) => total + ms, 0);
    console.log(
      `\n${model} ${count} x ${tokens} ${policy}: step ${step.toFixed(2)} ms on the device, ops ${sum.toFixed(2)} ms, ` +
        `${((100 * sum) / step).toFixed(1)} %`,
    );
    for (const [key, { ms, ops }] of [...rows].sort(([, a], [, b]) => b.ms - a.ms))
      console.log(`  ${ms.toFixed(2).padStart(9)} ms ${String(ops).padStart(5)} x  ${key}`);
    return {
      model,
      batch: `${count} x ${tokens}`,
      policy,
      stepMs: step,
      opsMs: sum,
      share: sum / step,
      ops: Object.fromEntries(rows),
    };
  } finally {
    await session.dispose();
  }
}

const [file, ...wanted] = process.argv.slice(2);
const rows: Record<string, unknown>[] = [];
for (const shape of shapesOf(DEVICE)) {
  if (wanted.length > 0 && !wanted.includes(shape[0])) continue;
  for (const policy of POLICIES) rows.push(await report(shape, policy));
}
if (file !== undefined && file !== "-") await writeResult(file, { bench: "gpu_ops", rows });
