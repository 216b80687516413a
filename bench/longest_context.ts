/**
 * The longest single document that trains: Llama-3.2-1B and 3.1-8B on cards of 24 and 80 GiB, the driver's own share
 * included, with bf16 weights and r = 16 on all linears. Each is planned; those whose predicted step is short enough are run
 * at full length with the rest of the device's memory taken, the others are committed and run on a shorter document in the
 * same reservation, since attention's time grows with the square of the length while its memory does not.
 *
 *     bun bench/longest_context.ts [--models 1B,8B] [--cards 24,80] [--max-seconds 45] [--device auto] [--out result.json]
 *
 * `--device cpu` takes a small model and a small card, to try the mechanics.
 */
import { parseArgs } from "node:util";
import type { ProgramName } from "../src/api/graph/program.ts";
import { formatSeconds } from "../src/api/plan/report.ts";
import { describePoints } from "../src/api/plan/save_points.ts";
import { fullLoad } from "../src/api/plan/time.ts";
import { FitSearch, largestTokens } from "../src/api/train/fit_run.ts";
import type { RunPlan } from "../src/api/train/run_plan.ts";
import { benchDevice, type ModelName, shapeSpec } from "./gpu_shapes.ts";
import { gib, type Measured, measureRun, printTable, randomDocuments } from "./random_session.ts";
import { writeResult } from "./results.ts";

const { values: flags } = parseArgs({
  options: {
    models: { type: "string", default: "1B,8B" },
    cards: { type: "string", default: "24,80" },
    "max-seconds": { type: "string", default: "45" },
    device: { type: "string", default: "auto" },
    out: { type: "string" },
  },
});
const { device, profile } = await benchDevice(flags.device);
const maxSeconds = Number(flags["max-seconds"]);
const GIB = 2 ** 30;
/** Where a full step would take too long: the document that is run in the same reservation. */
const SHORT = 4096;
/** Longer than any document here. */
const LIMIT = 1 << 21;
const PROGRAMS: readonly ProgramName[] = ["train", "optimizer"];
const MODELS: Readonly<Record<string, ModelName>> = {
  "1B": "Llama-3.2-1B",
  "8B": "Llama-3.1-8B",
};
/**
 * Unsloth's published figures for Llama-3.1-8B (its README): QLoRA, a base in 4 bits, r = 32 on all linears, one document,
 * tokens by GB of the card. Another base dtype: 4-bit weights are 5 GB where bf16 weights are 15 GiB.
 */
const UNSLOTH_QLORA_8B: Readonly<Record<string, number>> = { "24": 78_475, "80": 342_733 };

interface Row {
  readonly model: string;
  readonly card: string;
  readonly budgetBytes: number;
  readonly tokens: number;
  readonly planBytes: number;
  readonly savePoints: string;
  readonly predictedSeconds: number;
  /** Tokens of the document that was run: all of them, or fewer where a step would take too long. */
  readonly ranTokens: number;
  readonly unslothQlora: number | null;
  readonly measured: Measured;
}

/** The leanest plan of the longest document. */
function planLongest(model: ModelName, budget: number): RunPlan {
  const specFor = (tokens: number) => shapeSpec([model, 1, tokens], device, PROGRAMS);
  const optionsFor = (tokens: number) => ({
    savePoints: null,
    lossChunkTokens: null,
    profile,
    step: fullLoad(tokens),
  });
  const limit = device === "cpu" ? 1 << 13 : LIMIT;
  const tokens = largestTokens(specFor(limit), optionsFor(limit), budget, limit);
  if (tokens === null) throw new Error(`${model}: nothing fits ${budget} bytes`);
  return new FitSearch(specFor(tokens), optionsFor(tokens)).fit(budget);
}

async function longest(name: string, card: string): Promise<Row> {
  const model = device === "cpu" ? "four layers" : (MODELS[name] as ModelName);
  const budget =
    device === "cpu" ? Number(card) * (1 << 20) : Number(card) * GIB - (profile.driver ?? 0);
  const run = planLongest(model, budget);
  const { tokensPerMicroBatch: tokens } = run.spec.dims;
  const predictedSeconds = run.plan.forecast?.seconds ?? Number.NaN;
  const ranTokens = predictedSeconds <= maxSeconds ? tokens : Math.min(tokens, SHORT);
  const documents = randomDocuments(run.spec.config.vocabSize, 1, ranTokens);
  const times = predictedSeconds < 5 ? { warm: 1, steps: 2 } : { warm: 0, steps: 1 };
  const measured = await measureRun(run, documents, { device, ...times, limit: budget });
  return {
    model,
    card: `${card} ${device === "cpu" ? "MiB" : "GiB"}`,
    budgetBytes: budget,
    tokens,
    planBytes: run.plan.deviceBytes,
    savePoints: describePoints(run.savePoints),
    predictedSeconds,
    ranTokens,
    unslothQlora: name === "8B" ? (UNSLOTH_QLORA_8B[card] ?? null) : null,
    measured,
  };
}

const rows: Row[] = [];
for (const name of flags.models.split(",")) {
  for (const card of flags.cards.split(",")) {
    const row = await longest(name, card);
    rows.push(row);
    const ran =
      row.ranTokens === row.tokens ? "run at full length" : `run on ${row.ranTokens} tokens`;
    console.log(
      `${row.model} ${row.card}: ${row.tokens} tokens, ${ran}, ${formatSeconds(row.measured.seconds)}`,
    );
  }
}
printTable(
  [
    "model",
    "card",
    "longest document",
    "plan GiB",
    "driver",
    "predicted",
    "measured",
    "on tokens",
    "Unsloth QLoRA (4-bit base)",
  ],
  rows.map((row) => [
    row.model,
    row.card,
    String(row.tokens),
    gib(row.planBytes),
    gib(row.measured.driverEnd),
    formatSeconds(row.predictedSeconds),
    formatSeconds(row.measured.seconds),
    String(row.ranTokens),
    row.unslothQlora === null ? "-" : String(row.unslothQlora),
  ]),
);
if (flags.out !== undefined) {
  const settings = { device, maxSeconds, precision: "bf16", rank: 16, profile: profile.name };
  await writeResult(flags.out, { bench: "longest_context", settings, rows });
}
