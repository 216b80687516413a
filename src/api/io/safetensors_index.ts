/**
 * Which files a model folder consists of. The index decides, never a glob: folders on the Hub also
 * hold `consolidated.safetensors`, adapters and other copies of the weights.
 */
import { stat } from "node:fs/promises";
import { dirname, join } from "node:path";
import type { LoramemError } from "../../ffi/error.ts";
import { errnoOf, ioError } from "./io_error.ts";
import { isObject, readJsonFile } from "./json.ts";
import { badFile } from "./safetensors_header.ts";

const SINGLE = "model.safetensors";
const INDEX = "model.safetensors.index.json";
const PICKLES = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/** An index file, or one file of weights. */
export type ModelFiles =
  | { readonly index: string }
  | { readonly index: null; readonly single: string };

/**
 * Finds the weights that a path stands for: the file itself, or what the folder's index or single
 * file is.
 */
export async function resolveModelFiles(path: string): Promise<ModelFiles> {
  if ((await kindOf(path)) !== "folder") return { index: null, single: path };
  const index = join(path, INDEX);
  if ((await kindOf(index)) !== "missing") return { index };
  const single = join(path, SINGLE);
  if ((await kindOf(single)) !== "missing") return { index: null, single };
  for (const name of PICKLES) {
    if ((await kindOf(join(path, name))) === "missing") continue;
    const fix =
      "convert it where transformers is installed: AutoModelForCausalLM.from_pretrained(folder)" +
      ".save_pretrained(folder, safe_serialization=True)";
    const what = "the only weights are a pickle, which can run any code when it is opened";
    throw badFile(join(path, name), what, undefined, fix);
  }
  const fix = `a model folder holds ${SINGLE}, or ${INDEX} and its shards`;
  throw badFile(path, "the folder holds no weights", undefined, fix);
}

/** Names of tensors: a set, or the keys of a map. */
type TensorNames = Pick<ReadonlySet<string>, "has" | "keys">;

/** The shards of a model. */
export interface ShardIndex {
  /** Paths of the shards, sorted. */
  readonly files: readonly string[];
  /**
   * Compares shards with the list in the index, tensor by tensor; the first fault is enough for a reader.
   *
   * @param shards The tensors of each file, by its path; files that could not be read are left out.
   */
  faults(shards: ReadonlyMap<string, TensorNames>): Iterable<LoramemError>;
}

/** Reads `model.safetensors.index.json`: `{"metadata": ..., "weight_map": {tensor: file name}}`. */
export async function readIndex(index: string): Promise<ShardIndex> {
  const root = await readJsonFile("openSafetensors", index, (what) => {
    throw badFile(index, `the index cannot be read: ${what}`);
  });
  const map = isObject(root) ? root.weight_map : undefined;
  if (!isObject(map)) throw badFile(index, "the index has no weight_map");
  const shardOf = new Map<string, string>();
  for (const [tensor, name] of Object.entries(map)) {
    if (typeof name !== "string" || !/^[^/\\\0]+\.safetensors$/.test(name)) {
      const target = JSON.stringify(name);
      const what = `the index points to ${target}, not to a .safetensors file beside it`;
      throw badFile(index, what, tensor);
    }
    shardOf.set(tensor, join(dirname(index), name));
  }
  if (shardOf.size === 0) throw badFile(index, "the index names no tensor");
  const files = [...new Set(shardOf.values())].sort();
  return { files, faults: (shards) => faultsOf(shardOf, shards) };
}

function* faultsOf(
  shardOf: ReadonlyMap<string, string>,
  shards: ReadonlyMap<string, TensorNames>,
): Generator<LoramemError> {
  const fix = "get the index and all shards from one source";
  for (const [file, tensors] of shards) {
    for (const name of tensors.keys()) {
      if (shardOf.get(name) === file) continue;
      const where = shardOf.get(name) ?? "nowhere";
      const what = `the tensor is in this shard, but by the index it is in ${where}`;
      yield badFile(file, what, name, fix);
    }
  }
  for (const [name, file] of shardOf) {
    if (shards.get(file)?.has(name) ?? true) continue;
    yield badFile(file, "the index promises a tensor that the shard does not hold", name, fix);
  }
}

async function kindOf(path: string): Promise<"folder" | "file" | "missing"> {
  try {
    return (await stat(path)).isDirectory() ? "folder" : "file";
  } catch (error) {
    if (errnoOf(error) === "ENOENT") return "missing";
    throw ioError("openSafetensors", path, error);
  }
}
