/** Says what a model, an adapter, checkpoints or any safetensors file holds, and whether it is sound. Opens no library. */
import { readdir, stat } from "node:fs/promises";
import { join } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import { readAdapter } from "../io/adapter.ts";
import { ADAPTER_CONFIG } from "../io/adapter_config.ts";
import { listCheckpoints } from "../io/checkpoint.ts";
import { type InspectedFile, inspectFile } from "../io/inspect_file.ts";
import { ioError } from "../io/io_error.ts";
import { readIndex, resolveModelFiles } from "../io/safetensors_index.ts";
import { readModelConfig } from "../nn/config.ts";
import { type TensorInfo, validateCheckpoint } from "../nn/config_tensors.ts";

/** What {@linkcode inspectFiles} found. */
export interface Inspection {
  readonly path: string;
  /** What the path was taken for. */
  readonly kind: "safetensors" | "model" | "adapter" | "checkpoint" | "run";
  readonly files: readonly InspectedFile[];
  /** What is wrong; each message names the file and, where it is one tensor, the tensor. */
  readonly faults: readonly LoramemError[];
  /** What is odd but harms no reader, such as a shard that the index does not name. */
  readonly remarks: readonly string[];
  /** Whether there are no faults. */
  readonly sound: boolean;
}

/** Settings of {@linkcode inspectFiles}. */
export interface InspectOptions {
  /** Read every element of F32, BF16 and F16 tensors and count NaN and infinity, which then are faults. Default false. */
  readonly values?: boolean;
}

/** How shards are named; the loader goes by the index alone. */
const SHARD = /^model-\d+-of-\d+\.safetensors$/;

/**
 * Looks at a safetensors file, a model folder (single file or shards), a PEFT adapter folder, or a run folder with its
 * checkpoints: headers, offsets, dtypes and shapes, shards against their index, tensors against config.json or
 * adapter_config.json, and the checksums of checkpoints. Needs no native library and little memory, but the values of an
 * adapter are read as a whole.
 *
 * @example Usage
 * ```ts
 * import { inspectFiles } from "./mod.ts";
 * const { kind, sound, files } = await inspectFiles("examples/demo/model", { values: true });
 * console.log(kind, sound, files[0]?.tensors.length);
 * ```
 *
 * @param path The file or folder.
 * @param options Whether to look at values, too.
 * @returns What it holds, with every fault that was found.
 * @throws {LoramemError} `IO` where the path does not exist or cannot be read; what is wrong with a file is a fault instead.
 */
export async function inspectFiles(
  path: string,
  options: InspectOptions = {},
): Promise<Inspection> {
  const values = options.values ?? false;
  try {
    if (!(await stat(path)).isDirectory()) {
      const file = await inspectFile(path, values);
      return conclude(path, file.checkpoint ? "checkpoint" : "safetensors", [file], [], []);
    }
    const names = await readdir(path);
    if (names.includes("config.json")) return await inspectModel(path, names, values);
    if (names.includes(ADAPTER_CONFIG)) return await inspectAdapter(path, values);
    const { checkpoints } = await listCheckpoints(path);
    if (checkpoints.length === 0) return await inspectModel(path, names, values);
    const files: InspectedFile[] = [];
    for (const checkpoint of checkpoints) files.push(await inspectFile(checkpoint.path, values));
    return conclude(path, "run", files, [], []);
  } catch (error) {
    throw ioError("inspect", path, error);
  }
}

function conclude(
  path: string,
  kind: Inspection["kind"],
  files: readonly InspectedFile[],
  more: readonly LoramemError[],
  remarks: readonly string[],
): Inspection {
  const faults = [...files.flatMap((file) => file.faults), ...more];
  return { path, kind, files, faults, remarks, sound: faults.length === 0 };
}

async function inspectAdapter(path: string, values: boolean): Promise<Inspection> {
  const file = await inspectFile(join(path, "adapter_model.safetensors"), values);
  const [faults, remarks] = await sortOut(file.faults, () => readAdapter(path));
  return conclude(path, "adapter", [file], faults, remarks);
}

async function inspectModel(
  path: string,
  names: readonly string[],
  values: boolean,
): Promise<Inspection> {
  const { files, faults } = await inspectWeights(path, values);
  const used = new Set(files.map((file) => file.path));
  const remarks = names
    .filter((name) => SHARD.test(name) && !used.has(join(path, name)))
    .map((name) => `${join(path, name)} is no shard of the index, and is not read`);
  const wrong = [...faults, ...files.flatMap((file) => file.faults)];
  const [more, odd] = await sortOut(wrong, async () => {
    const config = await readModelConfig(path);
    const tensors = new Map<string, TensorInfo>();
    for (const file of files) {
      for (const tensor of file.tensors) tensors.set(tensor.name, { ...tensor, file: file.path });
    }
    validateCheckpoint(config, tensors);
  });
  return conclude(path, "model", files, [...faults, ...more], [...remarks, ...odd]);
}

async function inspectWeights(
  path: string,
  values: boolean,
): Promise<{ readonly files: InspectedFile[]; readonly faults: LoramemError[] }> {
  const files: InspectedFile[] = [];
  try {
    const found = await resolveModelFiles(path);
    if (found.index === null) {
      files.push(await inspectFile(found.single, values));
      return { files, faults: [] };
    }
    const index = await readIndex(found.index);
    for (const file of index.files) files.push(await inspectFile(file, values));
    const readable = files.filter((file) => file.tensors.length > 0 || file.faults.length === 0);
    const held = readable.map(
      ({ path, tensors }) => [path, new Set(tensors.map(({ name }) => name))] as const,
    );
    return { files, faults: [...index.faults(new Map(held))] };
  } catch (error) {
    if (!(error instanceof LoramemError)) throw error;
    return { files, faults: [error] };
  }
}

/**
 * A check of the whole that stops at its first fault. It says nothing new where the files themselves are at fault; what
 * loramem cannot train may still be sound.
 */
async function sortOut(
  wrong: readonly LoramemError[],
  check: () => Promise<unknown>,
): Promise<readonly [faults: LoramemError[], remarks: string[]]> {
  if (wrong.length > 0) return [[], []];
  try {
    await check();
    return [[], []];
  } catch (error) {
    if (!(error instanceof LoramemError)) throw error;
    return error.is("UNSUPPORTED") ? [[], [error.message]] : [[error], []];
  }
}
