/**
 * One training step of a small model, for compute-sanitizer to watch. Its head size decides which attention kernels run.
 *
 *     LORAMEM_CUBLASLT=off compute-sanitizer --tool memcheck bun tests/cuda/one_step.ts cuda:0 bf16 128
 *
 * `--tool racecheck` wants a library whose warps arrive at barriers lane by lane: see lm_barrier_arrive_warp in csrc/cuda/hopper.cuh.
 */
import process from "node:process";
import type { Precision } from "../../src/api/amp/precision.ts";
import { parseModelConfig } from "../../src/api/nn/config.ts";
import { linearModules } from "../../src/api/nn/config_tensors.ts";
import { resolveLoraTargets } from "../../src/api/nn/lora_config.ts";
import { initializeAdapters } from "../../src/api/train/adapter_state.ts";
import { randomWeights } from "../../src/api/train/random_data.ts";
import { MODELS } from "../plan/models.ts";
import { markovBatch } from "../shapes/markov.ts";
import { commitShape, SETTINGS, type ShapeSetup, shapeSpec } from "../shapes/session.ts";

const [device = "cuda:0", precision = "bf16", headDim = "64"] = process.argv.slice(2);
const [documents, tokens] = [4, 512];
const setup = { device, precision: precision as Precision } as ShapeSetup;
const model = { ...MODELS["four layers"], head_dim: Number(headDim) };
const spec = shapeSpec({ model: "four layers", documents, tokens }, setup);
const config = parseModelConfig(model, "config.json");
const lora = { rank: 16, alpha: 32, targetModules: "all-linear" } as const;
const targets = resolveLoraTargets(linearModules(config), lora);
await using shape = await commitShape({ ...spec, config, targets }, setup);
const { session } = shape;
await randomWeights(session);
await initializeAdapters(session.executor, session.run, 0);
const batch = markovBatch({ vocabSize: config.vocabSize, documents, tokens, seed: 0, step: 0 });
const { loss } = await session.trainStep(batch, SETTINGS);
console.log(`${device}, ${precision}, head size ${headDim}: loss ${loss}`);
