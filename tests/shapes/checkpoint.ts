/**
 * Checkpoints of well-known shapes with random weights: N(0, 0.02) in bf16, norms one, as fresh models of the field. They
 * are read from one pool of random numbers, so that 16 GB of weights cost no more than copying them.
 */
import { mkdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { type AdapterTensors, writeAdapter } from "../../src/api/io/adapter.ts";
import { type TensorFile, writeSafetensors } from "../../src/api/io/safetensors.ts";
import type { TensorEntry } from "../../src/api/io/safetensors_header.ts";
import type { ModelConfig } from "../../src/api/nn/config.ts";
import { expectedTensors, linearModules } from "../../src/api/nn/config_tensors.ts";
import { resolveLoraTargets } from "../../src/api/nn/lora_config.ts";
import { bf16Bits, bf16Round, randomWords } from "./random.ts";

/** A prime, so that no two rows of a matrix are the same stretch of the pool. */
const POOL = 4194301;
const DEVIATION = 0.02;
const ONE = 0x3f80;

/** The adapters that all sessions and peers start from. */
export const LORA = { rank: 16, alpha: 32, targetModules: "all-linear" } as const;

/** What loading needs of a checkpoint; nothing is stored. */
export type Checkpoint = Pick<TensorFile, "tensors" | "read">;

/** The random checkpoint of a model. */
export function randomCheckpoint(config: ModelConfig, seed: number): Checkpoint {
  const pool = normals(seed);
  const tensors = new Map<string, TensorEntry>();
  const starts = new Map<string, number>();
  const place = randomWords(seed, 1);
  for (const [name, shape] of expectedTensors(config)) {
    const bytes = 2 * shape.reduce((product, size) => product * size, 1);
    tensors.set(name, { name, dtype: "BF16", shape, bytes, offset: 0, file: "random" });
    starts.set(name, place() % POOL);
  }
  return {
    tensors,
    async read({ name }, into, at = 0) {
      const words = new Uint16Array(into.buffer, into.byteOffset, into.byteLength / 2);
      if (name.endsWith("norm.weight")) {
        words.fill(ONE);
        return;
      }
      let from = ((starts.get(name) as number) + at / 2) % POOL;
      for (let done = 0; done < words.length; from = 0) {
        const part = pool.subarray(from, from + words.length - done);
        words.set(part, done);
        done += part.length;
      }
    },
  };
}

/** bf16 numbers of the normal distribution, by the method of Box and Muller. */
function normals(seed: number): Uint16Array {
  const word = randomWords(seed, 0);
  const pool = new Uint16Array(POOL);
  for (let at = 0; at < POOL; at += 2) {
    const radius = DEVIATION * Math.sqrt(-2 * Math.log((word() + 0.5) / 2 ** 32));
    const angle = (2 * Math.PI * word()) / 2 ** 32;
    pool[at] = bf16Bits(radius * Math.cos(angle));
    pool[at + 1] = bf16Bits(radius * Math.sin(angle)); // the last one falls off the end
  }
  return pool;
}

/**
 * Adapters that are exact in bf16, so that every precision starts from the same numbers: A uniform in +-1 / sqrt(in), and
 * B uniform in +-1/1024 instead of zero, so that A has a gradient in the first step already.
 */
export function randomAdapter(config: ModelConfig, seed: number): AdapterTensors[] {
  const word = randomWords(seed, 2);
  const uniform = (count: number, bound: number) =>
    Float32Array.from({ length: count }, () => bf16Round((word() / 2 ** 31 - 1) * bound));
  return resolveLoraTargets(linearModules(config), LORA).map(
    ({ path, inFeatures, outFeatures, rank }) => ({
      path,
      rank,
      inFeatures,
      outFeatures,
      a: uniform(rank * inFeatures, 1 / Math.sqrt(inFeatures)),
      b: uniform(outFeatures * rank, 1 / 1024),
    }),
  );
}

/** Writes `config.json` and the weights, a file per decoder layer and one for the rest. */
export async function writeCheckpoint(
  folder: string,
  json: Readonly<Record<string, unknown>>,
  checkpoint: Checkpoint,
): Promise<void> {
  await mkdir(folder, { recursive: true });
  await writeFile(join(folder, "config.json"), `${JSON.stringify(json, null, 2)}\n`);
  const shards = Map.groupBy(checkpoint.tensors.values(), ({ name }) => {
    const layer = /layers\.(\d+)\./.exec(name)?.[1] ?? "rest";
    return `model-${layer}.safetensors`;
  });
  const files: Record<string, string> = {};
  for (const [file, entries] of shards) {
    const tensors = [];
    for (const entry of entries) {
      const data = new Uint8Array(entry.bytes);
      await checkpoint.read(entry, data);
      tensors.push({ name: entry.name, dtype: entry.dtype, shape: entry.shape, data });
      files[entry.name] = file;
    }
    await writeSafetensors(join(folder, file), tensors, { format: "pt" });
  }
  const index = { metadata: {}, weight_map: files };
  await writeFile(join(folder, "model.safetensors.index.json"), JSON.stringify(index));
}

/** Writes adapters as PEFT reads them. */
export async function writeRandomAdapter(
  folder: string,
  config: ModelConfig,
  seed: number,
): Promise<void> {
  const modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
  const { rank, alpha } = LORA;
  await writeAdapter(folder, {
    config: { rank, alpha, targetModules: modules, baseModel: "random" },
    tensors: randomAdapter(config, seed),
  });
}
