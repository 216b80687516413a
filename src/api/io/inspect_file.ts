/** One safetensors file looked at from outside: what it holds, and every fault instead of the first alone. */
import { stat } from "node:fs/promises";
import { LoramemError } from "../../ffi/error.ts";
import { IO_CHUNK } from "./atomic.ts";
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
}

/** One safetensors file. */
export interface InspectedFile {
  readonly path: string;
  /** Size on disk; null where the file cannot be reached. */
  readonly bytes: number | null;
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
  const size = await stat(path).then(
    (info) => info.size,
    () => null,
  );
  try {
    await using file = await openSafetensors(path);
    for (const [key, text] of file.metadata) metadata[key] = text;
    const entries = [...file.tensors.values()].sort((a, b) => a.offset - b.offset);
    const buffer = new Uint8Array(values ? Math.min(IO_CHUNK, size ?? 0) & ~7 : 0);
    for (const entry of entries) {
      const counts = values ? await countOdd(file, entry, buffer) : { nan: null, infinite: null };
      const { name, dtype, shape, bytes } = entry;
      tensors.push({ name, dtype, shape, bytes, ...counts });
      if (!counts.nan && !counts.infinite) continue;
      const what = `it holds ${counts.nan} NaN and ${counts.infinite} infinite elements`;
      faults.push(badFile(path, what, name, "get the file again, or an earlier one"));
    }
  } catch (error) {
    if (!(error instanceof LoramemError)) throw error;
    faults.push(error);
  }
  return { path, bytes: size, metadata, tensors, faults };
}

interface OddCounts {
  readonly nan: number | null;
  readonly infinite: number | null;
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

/** Counts NaN and infinite elements, a piece at a time; null for a dtype that has neither or is not looked into. */
async function countOdd(
  file: TensorFile,
  entry: TensorEntry,
  buffer: Uint8Array<ArrayBuffer>,
): Promise<OddCounts> {
  const float = FLOATS[entry.dtype];
  if (float === undefined) return { nan: null, infinite: null };
  const { words: Words, exponent, fraction } = float;
  let [nan, infinite] = [0, 0];
  for (let at = 0; at < entry.bytes; at += buffer.byteLength) {
    const part = buffer.subarray(0, Math.min(buffer.byteLength, entry.bytes - at));
    await file.read(entry, part, at);
    const words = new Words(part.buffer, 0, part.byteLength / Words.BYTES_PER_ELEMENT);
    for (let i = 0; i < words.length; i++) {
      const word = words[i] as number;
      if ((word & exponent) !== exponent) continue;
      if ((word & fraction) === 0) infinite++;
      else nan++;
    }
  }
  return { nan, infinite };
}
