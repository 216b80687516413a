/**
 * The safetensors header: parsed and checked in full before one byte of tensor data is read.
 *
 * Layout (specification of the safetensors project): u64 little-endian header length N, N bytes of
 * JSON `{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__"?: {string: string}}`,
 * then the data. Offsets count from the end of the header; tensors cover the data exactly, without
 * holes or overlaps.
 */
import { LoramemError } from "../../ffi/error.ts";
import { type Dtype, isDtype, tensorBytes } from "./dtype.ts";
import { isObject, MAX_JSON_BYTES, parseStrictJson } from "./json.ts";

/** Where one tensor lies. */
export interface TensorEntry {
  readonly name: string;
  readonly dtype: Dtype;
  /** Sizes, slowest dimension first; empty for a scalar. */
  readonly shape: readonly number[];
  /** Path of the file that holds it. */
  readonly file: string;
  /** Byte offset from the start of the file; any alignment. */
  readonly offset: number;
  /** Length in bytes, equal to the product of the shape times the element size. */
  readonly bytes: number;
}

/** What a header says. */
export interface SafetensorsHeader {
  readonly tensors: Map<string, TensorEntry>;
  readonly metadata: Map<string, string>;
}

/** The key of the free-form string table; no tensor may have this name. */
export const METADATA_KEY = "__metadata__";
/** Bytes of the length field in front of the header. */
export const LENGTH_BYTES = 8;

const OP = "openSafetensors";
const DAMAGED = "the file is damaged or not a safetensors file; get it again";

/** The `BAD_FILE` error of this format. */
export function badFile(file: string, what: string, tensor?: string, fix = DAMAGED): LoramemError {
  const details = tensor === undefined ? { file } : { file, tensor };
  const where = tensor === undefined ? file : `${file}, tensor ${JSON.stringify(tensor)}`;
  return new LoramemError("BAD_FILE", `${OP}: ${what}: ${where}: ${fix}`, details);
}

/**
 * Checks the length field against the file, so that the header can be read into a buffer of that
 * size.
 *
 * @param prefix The first 8 bytes of the file, or all of a shorter one.
 * @param fileBytes Size of the file.
 * @param file Its path, for messages.
 * @returns Bytes of JSON that follow.
 */
export function headerLength(prefix: Uint8Array, fileBytes: number, file: string): number {
  if (prefix.byteLength < LENGTH_BYTES) {
    throw badFile(file, `the file has ${fileBytes} bytes, less than the 8 of the header length`);
  }
  const view = new DataView(prefix.buffer, prefix.byteOffset, LENGTH_BYTES);
  const length = view.getBigUint64(0, true); // compared as bigint: 2^63 must not wrap or round
  if (length > BigInt(MAX_JSON_BYTES)) {
    throw badFile(file, `the header length is ${length}, over the format's limit of 100 MB`);
  }
  if (length > BigInt(fileBytes - LENGTH_BYTES)) {
    const what = `the header length is ${length}, but the file has only ${fileBytes} bytes`;
    throw badFile(file, what, undefined, "the file is truncated; get it again");
  }
  if (length < 2n) throw badFile(file, `the header length is ${length}, too short for {}`);
  return Number(length);
}

/**
 * Parses the JSON of a header and checks every entry.
 *
 * @param json The header's bytes.
 * @param fileBytes Size of the whole file.
 * @param file Its path, for messages and entries.
 * @throws {LoramemError} `BAD_FILE` that names the tensor.
 */
export function parseHeader(json: Uint8Array, fileBytes: number, file: string): SafetensorsHeader {
  if (json[0] !== 0x7b) throw badFile(file, "the header does not start with {");
  const root = parseStrictJson(json, 4, (what) => {
    throw badFile(file, `the header cannot be read: ${what}`);
  });
  if (!isObject(root)) throw badFile(file, "the header is not a JSON object");
  const dataStart = LENGTH_BYTES + json.byteLength;
  const tensors = new Map<string, TensorEntry>();
  let metadata = new Map<string, string>();
  for (const [name, value] of Object.entries(root)) {
    if (name === METADATA_KEY) metadata = parseMetadata(value, file);
    else tensors.set(name, parseEntry(name, value, dataStart, fileBytes, file));
  }
  checkCoverage([...tensors.values()], dataStart, fileBytes, file);
  return { tensors, metadata };
}

function parseMetadata(value: unknown, file: string): Map<string, string> {
  if (!isObject(value)) throw badFile(file, `${METADATA_KEY} is not an object`);
  const metadata = new Map<string, string>();
  for (const [key, text] of Object.entries(value)) {
    if (typeof text !== "string") {
      throw badFile(file, `${METADATA_KEY}.${key} is not a string`);
    }
    metadata.set(key, text);
  }
  return metadata;
}

function parseEntry(
  name: string,
  value: unknown,
  dataStart: number,
  fileBytes: number,
  file: string,
): TensorEntry {
  if (!isObject(value)) throw badFile(file, "the entry is not an object", name);
  const { dtype, shape, data_offsets: offsets, ...rest } = value;
  const unknown = Object.keys(rest)[0];
  if (unknown !== undefined) throw badFile(file, `unknown field ${JSON.stringify(unknown)}`, name);
  if (!isDtype(dtype)) throw badFile(file, `unknown dtype ${JSON.stringify(dtype)}`, name);
  const bytes = Array.isArray(shape) ? tensorBytes(dtype, shape) : null;
  if (bytes === null) {
    throw badFile(file, `the shape is not valid for ${dtype}: ${excerpt(shape)}`, name);
  }
  const isRange =
    Array.isArray(offsets) &&
    offsets.length === 2 &&
    offsets.every((offset) => Number.isSafeInteger(offset) && offset >= 0);
  if (!isRange) {
    throw badFile(file, `data_offsets are not two byte positions: ${excerpt(offsets)}`, name);
  }
  const [begin, end] = offsets as [number, number];
  const range = `data_offsets [${begin}, ${end}]`;
  if (begin > end) throw badFile(file, `${range} end before they begin`, name);
  if (end > fileBytes - dataStart) {
    const what = `${range} reach beyond the ${fileBytes - dataStart} bytes of data in the file`;
    throw badFile(file, what, name, "the file is truncated; get it again");
  }
  if (end - begin !== bytes) {
    const need = `${dtype} ${excerpt(shape)} needs ${bytes}`;
    throw badFile(file, `${range} hold ${end - begin} bytes, but ${need}`, name);
  }
  return { name, dtype, shape: shape as number[], file, offset: dataStart + begin, bytes };
}

/**
 * Walks the tensors in file order: each must begin where the one before ended, the last ends the
 * file.
 */
function checkCoverage(
  entries: TensorEntry[],
  dataStart: number,
  fileBytes: number,
  file: string,
): void {
  entries.sort((a, b) => a.offset - b.offset || a.bytes - b.bytes);
  let end = dataStart;
  for (const entry of entries) {
    const by = Math.abs(entry.offset - end);
    if (entry.offset < end)
      throw badFile(file, `it overlaps the tensor before it by ${by} bytes`, entry.name);
    if (entry.offset > end) throw badFile(file, `a hole of ${by} bytes lies before it`, entry.name);
    end = entry.offset + entry.bytes;
  }
  if (end !== fileBytes) {
    throw badFile(file, `${fileBytes - end} bytes follow the last tensor`);
  }
}

/** A value from a hostile file, short enough for a message. */
function excerpt(value: unknown): string {
  const text = JSON.stringify(value) ?? "missing";
  return text.length > 80 ? `${text.slice(0, 80)}...` : text;
}
