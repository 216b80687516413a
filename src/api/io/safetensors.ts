/**
 * Reading and writing safetensors: one file, or a model folder with an index and its shards.
 *
 * Opening reads and checks the headers only. Tensor bytes go where the caller says, in pieces that
 * the caller chooses, so a model is loaded through a staging buffer of fixed size.
 */
import { type FileHandle, open, stat } from "node:fs/promises";
import { LoramemError } from "../../ffi/error.ts";
import { IO_CHUNK, writeFileAtomic } from "./atomic.ts";
import { type Dtype, dtypeBits, isDtype, tensorBytes } from "./dtype.ts";
import { errnoOf, ioError } from "./io_error.ts";
import {
  badFile,
  headerLength,
  LENGTH_BYTES,
  METADATA_KEY,
  parseHeader,
  type SafetensorsHeader,
  type TensorEntry,
} from "./safetensors_header.ts";
import { readIndex, resolveModelFiles } from "./safetensors_index.ts";

export type { TensorEntry } from "./safetensors_header.ts";

/** Open safetensors files; the tensors of all shards in one table. */
export interface TensorFile extends AsyncDisposable {
  /** Every tensor by name. */
  readonly tensors: ReadonlyMap<string, TensorEntry>;
  /** The free-form string table; with several shards, that of the first file where a key stands. */
  readonly metadata: ReadonlyMap<string, string>;
  /**
   * Reads bytes of one tensor.
   *
   * @param entry One of `tensors`.
   * @param into Filled completely; a view over any memory that stays valid until the promise
   * settles.
   * @param at Offset inside the tensor in bytes, 0 by default; `at + into.byteLength` may not
   * exceed `entry.bytes`.
   * @throws {LoramemError} `BAD_FILE` where the file became shorter, `IO` where the disk fails,
   * `DISPOSED` after `close()`.
   */
  read(entry: TensorEntry, into: Uint8Array, at?: number): Promise<void>;
  /** Closes the files after the reads under way; twice is fine. */
  close(): Promise<void>;
}

/** One tensor to be written. */
export interface TensorData {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  /** Little-endian elements, row-major; borrowed until the write is done. */
  readonly data: Uint8Array;
}

/**
 * Opens a safetensors file or a model folder.
 *
 * A folder is read by `model.safetensors.index.json` (only the shards that it names, whose tensors
 * must be exactly those that it lists) or else by `model.safetensors`. Other files are never looked
 * at. Headers are checked in full against the size of the file before anything larger than a header
 * is allocated.
 *
 * @example Usage
 * ```ts
 * import { openSafetensors } from "./mod.ts";
 * await using file = await openSafetensors("examples/demo/model");
 * const entry = file.tensors.get("model.norm.weight")!;
 * const bytes = new Uint8Array(entry.bytes);
 * await file.read(entry, bytes);
 * console.log(entry.dtype, entry.shape);
 * ```
 *
 * @param path The file or folder.
 * @returns The open files; close them with `await using` or `close()`.
 * @throws {LoramemError} `BAD_FILE` where a file is missing, truncated or malformed (naming file
 * and tensor), or only a pickle (`pytorch_model.bin`) is there; `IO` where the file system refuses.
 */
export async function openSafetensors(path: string): Promise<TensorFile> {
  const files = await resolveModelFiles(path);
  const shards: Shard[] = [];
  try {
    if (files.index === null) {
      shards.push(await openShard(files.single));
    } else {
      const index = await readIndex(files.index);
      for (const file of index.files) shards.push(await openShard(file, files.index));
      const held = new Map(shards.map(({ file, header }) => [file, header.tensors]));
      for (const fault of index.faults(held)) throw fault;
    }
    return new OpenTensorFile(shards);
  } catch (error) {
    for (const shard of shards) await shard.handle.close().catch(() => {});
    throw error;
  }
}

interface Shard {
  readonly file: string;
  readonly handle: FileHandle;
  readonly header: SafetensorsHeader;
}

async function openShard(file: string, index?: string): Promise<Shard> {
  let handle: FileHandle | undefined;
  try {
    // Asked before opening, as opening a pipe would wait for a writer.
    if (!(await stat(file)).isFile()) throw badFile(file, "it is not a regular file");
    handle = await open(file, "r");
    const { size } = await handle.stat();
    const prefix = new Uint8Array(Math.min(LENGTH_BYTES, size));
    await readFully(handle, prefix, 0, file);
    const json = new Uint8Array(headerLength(prefix, size, file));
    await readFully(handle, json, LENGTH_BYTES, file);
    return { file, handle, header: parseHeader(json, size, file) };
  } catch (error) {
    await handle?.close().catch(() => {});
    if (errnoOf(error) !== "ENOENT") throw ioError("openSafetensors", file, error);
    const what = index === undefined ? "there is no such file" : `${index} names a missing shard`;
    throw badFile(file, what, undefined, "check the path, or get the file again");
  }
}

/** Reads until `into` is full: a read may be short, and one call moves at most 2 GiB. */
async function readFully(
  handle: FileHandle,
  into: Uint8Array,
  position: number,
  file: string,
  tensor?: string,
): Promise<void> {
  for (let at = 0; at < into.byteLength; ) {
    const length = Math.min(IO_CHUNK, into.byteLength - at);
    const { bytesRead } = await handle.read(into, at, length, position + at);
    if (bytesRead === 0) {
      const what = `the file ends at byte ${position + at}; it became shorter while it was open`;
      throw badFile(file, what, tensor, "let no other program write to it");
    }
    at += bytesRead;
  }
}

class OpenTensorFile implements TensorFile {
  readonly tensors = new Map<string, TensorEntry>();
  readonly metadata = new Map<string, string>();
  readonly #handles = new Map<string, FileHandle>();
  readonly #reads = new Set<Promise<void>>();
  #closed: Promise<void> | undefined;

  constructor(shards: readonly Shard[]) {
    for (const { file, handle, header } of shards) {
      this.#handles.set(file, handle);
      for (const [name, entry] of header.tensors) this.tensors.set(name, entry);
      for (const [key, text] of header.metadata) {
        if (!this.metadata.has(key)) this.metadata.set(key, text);
      }
    }
  }

  async read(entry: TensorEntry, into: Uint8Array, at = 0): Promise<void> {
    const op = "TensorFile.read";
    const handle = this.#handles.get(entry.file);
    if (this.#closed) {
      const label = entry.file;
      throw new LoramemError("DISPOSED", `${op}: the file is closed: ${label}: open it again`, {
        label,
      });
    }
    if (handle === undefined || this.tensors.get(entry.name) !== entry) {
      const message = `${op}: the entry is not of this file: ${entry.name}: take it from tensors`;
      throw new LoramemError("BAD_ARGUMENT", message, { name: "entry", value: entry.name });
    }
    if (!Number.isSafeInteger(at) || at < 0 || at + into.byteLength > entry.bytes) {
      const message =
        `${op}: the range is outside the tensor: ${entry.name} has ${entry.bytes} bytes, ` +
        `asked for ${into.byteLength} at ${at}: read within it`;
      throw new LoramemError("BAD_ARGUMENT", message, { name: "at", value: at });
    }
    const done = readFully(handle, into, entry.offset + at, entry.file, entry.name);
    this.#reads.add(done);
    try {
      await done;
    } catch (error) {
      throw ioError(op, entry.file, error);
    } finally {
      this.#reads.delete(done);
    }
  }

  close(): Promise<void> {
    this.#closed ??= this.#close();
    return this.#closed;
  }

  async #close(): Promise<void> {
    // The memory that is read into may be native and freed next: no read may outlive the close.
    await Promise.allSettled(this.#reads);
    await Promise.allSettled([...this.#handles.values()].map((handle) => handle.close()));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/**
 * Writes a safetensors file atomically: a temporary name in the same folder, synced, renamed, the
 * folder synced.
 *
 * Tensors are laid out by falling element size, then by name, and the header is padded with spaces
 * to 8 bytes, as the specification's own writer does; so elements are aligned. Writing over a file
 * that is open is safe.
 *
 * @example Usage
 * ```ts
 * import { writeSafetensors } from "./mod.ts";
 * const data = new Uint8Array(new Float32Array([1, 2, 3]).buffer);
 * await writeSafetensors("out.safetensors", [{ name: "x", dtype: "F32", shape: [3], data }]);
 * ```
 *
 * @param path The destination; its folder must exist.
 * @param tensors What to write.
 * @param metadata The free-form string table.
 * @throws {LoramemError} `BAD_ARGUMENT` where a name comes twice or data, dtype and shape disagree;
 * `IO` where the file system refuses. In both cases `path` is as it was.
 */
export async function writeSafetensors(
  path: string,
  tensors: Iterable<TensorData>,
  metadata: Readonly<Record<string, string>> = {},
): Promise<void> {
  const sorted = [...tensors].sort(
    (a, b) => dtypeBits(b.dtype) - dtypeBits(a.dtype) || (a.name < b.name ? -1 : 1),
  );
  const names = new Set<string>([METADATA_KEY]);
  const fields: string[] = [];
  if (Object.keys(metadata).length > 0) {
    fields.push(`${JSON.stringify(METADATA_KEY)}:${JSON.stringify(metadata)}`);
  }
  let end = 0;
  for (const { name, dtype, shape, data } of sorted) {
    if (names.has(name))
      throw badTensor(name, "the name is taken", "give each tensor its own name");
    names.add(name);
    if (!isDtype(dtype) || tensorBytes(dtype, shape) !== data.byteLength) {
      const what = `${data.byteLength} bytes do not fit ${dtype} [${shape}]`;
      throw badTensor(name, what, "make data, dtype and shape agree");
    }
    const begin = end;
    end += data.byteLength;
    const entry = { dtype, shape, data_offsets: [begin, end] };
    fields.push(`${JSON.stringify(name)}:${JSON.stringify(entry)}`);
  }
  const json = new TextEncoder().encode(`{${fields.join(",")}}`);
  const padded = Math.ceil(json.byteLength / 8) * 8;
  const header = new Uint8Array(LENGTH_BYTES + padded).fill(0x20);
  new DataView(header.buffer).setBigUint64(0, BigInt(padded), true);
  header.set(json, LENGTH_BYTES);
  await writeFileAtomic(path, [header, ...sorted.map((tensor) => tensor.data)]);
}

function badTensor(name: string, what: string, fix: string): LoramemError {
  const message = `writeSafetensors: ${what}: tensor ${JSON.stringify(name)}: ${fix}`;
  return new LoramemError("BAD_ARGUMENT", message, { name: "tensors", value: name });
}
