/** Plans a training run without a device, weights or the native library: memory, times and alternatives. */

import { access } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import { choosePrecision } from "../amp/precision.ts";
import type { DType } from "../graph/value.ts";
import { readAdapter } from "../io/adapter.ts";
import { openSafetensors } from "../io/safetensors.ts";
import { type ModelConfig, readModelConfig } from "../nn/config.ts";
import { linearModules, validateCheckpoint } from "../nn/config_tensors.ts";
import { resolveLoraTargets } from "../nn/lora_config.ts";
import type { Backend } from "../nn/programs.ts";
import type { Plan } from "../plan/plan.ts";
import { type DeviceProfile, findProfile } from "../plan/profiles.ts";
import { formatBytes } from "../plan/report.ts";
import { describePoints } from "../plan/save_points.ts";
import { type Candidate, FitSearch, largestTokens } from "./fit_run.ts";
import { storedType } from "./load_weights.ts";
import type { ResolvedOptions, TrainOptions } from "./options.ts";
import { readOwnProfile } from "./own_profile.ts";
import {
  dimsOf,
  fitOptions,
  hostBudgetOf,
  loraOf,
  programsOf,
  type RunData,
  readProfile,
  readRunData,
  stepLoadOf,
} from "./run_inputs.ts";
import type { RunPlan, WeightPlace } from "./run_plan.ts";

/**
 * Options of {@linkcode planTraining}: those of a training. `model` may be a `config.json` alone, and `data` may be left out
 * where `tokensPerMicroBatch` is a number.
 */
export type PlanOptions = Omit<TrainOptions, "data"> & Partial<Pick<TrainOptions, "data">>;

/** A plan at another budget. */
export interface Alternative {
  /** The smallest budget that gets it, bytes. */
  readonly budget: number;
  /** Page-locked host bytes of streamed weights and offloaded layer inputs. */
  readonly hostBytes: number;
  readonly weights: WeightPlace;
  readonly savePoints: string;
  readonly lossChunkTokens: number;
  readonly tokensPerSecond: number;
  /** Whether it is the plan that was chosen. */
  readonly chosen: boolean;
}

/** What a training would take. `String(plan)` is a report. */
export interface TrainingPlan {
  readonly plan: Plan;
  readonly weights: WeightPlace;
  /** Such as `"keep"` or `"20 keep + 12 checkpoint"`. */
  readonly savePoints: string;
  readonly lossChunkTokens: number;
  readonly tokensPerMicroBatch: number;
  /** Parameters that are trained. */
  readonly parameters: number;
  /** Bytes that the plan had to fit; Infinity = no limit was given. */
  readonly budget: number;
  /** The longest document that the budget could train, in tokens; null without a budget. */
  readonly longestDocument: number | null;
  /** From the leanest to the fastest. */
  readonly alternatives: readonly Alternative[];
  /** The plans of the leanest and the fastest alternative and of the choice itself, each once. */
  compared(): readonly { readonly name: string; readonly plan: Plan }[];
  toString(): string;
}

/** Alternatives that are listed. */
const LISTED = 8;

/** What a driver takes where it was not measured. */
const DRIVER_BYTES = 600 << 20;

/** Where config, weights and tokenizer of a run are; null = there are none. */
interface ModelFiles {
  readonly config: ModelConfig;
  readonly dtypeOf: (tensor: string) => DType;
  /** Folder of the tokenizer. */
  readonly tokenizer: string | null;
}

/**
 * Works out what a training would take. Reads the config, the headers of the weights if there are any (else their dtype is
 * the config's), and the data if there is a tokenizer.
 *
 * @example Usage
 * ```ts
 * import { planTraining } from "./mod.ts";
 * const planned = await planTraining({
 *   model: "examples/demo/model",
 *   data: "examples/demo/train.jsonl",
 *   deviceProfile: "rtx-3090",
 *   memoryBudget: "100MiB",
 * });
 * console.log(planned.savePoints, planned.plan.deviceBytes, planned.plan.forecast?.tokensPerSecond);
 * ```
 *
 * @param raw Options of a training.
 * @returns The plan, its forecast and its alternatives.
 * @throws {LoramemError} BAD_ARGUMENT, BAD_CONFIG, BAD_DATA, BAD_FILE, UNSUPPORTED as a training would; OUT_OF_MEMORY if
 * nothing fits the budget, naming the one that would do.
 */
export async function planTraining(raw: PlanOptions): Promise<TrainingPlan> {
  const { budgetBytes, resolveOptions } = await import("./options.ts"); // brings in zod
  const options = resolveOptions({ data: [], ...raw });
  const profile = await readProfile(options.deviceProfile, () => defaultProfile(options));
  const { config, dtypeOf, tokenizer } = await readModelFiles(options.model);
  const lora =
    options.adapter === undefined ? loraOf(options) : (await readAdapter(options.adapter)).config;
  const targets = resolveLoraTargets(linearModules(config), lora);
  const read =
    raw.data === undefined || tokenizer === null
      ? null
      : await readRunData(options, config, tokenizer);
  if (read === null && options.tokensPerMicroBatch === "auto") {
    const what = raw.data === undefined ? "no data" : "no tokenizer beside the config";
    const message = `plan: the longest document is not known: ${what}: set tokensPerMicroBatch to its tokens`;
    throw new LoramemError("BAD_ARGUMENT", message, { name: "tokensPerMicroBatch" });
  }
  const dims = dimsOf(
    options,
    config,
    Math.max(read?.data.longest ?? 0, read?.evalData?.longest ?? 0),
  );
  const step = stepLoadOf(options, config, dims.tokensPerMicroBatch, read?.data.documents ?? null);
  const backend: Backend = profile.name === "cpu" ? "cpu" : "cuda";
  const spec = {
    config,
    targets,
    dtypeOf,
    precision: choosePrecision(options.precision, backend),
    backend,
    dims,
    programs: programsOf(options),
    snapshot: options.saveEvery !== undefined,
  };
  const budget = budgetBytes(options.memoryBudget) ?? profileBudget(options, profile);
  const hostBudget = hostBudgetOf(
    options,
    budgetBytes(options.hostMemoryBudget),
    backend === "cpu",
    Number.POSITIVE_INFINITY, // the host of the profile's device is not known
  );
  const search = new FitSearch(spec, fitOptions(options, config, profile, step, hostBudget));
  const run = search.fit(budget);
  const longestDocument = Number.isFinite(budget)
    ? largestTokens(spec, search.options, budget, config.maxPositions)
    : null;
  return new Planned(search, run, budget, longestDocument, read);
}

class Planned implements TrainingPlan {
  readonly plan: Plan;
  readonly weights: WeightPlace;
  readonly savePoints: string;
  readonly lossChunkTokens: number;
  readonly tokensPerMicroBatch: number;
  readonly parameters: number;
  readonly budget: number;
  readonly longestDocument: number | null;
  readonly alternatives: readonly Alternative[];
  readonly #search: FitSearch;
  readonly #read: RunData | null;

  constructor(
    search: FitSearch,
    run: RunPlan,
    budget: number,
    longestDocument: number | null,
    read: RunData | null,
  ) {
    const { lossChunkTokens, tokensPerMicroBatch } = run.spec.dims;
    this.plan = run.plan;
    this.weights = run.spec.weights ?? "resident";
    this.savePoints = describePoints(run.savePoints);
    this.lossChunkTokens = lossChunkTokens;
    this.tokensPerMicroBatch = tokensPerMicroBatch;
    this.parameters = run.adapters.parameters;
    this.budget = budget;
    this.longestDocument = longestDocument;
    this.#search = search;
    this.#read = read;
    const { load, microBatches } = search.options.step;
    const isChosen = ({ weights, savePoints, lossChunkTokens: chunk }: Candidate) =>
      weights === this.weights &&
      chunk === lossChunkTokens &&
      describePoints(savePoints) === this.savePoints;
    this.alternatives = pick(search.frontier(), isChosen).map((candidate) => ({
      budget: candidate.deviceBytes,
      hostBytes: candidate.hostBytes,
      weights: candidate.weights,
      savePoints: describePoints(candidate.savePoints),
      lossChunkTokens: candidate.lossChunkTokens,
      tokensPerSecond: (load.tokens * microBatches) / candidate.seconds,
      chosen: isChosen(candidate),
    }));
  }

  compared(): readonly { readonly name: string; readonly plan: Plan }[] {
    const front = this.#search.frontier();
    const plans = [{ name: `chosen: ${describeChoice(this)}`, plan: this.plan }];
    for (const [what, candidate] of [
      ["leanest", front[0]],
      ["fastest", front.at(-1)],
    ] as const) {
      if (candidate === undefined || candidate.deviceBytes === this.plan.deviceBytes) continue;
      const savePoints = describePoints(candidate.savePoints);
      const name = `${what}: ${describeChoice({ ...candidate, savePoints })}`;
      plans.push({ name, plan: this.#search.plan(candidate).plan });
    }
    return plans;
  }

  toString(): string {
    const { step } = this.#search.options;
    const lines = [String(this.plan)];
    lines.push(
      `Chosen: save points ${describeChoice(this)}, loss chunk ${this.lossChunkTokens} tokens`,
      `${this.parameters} trained parameters, ${this.tokensPerMicroBatch} tokens per micro-batch`,
    );
    if (this.longestDocument !== null)
      lines.push(`Longest document that this budget trains: ${this.longestDocument} tokens`);
    if (this.#read === null) {
      lines.push("Data not read: times are for full micro-batches of one document");
    } else {
      const { documents, tokens, longest } = this.#read.data;
      lines.push(
        `Data: ${documents.length} documents, ${tokens} tokens, the longest ${longest}; ` +
          `${step.microBatches.toFixed(2)} micro-batches of ${Math.round(step.load.tokens)} tokens a step`,
      );
    }
    lines.push(
      "Alternatives",
      "        budget          host  loss chunk     tokens/s  save points",
    );
    for (const alternative of this.alternatives) {
      const { budget, hostBytes, lossChunkTokens, tokensPerSecond, chosen } = alternative;
      const [device, host] = [budget, hostBytes].map((bytes) => formatBytes(bytes).padStart(12));
      lines.push(
        `  ${device}  ${host}  ${String(lossChunkTokens).padStart(10)}  ` +
          `${String(Math.round(tokensPerSecond)).padStart(11)}  ${describeChoice(alternative)}${chosen ? "  (chosen)" : ""}`,
      );
    }
    return lines.join("\n");
  }
}

/** Save points, and the place of the weights where it is not the device. */
function describeChoice(choice: {
  readonly weights: WeightPlace;
  readonly savePoints: string;
}): string {
  const places = {
    resident: "",
    stream: ", weights streamed",
    file: ", weights streamed from a file",
  };
  return `${choice.savePoints}${places[choice.weights]}`;
}

/** Some of `front`, evenly over its bytes: the ends and what was chosen among them. */
function pick(
  front: readonly Candidate[],
  isChosen: (candidate: Candidate) => boolean,
): readonly Candidate[] {
  const [low, high] = [front[0]?.deviceBytes ?? 0, front.at(-1)?.deviceBytes ?? 0];
  const places = Array.from({ length: LISTED }, (_, index) => {
    const bytes = low + ((high - low) * index) / (LISTED - 1);
    return front.findLast(({ deviceBytes }) => deviceBytes <= bytes);
  });
  return front.filter((candidate) => places.includes(candidate) || isChosen(candidate));
}

/** Without a profile the times are those of the device that was asked for, as measured on this machine if they were. */
async function defaultProfile({ device }: ResolvedOptions): Promise<DeviceProfile> {
  const kind = device === "cpu" ? "cpu" : "cuda";
  const shipped = findProfile(kind === "cpu" ? "cpu" : "h200") as DeviceProfile;
  return (await readOwnProfile(kind, null)) ?? shipped;
}

/** Without a budget, a profile that was asked for brings the memory of its device. */
function profileBudget(
  { deviceProfile }: ResolvedOptions,
  { memory, driver }: DeviceProfile,
): number {
  if (deviceProfile === "auto" || memory === null) return Number.POSITIVE_INFINITY;
  return memory - (driver ?? DRIVER_BYTES);
}

async function readModelFiles(model: string): Promise<ModelFiles> {
  const config = await readModelConfig(model);
  // A config under another name stands alone: what lies beside it may belong to another model.
  const folder =
    basename(model) === "config.json" ? dirname(model) : model.endsWith(".json") ? null : model;
  const has = async (name: string) =>
    folder !== null &&
    (await access(join(folder, name)).then(
      () => true,
      () => false,
    ));
  const tokenizer = (await has("tokenizer.json")) ? folder : null;
  if ((await has("model.safetensors")) || (await has("model.safetensors.index.json"))) {
    await using files = await openSafetensors(folder as string);
    validateCheckpoint(config, files.tensors);
    const types = new Map([...files.tensors.keys()].map((name) => [name, storedType(files, name)]));
    return { config, tokenizer, dtypeOf: (tensor) => types.get(tensor) as DType };
  }
  const dtype = claimedType(config, model);
  return { config, tokenizer, dtypeOf: () => dtype };
}

/** The dtype that a config claims; f32 where it claims none, as transformers reads it. */
function claimedType({ torchDtype }: ModelConfig, file: string): DType {
  const types: Readonly<Record<string, DType>> = {
    float32: "f32",
    bfloat16: "bf16",
    float16: "f16",
  };
  const dtype = types[torchDtype ?? "float32"];
  if (dtype !== undefined) return dtype;
  const message = `plan: dtype cannot be trained: ${torchDtype}: use float32, bfloat16 or float16`;
  throw new LoramemError("UNSUPPORTED", message, { what: `${file}: ${torchDtype}` });
}
