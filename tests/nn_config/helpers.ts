/** Helpers of the config tests. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseModelConfig } from "../../src/api/nn/config.ts";
import { type ErrorCode, LoramemError } from "../../src/ffi/error.ts";

export const GOLDEN = fileURLToPath(new URL("../golden", import.meta.url));

/** The JSON of a golden file. */
export function goldenJson(path: string): Record<string, unknown> {
  return JSON.parse(readFileSync(join(GOLDEN, path), "utf8"));
}

/** The parsed config of a golden model. */
export const goldenConfig = (name: string) =>
  parseModelConfig(goldenJson(`${name}/model/config.json`), name);

/** The names in a safetensors file with their dtype and shape, read without the library. */
export function goldenTensors(path: string): Map<string, { dtype: string; shape: number[] }> {
  const bytes = readFileSync(join(GOLDEN, path));
  const header = JSON.parse(bytes.subarray(8, 8 + Number(bytes.readBigUInt64LE(0))).toString());
  delete header.__metadata__;
  return new Map(Object.entries(header));
}

/** Expects a LoramemError with this code whose message matches every pattern. */
export function refuses(body: () => unknown, code: ErrorCode, ...patterns: RegExp[]): LoramemError {
  try {
    body();
  } catch (error) {
    assert.ok(error instanceof LoramemError, `not a LoramemError: ${error}`);
    assert.equal(error.code, code, error.message);
    for (const pattern of patterns) assert.match(error.message, pattern);
    return error;
  }
  assert.fail(`nothing was thrown, expected ${code}`);
}

/** Llama-3.1-8B, as on the Hub. */
export const LLAMA_31_8B = {
  architectures: ["LlamaForCausalLM"],
  attention_bias: false,
  attention_dropout: 0.0,
  bos_token_id: 128000,
  eos_token_id: [128001, 128008, 128009],
  hidden_act: "silu",
  hidden_size: 4096,
  initializer_range: 0.02,
  intermediate_size: 14336,
  max_position_embeddings: 131072,
  mlp_bias: false,
  model_type: "llama",
  num_attention_heads: 32,
  num_hidden_layers: 32,
  num_key_value_heads: 8,
  pretraining_tp: 1,
  rms_norm_eps: 1e-5,
  rope_scaling: {
    factor: 8.0,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
    original_max_position_embeddings: 8192,
    rope_type: "llama3",
  },
  rope_theta: 500000.0,
  tie_word_embeddings: false,
  torch_dtype: "bfloat16",
  transformers_version: "4.42.3",
  use_cache: true,
  vocab_size: 128256,
};

/** Qwen2.5-0.5B, as on the Hub. */
export const QWEN25_05B = {
  architectures: ["Qwen2ForCausalLM"],
  attention_dropout: 0.0,
  bos_token_id: 151643,
  eos_token_id: 151643,
  hidden_act: "silu",
  hidden_size: 896,
  initializer_range: 0.02,
  intermediate_size: 4864,
  max_position_embeddings: 32768,
  max_window_layers: 24,
  model_type: "qwen2",
  num_attention_heads: 14,
  num_hidden_layers: 24,
  num_key_value_heads: 2,
  rms_norm_eps: 1e-6,
  rope_theta: 1000000.0,
  sliding_window: 32768,
  tie_word_embeddings: true,
  torch_dtype: "bfloat16",
  transformers_version: "4.40.1",
  use_cache: true,
  use_mrope: false,
  use_sliding_window: false,
  vocab_size: 151936,
};
