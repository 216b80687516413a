/**
 * The header of a checkpoint: that of a safetensors file, with metadata that say how the run goes on.
 *
 * `__metadata__` stands first and begins with `crc32c`, eight hex digits over the whole header (length field and padding
 * included) in which they themselves count as zeros. Then come `format`, `version`, `tensors` (the CRC-32C of each tensor's
 * bytes, as JSON) and `state` (JSON). So a checksum (CRC-32C, RFC 3720) covers every byte of the file. The header is padded
 * with spaces, so that the data starts at a multiple of 4 KiB, as direct input and output want it.
 */
import { LoramemError } from "../../ffi/error.ts";
import { crc32c } from "./crc32c.ts";
import type { Dtype } from "./dtype.ts";
import { isObject, parseStrictJson } from "./json.ts";
import {
  headerLength,
  LENGTH_BYTES,
  METADATA_KEY,
  parseHeader,
  type TensorEntry,
} from "./safetensors_header.ts";

/** A tensor of a checkpoint. */
export interface CheckpointTensor {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly bytes: number;
}

/** Where a tensor lies in a checkpoint, and the CRC-32C of its bytes. */
export interface CheckpointEntry extends TensorEntry {
  readonly checksum: number;
}

/** What a header says. */
export interface CheckpointHeader {
  readonly tensors: ReadonlyMap<string, CheckpointEntry>;
  /** Parsed JSON that nobody has checked yet. */
  readonly state: unknown;
}

const FORMAT = "loramem-checkpoint";
const VERSION = 1;
/** Data starts at a multiple of this many bytes. */
const DATA_ALIGNMENT = 4096;
const START = `{${JSON.stringify(METADATA_KEY)}:{"crc32c":"`;
const DIGITS = 8;
/** Where the digits of the header's own checksum begin. */
const CHECKSUM_AT = LENGTH_BYTES + START.length;
/** How deep the state may nest. */
const STATE_DEPTH = 8;

/** Whether the metadata of a safetensors file are those of a checkpoint. */
export function isCheckpoint(metadata: ReadonlyMap<string, string>): boolean {
  return metadata.get("format") === FORMAT;
}

/** The error of a checkpoint that is not as it was written. */
export function badCheckpoint(file: string, what: string, tensor?: string): LoramemError {
  const details = tensor === undefined ? { file } : { file, tensor };
  const where = tensor === undefined ? file : `${file}, tensor ${JSON.stringify(tensor)}`;
  const message = `checkpoint: ${what}: ${where}: delete it, or resume from an earlier one`;
  return new LoramemError("BAD_FILE", message, details);
}

/**
 * The header of a file that holds `tensors` one after the other. Its size depends on names, shapes and state, never on the
 * checksums, so it is known before the data is written.
 *
 * @param checksums Of the tensors, in order; zeros where they are not known yet.
 */
export function encodeCheckpointHeader(
  tensors: readonly CheckpointTensor[],
  state: unknown,
  checksums: readonly number[] = tensors.map(() => 0),
): Uint8Array {
  const sums = tensors.map(({ name }, index) => [name, hex(checksums[index] as number)]);
  const metadata = {
    crc32c: hex(0),
    format: FORMAT,
    version: String(VERSION),
    tensors: JSON.stringify(Object.fromEntries(sums)),
    state: JSON.stringify(state),
  };
  let end = 0;
  const entries = tensors.map(({ name, dtype, shape, bytes }) => {
    const begin = end;
    end += bytes;
    return [name, { dtype, shape, data_offsets: [begin, end] }];
  });
  const json = new TextEncoder().encode(
    JSON.stringify({ [METADATA_KEY]: metadata, ...Object.fromEntries(entries) }),
  );
  const total = Math.ceil((LENGTH_BYTES + json.byteLength) / DATA_ALIGNMENT) * DATA_ALIGNMENT;
  const header = new Uint8Array(total).fill(0x20);
  new DataView(header.buffer).setBigUint64(0, BigInt(total - LENGTH_BYTES), true);
  header.set(json, LENGTH_BYTES);
  header.set(new TextEncoder().encode(hex(crc32c(header))), CHECKSUM_AT);
  return header;
}

/**
 * Checks a header in full.
 *
 * @param header All of it, from the first byte of the file to the first of the data.
 * @param fileBytes Size of the whole file.
 * @param file Its path, for messages.
 * @throws {LoramemError} `BAD_FILE` where a byte is not as it was written; `UNSUPPORTED` for a later version.
 */
export function parseCheckpointHeader(
  header: Uint8Array,
  fileBytes: number,
  file: string,
): CheckpointHeader {
  const bad = (what: string): never => {
    throw badCheckpoint(file, what);
  };
  const json = header.subarray(LENGTH_BYTES);
  if (headerLength(header.subarray(0, LENGTH_BYTES), fileBytes, file) !== json.byteLength) {
    bad("the header is not complete");
  }
  const { tensors, metadata } = parseHeader(json, fileBytes, file);
  if (!isCheckpoint(metadata) || !startsWith(json, START)) bad("it is no checkpoint");
  const digits = header.subarray(CHECKSUM_AT, CHECKSUM_AT + DIGITS);
  const zeroed = header.slice();
  zeroed.fill(0x30, CHECKSUM_AT, CHECKSUM_AT + DIGITS);
  if (new TextDecoder().decode(digits) !== hex(crc32c(zeroed))) {
    bad("the header is damaged: its checksum differs");
  }
  const version = metadata.get("version");
  if (version !== String(VERSION)) {
    const message = `checkpoint: version ${version} is not known, only ${VERSION}: ${file}: use the loramem that wrote it`;
    throw new LoramemError("UNSUPPORTED", message, { what: `checkpoint version ${version}` });
  }
  const parse = (key: "tensors" | "state", depth: number) => {
    const text = new TextEncoder().encode(metadata.get(key) ?? "");
    const value = parseStrictJson(text, depth, (what) => bad(`${key} cannot be read: ${what}`));
    return isObject(value) ? value : bad(`${key} is not an object`);
  };
  const sums = parse("tensors", 1);
  const entries = [...tensors.values()].map((entry): [string, CheckpointEntry] => {
    const sum = sums[entry.name];
    if (typeof sum !== "string" || !/^[0-9a-f]{8}$/.test(sum)) bad(`${entry.name} has no checksum`);
    return [entry.name, { ...entry, checksum: Number.parseInt(sum as string, 16) }];
  });
  return { tensors: new Map(entries), state: parse("state", STATE_DEPTH) };
}

function hex(checksum: number): string {
  return (checksum >>> 0).toString(16).padStart(DIGITS, "0");
}

function startsWith(bytes: Uint8Array, text: string): boolean {
  return new TextDecoder().decode(bytes.subarray(0, text.length)) === text;
}
