/**
 * The options of a run: one schema gives the names of the API, the flags of the command line and `--config run.json`.
 * This module loads zod, so it is imported when a run is opened, not before.
 */
import { z } from "zod";
import { LoramemError } from "../../ffi/error.ts";
import { PRECISIONS } from "../amp/precision.ts";
import type { RecordSource } from "../data/records.ts";
import { nearMisses } from "../nn/config_near.ts";
import { PROFILES } from "../plan/profiles.ts";
import { SAVE_POLICIES } from "../plan/save_points.ts";
import { WEIGHT_PLACES } from "./run_plan.ts";
import { SCHEDULES } from "./schedule.ts";

const policies = SAVE_POLICIES.join(", ");
const anyPolicy = `(${SAVE_POLICIES.join("|")})`;
const SAVE_POINTS = new RegExp(`^(auto|${anyPolicy}|\\d+ ${anyPolicy}( \\+ \\d+ ${anyPolicy})*)$`);
const BYTES = /^\d+(\.\d+)?\s*([KMGT]i?B|B)?$/i;
const count = () => z.int().min(1);
const records = z.custom<RecordSource>(
  (value) => typeof value === "string" || (typeof value === "object" && value !== null),
  "expected a path, a glob or an iterable of records",
);
/** An f32 that is not negative. */
const lossScale = () =>
  z
    .number()
    .min(0)
    .max(2 ** 127);
const modules = z.union([z.string().min(1), z.array(z.string().min(1)).min(1)]);

const loraSchema = z.strictObject({
  rank: count().max(1024).default(16).describe("rank of the adapters"),
  alpha: z.number().positive().default(32).describe("scale of the adapters is alpha / rank"),
  targetModules: modules
    .default("all-linear")
    .describe(
      '"all-linear", name suffixes (q_proj,v_proj) or one regular expression over module paths',
    ),
  excludeModules: modules.optional().describe("modules to leave out, in the same forms"),
  rankPattern: z
    .record(z.string(), count())
    .optional()
    .describe("rank by regular expression over path ends"),
  alphaPattern: z.record(z.string(), z.number().positive()).optional().describe("alpha likewise"),
  useRslora: z.boolean().default(false).describe("scale by alpha / sqrt(rank) (rsLoRA)"),
});

/** The schema of {@linkcode TrainOptions}. */
export const trainSchema = z.strictObject({
  model: z.string().min(1).describe("folder with config.json, safetensors and tokenizer"),
  data: records.describe("training data: JSONL with messages; path or glob"),
  evalData: records.optional().describe("evaluation data in the same form"),
  adapter: z
    .string()
    .min(1)
    .optional()
    .describe("PEFT adapter folder to start from; brings its own LoRA settings"),
  lora: loraSchema.prefault({}),
  device: z
    .string()
    .regex(/^(auto|cpu|cuda:\d+)$/, 'expected "auto", "cpu" or "cuda:<n>"')
    .default("auto")
    .describe("auto, cpu or cuda:<n>"),
  threads: z.int().min(0).max(1024).default(0).describe("CPU threads; 0 = all available cores"),
  precision: z
    .enum(["auto", ...PRECISIONS])
    .default("auto")
    .describe("what activations are stored in; auto = bf16 on a GPU, fp32 on the CPU"),
  initLossScale: lossScale()
    .refine((value) => value > 0, "expected a number above 0")
    .default(65536)
    .describe("first loss scale of fp16"),
  lossScaleInterval: count()
    .max(2 ** 31 - 1)
    .default(2000)
    .describe("finite gradients in a row after which the loss scale of fp16 doubles"),
  minLossScale: lossScale()
    .default(0)
    .describe(
      "stop where the gradient overflows at this loss scale of fp16; 0 = lower it without end",
    ),
  maxLossScale: lossScale()
    .default(0)
    .describe("the loss scale of fp16 never grows beyond; 0 = no limit"),
  deviceProfile: z
    .string()
    .min(1)
    .default("auto")
    .describe(
      `rates for predicted times: auto = measured by loramem doctor --calibrate, else by the device; ${PROFILES.map(({ name }) => name).join(", ")} or a JSON file`,
    ),
  memoryBudget: z
    .union([z.literal("auto"), z.number().positive(), z.string().regex(BYTES)])
    .default("auto")
    .describe('bytes on the device, such as 2GiB; "auto" = what is free'),
  weights: z
    .enum(["auto", ...WEIGHT_PLACES])
    .default("auto")
    .describe(
      "where layer weights are: resident = on the device, stream = in host memory and copied layer by layer, file = on the disk and read layer by layer; auto = the first of these that the budgets allow",
    ),
  weightsFolder: z
    .string()
    .min(1)
    .optional()
    .describe(
      "folder of the file of weights: file, on a disk with room for the layers; default: runDir, else the system's folder for temporary files",
    ),
  hostMemoryBudget: z
    .union([z.literal("auto"), z.number().min(0), z.string().regex(BYTES)])
    .default("auto")
    .describe(
      'page-locked host bytes for streamed weights and offloaded layer inputs; "auto" = nine tenths of what is free; on the CPU none unless asked for',
    ),
  savePoints: z
    .string()
    .regex(SAVE_POINTS, `expected "auto", ${policies} or counts such as "20 keep + 12 checkpoint"`)
    .default("auto")
    .describe(
      `what stays in memory for backward: auto = the fastest that fits the budget, ${policies}, or counts of layers`,
    ),
  batchSize: count().default(8).describe("documents per optimizer step"),
  tokensPerMicroBatch: z
    .union([z.literal("auto"), z.int().min(2)])
    .default("auto")
    .describe('tokens computed at once; "auto" = the longest document, rounded up'),
  overlong: z
    .enum(["error", "truncate", "split"])
    .default("error")
    .describe("what to do with a document longer than tokensPerMicroBatch"),
  lossChunkTokens: z
    .union([z.literal("auto"), count()])
    .default("auto")
    .describe(
      'labelled tokens whose logits exist at a time; "auto" = 512 on a GPU, on the CPU what suits the budget',
    ),
  epochs: count().default(1).describe("passes over the training data"),
  maxSteps: count().optional().describe("stop after this many optimizer steps"),
  dropLast: z
    .boolean()
    .default(false)
    .describe("leave out the last batch of an epoch if it is not full"),
  learningRate: z.number().positive().default(2e-4).describe("peak learning rate"),
  schedule: z
    .enum(SCHEDULES)
    .default("cosine")
    .describe("how the learning rate falls after the warm-up"),
  warmupSteps: z.int().min(0).default(0).describe("steps of linear warm-up"),
  weightDecay: z.number().min(0).default(0).describe("AdamW weight decay"),
  beta1: z.number().min(0).lt(1).default(0.9).describe("AdamW beta 1"),
  beta2: z.number().min(0).lt(1).default(0.999).describe("AdamW beta 2"),
  adamEps: z.number().positive().default(1e-8).describe("AdamW epsilon"),
  maxGradNorm: z
    .number()
    .min(0)
    .default(1)
    .describe("clip the gradient to this L2 norm; 0 = do not clip"),
  seed: z
    .int()
    .min(0)
    .max(2 ** 32 - 1)
    .default(0)
    .describe("seed of the adapters and of the data order"),
  promptTokens: z
    .int()
    .min(0)
    .default(256)
    .describe("longest prompt of generate(); 0 = no generation"),
  answerTokens: z.int().min(0).default(256).describe("longest answer of generate()"),
  execution: z
    .enum(["graph", "eager"])
    .default("graph")
    .describe("replay recorded segments, or call every kernel one by one"),
  algorithms: z
    .string()
    .min(1)
    .default("timed")
    .describe(
      "algorithms of matrix products on a GPU: timed before the first step, estimated, or what run.json of an earlier run says",
    ),
  runDir: z
    .string()
    .min(1)
    .optional()
    .describe("folder of the run, where checkpoints are; locked, as one run at a time may use it"),
  saveEvery: count()
    .optional()
    .describe("write a checkpoint every so many optimizer steps, and one where the run stops"),
  keepLast: count()
    .default(2)
    .describe("newest checkpoints that stay; the best by evaluation loss stays too"),
  resume: z
    .string()
    .min(1)
    .optional()
    .describe(
      "go on from a checkpoint: auto = the newest whole one of the run's folder, if there is any; or a file or folder",
    ),
});

/** Options as a caller writes them; everything but `model` and `data` has a default. */
export type TrainOptions = z.input<typeof trainSchema>;

/** Options with defaults filled in. */
export type ResolvedOptions = z.output<typeof trainSchema>;

/**
 * Checks options and fills in defaults.
 *
 * @throws {LoramemError} BAD_ARGUMENT naming every option that is wrong, with the nearest name for an unknown one.
 */
export function resolveOptions(
  options: unknown,
  nameOf: (path: string) => string = (path) => path,
): ResolvedOptions {
  const parsed = trainSchema.safeParse(options);
  if (parsed.success) return parsed.data;
  const faults = parsed.error.issues.map((issue) => {
    const at = issue.path.join(".");
    if (issue.code === "unrecognized_keys") {
      return issue.keys.map((key) => unknownOption(at === "" ? key : `${at}.${key}`)).join("; ");
    }
    return `${nameOf(at)}: ${issue.message}`;
  });
  const first = parsed.error.issues[0]?.path.join(".") ?? "";
  throw new LoramemError("BAD_ARGUMENT", `options: ${faults.join("; ")}: mend the option`, {
    name: first,
  });
}

function unknownOption(key: string): string {
  const names = [
    ...Object.keys(trainSchema.shape),
    ...Object.keys(loraSchema.shape).map((name) => `lora.${name}`),
  ];
  const near = nearMisses(names, key);
  return `unknown option ${key}${near.close ? ` (did you mean ${near.names.join(" or ")}?)` : ""}`;
}

/** A byte budget as a number; null = "auto". */
export function budgetBytes(budget: string | number): number | null {
  if (budget === "auto") return null;
  if (typeof budget === "number") return budget;
  const match = /^([\d.]+)\s*([KMGT]?)(i?)B?$/i.exec(budget) as RegExpExecArray;
  const unit = { "": 0, K: 1, M: 2, G: 3, T: 4 }[(match[2] as string).toUpperCase()] as number;
  return Math.floor(Number(match[1]) * (match[3] === "" ? 1000 : 1024) ** unit);
}
