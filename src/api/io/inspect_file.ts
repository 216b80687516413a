/** One safetensors file looked at from outside: what it holds, and every fault instead of the first alone. */
import { stat } from "node:fs/promises";
import { LoramemError } from "../../ffi/error.ts";
import { IO_CHUNK } from "./atomic.ts";
import { readCheckpointHeader } from "./checkpoint.ts";
import { badCheckpoint, type CheckpointHeader, isCheckpoint } from "./checkpoint_header.ts";
import { crc32c } from "./crc32c.ts";
import type { Dtype } from "./dtype.ts";
import { openSafetensors, type TensorEntry, type TensorFile } from "./safetensors.ts";
import { badFile } from "./safetensors_header.ts";

/** One tensor of a file. */
export interface InspectedTensor {
  readonly name: string;
  readonly dtype: Dtype;
  /** Sizes, slowest dimension first; empty for a scalar. */
  readonly shape: readonly number[];
  readonly bytes: number;
  /** Elements that are NaN; null where they were not counted. */
  readonly nan: number | null;
  /** Elements that are infinite; null where they were not counted. */
  readonly infinite: number | null;
  /** Whether its bytes have the checksum that the file promises; null where it promises none. */
  readonly intact: boolean | null;
}

/** One safetensors file. */
export interface InspectedFile {
  readonly path: string;
  /** Size on disk; null where the file cannot be reached. */
  readonly bytes: number | null;
  /** Whether it says that it is a checkpoint of a run. */
  readonly checkpoint: boolean;
  /** The free-form string table. */
  readonly metadata: Readonly<Record<string, string>>;
  /** In the order of the file; empty where the header cannot be read. */
  readonly tensors: readonly InspectedTensor[];
  readonly faults: readonly LoramemError[];
}

/** Looks at one file; never throws for what is wrong with it. */
export async function inspectFile(path: string, values: boolean): Promise<InspectedFile> {
  const faults: LoramemError[] = [];
  const tensors: InspectedTensor[] = [];
  const metadata: Record<string, string> = {};
  let checkpoint = false;
  const size = await stat(path).then(
    (info) => info.size,
    () => null,
  );
  try {
    await using file = await openSafetensors(path);
    for (const [key, text] of file.metadata) metadata[key] = text;
    checkpoint = isCheckpoint(file.metadata);
    const sums = checkpoint ? await readSums(path, faults) : null;
    const buffer = new Uint8Array(Math.min(IO_CHUNK, size ?? 0) & ~7);
    for (const entry of [...file.tensors.values()].sort((a, b) => a.offset - b.offset)) {
      const sum = sums?.get(entry.name)?.checksum ?? null;
      const { name, dtype, shape, bytes } = entry;
      const found = await readTensor(file, entry, buffer, values, sum);
      tensors.push({ name, dtype, shape, bytes, ...found });
      const { nan, infinite, intact } = found;
      if (intact === false) {
        faults.push(badCheckpoint(path, "the data is damaged: its checksum differs", name));
      }
      if (nan || infinite) {
        const what = `it holds ${nan} NaN and ${infinite} infinite elements`;
        faults.push(badFile(path, what, name, "get the file again, or an earlier one"));
      }
    }
  } catch (error) {
    if (!(error instanceof LoramemError)) throw error;
    faults.push(error);
  }
  return { path, bytes: size, checkpoint, metadata, tensors, faults };
}

/** The checksums of a checkpoint; null, and a fault, where its header is damaged. */
async function readSums(
  path: string,
  faults: LoramemError[],
): Promise<CheckpointHeader["tensors"] | null> {
  try {
    return (await readCheckpointHeader(path)).tensors;
  } catch (error) {
    if (!(error instanceof LoramemError)) throw error;
    faults.push(error);
    return null;
  }
}

/** Exponent and fraction bits of the words in which NaN and infinity are seen. */
const FLOATS: Readonly<Partial<Record<Dtype, FloatWords>>> = {
  BF16: { words: Uint16Array, exponent: 0x7f80, fraction: 0x007f },
  F16: { words: Uint16Array, exponent: 0x7c00, fraction: 0x03ff },
  F32: { words: Uint32Array, exponent: 0x7f80_0000, fraction: 0x007f_ffff },
};

interface FloatWords {
  readonly words: typeof Uint16Array | typeof Uint32Array;
  readonly exponent: number;
  readonly fraction: number;
}

/** Reads as much of a tensor as has to be looked at, a piece at a time. */
async function readTensor(
  file: TensorFile,
  entry: TensorEntry,
  buffer: Uint8Array<ArrayBuffer>,
  values: boolean,
  checksum: number | null,
): Promise<Pick<InspectedTensor, "nan" | "infinite" | "intact">> {
  const float = values ? FLOATS[entry.dtype] : undefined;
  let [nan, infinite, crc] = [0, 0, 0];
  const end = float === undefined && checksum === null ? 0 : entry.bytes;
  for (let at = 0; at < end; at += buffer.byteLength) {
    const part = buffer.subarray(0, Math.min(buffer.byteLength, end - at));
    await file.read(entry, part, at);
    if (checksum !== null) crc = crc32c(part, crc);
    if (float === undefined) continue;
    const found = countOdd(part, float);
    nan += found.nan;
    infinite += found.infinite;
  }
  return {
    nan: float === undefined ? null : nan,
    infinite: float === undefined ? null : infinite,
    intact: checksum === null ? null : crc === checksum,
  };
}

/** Counts NaN and infinite elements; `part` starts at the start of its memory. */
function countOdd(
  part: Uint8Array<ArrayBuffer>,
  { words: Words, exponent, fraction }: FloatWords,
): { readonly nan: number; readonly infinite: number } {
  const words = new Words(part.buffer, 0, part.byteLength / Words.BYTES_PER_ELEMENT);
  let [nan, infinite] = [0, 0];
  for (let i = 0; i < words.length; i++) {
    const word = words[i] as number;
    if ((word & exponent) !== exponent) continue;
    if ((word & fraction) === 0) infinite++;
    else nan++;
  }
  return { nan, infinite };
}
