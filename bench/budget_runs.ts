/**
 * Plans against runs on a GPU: Llama-3.1-8B within 24, 20 and 18 GiB, the refusals at 16 and 8, those two with host memory
 * for weights and layer inputs, and every rung of the ladder at three shapes. Beside each other: planned bytes and the driver's, predicted and measured step time. During the
 * run of a budget the rest of the device's memory is taken, so that one byte too many could not be had.
 *
 *     bun bench/budget_runs.ts [--part budgets|host|rungs|all] [--steps 7] [--algorithms timed|estimated] [--device auto]
 *         [--out result.json]
 *
 * With estimated algorithms every plan of a model multiplies alike, and the losses must be the same bit for bit.
 *
 * `--device cpu` runs a small model, to try the mechanics.
 */
import { parseArgs } from "node:util";
import type { ProgramName } from "../src/api/graph/program.ts";
import { describePoints, SAVE_POLICIES } from "../src/api/plan/save_points.ts";
import type { FitSearch } from "../src/api/train/fit_run.ts";
import { planRun, type RunPlan } from "../src/api/train/run_plan.ts";
import { type Shape, shapeSpec } from "../tests/shapes/session.ts";
import { benchDevice, searchShape, shapeDocuments, shapesOf } from "./gpu_shapes.ts";
import { gib, type Measured, measureRun, printTable, randomLoad } from "./random_session.ts";
import { writeResult } from "./results.ts";

const { values: flags } = parseArgs({
  options: {
    part: { type: "string", default: "all" },
    steps: { type: "string", default: "7" },
    algorithms: { type: "string", default: "timed" },
    device: { type: "string", default: "auto" },
    out: { type: "string" },
  },
});
const { device, profile } = await benchDevice(flags.device);
const steps = Number(flags.steps);
const { algorithms } = flags;
const GIB = 2 ** 30;
/** Page-locked host memory that the plans of part "host" may take. */
const HOST = 64 * GIB;
const EVERYTHING: readonly ProgramName[] = ["train", "optimizer", "evaluate", "prefill", "decode"];

interface Row extends Measured {
  readonly model: string;
  readonly batch: string;
  /** What was asked for: a budget, or one policy for all layers. */
  readonly asked: string;
  readonly savePoints: string;
  readonly weights: string;
  /** Page-locked host memory of weights and layer inputs. */
  readonly hostBytes: number;
  readonly lossChunkTokens: number;
  readonly predictedSeconds: number;
  readonly budgetBytes: number | null;
}

async function measure(
  shape: Shape,
  asked: string,
  run: RunPlan,
  budget: number | null,
): Promise<Row> {
  const { model, documents, tokens } = shape;
  const limit = budget;
  const measured = await measureRun(run, shapeDocuments(shape), {
    device,
    warm: 3,
    steps,
    limit,
    algorithms,
  });
  return {
    model,
    batch: `${documents} x ${tokens}`,
    asked,
    savePoints: describePoints(run.savePoints),
    weights: run.spec.weights ?? "resident",
    hostBytes: run.plan.classes.host,
    lossChunkTokens: run.spec.dims.lossChunkTokens,
    predictedSeconds: run.plan.forecast?.seconds ?? Number.NaN,
    budgetBytes: budget,
    ...measured,
  };
}

/** Runs the largest shape within budgets, with weights and layer inputs on the device or also in host memory. */
async function runBudgets(
  rows: Row[],
  budgets: readonly number[],
  hostBudget: number,
): Promise<string[]> {
  const shape = shapesOf(device).at(-1) as Shape;
  const search = searchShape(shape, device, profile, { programs: EVERYTHING, hostBudget });
  const refusals: string[] = [];
  for (const budget of budgets) {
    const run = fitOrRefuse(search, budget, refusals);
    if (run === null) continue;
    const asked = `${(budget / GIB).toFixed(2)} GiB${hostBudget > 0 ? " + host" : ""}`;
    rows.push(await measure(shape, asked, run, budget));
  }
  return refusals;
}

function fitOrRefuse(search: FitSearch, budget: number, refusals: string[]): RunPlan | null {
  try {
    return search.fit(budget);
  } catch (error) {
    refusals.push((error as Error).message);
    return null;
  }
}

async function runRungs(rows: Row[]): Promise<void> {
  for (const shape of shapesOf(device)) {
    const { documents, tokens } = shape;
    const spec = shapeSpec(shape, { device });
    const step = { load: randomLoad(documents, tokens), microBatches: 1 };
    for (const policy of SAVE_POLICIES) {
      const lossChunkTokens = Math.min(1024, spec.dims.tokensPerMicroBatch);
      const dims = { ...spec.dims, lossChunkTokens };
      const run = planRun({ ...spec, dims }, policy, { timing: { profile, step } });
      rows.push(await measure(shape, policy, run, null));
    }
  }
}

const error = ({ predictedSeconds, seconds }: Row) => predictedSeconds / seconds - 1;

/** Pairs of plans of one shape that the prediction puts in the wrong order; within 1 %, predicted or measured, they are equal. */
function wrongOrders(rows: readonly Row[]): string[] {
  const wrong: string[] = [];
  for (const [at, a] of rows.entries()) {
    for (const b of rows.slice(at + 1)) {
      const predicted = a.predictedSeconds / b.predictedSeconds - 1;
      const measured = a.seconds / b.seconds - 1;
      if (a.model !== b.model || Math.min(Math.abs(predicted), Math.abs(measured)) < 0.01) continue;
      if (predicted * measured < 0) wrong.push(`${a.model}: ${a.asked} and ${b.asked}`);
    }
  }
  return wrong;
}

/** Plans of one shape whose losses differ from those of its first, though they compute the same; each with the first such step. */
function otherBits(rows: readonly Row[]): string[] {
  return rows.flatMap((row) => {
    const same = ({ model, lossChunkTokens }: Row) =>
      model === row.model && lossChunkTokens === row.lossChunkTokens;
    const first = rows.find(same) as Row;
    const step = row.losses.findIndex((loss, index) => loss !== first.losses[index]);
    return step < 0 ? [] : [`${row.model} ${row.asked} from step ${step + 1} on`];
  });
}

const budgets: Row[] = [];
const rungs: Row[] = [];
const refusals: string[] = [];
const wants = (part: string) => flags.part === part || flags.part === "all";
// On the CPU: twice, once and half of what the small model needs at least.
const [roomy, tight] =
  device === "cpu"
    ? [[0.03, 0.0145, 0.007], [0.012]]
    : [
        [24, 20, 18, 16, 8],
        [16, 8],
      ];
const bytes = (budgets: readonly number[]) => budgets.map((budget) => budget * GIB);
if (wants("budgets")) refusals.push(...(await runBudgets(budgets, bytes(roomy), 0)));
if (wants("host")) refusals.push(...(await runBudgets(budgets, bytes(tight), HOST)));
if (wants("rungs")) await runRungs(rungs);
const rows = [...budgets, ...rungs];
const errors = rows.map((row) => Math.abs(error(row))).sort((a, b) => a - b);
const medianError = errors[errors.length >> 1] as number;
const wrong = [...wrongOrders(budgets), ...wrongOrders(rungs)];
printTable(
  [
    "model",
    "asked",
    "save points",
    "weights",
    "host GiB",
    "plan GiB",
    "driver",
    "moved B",
    "predicted ms",
    "measured",
    "error",
    "on device",
    "input wait us",
    "MFU",
    "tokens/s",
  ],
  rows.map((row) => [
    row.model,
    row.asked,
    row.savePoints,
    row.weights,
    gib(row.hostBytes),
    gib(row.planBytes),
    gib(row.driverEnd),
    String(row.driverMoved ?? "-"),
    (row.predictedSeconds * 1000).toFixed(1),
    (row.seconds * 1000).toFixed(1),
    `${(100 * error(row)).toFixed(1)} %`,
    (row.deviceSeconds * 1000).toFixed(1),
    (row.inputWaitSeconds * 1e6).toFixed(0),
    row.modelFlopUtilization === null ? "-" : `${(100 * row.modelFlopUtilization).toFixed(1)} %`,
    String(Math.round(row.tokensPerSecond)),
  ]),
);
for (const refusal of refusals) console.log(`refused: ${refusal}`);
console.log(
  `median error of predicted times ${(100 * medianError).toFixed(1)} %, profile ${profile.title}; ` +
    `${wrong.length} pairs in the wrong order${wrong.length > 0 ? `: ${wrong.join("; ")}` : ""}`,
);
// Algorithms that are timed are chosen anew in every run.
const others = algorithms === "estimated" ? otherBits(rows) : null;
if (others !== null)
  console.log(
    others.length === 0
      ? "losses are the same bits under every plan of a model with the same loss chunk"
      : `losses differ in bits: ${others.join("; ")}`,
  );
if (flags.out !== undefined) {
  const settings = {
    device,
    steps,
    algorithms,
    precision: "bf16",
    rank: 16,
    seed: 0,
    profile: profile.name,
  };
  await writeResult(flags.out, {
    bench: "budget_runs",
    settings,
    budgets,
    rungs,
    refusals,
    medianError,
    wrong,
    otherBits: others,
  });
}
