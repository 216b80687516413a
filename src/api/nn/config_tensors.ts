/**
 * The modules and tensors that a config promises, under the names of Hugging Face checkpoints, and
 * the check that a checkpoint keeps the promise.
 */
import { LoramemError } from "../../ffi/error.ts";
import type { ModelConfig } from "./config.ts";

/** A linear layer y = W x (+ b), W stored as [outFeatures, inFeatures]. */
export interface LinearModule {
  /** Module path, e.g. `model.layers.0.self_attn.q_proj`. */
  readonly path: string;
  readonly inFeatures: number;
  readonly outFeatures: number;
}

/** The path of the output head, the one linear layer outside the decoder layers. */
export const LM_HEAD = "lm_head";

/** What a tensor in a file must tell about itself. */
export interface TensorInfo {
  readonly shape: readonly number[];
  readonly dtype: string;
  /** Path of the file, for messages. */
  readonly file?: string;
}

/**
 * Lists the linear layers of a model in the order of computation: q, k, v, o, gate, up and down of
 * every layer, then the output head (also where it shares the embedding's matrix).
 *
 * @example Usage
 * ```ts
 * import { linearModules, readModelConfig } from "./mod.ts";
 * const config = await readModelConfig("examples/demo/model");
 * console.log(linearModules(config)[0]?.path); // model.layers.0.self_attn.q_proj
 * ```
 *
 * @param config The model.
 */
export function linearModules(config: ModelConfig): LinearModule[] {
  const modules = Array.from({ length: config.layers }, (_, layer) => layerLinears(config, layer));
  const head = { path: LM_HEAD, inFeatures: config.hiddenSize, outFeatures: config.vocabSize };
  return [...modules.flat(), head];
}

/**
 * Lists the tensors that a checkpoint of this model must hold.
 *
 * @example Usage
 * ```ts
 * import { expectedTensors, readModelConfig } from "./mod.ts";
 * const config = await readModelConfig("examples/demo/model");
 * console.log(expectedTensors(config).get("model.norm.weight")); // [256]
 * ```
 *
 * @param config The model.
 * @returns Shape by tensor name. The output head is absent where it is tied to the embedding.
 */
export function expectedTensors(config: ModelConfig): Map<string, readonly number[]> {
  const { hiddenSize, vocabSize } = config;
  const tensors = new Map<string, readonly number[]>();
  tensors.set("model.embed_tokens.weight", [vocabSize, hiddenSize]);
  for (let layer = 0; layer < config.layers; layer++) {
    for (const norm of ["input_layernorm", "post_attention_layernorm"]) {
      tensors.set(`model.layers.${layer}.${norm}.weight`, [hiddenSize]);
    }
    for (const { path, inFeatures, outFeatures } of layerLinears(config, layer)) {
      tensors.set(`${path}.weight`, [outFeatures, inFeatures]);
      if (hasBias(config, path)) tensors.set(`${path}.bias`, [outFeatures]);
    }
  }
  tensors.set("model.norm.weight", [hiddenSize]);
  if (!config.tieWordEmbeddings) tensors.set(`${LM_HEAD}.weight`, [vocabSize, hiddenSize]);
  return tensors;
}

/**
 * Checks that a checkpoint holds exactly the tensors of its config.
 *
 * Two kinds of surplus are ignored, as transformers does: `rotary_emb.inv_freq` (computed from the
 * config) and the copy of a tied output head.
 *
 * @example Usage
 * ```ts
 * import { openSafetensors, readModelConfig, validateCheckpoint } from "./mod.ts";
 * const config = await readModelConfig("examples/demo/model");
 * await using files = await openSafetensors("examples/demo/model");
 * validateCheckpoint(config, files.tensors); // throws where they do not belong together
 * ```
 *
 * @param config The model.
 * @param tensors What the files hold.
 * @throws {LoramemError} `BAD_FILE` for a missing or surplus tensor or a shape that contradicts the
 * config; `UNSUPPORTED` for a dtype other than F32, BF16 and F16. Every message names the tensor.
 */
export function validateCheckpoint(
  config: ModelConfig,
  tensors: ReadonlyMap<string, TensorInfo>,
): void {
  const expected = expectedTensors(config);
  const missing: string[] = [];
  for (const [name, shape] of expected) {
    const tensor = tensors.get(name);
    if (tensor === undefined) missing.push(name);
    else checkTensor(name, tensor, shape);
  }
  if (missing.length > 0) {
    const name = missing[0] as string;
    const more = missing.length > 1 ? ` and ${missing.length - 1} more` : "";
    const what = `${name} [${expected.get(name)}]${more}`;
    throw badTensor(name, undefined, `missing from the checkpoint: ${what}`);
  }
  for (const [name, { shape, file }] of tensors) {
    if (expected.has(name) || name.endsWith("rotary_emb.inv_freq")) continue;
    if (name === `${LM_HEAD}.weight`) continue; // tied, or it would be expected
    const what = `not part of the ${config.family} model in config.json: ${name} [${shape}]`;
    throw badTensor(name, file, what);
  }
}

function checkTensor(
  name: string,
  { shape, dtype, file }: TensorInfo,
  expected: readonly number[],
) {
  if (!["F32", "BF16", "F16"].includes(dtype)) {
    const message =
      `checkpoint: dtype ${dtype} cannot be trained: ${name}${file ? ` in ${file}` : ""}: ` +
      "take a checkpoint with F32, BF16 or F16 weights";
    throw new LoramemError("UNSUPPORTED", message, { what: dtype });
  }
  if (shape.length !== expected.length || shape.some((size, i) => size !== expected[i])) {
    const what = `the shape contradicts config.json: ${name} is [${shape}], expected [${expected}]`;
    throw badTensor(name, file, what);
  }
}

function layerLinears(config: ModelConfig, layer: number): LinearModule[] {
  const { hiddenSize, intermediateSize, headDim } = config;
  const [qWidth, kvWidth] = [config.heads * headDim, config.kvHeads * headDim];
  const linear = (name: string, inFeatures: number, outFeatures: number): LinearModule => {
    return { path: `model.layers.${layer}.${name}`, inFeatures, outFeatures };
  };
  return [
    linear("self_attn.q_proj", hiddenSize, qWidth),
    linear("self_attn.k_proj", hiddenSize, kvWidth),
    linear("self_attn.v_proj", hiddenSize, kvWidth),
    linear("self_attn.o_proj", qWidth, hiddenSize),
    linear("mlp.gate_proj", hiddenSize, intermediateSize),
    linear("mlp.up_proj", hiddenSize, intermediateSize),
    linear("mlp.down_proj", intermediateSize, hiddenSize),
  ];
}

function hasBias(config: ModelConfig, path: string): boolean {
  if (path.includes(".mlp.")) return config.mlpBias;
  return path.endsWith("o_proj") ? config.oBias : config.qkvBias;
}

function badTensor(tensor: string, file: string | undefined, what: string): LoramemError {
  const where = file === undefined ? "" : ` in ${file}`;
  const message = `checkpoint: ${what}${where}: get config.json and all weights from one source`;
  const details = file === undefined ? { tensor } : { tensor, file };
  return new LoramemError("BAD_FILE", message, details);
}
