/**
 * Rotary position embeddings as config.json states them: `rope_parameters` (transformers 5), or
 * `rope_theta` with `rope_scaling` (transformers 4), whose type stands under `rope_type` or, in
 * older files, `type`.
 */
import { badConfig, ConfigReader, excerpt, isObject, unsupported } from "./config_reader.ts";

/** Plain rotary embedding: inverse frequencies theta^(-2i/d). */
export interface DefaultRope {
  readonly type: "default";
  readonly theta: number;
}

/**
 * Llama 3.1's rescaling for long contexts: low frequencies divided by `factor`, a smooth passage
 * between.
 */
export interface Llama3Rope {
  readonly type: "llama3";
  readonly theta: number;
  readonly factor: number;
  readonly lowFreqFactor: number;
  readonly highFreqFactor: number;
  /** Context length of the pre-training, in tokens. */
  readonly originalMaxPositions: number;
}

/** How positions turn queries and keys. */
export type RopeConfig = DefaultRope | Llama3Rope;

/** Types of transformers that rescale frequencies in a way that is not built here. */
const KNOWN_TYPES: readonly unknown[] = ["linear", "dynamic", "yarn", "longrope", "su", "mrope"];

/** What transformers takes for both families where no theta is given. */
const DEFAULT_THETA = 10_000;

/**
 * Takes the rotary embedding out of a config.
 *
 * @throws {LoramemError} `UNSUPPORTED` for a known type other than default and llama3; `BAD_CONFIG`
 * for an unknown type, an unknown key, a value out of range, or two statements that differ.
 */
export function readRope(config: ConfigReader): RopeConfig {
  const { file } = config;
  const parameters = config.take("rope_parameters");
  const scaling = config.take("rope_scaling");
  if (parameters !== undefined && scaling !== undefined) {
    const what = "rope_parameters and rope_scaling are both given";
    throw badConfig(file, "rope_parameters", what, "keep the one that the model was trained with");
  }
  const key = parameters === undefined ? "rope_scaling" : "rope_parameters";
  const object = parameters ?? scaling ?? {};
  if (!isObject(object)) throw config.bad(key, object, "an object");
  const rope = new ConfigReader(object, file, `${key}.`);
  const theta =
    agreed(file, "rope_theta", rope.take("rope_theta"), config.take("rope_theta")) ?? DEFAULT_THETA;
  if (typeof theta !== "number" || !Number.isFinite(theta) || theta <= 0) {
    throw config.bad("rope_theta", theta, "a number above 0");
  }
  const type =
    agreed(file, `${key}.rope_type`, rope.take("rope_type"), rope.take("type")) ?? "default";
  let result: RopeConfig;
  if (type === "default") {
    result = { type, theta };
  } else if (type === "llama3") {
    result = { type, theta, ...readLlama3(rope) };
  } else if (KNOWN_TYPES.includes(type)) {
    throw unsupported(file, `${key}.rope_type`, type, "only default and llama3 can be trained");
  } else {
    throw rope.bad("rope_type", type, "a type that transformers knows");
  }
  for (const [name, value] of rope.rest()) {
    if (value === null || (name === "partial_rotary_factor" && value === 1)) continue;
    const what = `unknown key ${key}.${name} = ${excerpt(value)} for type ${type}`;
    throw badConfig(file, `${key}.${name}`, what, "remove it if you know that it changes nothing");
  }
  return result;
}

function readLlama3(rope: ConfigReader): Omit<Llama3Rope, "type" | "theta"> {
  const factor = rope.positive("factor");
  if (factor < 1) throw rope.bad("factor", factor, "1 or more");
  const lowFreqFactor = rope.positive("low_freq_factor");
  const highFreqFactor = rope.positive("high_freq_factor");
  if (highFreqFactor <= lowFreqFactor) {
    throw rope.bad("high_freq_factor", highFreqFactor, `above low_freq_factor (${lowFreqFactor})`);
  }
  const originalMaxPositions = rope.integer("original_max_position_embeddings", 2 ** 31 - 1);
  return { factor, lowFreqFactor, highFreqFactor, originalMaxPositions };
}

/** One value that may stand in two places. */
function agreed(file: string, key: string, a: unknown, b: unknown): unknown {
  if (a !== undefined && b !== undefined && a !== b) {
    const what = `${key} is given twice, as ${excerpt(a)} and ${excerpt(b)}`;
    throw badConfig(file, key, what, "keep the one that the model was trained with");
  }
  return a ?? b;
}
