/**
 * The longest single document that trains: Llama-3.2-1B and 3.1-8B on cards of 24 and 80 GiB, the driver's own share
 * included, with bf16 weights and r = 16 on all linears; on the device alone, and with host memory for weights and layer
 * inputs. Each is planned; those whose predicted step is short enough are run at full length, with the rest of the device's
 * memory taken. The others are run with as many tokens in the same reservation, packed of documents of 4,096: attention's time
 * grows with the square of a document, its memory does not.
 *
 *     bun bench/longest_context.ts [--models 1B,8B] [--cards 24,80] [--host 0,64] [--max-seconds 30] [--device auto]
 *         [--out result.json]
 *
 * `--device cpu` takes a small model and a small card, to try the mechanics.
 */
import { parseArgs } from "node:util";
import type { Document } from "../src/api/data/conversation.ts";
import { formatSeconds } from "../src/api/plan/report.ts";
import { describePoints } from "../src/api/plan/save_points.ts";
import { fullLoad } from "../src/api/plan/time.ts";
import { FitSearch, largestTokens } from "../src/api/train/fit_run.ts";
import { randomDocuments } from "../src/api/train/random_data.ts";
import type { RunPlan } from "../src/api/train/run_plan.ts";
import { type Shape, shapeSpec } from "../tests/shapes/session.ts";
import { benchDevice } from "./gpu_shapes.ts";
import { gib, type Measured, measureRun, printTable } from "./random_session.ts";
import { writeResult } from "./results.ts";

const { values: flags } = parseArgs({
  options: {
    models: { type: "string", default: "1B,8B" },
    cards: { type: "string", default: "24,80" },
    host: { type: "string", default: "0,64" },
    "max-seconds": { type: "string", default: "30" },
    device: { type: "string", default: "auto" },
    out: { type: "string" },
  },
});
const { device, profile } = await benchDevice(flags.device);
const maxSeconds = Number(flags["max-seconds"]);
const GIB = 2 ** 30;
/** Where one document would take too long: the documents that fill the same reservation. */
const SHORT = 4096;
const MOST_DOCUMENTS = 512;
/** Longer than any document here. */
const LIMIT = 1 << 20;
const MODELS: Readonly<Record<string, Shape["model"]>> = {
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
  readonly weights: string;
  /** Page-locked host memory of weights and layer inputs. */
  readonly hostBytes: number;
  /** Of one document. */
  readonly predictedSeconds: number;
  /** Documents that were run: one of all the tokens, or as many tokens in several. */
  readonly documents: number;
  readonly unslothQlora: number | null;
  readonly measured: Measured;
}

/** The fastest plan of the longest document. */
function planLongest(model: Shape["model"], budget: number, hostBudget: number): RunPlan {
  const specFor = (tokens: number) => {
    const spec = shapeSpec({ model, documents: 1, tokens }, { device });
    return { ...spec, dims: { ...spec.dims, documentsPerMicroBatch: MOST_DOCUMENTS } };
  };
  const optionsFor = (tokens: number) => ({
    savePoints: null,
    lossChunkTokens: null,
    hostBudget,
    weights: hostBudget > 0 ? ("stream" as const) : ("resident" as const), // random weights go to no file
    profile,
    step: fullLoad(tokens),
  });
  const limit = device === "cpu" ? 1 << 13 : LIMIT;
  const tokens = largestTokens(specFor(limit), optionsFor(limit), budget, limit);
  if (tokens === null) throw new Error(`${model}: nothing fits ${budget} bytes`);
  return new FitSearch(specFor(tokens), optionsFor(tokens)).fit(budget);
}

/** One document, or as many tokens in several. */
function documentsFor(vocabSize: number, tokens: number, whole: boolean): Document[] {
  if (whole) return randomDocuments(vocabSize, 1, tokens);
  const [document] = randomDocuments(vocabSize, 1, Math.min(SHORT, tokens)) as [Document];
  const count = Math.min(MOST_DOCUMENTS, Math.floor(tokens / document.ids.length));
  return Array.from({ length: count }, () => document);
}

async function longest(name: string, card: string, host: string): Promise<Row> {
  const model = device === "cpu" ? "four layers" : (MODELS[name] as Shape["model"]);
  const budget =
    device === "cpu" ? Number(card) * (1 << 20) : Number(card) * GIB - (profile.driver ?? 0);
  const run = planLongest(model, budget, Number(host) * GIB);
  const { tokensPerMicroBatch: tokens } = run.spec.dims;
  const predictedSeconds = run.plan.forecast?.seconds ?? Number.NaN;
  const whole = predictedSeconds <= maxSeconds;
  const documents = documentsFor(run.spec.config.vocabSize, tokens, whole);
  const times = whole && predictedSeconds < 5 ? { warm: 1, steps: 2 } : { warm: 0, steps: 1 };
  const measured = await measureRun(run, documents, { device, ...times, limit: budget });
  return {
    model,
    card: `${card} ${device === "cpu" ? "MiB" : "GiB"}`,
    budgetBytes: budget,
    tokens,
    planBytes: run.plan.deviceBytes,
    savePoints: describePoints(run.savePoints),
    weights: run.spec.weights ?? "resident",
    hostBytes: run.plan.classes.host,
    predictedSeconds,
    documents: documents.length,
    unslothQlora: name === "8B" ? (UNSLOTH_QLORA_8B[card] ?? null) : null,
    measured,
  };
}

const rows: Row[] = [];
for (const host of flags.host.split(",")) {
  for (const name of flags.models.split(",")) {
    for (const card of flags.cards.split(",")) {
      const row = await longest(name, card, host);
      rows.push(row);
      const ran = row.documents === 1 ? "run as one document" : `run as ${row.documents} documents`;
      console.log(
        `${row.model} ${row.card}, host ${gib(row.hostBytes)} GiB: ${row.tokens} tokens, ${ran}, ` +
          formatSeconds(row.measured.seconds),
      );
    }
  }
}
printTable(
  [
    "model",
    "card",
    "host GiB",
    "longest document",
    "plan GiB",
    "driver",
    "predicted",
    "measured",
    "documents",
    "Unsloth QLoRA (4-bit base)",
  ],
  rows.map((row) => [
    row.model,
    row.card,
    gib(row.hostBytes),
    String(row.tokens),
    gib(row.planBytes),
    gib(row.measured.driverEnd),
    formatSeconds(row.predictedSeconds),
    formatSeconds(row.measured.seconds),
    String(row.documents),
    row.unslothQlora === null ? "-" : String(row.unslothQlora),
  ]),
);
if (flags.out !== undefined) {
  const settings = { device, maxSeconds, precision: "bf16", rank: 16, profile: profile.name };
  await writeResult(flags.out, { bench: "longest_context", settings, rows });
}
