/**
 * Checkpoint files: `checkpoint-<step>.safetensors` in the folder of a run, written so that a crash at any moment leaves the
 * ones before it, and read so that a byte that is not as it was written is found.
 */
import { open, readdir, stat } from "node:fs/promises";
import { join } from "node:path";
import type { DeviceBuffer, FileRing, PinnedBuffer, Stream } from "../memory/mod.ts";
import {
  badCheckpoint,
  type CheckpointHeader,
  type CheckpointTensor,
  encodeCheckpointHeader,
  parseCheckpointHeader,
} from "./checkpoint_header.ts";
import { ioError } from "./io_error.ts";
import { headerLength, LENGTH_BYTES } from "./safetensors_header.ts";

/** A tensor of a checkpoint and the memory that it comes from or goes to. */
export interface CheckpointPart extends CheckpointTensor {
  readonly memory: DeviceBuffer | PinnedBuffer;
  readonly memoryOffset: number;
}

/** A checkpoint by its name alone. */
export interface CheckpointName {
  readonly step: number;
  readonly path: string;
}

const NAME = /^checkpoint-(0|[1-9]\d{0,14})\.safetensors$/;
const TEMPORARY = /^\.checkpoint-\d+\.safetensors\.tmp$/;

/** Path of the checkpoint of a step. */
export function checkpointPath(dir: string, step: number): string {
  return join(dir, `checkpoint-${step}.safetensors`);
}

/** The checkpoints in a folder by their names, newest first, and what killed runs left of theirs. */
export async function listCheckpoints(
  dir: string,
): Promise<{ readonly checkpoints: CheckpointName[]; readonly leftovers: string[] }> {
  let names: string[];
  try {
    names = await readdir(dir);
  } catch (error) {
    throw ioError("checkpoint", dir, error);
  }
  const checkpoints = names.flatMap((name): CheckpointName[] => {
    const step = NAME.exec(name)?.[1];
    return step === undefined ? [] : [{ step: Number(step), path: join(dir, name) }];
  });
  return {
    checkpoints: checkpoints.sort((a, b) => b.step - a.step),
    leftovers: names.filter((name) => TEMPORARY.test(name)).map((name) => join(dir, name)),
  };
}

/** Bytes of the file that {@linkcode writeCheckpoint} would write. */
export function checkpointBytes(parts: readonly CheckpointPart[], state: unknown): number {
  const data = parts.reduce((sum, { bytes }) => sum + bytes, 0);
  return encodeCheckpointHeader(parts, state).byteLength + data;
}

/**
 * Writes a checkpoint: under another name, allocated as a whole, data, data on the disk, header with checksums, all on the
 * disk, renamed, folder on the disk. Until the rename nothing refers to it.
 *
 * @param stream What `parts` hold is what it has produced so far.
 * @throws {LoramemError} `IO` where the file system refuses; the unfinished file is removed.
 */
export async function writeCheckpoint(
  ring: FileRing,
  dir: string,
  step: number,
  parts: readonly CheckpointPart[],
  state: unknown,
  stream: Stream,
): Promise<void> {
  const blank = encodeCheckpointHeader(parts, state);
  const bytes = checkpointBytes(parts, state);
  const temporary = join(dir, `.checkpoint-${step}.safetensors.tmp`);
  await using file = await ring.open(temporary, { mode: "create", bytes });
  let offset = blank.byteLength;
  const extents = parts.map(({ bytes: size, memory, memoryOffset }) => {
    const extent = { offset, bytes: size, memory, memoryOffset };
    offset += size;
    return extent;
  });
  const { checksums } = await file.write(extents, { stream, checksums: true });
  await file.sync();
  const header = encodeCheckpointHeader(parts, state, checksums);
  await file.write([{ offset: 0, bytes: header.byteLength, memory: header }]);
  await file.publish(checkpointPath(dir, step));
}

/**
 * Reads and checks the header of a checkpoint.
 *
 * @throws {LoramemError} `BAD_FILE` where it is damaged, `IO` where the file system refuses.
 */
export async function readCheckpointHeader(path: string): Promise<CheckpointHeader> {
  try {
    if (!(await stat(path)).isFile()) throw badCheckpoint(path, "it is not a regular file");
    await using file = await open(path, "r");
    const { size } = await file.stat();
    const prefix = new Uint8Array(Math.min(LENGTH_BYTES, size));
    await file.read(prefix, 0, prefix.byteLength, 0);
    const header = new Uint8Array(LENGTH_BYTES + headerLength(prefix, size, path));
    // Short reads leave zeros, which the checksum does not forgive.
    await file.read(header, 0, header.byteLength, 0);
    return parseCheckpointHeader(header, size, path);
  } catch (error) {
    throw ioError("checkpoint", path, error);
  }
}

/**
 * Reads the tensors of a checkpoint and compares their checksums.
 *
 * @throws {LoramemError} `BAD_FILE` naming the tensor that is missing, of another size or damaged; the memory of `parts`
 * then holds anything.
 */
export async function readCheckpoint(
  ring: FileRing,
  path: string,
  { tensors }: CheckpointHeader,
  parts: readonly CheckpointPart[],
  stream: Stream,
): Promise<void> {
  const extents = parts.map(({ name, dtype, bytes, memory, memoryOffset }) => {
    const entry = tensors.get(name);
    if (entry?.dtype !== dtype || entry.bytes !== bytes) {
      throw badCheckpoint(path, `there is no ${dtype} tensor of ${bytes} bytes`, name);
    }
    return { offset: entry.offset, bytes, memory, memoryOffset };
  });
  await using file = await ring.open(path, { mode: "read" });
  const { checksums } = await file.read(extents, { stream, checksums: true });
  for (const [index, { name }] of parts.entries()) {
    if (checksums[index] === tensors.get(name)?.checksum) continue;
    throw badCheckpoint(path, "the data is damaged: its checksum differs", name);
  }
}
