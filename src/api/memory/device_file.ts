/** Files whose bytes go to and from device memory. */
import { LoramemError } from "../../ffi/error.ts";
import {
  type Cell,
  cellOf,
  disposeNow,
  holdNow,
  NativeObject,
  pointerOf,
} from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { packInto, structLayout } from "../../ffi/structs.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import { addressOf } from "./buffer.ts";
import { DeviceBuffer } from "./device_buffer.ts";
import {
  encodePath,
  type RequestResult,
  requestError,
  requestResult,
  runRequest,
  type Submit,
  submitRequest,
} from "./file_request.ts";
import type { FileRing } from "./file_ring.ts";
import { noteMade } from "./leaks.ts";
import { PinnedBuffer } from "./pinned_buffer.ts";
import { Stream } from "./stream.ts";

/** Bytes of a file, and the memory that they come from or go to. */
export interface FileExtent {
  /** First byte in the file; any number. */
  readonly offset: number;
  /** How many; 0 is allowed, and so is more than the ring holds. */
  readonly bytes: number;
  /**
   * Device memory, page-locked memory, or a few bytes of the host: those are copied at the call when they are written, and at
   * the end when they are read.
   */
  readonly memory: DeviceBuffer | PinnedBuffer | Uint8Array;
  /** First byte in the memory. Default 0. */
  readonly memoryOffset?: number;
}

/** Options of {@linkcode DeviceFile.read} and {@linkcode DeviceFile.write}. */
export interface TransferOptions {
  /**
   * What was enqueued on it so far ends before the first byte of memory is touched: a read does not overtake the last use of
   * the memory, a write finds what the stream has produced. The event loop goes on meanwhile.
   */
  readonly stream?: Stream;
  /** Begins no further piece once it is aborted; the promise then rejects with `CANCELLED`. */
  readonly signal?: AbortSignal;
  /** Called about ten times a second with the bytes done so far, and at the end with all of them. */
  readonly onProgress?: (bytes: number) => void;
  /** Whether to compute checksums while the bytes pass. Default false. */
  readonly checksums?: boolean;
}

/** What a transfer did. */
export interface FileReport {
  /** Bytes moved. */
  readonly bytes: number;
  /** From its first piece to its end. */
  readonly seconds: number;
  /** CRC-32C (RFC 3720) of each extent, in their order; empty unless asked for. */
  readonly checksums: readonly number[];
}

/** An extent that was checked. */
interface Checked {
  readonly extent: FileExtent;
  /** The host bytes that it stands for. */
  readonly host: Uint8Array | null;
}

const PROGRESS_MS = 100;
const EXTENT_BYTES = structLayout("lm_file_extent").size;

/** An open file of a {@linkcode FileRing}. One that was made and not published is removed when it is closed. */
export class DeviceFile extends NativeObject implements AsyncDisposable {
  /** Ring that opened it. */
  readonly ring: FileRing;
  /** `"direct"` where the page cache is gone around, as far as offsets and sizes allow. */
  readonly io: "direct" | "buffered";

  readonly #pending = new Set<Promise<unknown>>();
  readonly #files: Set<DeviceFile>;
  #path: string;
  #bytes: number;
  #closing: Promise<void> | undefined;

  constructor(
    ring: FileRing,
    files: Set<DeviceFile>,
    cell: Cell,
    path: string,
    result: RequestResult,
  ) {
    super(cell);
    this.ring = ring;
    this.#files = files;
    this.#path = path;
    this.#bytes = result.value;
    this.io = result.direct === 1 ? "direct" : "buffered";
  }

  /** Where it is; after {@linkcode DeviceFile.publish} its new name. */
  get path(): string {
    return this.#path;
  }

  /** Its size when it was opened, or the end of what was written since if that is more. */
  get bytes(): number {
    return this.#bytes;
  }

  /**
   * Reads from the file into memory; resolves when the bytes are there. Extents that follow each other in the file and in the
   * list are read together. If it rejects, the memory holds anything.
   *
   * @param extents What goes where. The memory must not be used by others until the end; disposing it is allowed.
   * @param options A stream to go after, cancelling, progress, checksums.
   * @throws {LoramemError} Rejects with `IO` (also for a file that is too short), `CANCELLED`, `DEVICE`, `BAD_ARGUMENT`,
   * `DISPOSED`.
   */
  read(extents: readonly FileExtent[], options: TransferOptions = {}): Promise<FileReport> {
    return this.#run(this.#transfer("DeviceFile.read", extents, options));
  }

  /**
   * Writes from memory to the file; resolves when the file system has the bytes. {@linkcode DeviceFile.sync} and
   * {@linkcode DeviceFile.publish} make them last.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * await using stream = device.createStream();
   * await using ring = device.createFileRing({ slots: 2, slotBytes: 1 << 20 });
   * using x = device.createBuffer(1 << 16);
   * stream.fill(x, 7);
   * await using file = await ring.open("out.bin.tmp", { mode: "create", bytes: x.bytes });
   * await file.write([{ offset: 0, bytes: x.bytes, memory: x }], { stream }); // after the fill
   * await file.publish("out.bin"); // from here on it is there, whole
   * await ring.removeFile("out.bin");
   * ```
   *
   * @param extents What goes where. The memory must not be written by others until the end; disposing it is allowed.
   * @param options A stream to go after, cancelling, progress, checksums.
   * @throws {LoramemError} Rejects with `IO`, `CANCELLED`, `DEVICE`, `BAD_ARGUMENT`, `DISPOSED`.
   */
  write(extents: readonly FileExtent[], options: TransferOptions = {}): Promise<FileReport> {
    return this.#run(this.#transfer("DeviceFile.write", extents, options));
  }

  /**
   * Lets what was written so far survive a power cut (fdatasync).
   *
   * @throws {LoramemError} Rejects with `IO`, `DISPOSED`.
   */
  async sync(): Promise<void> {
    const op = "DeviceFile.sync";
    await this.#settled();
    const submit: Submit = (callback, tag) =>
      native().fn.lm_file_sync(pointerOf(this), callback, tag);
    await this.#run(runRequest(this.ring.device, op, this.path, submit));
  }

  /**
   * The atomic end of a file that was made: it is synced, renamed, and the folder is synced. Before that `path` is what it
   * was, afterwards it is this file. A symbolic link at `path` is replaced.
   *
   * @param path Its name; in the same file system.
   * @throws {LoramemError} Rejects with `IO`, `BAD_ARGUMENT` for a file that is published or was not made, `DISPOSED`.
   */
  async publish(path: string): Promise<void> {
    const op = "DeviceFile.publish";
    const text = encodePath(op, path);
    await this.#settled();
    const submit: Submit = (callback, tag) =>
      native().fn.lm_file_publish(pointerOf(this), text, callback, tag);
    await this.#run(runRequest(this.ring.device, op, path, submit));
    this.#path = path;
  }

  /**
   * Waits for what is under way, then closes the file; one that was made and not published is removed.
   *
   * @throws {LoramemError} Rejects with `IO` where the file system reports a failure only now.
   */
  [Symbol.asyncDispose](): Promise<void> {
    this.#closing ??= this.#close();
    return this.#closing;
  }

  /** {@linkcode DeviceFile[Symbol.asyncDispose]} by name. */
  dispose(): Promise<void> {
    return this[Symbol.asyncDispose]();
  }

  async #close(): Promise<void> {
    try {
      await this.#settled();
      if (this.disposed) return;
      const submit: Submit = (callback, tag) =>
        native().fn.lm_file_close(pointerOf(this), callback, tag);
      await runRequest(this.ring.device, "DeviceFile.dispose", this.path, submit);
    } finally {
      this.#files.delete(this);
      disposeNow(this);
    }
  }

  async #settled(): Promise<void> {
    while (this.#pending.size > 0) await Promise.allSettled(this.#pending);
  }

  async #run<T>(work: Promise<T>): Promise<T> {
    this.#pending.add(work);
    try {
      return await work;
    } finally {
      this.#pending.delete(work);
    }
  }

  async #transfer(
    op: "DeviceFile.read" | "DeviceFile.write",
    extents: readonly FileExtent[],
    options: TransferOptions,
  ): Promise<FileReport> {
    const file = pointerOf(this);
    const { stream, signal, onProgress, checksums = false } = options;
    const checked = extents.map((extent, index) => this.#check(op, extent, index));
    if (stream !== undefined) this.#checkStream(op, stream);
    if (signal?.aborted === true) throw cancelled(op, this.path, signal);
    const { fn } = native();
    const write = op === "DeviceFile.write";
    const structs = packExtents(checked);
    const host = joinHost(checked, write);
    const flags = checksums ? 1 : 0;
    const after = stream === undefined ? null : pointerOf(stream);
    const releases = checked.flatMap(({ extent: { memory }, host }) =>
      host === null ? [holdNow(memory as DeviceBuffer | PinnedBuffer)] : [],
    );
    const submit: Submit = (callback, tag) =>
      write
        ? fn.lm_file_write(file, structs, host, checked.length, flags, after, callback, tag)
        : fn.lm_file_read(file, structs, checked.length, flags, after, callback, tag);
    let request: Ptr | null = null;
    let timer: ReturnType<typeof setInterval> | undefined;
    const abort = () => {
      if (request !== null) fn.lm_file_request_cancel(request);
    };
    try {
      const started = submitRequest(this.ring.device, op, submit);
      request = started.request;
      signal?.addEventListener("abort", abort);
      if (onProgress !== undefined) {
        timer = setInterval(() => onProgress(requestResult(started.request).bytes), PROGRESS_MS);
      }
      await started.done;
      const result = requestResult(request);
      if (result.status < 0) throw this.#failure(op, request, result, signal);
      if (write) this.#grow(checked);
      else takeHost(request, checked, host);
      onProgress?.(result.bytes);
      const report = { bytes: result.bytes, seconds: result.seconds };
      return { ...report, checksums: checksums ? readChecksums(request, checked.length) : [] };
    } finally {
      clearInterval(timer);
      signal?.removeEventListener("abort", abort);
      if (request !== null) fn.lm_file_request_destroy(request);
      request = null;
      for (const release of releases) release();
    }
  }

  #failure(op: string, request: Ptr, result: RequestResult, signal?: AbortSignal): LoramemError {
    const error = requestError(op, this.path, request, result);
    return error.is("CANCELLED") && signal !== undefined ? cancelled(op, this.path, signal) : error;
  }

  #grow(checked: readonly Checked[]): void {
    for (const { extent } of checked) {
      if (extent.bytes > 0) this.#bytes = Math.max(this.#bytes, extent.offset + extent.bytes);
    }
  }

  #check(op: string, extent: FileExtent, index: number): Checked {
    const { offset, bytes, memory, memoryOffset = 0 } = extent;
    const name = `extents[${index}]`;
    checkInteger(op, `${name}.offset`, offset, 0);
    checkInteger(op, `${name}.bytes`, bytes, 0, Number.MAX_SAFE_INTEGER - offset);
    const host = memory instanceof Uint8Array;
    if (!host && !(memory instanceof DeviceBuffer) && !(memory instanceof PinnedBuffer)) {
      const message = `${name}.memory must be a DeviceBuffer, PinnedBuffer or Uint8Array: it is ${typeof memory}`;
      badArgument(op, message, `${name}.memory`, memory);
    }
    if (!host && memory.device !== this.ring.device) {
      badArgument(
        op,
        `${name}.memory belongs to another device: "${memory.label}"`,
        `${name}.memory`,
      );
    }
    const size = host ? memory.byteLength : memory.bytes;
    checkInteger(op, `${name}.memoryOffset`, memoryOffset, 0, size);
    if (bytes > size - memoryOffset) {
      const what = `${bytes} bytes from byte ${memoryOffset} on, it has ${size}`;
      badArgument(op, `${name} leaves its memory: ${what}: pass smaller bytes or offsets`, name);
    }
    return { extent, host: host ? memory.subarray(memoryOffset, memoryOffset + bytes) : null };
  }

  #checkStream(op: string, stream: Stream): void {
    if (!(stream instanceof Stream)) {
      badArgument(op, `stream must be a Stream: it is ${typeof stream}`, "stream", stream);
    }
    if (stream.device !== this.ring.device) {
      badArgument(op, "stream belongs to another device", "stream");
    }
  }
}

function cancelled(op: string, path: string, signal: AbortSignal): LoramemError {
  const message = `${op}: cancelled by its signal: ${path}`;
  return new LoramemError("CANCELLED", message, {}, { cause: signal.reason });
}

function packExtents(checked: readonly Checked[]): Uint8Array<ArrayBuffer> {
  const { runtime } = native();
  const view = new DataView(new ArrayBuffer(Math.max(1, checked.length) * EXTENT_BYTES));
  checked.forEach(({ extent: { offset, bytes, memory, memoryOffset = 0 }, host }, index) => {
    // The address by arithmetic: an extent may end where its memory does, and there may be very many.
    const address =
      host !== null
        ? 0n
        : runtime.address(addressOf(memory as DeviceBuffer | PinnedBuffer)) + BigInt(memoryOffset);
    packInto(view, index * EXTENT_BYTES, "lm_file_extent", { offset, bytes, memory: address });
  });
  return new Uint8Array(view.buffer);
}

/** All host bytes of a transfer in one piece: filled for a write, room for a read. */
function joinHost(checked: readonly Checked[], write: boolean): Uint8Array<ArrayBuffer> | null {
  const bytes = checked.reduce((sum, { host }) => sum + (host?.byteLength ?? 0), 0);
  if (bytes === 0) return null;
  const joined = new Uint8Array(bytes);
  if (write) eachHost(checked, (part, at) => joined.set(part, at));
  return joined;
}

function takeHost(
  request: Ptr,
  checked: readonly Checked[],
  joined: Uint8Array<ArrayBuffer> | null,
): void {
  if (joined === null) return;
  native().fn.lm_file_request_host(request, joined, BigInt(joined.byteLength));
  eachHost(checked, (part, at) => part.set(joined.subarray(at, at + part.byteLength)));
}

function eachHost(checked: readonly Checked[], use: (part: Uint8Array, at: number) => void): void {
  let at = 0;
  for (const { host } of checked) {
    if (host === null) continue;
    use(host, at);
    at += host.byteLength;
  }
}

function readChecksums(request: Ptr, count: number): number[] {
  const crcs = new Uint32Array(new ArrayBuffer(Math.max(1, count) * 4));
  native().fn.lm_file_request_checksums(request, crcs);
  return [...crcs.subarray(0, count)];
}

/** {@linkcode FileRing.open}. */
export function createDeviceFile(
  ring: FileRing,
  files: Set<DeviceFile>,
  path: string,
  pointer: Ptr,
  result: RequestResult,
): DeviceFile {
  const cell: Cell = {
    label: `DeviceFile "${path}"`,
    pointer,
    parent: cellOf(ring),
    destroy: native().fn.lm_file_destroy,
  };
  noteMade(ring.device, cell);
  const file = new DeviceFile(ring, files, cell, path, result);
  files.add(file); // here, so that a ring that is disposed meanwhile closes it
  return file;
}
