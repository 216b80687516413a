/** Page-locked slots and threads that move bytes between files and memory. */
import { type Cell, cellOf, disposeNow, NativeObject, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { creationError } from "../../ffi/status.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import type { Device } from "./device.ts";
import { createDeviceFile, type DeviceFile } from "./device_file.ts";
import { encodePath, runRequest, type Submit } from "./file_request.ts";
import { noteMade } from "./leaks.ts";
import { readStats } from "./stats.ts";

/** Options of {@linkcode Device.createFileRing}. */
export interface FileRingOptions {
  /** Page-locked slots. Default 8. */
  readonly slots?: number;
  /** Size of a slot: a multiple of 4096, at most 1 GiB. Default 8 MiB. */
  readonly slotBytes?: number;
  /** Threads that read and write. Default: one per available core, at most 8. */
  readonly threads?: number;
}

/** Options of {@linkcode FileRing.open}. */
export interface OpenFileOptions {
  /** To read a file; to make one, where nothing has that name; to read and write one that is there. */
  readonly mode: "read" | "create" | "update";
  /**
   * `"auto"`, the default, goes around the page cache (O_DIRECT) where the file system allows it, so that a large file does
   * not push everything else out; what the cache holds is taken from there. `"never"` fills the page cache.
   */
  readonly direct?: "auto" | "never";
  /** Of `"create"`: size that the disk is asked for at once, so that a full disk is an error now. Default: none. */
  readonly bytes?: number;
}

/** State of a ring. Bytes and counts since it was made unless named otherwise. */
export interface FileRingStats {
  /** Slots, a count. */
  readonly slots: number;
  /** Of one slot. */
  readonly slotBytes: number;
  /** Threads, a count. */
  readonly threads: number;
  /** Slots in no use now, a count. */
  readonly freeSlots: number;
  /** Requests under way now, a count. */
  readonly requests: number;
  /** Files open now, a count. */
  readonly files: number;
  /** Read without the page cache. */
  readonly readDirect: number;
  /** Found in the page cache although the file is opened without it. */
  readonly readCached: number;
  /** Read through the page cache. */
  readonly readBuffered: number;
  /** Written without the page cache. */
  readonly writeDirect: number;
  /** Written through the page cache. */
  readonly writeBuffered: number;
  /** Passed through slots. */
  readonly copied: number;
  /** Calls that moved less than asked for or were interrupted, and went on, a count. */
  readonly retries: number;
  /** Files that refused O_DIRECT, a count. */
  readonly fallbacks: number;
  /** Seconds that all threads spent in reading and writing files. */
  readonly fileSeconds: number;
  /** Seconds that all threads waited for copies. */
  readonly deviceSeconds: number;
  /** Seconds that all threads were without work. */
  readonly idleSeconds: number;
}

const MODES = { read: 0, create: 1, update: 2 } as const;

/** Rings of each device that are open. */
const rings = new WeakMap<Device, Set<FileRing>>();

/** Closes the rings of a device. */
export async function disposeRings(device: Device): Promise<void> {
  await Promise.allSettled([...(rings.get(device) ?? [])].map((ring) => ring.dispose()));
}

/**
 * A ring of page-locked slots with threads, made once: it serves loading, saving, offload and streaming side by side, and its
 * requests take turns. No call of it blocks the event loop.
 */
export class FileRing extends NativeObject implements AsyncDisposable {
  /** Device that made it. */
  readonly device: Device;
  readonly #files = new Set<DeviceFile>();
  readonly #pending = new Set<Promise<unknown>>();

  constructor(device: Device, cell: Cell) {
    super(cell);
    this.device = device;
  }

  /**
   * Opens or makes a file. A symbolic link is followed, but by `"create"`.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * const path = "examples/demo/model/model.safetensors";
   * await using device = await Device.open("cpu");
   * await using ring = device.createFileRing({ slots: 2, slotBytes: 1 << 20 });
   * await using file = await ring.open(path, { mode: "read" });
   * using buffer = device.createBuffer(file.bytes);
   * const { bytes } = await file.read([{ offset: 0, bytes: file.bytes, memory: buffer }]);
   * console.log(bytes, file.io);
   * ```
   *
   * @param path The file; relative to the working folder.
   * @param options What for, and whether the page cache is used.
   * @returns The file. Close it with `await using`, or {@linkcode DeviceFile.dispose}.
   * @throws {LoramemError} Rejects with `IO` where the file system refuses, `BAD_ARGUMENT`, `DISPOSED`.
   */
  async open(path: string, options: OpenFileOptions): Promise<DeviceFile> {
    const op = "FileRing.open";
    const { mode, direct = "auto", bytes = 0 } = options;
    const text = encodePath(op, path);
    if (!Object.hasOwn(MODES, mode)) {
      badArgument(op, `mode must be "read", "create" or "update": it is ${mode}`, "mode", mode);
    }
    if (direct !== "auto" && direct !== "never") {
      badArgument(op, `direct must be "auto" or "never": it is ${direct}`, "direct", direct);
    }
    checkInteger(op, "bytes", bytes, 0);
    if (bytes > 0 && mode !== "create") {
      badArgument(op, `bytes is for "create" only: the mode is "${mode}"`, "bytes", bytes);
    }
    const { fn } = native();
    const flags = direct === "never" ? 1 : 0;
    const submit: Submit = (callback, tag) =>
      fn.lm_file_open(pointerOf(this), text, MODES[mode], flags, BigInt(bytes), callback, tag);
    return this.#run(
      runRequest(this.device, op, path, submit, (request, result) =>
        createDeviceFile(this, this.#files, path, fn.lm_file_request_file(request) as Ptr, result),
      ),
    );
  }

  /**
   * Removes a file and syncs its folder.
   *
   * @throws {LoramemError} Rejects with `IO`, `BAD_ARGUMENT`, `DISPOSED`.
   */
  async removeFile(path: string): Promise<void> {
    const op = "FileRing.removeFile";
    const text = encodePath(op, path);
    const { fn } = native();
    await this.#run(
      runRequest(this.device, op, path, (callback, tag) =>
        fn.lm_file_remove(pointerOf(this), text, callback, tag),
      ),
    );
  }

  /**
   * Makes a folder and the parents that are missing, and syncs where they appear; one that exists is fine.
   *
   * @throws {LoramemError} Rejects with `IO`, `BAD_ARGUMENT`, `DISPOSED`.
   */
  async makeFolder(path: string): Promise<void> {
    const op = "FileRing.makeFolder";
    const text = encodePath(op, path);
    const { fn } = native();
    await this.#run(
      runRequest(this.device, op, path, (callback, tag) =>
        fn.lm_folder_create(pointerOf(this), text, callback, tag),
      ),
    );
  }

  /**
   * Bytes that this user can still write where a path lies.
   *
   * @param path A file or folder that exists.
   * @throws {LoramemError} Rejects with `IO`, `BAD_ARGUMENT`, `DISPOSED`.
   */
  async freeBytes(path: string): Promise<number> {
    const op = "FileRing.freeBytes";
    const text = encodePath(op, path);
    const { fn } = native();
    const { value } = await this.#run(
      runRequest(this.device, op, path, (callback, tag) =>
        fn.lm_disk_free(pointerOf(this), text, callback, tag),
      ),
    );
    return value;
  }

  /**
   * State of the ring.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  stats(): FileRingStats {
    const ring = pointerOf(this);
    const fill = (buf: DataView<ArrayBuffer>) => native().fn.lm_file_ring_stats_get(ring, buf);
    return readStats("FileRing.stats", this.device, "lm_file_ring_stats", fill);
  }

  /** Waits for what is under way, closes the files that are open, and gives slots and threads back. */
  async [Symbol.asyncDispose](): Promise<void> {
    while (this.#pending.size > 0) await Promise.allSettled(this.#pending);
    const closed = await Promise.allSettled([...this.#files].map((file) => file.dispose()));
    rings.get(this.device)?.delete(this);
    disposeNow(this);
    for (const result of closed) if (result.status === "rejected") throw result.reason;
  }

  /** {@linkcode FileRing[Symbol.asyncDispose]} by name. */
  dispose(): Promise<void> {
    return this[Symbol.asyncDispose]();
  }

  async #run<T>(work: Promise<T>): Promise<T> {
    this.#pending.add(work);
    try {
      return await work;
    } finally {
      this.#pending.delete(work);
    }
  }
}

/** {@linkcode Device.createFileRing}. */
export function createFileRing(device: Device, options: FileRingOptions): FileRing {
  const op = "Device.createFileRing";
  const { slots = 8, slotBytes = 8 << 20, threads = 0 } = options;
  checkInteger(op, "slots", slots, 1, 1024);
  checkInteger(op, "slotBytes", slotBytes, 4096, 2 ** 30);
  if (slotBytes % 4096 !== 0) {
    badArgument(
      op,
      `slotBytes must be a multiple of 4096: it is ${slotBytes}`,
      "slotBytes",
      slotBytes,
    );
  }
  checkInteger(op, "threads", threads, 0, 256);
  const { fn } = native();
  const ctx = pointerOf(device);
  const ring = fn.lm_file_ring_create(ctx, BigInt(slotBytes), slots, threads);
  if (ring === null)
    throw creationError(native(), ctx, op, () => ({ requested: slots * slotBytes }));
  const cell: Cell = {
    label: "FileRing",
    pointer: ring,
    parent: cellOf(device),
    destroy: fn.lm_file_ring_destroy,
  };
  noteMade(device, cell, slots * slotBytes);
  const made = new FileRing(device, cell);
  const open = rings.get(device) ?? new Set();
  rings.set(device, open.add(made));
  return made;
}
