/**
 * `config.json` of a Hugging Face checkpoint, as the decoder that it describes.
 *
 * Every key is read, known to be harmless, or an error that names it.
 */
import { readFile, stat } from "node:fs/promises";
import { join } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import { checkRemainingKeys } from "./config_keys.ts";
import { badConfig, ConfigReader, excerpt, isObject } from "./config_reader.ts";
import { type RopeConfig, readRope } from "./config_rope.ts";
import { readWindows } from "./config_window.ts";

export type { DefaultRope, Llama3Rope, RopeConfig } from "./config_rope.ts";

/** A decoder architecture that can be trained. */
export type Family = "llama" | "qwen2";

/** The decoder that a checkpoint holds. */
export interface ModelConfig {
  readonly family: Family;
  /** Rows of the embedding and of the output head. */
  readonly vocabSize: number;
  /** Width of the residual stream. */
  readonly hiddenSize: number;
  /** Width of the gated MLP. */
  readonly intermediateSize: number;
  /** Decoder layers. */
  readonly layers: number;
  /** Query heads. */
  readonly heads: number;
  /** Key and value heads; `heads` is a multiple of it. */
  readonly kvHeads: number;
  /** Size of one head; even. `heads * headDim` may differ from `hiddenSize`. */
  readonly headDim: number;
  /** Added to the mean square in RMSNorm. */
  readonly rmsNormEps: number;
  /** Longest context that the checkpoint was made for, in tokens. */
  readonly maxPositions: number;
  /** The output head is the embedding matrix. */
  readonly tieWordEmbeddings: boolean;
  /** q_proj, k_proj and v_proj have a bias. */
  readonly qkvBias: boolean;
  /** o_proj has a bias. */
  readonly oBias: boolean;
  /** gate_proj, up_proj and down_proj have a bias. */
  readonly mlpBias: boolean;
  readonly rope: RopeConfig;
  /** By layer: rows that a query sees at most, itself among them; 0 = all before it. */
  readonly windows: readonly number[];
  /** The dtype that the config claims, e.g. `bfloat16`; the files decide. */
  readonly torchDtype: string | null;
}

const FAMILIES: ReadonlyMap<string, Family> = new Map([
  ["LlamaForCausalLM", "llama"],
  ["Qwen2ForCausalLM", "qwen2"],
]);

/** Far above every model in use, and low enough that no tensor leaves 2^53 elements. */
const LIMITS = { layers: 4096, size: 2 ** 22, vocab: 2 ** 26, positions: 2 ** 31 - 1 };

/** A hundred times the largest config.json in use. */
const MAX_BYTES = 10_000_000;

/**
 * Reads the `config.json` of a model.
 *
 * @example Usage
 * ```ts
 * import { readModelConfig } from "./mod.ts";
 * const config = await readModelConfig("examples/demo/model");
 * console.log(config.family, config.layers, config.hiddenSize);
 * ```
 *
 * @param path The model folder, or the path of its `config.json`.
 * @returns The checked config.
 * @throws {LoramemError} as {@linkcode parseModelConfig}; `BAD_CONFIG` also where the file is
 * missing or not JSON, `IO` where the file system refuses.
 */
export async function readModelConfig(path: string): Promise<ModelConfig> {
  let file = path;
  let text: string;
  try {
    if ((await stat(path)).isDirectory()) file = join(path, "config.json");
    const { size } = await stat(file);
    if (size > MAX_BYTES)
      throw badConfig(file, null, `it has ${size} bytes`, "this is no config.json");
    text = await readFile(file, "utf8");
  } catch (error) {
    if (error instanceof LoramemError) throw error;
    const errno = String((error as { code?: unknown }).code ?? (error as Error).name);
    if (errno === "ENOENT") {
      throw badConfig(
        file,
        null,
        "there is no such file",
        "give a model folder or its config.json",
      );
    }
    const message = `config: the file cannot be read: ${file} (${errno}): check path and mode`;
    throw new LoramemError("IO", message, { file, errno }, { cause: error });
  }
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (error) {
    const what = `it is not valid JSON (${(error as Error).message})`;
    throw badConfig(file, null, what, "the file is truncated or damaged; get it again");
  }
  return parseModelConfig(json, file);
}

/**
 * Checks the content of a `config.json`.
 *
 * @example Usage
 * ```ts
 * import { readFile } from "node:fs/promises";
 * import { parseModelConfig } from "./mod.ts";
 * const file = "examples/demo/model/config.json";
 * const config = parseModelConfig(JSON.parse(await readFile(file, "utf8")), file);
 * console.log(config.heads * config.headDim);
 * ```
 *
 * @param json The parsed JSON.
 * @param where The file it comes from, for messages.
 * @returns The config with defaults filled in as transformers does.
 * @throws {LoramemError} `UNSUPPORTED` for an architecture, RoPE type or feature that cannot be
 * trained, by name; `BAD_CONFIG` for a key that is unknown, missing, or has a value that is out of
 * range or contradicts another.
 */
export function parseModelConfig(json: unknown, where: string): ModelConfig {
  if (!isObject(json))
    throw badConfig(where, null, "it is not a JSON object", "get the file again");
  const reader = new ConfigReader(json, where);
  const family = readFamily(reader);
  const hiddenSize = reader.integer("hidden_size", LIMITS.size);
  const heads = reader.integer("num_attention_heads", LIMITS.size);
  // Llama 1 has as many; Qwen2 always states it, and its default in transformers (32) is a trap.
  const kvHeads = reader.integer(
    "num_key_value_heads",
    heads,
    family === "llama" ? heads : undefined,
  );
  if (heads % kvHeads !== 0) {
    throw reader.bad("num_key_value_heads", kvHeads, `a divisor of num_attention_heads (${heads})`);
  }
  const attentionBias = family === "llama" && reader.boolean("attention_bias");
  const layers = reader.integer("num_hidden_layers", LIMITS.layers);
  const config: ModelConfig = {
    family,
    vocabSize: reader.integer("vocab_size", LIMITS.vocab),
    hiddenSize,
    intermediateSize: reader.integer("intermediate_size", LIMITS.size),
    layers,
    heads,
    kvHeads,
    headDim: readHeadDim(reader, hiddenSize, heads),
    rmsNormEps: reader.positive("rms_norm_eps"),
    maxPositions: reader.integer("max_position_embeddings", LIMITS.positions),
    tieWordEmbeddings: reader.boolean("tie_word_embeddings"),
    qkvBias: family === "qwen2" || attentionBias,
    oBias: attentionBias,
    mlpBias: family === "llama" && reader.boolean("mlp_bias"),
    rope: readRope(reader),
    windows: readWindows(reader, family === "qwen2", layers),
    torchDtype: readDtype(reader),
  };
  checkRemainingKeys(reader);
  return config;
}

/** `architectures` decides; `model_type` must not contradict it. */
function readFamily(reader: ConfigReader): Family {
  const architectures = reader.take("architectures");
  const type = reader.take("model_type");
  const supported = `supported are ${[...FAMILIES.keys()].join(" and ")}`;
  if (architectures === undefined && type === undefined) {
    throw badConfig(reader.file, "architectures", "no architectures and no model_type", supported);
  }
  const name = Array.isArray(architectures) ? architectures[0] : architectures;
  const family =
    name === undefined
      ? [...FAMILIES.values()].find((family) => family === type)
      : FAMILIES.get(String(name));
  if (family === undefined || (Array.isArray(architectures) && architectures.length !== 1)) {
    const what = excerpt(architectures ?? type);
    const message = `config: unknown architecture: ${what} in ${reader.file}: ${supported}`;
    throw new LoramemError("UNSUPPORTED", message, { what });
  }
  if (type !== undefined && type !== family) {
    const what = `model_type is ${excerpt(type)}, but architectures is ${excerpt(architectures)}`;
    throw badConfig(reader.file, "model_type", what, "make them agree");
  }
  return family;
}

function readHeadDim(reader: ConfigReader, hiddenSize: number, heads: number): number {
  if (typeof reader.peek("head_dim") !== "number" && hiddenSize % heads !== 0) {
    throw reader.bad("hidden_size", hiddenSize, `a multiple of num_attention_heads (${heads})`);
  }
  const headDim = reader.integer("head_dim", Math.floor(LIMITS.size / heads), hiddenSize / heads);
  if (headDim % 2 === 0) return headDim;
  throw reader.bad("head_dim", headDim, "even, as rotary embeddings turn pairs");
}

/** `dtype` in transformers 5, `torch_dtype` before. */
function readDtype(reader: ConfigReader): string | null {
  const dtype = reader.take("dtype") ?? reader.take("torch_dtype");
  reader.take("torch_dtype");
  if (dtype === undefined || typeof dtype === "string") return dtype ?? null;
  throw reader.bad("dtype", dtype, "a name such as bfloat16");
}
