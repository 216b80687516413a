/**
 * How fast memory is in a training step. Kernels that stream alone reach a rate that the many short ones of a step do not,
 * so it is found backwards: a small decoder is trained, and the rate is the one with which the time model predicts its step.
 */
import type { Document } from "../data/conversation.ts";
import type { Device } from "../memory/mod.ts";
import { parseModelConfig } from "../nn/config.ts";
import { linearModules } from "../nn/config_tensors.ts";
import { resolveLoraTargets } from "../nn/lora_config.ts";
import type { DeviceProfile } from "../plan/profiles.ts";
import { forecastStep } from "../plan/time.ts";
import { initializeAdapters } from "./adapter_state.ts";
import { randomDocuments, randomWeights } from "./random_data.ts";
import { loadOf } from "./run_inputs.ts";
import { planRun, type RunPlan } from "./run_plan.ts";
import { type OptimizerSettings, Session } from "./session.ts";

/** Two layers with the proportions of well-known models, and the documents of a step. */
const ON_GPU = { hidden: 2048, heads: 32, vocab: 32768, documents: 2, tokens: 2048 };
const ON_CPU = { hidden: 256, heads: 4, vocab: 2048, documents: 2, tokens: 128 };

const SETTINGS: OptimizerSettings = {
  learningRate: 1e-4,
  beta1: 0.9,
  beta2: 0.999,
  adamEps: 1e-8,
  weightDecay: 0,
  maxGradNorm: 1,
};

/** The first steps record graphs and warm caches. Of the others the fastest counts: other programs only slow down. */
const WARM = 2;
const STEPS = 5;

/** The rate is looked for between that of streaming kernels alone and this part of it. */
const SLOWEST = 1 / 16;
const HALVINGS = 30;

/**
 * Measures the bandwidth of a device that is otherwise idle, in a training step of a small model.
 *
 * @param profile All other rates of the device, and as `bandwidth` what streaming kernels alone reach.
 * @returns Bytes per second, read and written together.
 * @throws {LoramemError} OUT_OF_MEMORY where the device has no room for about 64 MiB (CPU) or 1 GiB (GPU).
 */
export async function stepBandwidth(device: Device, profile: DeviceProfile): Promise<number> {
  const { documents, tokens, ...sizes } = device.kind === "cpu" ? ON_CPU : ON_GPU;
  const run = planSmall(device, sizes, documents, tokens);
  const batch = randomDocuments(sizes.vocab, documents, tokens);
  const seconds = await measure(device, run, batch);
  const load = loadOf(batch, run.spec.config);
  const programs = [...run.plan.programs.values()].map(({ program }) => program);
  return rateFor(seconds, profile.bandwidth, (bandwidth) => {
    const rates = { ...profile, bandwidth };
    return forecastStep(programs, rates, { load, microBatches: 1 }).seconds;
  });
}

/**
 * The rate with which `predicted`, which falls as the rate grows, gives `seconds`; the nearest end where none between `most`
 * and a sixteenth of it does.
 */
export function rateFor(
  seconds: number,
  most: number,
  predicted: (rate: number) => number,
): number {
  let [low, high] = [most * SLOWEST, most];
  for (let halving = 0; halving < HALVINGS; halving++) {
    const middle = (low + high) / 2;
    if (predicted(middle) > seconds) low = middle;
    else high = middle;
  }
  return high;
}

function planSmall(
  device: Device,
  { hidden, heads, vocab }: { hidden: number; heads: number; vocab: number },
  documents: number,
  tokens: number,
): RunPlan {
  const json = {
    architectures: ["LlamaForCausalLM"],
    hidden_size: hidden,
    intermediate_size: hidden * 4,
    num_attention_heads: heads,
    num_key_value_heads: heads / 4,
    num_hidden_layers: 2,
    vocab_size: vocab,
    rms_norm_eps: 1e-5,
    max_position_embeddings: tokens,
    tie_word_embeddings: true,
    rope_theta: 10000,
    hidden_act: "silu",
  };
  const config = parseModelConfig(json, "the model of the calibration");
  const lora = { rank: 16, alpha: 32, targetModules: "all-linear" };
  const dims = {
    tokensPerMicroBatch: documents * tokens,
    documentsPerMicroBatch: documents,
    lossChunkTokens: Math.min(1024, documents * tokens),
    prefillTokens: 0,
    contextTokens: 0,
  };
  const spec = {
    config,
    targets: resolveLoraTargets(linearModules(config), lora),
    dtypeOf: () => "bf16" as const,
    precision: "bf16" as const,
    backend: device.kind === "cpu" ? ("cpu" as const) : ("cuda" as const),
    dims,
    programs: ["train", "optimizer"] as const,
  };
  return planRun(spec, "keep");
}

/** Seconds of a step. */
async function measure(device: Device, run: RunPlan, batch: readonly Document[]): Promise<number> {
  const session = Session.commit(device, run, "graph", {}, "timed");
  try {
    await randomWeights(session);
    await initializeAdapters(session.executor, run, 0);
    const times: number[] = [];
    for (let step = 0; step < WARM + STEPS; step++) {
      const start = performance.now();
      await session.trainStep(batch, SETTINGS, batch);
      if (step >= WARM) times.push((performance.now() - start) / 1000);
    }
    return Math.min(...times);
  } finally {
    await session.dispose();
  }
}
