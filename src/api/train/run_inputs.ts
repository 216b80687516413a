/** What opening a run and planning one have in common: sizes, programs, budget and load, from options and data. */
import { readFile } from "node:fs/promises";
import { LoramemError } from "../../ffi/error.ts";
import { type ChatTemplate, loadChatTemplate } from "../data/chat_template.ts";
import { countLabels, type Document } from "../data/conversation.ts";
import { type Dataset, loadDataset } from "../data/dataset.ts";
import { shuffledOrder } from "../data/order.ts";
import { packDocuments } from "../data/packing.ts";
import { loadTokenizer, type Tokenizer } from "../data/tokenizer.ts";
import { documentPairs, type Load } from "../graph/cost.ts";
import type { ProgramName } from "../graph/program.ts";
import type { ScalerSettings } from "../kernels/scaler.ts";
import type { ModelConfig } from "../nn/config.ts";
import type { LoraConfig } from "../nn/lora_config.ts";
import type { StepDims } from "../nn/programs.ts";
import { type DeviceProfile, findProfile, parseProfile } from "../plan/profiles.ts";
import { parsePoints } from "../plan/save_points.ts";
import { fullLoad, type StepLoad } from "../plan/time.ts";
import type { FitOptions } from "./fit_run.ts";
import type { ResolvedOptions } from "./options.ts";

/** "auto" sizes are rounded up to a multiple of this many tokens. */
const TOKEN_STEP = 64;

/** Share of the free host memory that "auto" takes for weights and layer inputs. */
const HOST_SHARE = 0.9;

/** Steps whose packing is looked at to predict times; more do not change the mean. */
const SAMPLED_STEPS = 2000;

/** Tokenizer, template and data of a run. */
export interface RunData {
  readonly tokenizer: Tokenizer;
  readonly template: ChatTemplate;
  readonly data: Dataset;
  readonly evalData: Dataset | null;
}

/** The LoRA settings of the options. */
export function loraOf({ lora }: ResolvedOptions): LoraConfig {
  return Object.fromEntries(
    Object.entries(lora).filter(([, value]) => value !== undefined),
  ) as unknown as LoraConfig;
}

/** The gradient scaler of the options. */
export function scalerOf(options: ResolvedOptions): ScalerSettings {
  return {
    initScale: options.initLossScale,
    growthInterval: options.lossScaleInterval,
    minScale: options.minLossScale,
    maxScale: options.maxLossScale,
  };
}

/**
 * Reads tokenizer, template and data.
 *
 * @param folder Where tokenizer and template are.
 */
export async function readRunData(
  options: ResolvedOptions,
  config: ModelConfig,
  folder: string,
): Promise<RunData> {
  const tokenizer = await loadTokenizer(folder);
  if (tokenizer.vocabSize > config.vocabSize) {
    const what = `${tokenizer.vocabSize} tokens, ${config.vocabSize} rows of the embedding`;
    const message = `model: tokenizer and config do not belong together: ${what}: get both from one source`;
    throw new LoramemError("BAD_CONFIG", message, { file: options.model, key: "vocab_size" });
  }
  const template = await loadChatTemplate(folder);
  const maxTokens =
    options.tokensPerMicroBatch === "auto" ? config.maxPositions : options.tokensPerMicroBatch;
  const how = { tokenizer, template, maxTokens, overlong: options.overlong };
  const data = await loadDataset(options.data, { ...how, what: "training data" });
  const evalData =
    options.evalData === undefined
      ? null
      : await loadDataset(options.evalData, { ...how, what: "evaluation data" });
  return { tokenizer, template, data, evalData };
}

/** The sizes that a run is planned for. `longest` is the longest document, in tokens. */
export function dimsOf(options: ResolvedOptions, config: ModelConfig, longest: number): StepDims {
  const tokensPerMicroBatch =
    options.tokensPerMicroBatch === "auto"
      ? Math.ceil(longest / TOKEN_STEP) * TOKEN_STEP
      : options.tokensPerMicroBatch;
  const prefillTokens = Math.min(options.promptTokens, config.maxPositions);
  return {
    tokensPerMicroBatch,
    documentsPerMicroBatch: options.batchSize,
    lossChunkTokens:
      options.lossChunkTokens === "auto" ? tokensPerMicroBatch : options.lossChunkTokens,
    prefillTokens,
    contextTokens:
      prefillTokens === 0 ? 0 : Math.min(prefillTokens + options.answerTokens, config.maxPositions),
  };
}

/** The programs that a run needs. */
export function programsOf(options: ResolvedOptions): ProgramName[] {
  const programs: ProgramName[] = ["train", "optimizer"];
  if (options.evalData !== undefined) programs.push("evaluate");
  if (options.promptTokens > 0) programs.push("prefill", "decode");
  return programs;
}

/** Optimizer steps of one pass over the data and of the whole run. */
export function stepCounts(
  { batchSize, dropLast, epochs, maxSteps }: ResolvedOptions,
  documents: number,
): { readonly perEpoch: number; readonly total: number } {
  const batches = documents / batchSize;
  const perEpoch = dropLast ? Math.floor(batches) : Math.ceil(batches);
  const all = perEpoch * epochs;
  return { perEpoch, total: Math.min(all, maxSteps ?? all) };
}

/**
 * What may be chosen to fit the budget.
 *
 * @param hostBudget Bytes of page-locked host memory that may be taken.
 */
export function fitOptions(
  options: ResolvedOptions,
  config: ModelConfig,
  profile: DeviceProfile,
  step: StepLoad,
  hostBudget: number,
): FitOptions {
  const { savePoints, lossChunkTokens, weights } = options;
  return {
    savePoints: savePoints === "auto" ? null : parsePoints(savePoints, config.layers),
    lossChunkTokens: lossChunkTokens === "auto" ? null : lossChunkTokens,
    weights: weights === "auto" ? null : weights,
    hostBudget,
    profile,
    step,
  };
}

/**
 * Bytes of page-locked host memory for weights and layer inputs.
 *
 * @param given As asked for; null = "auto".
 * @param onHost Whether the run computes in host memory. Then moving data there gains nothing and is done on request only.
 * @param free Host bytes that are free.
 */
export function hostBudgetOf(
  { weights, savePoints }: ResolvedOptions,
  given: number | null,
  onHost: boolean,
  free: number,
): number {
  if (given !== null) return given;
  const asked = weights === "stream" || savePoints.includes("offload");
  return onHost && !asked ? 0 : free * HOST_SHARE;
}

/**
 * The profile that `deviceProfile` names: a shipped one, or a JSON file.
 *
 * @param fallback Gives what "auto" stands for.
 */
export async function readProfile(
  name: string,
  fallback: () => Promise<DeviceProfile>,
): Promise<DeviceProfile> {
  if (name === "auto") return await fallback();
  const shipped = findProfile(name);
  if (shipped !== null) return shipped;
  const text = await readFile(name, "utf8").catch(() => "null");
  let json: unknown = null;
  try {
    json = JSON.parse(text);
  } catch {
    // Refused below, with the name and what is allowed.
  }
  return parseProfile(json, name);
}

type Windows = Pick<ModelConfig, "windows">;

/**
 * How full the micro-batches of the first epoch are on average.
 *
 * @param documents Null = not known: full micro-batches.
 */
export function stepLoadOf(
  { batchSize, seed }: ResolvedOptions,
  config: Windows,
  tokensPerMicroBatch: number,
  documents: readonly Document[] | null,
): StepLoad {
  if (documents === null || documents.length === 0) {
    return fullLoad(tokensPerMicroBatch, slidingWindow(config));
  }
  const order = shuffledOrder(documents.length, seed, 0);
  const steps = Math.min(SAMPLED_STEPS, Math.ceil(documents.length / batchSize));
  const sum = { tokens: 0, labelled: 0, pairs: 0, windowPairs: 0 };
  let microBatches = 0;
  for (let step = 0; step < steps; step++) {
    const picked = order.subarray(step * batchSize, (step + 1) * batchSize);
    const batch = Array.from(picked, (index) => documents[index] as Document);
    microBatches += packDocuments(batch, tokensPerMicroBatch, batchSize).length;
    const { tokens, labelled, pairs, windowPairs } = loadOf(batch, config);
    sum.tokens += tokens;
    sum.labelled += labelled;
    sum.pairs += pairs;
    sum.windowPairs += windowPairs;
  }
  const load = {
    tokens: sum.tokens / microBatches,
    labelled: sum.labelled / microBatches,
    pairs: sum.pairs / microBatches,
    windowPairs: sum.windowPairs / microBatches,
  };
  return { load, microBatches: microBatches / steps };
}

/** What documents amount to. */
export function loadOf(documents: readonly Document[], config: Windows): Load {
  const window = slidingWindow(config);
  let [tokens, labelled, pairs, windowPairs] = [0, 0, 0, 0];
  for (const document of documents) {
    const { length } = document.ids;
    tokens += length;
    labelled += countLabels(document);
    pairs += documentPairs(length);
    windowPairs += documentPairs(length, window);
  }
  return { tokens, labelled, pairs, windowPairs };
}

/** The window of the layers that have one: one for all of them; 0 = none has. */
function slidingWindow({ windows }: Windows): number {
  return Math.max(...windows);
}
