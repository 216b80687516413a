/**
 * LoRA adapters in PEFT's folder format: `adapter_config.json` and `adapter_model.safetensors`.
 *
 * Tensor names are `base_model.model.<module path>.lora_A.weight` [rank, in] and `.lora_B.weight`
 * [out, rank] (PEFT 0.21, which strips the adapter's name).
 */
import { Buffer } from "node:buffer";
import { stat } from "node:fs/promises";
import { join } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import {
  ADAPTER_CONFIG,
  type AdapterConfig,
  adapterConfigToJson,
  parseAdapterConfig,
  readAdapterConfig,
} from "./adapter_config.ts";
import { IO_CHUNK, writeFileAtomic, writeFolderAtomic } from "./atomic.ts";
import { toFloat32 } from "./dtype.ts";
import {
  openSafetensors,
  type TensorData,
  type TensorFile,
  writeSafetensors,
} from "./safetensors.ts";
import type { TensorEntry } from "./safetensors_header.ts";

const WEIGHTS = "adapter_model.safetensors";
const PICKLE = "adapter_model.bin";
const PREFIX = "base_model.model.";

/** The two matrices of one adapted module. */
export interface AdapterTensors {
  /** Module path in the base model, e.g. `model.layers.0.self_attn.q_proj`. */
  readonly path: string;
  readonly rank: number;
  readonly inFeatures: number;
  readonly outFeatures: number;
  /** lora_A, [rank, inFeatures], row-major. */
  readonly a: Float32Array;
  /** lora_B, [outFeatures, rank], row-major. */
  readonly b: Float32Array;
}

/** A whole adapter. */
export interface Adapter {
  readonly config: AdapterConfig;
  readonly tensors: readonly AdapterTensors[];
}

/**
 * Writes an adapter that PEFT, vLLM and llama.cpp can load.
 *
 * The files are written to a staging folder, opened again and compared with what was given, and
 * only then renamed into `dir`; a failure leaves `dir` as it was.
 *
 * @example Usage
 * ```ts
 * import { writeAdapter } from "./mod.ts";
 * const path = "model.layers.0.self_attn.q_proj";
 * const a = new Float32Array(2 * 8).fill(0.1);
 * const b = new Float32Array(8 * 2);
 * await writeAdapter("out/adapter", {
 *   config: { rank: 2, alpha: 4, targetModules: ["q_proj"], baseModel: "examples/demo/model" },
 *   tensors: [{ path, rank: 2, inFeatures: 8, outFeatures: 8, a, b }],
 * });
 * ```
 *
 * @param dir The adapter's folder; made where it is missing, other files in it are left alone.
 * @param adapter Config and float32 tensors; the tensors are borrowed and may be views over native
 * memory.
 * @throws {LoramemError} `BAD_ARGUMENT` where the adapter is empty, holds a NaN or infinity, or
 * contradicts its config; `IO` where the file system refuses; `BAD_FILE` where the written file
 * reads back differently.
 */
export async function writeAdapter(dir: string, adapter: Adapter): Promise<void> {
  checkAdapter(adapter);
  const json = adapterConfigToJson(adapter.config);
  const text = new TextEncoder().encode(`${JSON.stringify(json, null, 2)}\n`);
  const tensors = adapter.tensors.flatMap(tensorData);
  // The config comes last: without it the folder is no adapter yet.
  await writeFolderAtomic(dir, [WEIGHTS, ADAPTER_CONFIG], async (staging) => {
    await writeSafetensors(join(staging, WEIGHTS), tensors, { format: "pt" });
    await verify(join(staging, WEIGHTS), tensors);
    await writeFileAtomic(join(staging, ADAPTER_CONFIG), [text]);
  });
}

/**
 * Reads an adapter folder that PEFT or loramem wrote.
 *
 * @example Usage
 * ```ts
 * import { readAdapter } from "./mod.ts";
 * const adapter = await readAdapter("tests/golden/llama/adapter0");
 * for (const { path, rank, a } of adapter.tensors) console.log(path, rank, a.length);
 * ```
 *
 * @param dir The folder.
 * @returns Its config and tensors as float32 (stored as F32, BF16 or F16), in the
 * order of the file's header.
 * @throws {LoramemError} `BAD_CONFIG` or `BAD_FILE` where a file is missing or malformed, or a
 * tensor is not finite; `UNSUPPORTED` for DoRA, trained biases, fully trained modules and other
 * parts of PEFT that are not plain LoRA.
 */
export async function readAdapter(dir: string): Promise<Adapter> {
  const config = await readAdapterConfig(join(dir, ADAPTER_CONFIG));
  const path = join(dir, WEIGHTS);
  if (!(await exists(path)) && (await exists(join(dir, PICKLE)))) {
    const what = `${PICKLE} is a pickle, which can run any code when it is opened`;
    throw badAdapter(dir, what, undefined, "load it with a recent PEFT and save it again");
  }
  await using file = await openSafetensors(path);
  const pairs = pairUp(file, path);
  const ranks = allowedRanks(config);
  const tensors: AdapterTensors[] = [];
  for (const [module, { a, b }] of pairs) {
    const [rank = 0, inFeatures = 0] = a.shape;
    const [outFeatures = 0, rankOfB = 0] = b.shape;
    if (rank !== rankOfB || rank * inFeatures * outFeatures === 0) {
      const what = `lora_A [${a.shape}] and lora_B [${b.shape}] are not [r, in] and [out, r]`;
      throw badAdapter(path, what, module);
    }
    if (!ranks.has(rank)) {
      const what = `rank ${rank} is not in ${ADAPTER_CONFIG} (${[...ranks].join(", ")})`;
      throw badAdapter(path, what, module);
    }
    const values = { a: await readFloats(file, a), b: await readFloats(file, b) };
    tensors.push({ path: module, rank, inFeatures, outFeatures, ...values });
  }
  return { config, tensors };
}

/** Groups the tensors of a file by module; a name that is not plain LoRA is an error. */
function pairUp(file: TensorFile, path: string): Map<string, { a: TensorEntry; b: TensorEntry }> {
  const halves = { A: new Map<string, TensorEntry>(), B: new Map<string, TensorEntry>() };
  for (const entry of file.tensors.values()) {
    const match = /^base_model\.model\.(.+)\.lora_([AB])\.weight$/.exec(entry.name);
    if (match === null) {
      const message =
        `readAdapter: a tensor is not a lora_A or lora_B weight: ${entry.name} in ${path}: ` +
        "merge this adapter into its base with PEFT, or train one with plain LoRA on linear layers";
      throw new LoramemError("UNSUPPORTED", message, { what: entry.name });
    }
    if (entry.shape.length !== 2) {
      throw badAdapter(path, `the shape [${entry.shape}] is not a matrix`, entry.name);
    }
    halves[match[2] as "A" | "B"].set(match[1] as string, entry);
  }
  const pairs = new Map<string, { a: TensorEntry; b: TensorEntry }>();
  for (const module of new Set([...halves.A.keys(), ...halves.B.keys()])) {
    const [a, b] = [halves.A.get(module), halves.B.get(module)];
    if (a === undefined || b === undefined) {
      throw badAdapter(path, `lora_${a === undefined ? "A" : "B"} is missing`, module);
    }
    pairs.set(module, { a, b });
  }
  if (pairs.size === 0) throw badAdapter(path, "the adapter is empty");
  return pairs;
}

async function readFloats(file: TensorFile, entry: TensorEntry): Promise<Float32Array> {
  if (!["F32", "BF16", "F16"].includes(entry.dtype)) {
    const message =
      `readAdapter: dtype ${entry.dtype} cannot be read: ${entry.name} in ${entry.file}: ` +
      "save the adapter as F32, BF16 or F16";
    throw new LoramemError("UNSUPPORTED", message, { what: entry.dtype });
  }
  const bytes = new Uint8Array(entry.bytes);
  await file.read(entry, bytes);
  const values = toFloat32(entry.dtype, bytes);
  if (!values.every(Number.isFinite)) {
    throw badAdapter(entry.file, "it holds a NaN or an infinity", entry.name);
  }
  return values;
}

/** Checks an adapter before anything is written. */
function checkAdapter({ config, tensors }: Adapter): void {
  const fail = (what: string, fix: string): never => {
    throw new LoramemError("BAD_ARGUMENT", `writeAdapter: ${what}: ${fix}`, { name: "adapter" });
  };
  if (/^all-linear$/i.test(String(config.targetModules))) {
    fail("targetModules is all-linear", "give the names it stands for, as readers want them");
  }
  try {
    parseAdapterConfig(adapterConfigToJson(config), ADAPTER_CONFIG);
  } catch (error) {
    fail(`the config is not valid (${(error as Error).message})`, "mend the config");
  }
  if (tensors.length === 0) fail("the adapter has no tensors", "adapt at least one module");
  const ranks = allowedRanks(config);
  for (const { path, rank, inFeatures, outFeatures, a, b } of tensors) {
    if (!ranks.has(rank))
      fail(`rank ${rank} of ${path} is not in the config`, "add it to rankPattern");
    if (a.length !== rank * inFeatures || b.length !== outFeatures * rank) {
      const what =
        `${a.length} and ${b.length} elements of ${path} are not [${rank}, ${inFeatures}] ` +
        `and [${outFeatures}, ${rank}]`;
      fail(what, "make shapes and data agree");
    }
    if (a.length === 0 || b.length === 0) fail(`${path} is empty`, "give it at least one element");
    if (!a.every(Number.isFinite) || !b.every(Number.isFinite)) {
      const fix =
        "the run has diverged; go back to an earlier checkpoint with a lower learning rate";
      fail(`${path} holds a NaN or an infinity`, fix);
    }
  }
}

/**
 * The ranks that occur. Which module has which is checked where the patterns meet the model's
 * modules.
 */
function allowedRanks(config: AdapterConfig): Set<number> {
  return new Set([config.rank, ...Object.values(config.rankPattern ?? {})]);
}

function tensorData({ path, rank, inFeatures, outFeatures, a, b }: AdapterTensors): TensorData[] {
  const bytes = (x: Float32Array) => new Uint8Array(x.buffer, x.byteOffset, x.byteLength);
  const [name, dtype] = [PREFIX + path, "F32" as const];
  return [
    { name: `${name}.lora_A.weight`, dtype, shape: [rank, inFeatures], data: bytes(a) },
    { name: `${name}.lora_B.weight`, dtype, shape: [outFeatures, rank], data: bytes(b) },
  ];
}

/** Opens the written file and compares names, dtypes, shapes and every byte. */
async function verify(path: string, expected: readonly TensorData[]): Promise<void> {
  await using file = await openSafetensors(path);
  const differs = (what: string, tensor?: string) =>
    badAdapter(path, `${what} read back differently`, tensor, "check disk and memory; save again");
  if (file.tensors.size !== expected.length) throw differs("the number of tensors");
  const buffer = new Uint8Array(IO_CHUNK);
  for (const { name, dtype, shape, data } of expected) {
    const entry = file.tensors.get(name);
    if (entry?.dtype !== dtype || String(entry.shape) !== String(shape)) {
      throw differs("name, dtype or shape", name);
    }
    for (let at = 0; at < data.byteLength; at += IO_CHUNK) {
      const part = data.subarray(at, at + IO_CHUNK);
      const read = buffer.subarray(0, part.byteLength);
      await file.read(entry, read, at);
      if (Buffer.compare(read, part) !== 0) throw differs("the bytes", name);
    }
  }
}

async function exists(path: string): Promise<boolean> {
  return await stat(path).then(
    () => true,
    () => false,
  );
}

function badAdapter(
  file: string,
  what: string,
  tensor?: string,
  fix = "get the adapter again",
): LoramemError {
  const where = tensor === undefined ? file : `${file}, ${tensor}`;
  const message = `readAdapter: ${what}: ${where}: ${fix}`;
  return new LoramemError("BAD_FILE", message, tensor === undefined ? { file } : { file, tensor });
}
