/**
 * What a background checkpoint costs: stretches of steps with a save at their beginning beside stretches without, in turns,
 * at real model shapes with random weights. Then the last checkpoint is read back, and the steps after it must come out as
 * they did before, bit for bit.
 *
 *     bun bench/checkpoint.ts [--models 1B,8B] [--steps 4] [--turns 4] [--dir FOLDER] [--device auto] [--out result.json]
 *
 * `--device cpu` takes a small model, to try the mechanics. The folder says which disk is written to.
 */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import process from "node:process";
import { parseArgs } from "node:util";
import { checkpointPath, readCheckpoint, readCheckpointHeader } from "../src/api/io/checkpoint.ts";
import { Device } from "../src/api/memory/mod.ts";
import { castMasters, clearState, initializeAdapters } from "../src/api/train/adapter_state.ts";
import { Checkpoints } from "../src/api/train/checkpoints.ts";
import { randomWeights } from "../src/api/train/random_data.ts";
import { planRun } from "../src/api/train/run_plan.ts";
import { Session } from "../src/api/train/session.ts";
import { deviceParts } from "../src/api/train/snapshot.ts";
import { SETTINGS, type Shape, shapeSpec } from "../tests/shapes/session.ts";
import { benchDevice, shapeDocuments, shapesOf } from "./gpu_shapes.ts";
import { printTable } from "./random_session.ts";
import { writeResult } from "./results.ts";

const { values: flags } = parseArgs({
  options: {
    models: { type: "string", default: "1B,8B" },
    steps: { type: "string", default: "4" },
    turns: { type: "string", default: "4" },
    dir: { type: "string", default: tmpdir() },
    device: { type: "string", default: "auto" },
    out: { type: "string" },
  },
});
const { device: kind } = await benchDevice(flags.device);
const [steps, turns] = [Number(flags.steps), Number(flags.turns)];
const WARM = 3;

interface Row {
  readonly model: string;
  readonly checkpointBytes: number;
  /** Page-locked memory that the plan keeps for the copy of the state. */
  readonly hostBytes: number;
  /** Median step of the stretches without a save. */
  readonly stepSeconds: number;
  readonly saveEvery: number;
  /** Median over the turns: a stretch with a save by the one without before it. */
  readonly slowdown: number;
  /** From the call of a save to the file being on the disk, median. */
  readonly saveSeconds: number;
  /** CPU time of the process that a save adds to its stretch, median. */
  readonly saveCpuSeconds: number;
  /** The steps after the last checkpoint, run again from its file. */
  readonly sameBits: boolean;
}

const median = (values: readonly number[]) =>
  values.toSorted((a, b) => a - b)[values.length >> 1] as number;

async function measure(shape: Shape, dir: string): Promise<Row> {
  const documents = shapeDocuments(shape);
  await using device = await Device.open(kind);
  await using ring = device.createFileRing();
  const run = planRun({ ...shapeSpec(shape, { device: kind }), snapshot: true }, "keep");
  const session = Session.commit(device, run, "graph");
  await using undo = new AsyncDisposableStack();
  undo.defer(() => session.dispose());
  const { executor } = session;
  await randomWeights(session);
  await initializeAdapters(executor, run, 0);

  let bytes = 0;
  const checkpoints = await Checkpoints.open(
    ring,
    session,
    { dir, saveEvery: steps, keepLast: 1 },
    {
      facts: {
        settings: {},
        chosen: {
          device: kind,
          weights: "resident",
          savePoints: "keep",
          lossChunkTokens: 0,
          algorithms: "estimated",
          plan: "",
        },
        options: {},
      },
      evalData: "",
      notice: ({ kind: what, message }) => {
        if (what !== "checkpointSaved") throw new Error(message);
      },
    },
    null,
  );
  undo.defer(() => checkpoints.dispose());
  const save = () => checkpoints.save({ step: session.steps, epoch: 0, batch: session.steps });
  /** Loss and gradient norm of each of some steps. */
  const train = async (count: number) => {
    const results: string[] = [];
    for (let step = 0; step < count; step++) {
      const { loss, gradNorm } = await session.trainStep(documents, SETTINGS, documents);
      results.push(`${loss} ${gradNorm}`);
    }
    return results.join("\n");
  };
  /** Seconds, and CPU seconds of the process, of some steps. */
  const stretch = async (begin: () => Promise<void>) => {
    const [start, cpu] = [performance.now(), process.cpuUsage()];
    await begin();
    await train(steps);
    const { user, system } = process.cpuUsage(cpu);
    return { seconds: (performance.now() - start) / 1000, cpu: (user + system) / 1e6 };
  };

  await train(WARM);
  await save(); // the first one writes to memory and disk that nobody touched yet
  await checkpoints.settled();
  const plain: number[] = [];
  const ratios: number[] = [];
  const cpus: number[] = [];
  const saves: number[] = [];
  for (let turn = 0; turn < turns; turn++) {
    const without = await stretch(async () => {});
    let written: Promise<void> = Promise.resolve();
    const withSave = await stretch(async () => {
      const start = performance.now();
      await save();
      written = checkpoints
        .settled()
        .then(() => void saves.push((performance.now() - start) / 1000));
    });
    await written;
    plain.push(without.seconds / steps);
    ratios.push(withSave.seconds / without.seconds);
    cpus.push(withSave.cpu - without.cpu);
  }

  await save();
  await checkpoints.settled();
  const path = checkpointPath(dir, session.steps);
  const header = await readCheckpointHeader(path);
  bytes = [...header.tensors.values()].reduce((sum, tensor) => sum + tensor.bytes, 0);
  const [before, expected] = [session.steps, await train(steps)];
  clearState(executor, run);
  await readCheckpoint(ring, path, header, deviceParts(session), executor.stream);
  await castMasters(executor, run);
  session.resumeAfter(before);
  const again = await train(steps);
  return {
    model: shape.model,
    checkpointBytes: bytes,
    hostBytes: run.plan.classes.host,
    stepSeconds: median(plain),
    saveEvery: steps,
    slowdown: median(ratios),
    saveSeconds: median(saves),
    saveCpuSeconds: median(cpus),
    sameBits: again === expected,
  };
}

const dir = await mkdtemp(join(flags.dir, "loramem-bench-"));
const rows: Row[] = [];
try {
  const wanted = flags.models.split(",");
  for (const shape of shapesOf(kind)) {
    if (kind !== "cpu" && !wanted.some((name) => shape.model.endsWith(name))) continue;
    rows.push(await measure(shape, await mkdtemp(join(dir, "run-"))));
  }
} finally {
  await rm(dir, { recursive: true });
}
printTable(
  ["model", "MB", "step ms", "save every", "slowdown", "save s", "GB/s", "CPU s", "same bits"],
  rows.map((row) => [
    row.model,
    (row.checkpointBytes / 1e6).toFixed(1),
    (row.stepSeconds * 1e3).toFixed(1),
    String(row.saveEvery),
    row.slowdown.toFixed(4),
    row.saveSeconds.toFixed(3),
    (row.checkpointBytes / row.saveSeconds / 1e9).toFixed(2),
    row.saveCpuSeconds.toFixed(3),
    String(row.sameBits),
  ]),
);
if (flags.out !== undefined) await writeResult(flags.out, { bench: "checkpoint", rows });
if (rows.some(({ sameBits }) => !sameBits)) process.exitCode = 1;
