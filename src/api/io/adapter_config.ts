/**
 * `adapter_config.json` of PEFT, as plain data.
 *
 * Written: the core keys, and others only where they differ from PEFT's default, as PEFT versions
 * before 0.13 refuse a key they do not know. Read: every key is understood, harmless, or an error
 * that names it; a key that PEFT may add tomorrow passes as long as its value says "off".
 */
import { LoramemError } from "../../ffi/error.ts";
import { isObject, readJsonFile } from "./json.ts";

/** The name of the file in an adapter folder. */
export const ADAPTER_CONFIG = "adapter_config.json";

/**
 * What an adapter is, beside its tensors. Optional fields are absent where PEFT's default holds.
 */
export interface AdapterConfig {
  /** The base model: a Hub name or a path, not interpreted. */
  readonly baseModel?: string;
  /** Rank of every module that `rankPattern` does not name. */
  readonly rank: number;
  /** Numerator of the scale alpha / rank (with rsLoRA alpha / sqrt(rank)). */
  readonly alpha: number;
  /** Probability with which PEFT drops an input of A while training. */
  readonly dropout?: number;
  /**
   * Names or path endings of the adapted modules, or one regular expression that matches whole
   * paths.
   */
  readonly targetModules: string | readonly string[];
  /** Modules left out, in the same two forms. */
  readonly excludeModules?: string | readonly string[];
  /** Rank by regular expression over the end of the path. */
  readonly rankPattern?: Readonly<Record<string, number>>;
  /** Alpha by regular expression over the end of the path. */
  readonly alphaPattern?: Readonly<Record<string, number>>;
  /** Scale by alpha / sqrt(rank) instead of alpha / rank. */
  readonly useRslora?: boolean;
}

/** Keys that say nothing about the result, whatever their value. */
const INERT = new Set([
  "auto_mapping",
  "inference_mode",
  "megatron_core",
  "peft_version",
  "qalora_group_size",
  "revision",
]);

/** Keys of PEFT features that loramem does not read yet; accepted where the value says "off". */
const FEATURES: ReadonlyMap<string, string> = new Map([
  ["alora_invocation_tokens", "activated LoRA"],
  ["arrow_config", "Arrow routing"],
  ["corda_config", "CorDA initialization"],
  ["ensure_weight_tying", "adapters on tied weights"],
  ["eva_config", "EVA initialization"],
  ["fan_in_fan_out", "transposed weights"],
  ["kasa_config", "KaSA"],
  ["layer_replication", "replicated layers"],
  ["layers_pattern", "layer selection by pattern"],
  ["layers_to_transform", "layer selection by number"],
  ["loftq_config", "LoftQ initialization"],
  ["lora_bias", "a bias on lora_B"],
  ["lora_ga_config", "LoRA-GA initialization"],
  ["megatron_config", "Megatron layers"],
  ["modules_to_save", "fully trained modules"],
  ["monteclora_config", "MonteCLoRA"],
  ["target_parameters", "LoRA on bare parameters"],
  ["trainable_token_indices", "trained token rows"],
  ["use_bdlora", "block-diagonal LoRA"],
  ["use_dora", "DoRA"],
  ["use_qalora", "QALoRA"],
  ["velora_config", "VeLoRA"],
]);

/** Keys with a short list of accepted values, PEFT's default first. */
const FIXED: readonly (readonly [key: string, supported: readonly unknown[], what: string])[] = [
  ["peft_type", ["LORA"], "an adapter that is not LoRA"],
  ["task_type", ["CAUSAL_LM"], "an adapter for another task than language modelling"],
  ["bias", ["none"], "an adapter with trained biases"],
  // Initializations that leave the base weights alone, so that A and B are the whole adapter.
  [
    "init_lora_weights",
    [true, false, "gaussian", "orthogonal"],
    "an adapter that changed its base",
  ],
];

/** The config as the JSON object on disk, keys sorted. */
export function adapterConfigToJson(config: AdapterConfig): Record<string, unknown> {
  const json: Record<string, unknown> = {
    base_model_name_or_path: config.baseModel ?? null,
    bias: "none",
    inference_mode: true,
    lora_alpha: config.alpha,
    lora_dropout: config.dropout ?? 0,
    peft_type: "LORA",
    r: config.rank,
    target_modules: config.targetModules,
    task_type: "CAUSAL_LM",
  };
  if (config.excludeModules !== undefined) json.exclude_modules = config.excludeModules;
  if (!isOff(config.rankPattern)) json.rank_pattern = config.rankPattern;
  if (!isOff(config.alphaPattern)) json.alpha_pattern = config.alphaPattern;
  if (config.useRslora) json.use_rslora = true;
  return Object.fromEntries(Object.entries(json).sort(([a], [b]) => (a < b ? -1 : 1)));
}

/**
 * Reads `adapter_config.json`.
 *
 * @param file Path of the file.
 * @throws {LoramemError} `BAD_CONFIG` where it is missing, malformed, or holds an unknown key that
 * is not off; `UNSUPPORTED` for a PEFT feature that loramem does not read, naming the key.
 */
export async function readAdapterConfig(file: string): Promise<AdapterConfig> {
  const json = await readJsonFile("readAdapter", file, (what) => {
    throw badConfig(file, undefined, what);
  });
  if (json === undefined) {
    throw badConfig(file, undefined, "there is no such file");
  }
  return parseAdapterConfig(json, file);
}

/** Checks the JSON of an `adapter_config.json`; `file` is for messages. */
export function parseAdapterConfig(json: unknown, file: string): AdapterConfig {
  if (!isObject(json)) throw badConfig(file, undefined, "it is not a JSON object");
  const rest = new Map(Object.entries(json));
  /** Removes a key from `rest` and checks its value; null is PEFT's "not set". */
  const take = <T>(key: string, is: Check<T>, form: string, fallback?: T): T => {
    const value = rest.get(key) ?? fallback;
    rest.delete(key);
    if (!is(value)) throw badConfig(file, key, `${key} is ${JSON.stringify(value)}, not ${form}`);
    return value;
  };
  for (const [key, supported, what] of FIXED) {
    const value = rest.get(key) ?? supported[0];
    rest.delete(key);
    if (!supported.includes(value)) throw unsupported(file, key, value, what);
  }
  const targetModules = take(
    "target_modules",
    isModules,
    "a regular expression or a list of names",
  );
  if (targetModules.length === 0)
    throw badConfig(file, "target_modules", "target_modules is empty");
  const baseModel = take("base_model_name_or_path", isString, "a string", "");
  const dropout = take("lora_dropout", isProbability, "a number from 0 to below 1", 0);
  const excludeModules = take("exclude_modules", isModules, "a regular expression or a list", []);
  const rankPattern = take("rank_pattern", isRecordOf(isRank), "an object of ranks", {});
  const alphaPattern = take("alpha_pattern", isRecordOf(isAlpha), "an object of numbers", {});
  const useRslora = take("use_rslora", isBoolean, "true or false", false);
  const config: AdapterConfig = {
    rank: take("r", isRank, `an integer from 1 to ${MAX_RANK}`, 8),
    alpha: take("lora_alpha", isAlpha, "a positive number", 8),
    targetModules,
    ...(baseModel === "" ? {} : { baseModel }),
    ...(dropout === 0 ? {} : { dropout }),
    ...(excludeModules.length === 0 ? {} : { excludeModules }),
    ...(isOff(rankPattern) ? {} : { rankPattern }),
    ...(isOff(alphaPattern) ? {} : { alphaPattern }),
    ...(useRslora ? { useRslora } : {}),
  };
  for (const [key, value] of rest) {
    if (INERT.has(key) || isOff(value)) continue;
    const feature = FEATURES.get(key);
    if (feature !== undefined) throw unsupported(file, key, value, feature);
    throw badConfig(file, key, `unknown key ${key} = ${JSON.stringify(value)}`);
  }
  return config;
}

type Check<T> = (value: unknown) => value is T;

/** Larger than any rank in use; keeps sizes far from overflow. */
const MAX_RANK = 65_536;

const isString = (value: unknown): value is string => typeof value === "string";
const isBoolean = (value: unknown): value is boolean => typeof value === "boolean";
const isRank = (value: unknown): value is number =>
  Number.isInteger(value) && (value as number) >= 1 && (value as number) <= MAX_RANK;
const isAlpha = (value: unknown): value is number =>
  Number.isFinite(value) && (value as number) > 0;
const isProbability = (value: unknown): value is number =>
  Number.isFinite(value) && (value as number) >= 0 && (value as number) < 1;
const isModules = (value: unknown): value is string | string[] =>
  isString(value) || (Array.isArray(value) && value.every((name) => isString(name) && name !== ""));
const isRecordOf =
  <T>(is: Check<T>): Check<Record<string, T>> =>
  (value): value is Record<string, T> =>
    isObject(value) && Object.values(value).every(is);

/**
 * Whether a value is one of the ways to say "not used": null, false, 0, "", {} or [], also inside
 * an object.
 */
function isOff(value: unknown): boolean {
  if (Array.isArray(value)) return value.length === 0;
  if (isObject(value)) return Object.values(value).every(isOff);
  return !value;
}

function badConfig(file: string, key: string | undefined, what: string): LoramemError {
  const details = key === undefined ? { file } : { file, key };
  const fix = "the file must be as PEFT writes it";
  return new LoramemError("BAD_CONFIG", `readAdapter: ${what}: ${file}: ${fix}`, details);
}

function unsupported(file: string, key: string, value: unknown, what: string): LoramemError {
  const message =
    `readAdapter: ${what} cannot be read: ${key} = ${JSON.stringify(value)} in ${file}: ` +
    "merge this adapter into its base with PEFT, or train one without it";
  return new LoramemError("UNSUPPORTED", message, { what: key });
}
