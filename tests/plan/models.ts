/** Configs of well-known models, as plain literals: no weights are needed to plan. */
import { parseModelConfig } from "../../src/api/nn/config.ts";
import { linearModules } from "../../src/api/nn/config_tensors.ts";
import { resolveLoraTargets } from "../../src/api/nn/lora_config.ts";
import type { StepDims } from "../../src/api/nn/programs.ts";
import type { SavePoints, SavePolicy } from "../../src/api/plan/save_points.ts";
import { planRun, type RunPlan, type RunSpec } from "../../src/api/train/run_plan.ts";

const LLAMA_3_1_8B = {
  architectures: ["LlamaForCausalLM"],
  hidden_size: 4096,
  intermediate_size: 14336,
  num_attention_heads: 32,
  num_key_value_heads: 8,
  num_hidden_layers: 32,
  vocab_size: 128256,
  rms_norm_eps: 1e-5,
  max_position_embeddings: 131072,
  tie_word_embeddings: false,
  rope_theta: 500000,
  rope_scaling: {
    rope_type: "llama3",
    factor: 8,
    low_freq_factor: 1,
    high_freq_factor: 4,
    original_max_position_embeddings: 8192,
  },
  hidden_act: "silu",
  torch_dtype: "bfloat16",
};

const QWEN2_5_0_5B = {
  architectures: ["Qwen2ForCausalLM"],
  hidden_size: 896,
  intermediate_size: 4864,
  num_attention_heads: 14,
  num_key_value_heads: 2,
  num_hidden_layers: 24,
  vocab_size: 151936,
  rms_norm_eps: 1e-6,
  max_position_embeddings: 32768,
  tie_word_embeddings: true,
  rope_theta: 1000000,
  hidden_act: "silu",
  torch_dtype: "bfloat16",
};

const LLAMA_3_2_1B = {
  ...LLAMA_3_1_8B,
  hidden_size: 2048,
  intermediate_size: 8192,
  num_hidden_layers: 16,
  head_dim: 64,
  tie_word_embeddings: true,
  rope_scaling: { ...LLAMA_3_1_8B.rope_scaling, factor: 32 },
};

/** Small enough that every mix of policies can be planned. */
const FOUR_LAYERS = {
  ...LLAMA_3_2_1B,
  hidden_size: 256,
  intermediate_size: 704,
  num_attention_heads: 4,
  num_key_value_heads: 2,
  num_hidden_layers: 4,
  vocab_size: 2048,
};

export const MODELS = {
  "Llama-3.1-8B": LLAMA_3_1_8B,
  "Llama-3.2-1B": LLAMA_3_2_1B,
  "Qwen2.5-0.5B": QWEN2_5_0_5B,
  "four layers": FOUR_LAYERS,
} as const;

export const DIMS: StepDims = {
  tokensPerMicroBatch: 4096,
  documentsPerMicroBatch: 8,
  lossChunkTokens: 1024,
  prefillTokens: 256,
  contextTokens: 512,
};

/** Plans {@linkcode specOf}. */
export function planModel(
  name: keyof typeof MODELS,
  points: SavePolicy | SavePoints,
  dims: Partial<StepDims> = {},
): RunPlan {
  return planRun(specOf(name, dims), points);
}

/** Training, evaluation and generation with r = 16 on all linears, bf16 weights and activations. */
export function specOf(name: keyof typeof MODELS, dims: Partial<StepDims> = {}): RunSpec {
  const config = parseModelConfig(MODELS[name], "config.json");
  const lora = { rank: 16, alpha: 32, targetModules: "all-linear" };
  return {
    config,
    targets: resolveLoraTargets(linearModules(config), lora),
    dtypeOf: () => "bf16" as const,
    precision: "bf16" as const,
    backend: "cuda" as const,
    dims: { ...DIMS, ...dims },
    programs: ["train", "optimizer", "evaluate", "prefill", "decode"] as const,
  };
}
