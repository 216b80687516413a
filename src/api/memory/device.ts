/** An opened device: the root of everything else. */
import { streamDone } from "../../ffi/completion.ts";
import { LoramemError } from "../../ffi/error.ts";
import { type Cell, cellOf, disposeNow, NativeObject, pointerOf } from "../../ffi/handle.ts";
import { native, openLibrary } from "../../ffi/load.ts";
import { check, creationError, decodeText, nativeError } from "../../ffi/status.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import type { DeviceBuffer } from "./device_buffer.ts";
import { disposeWaiter, Event } from "./event.ts";
import { createFileRing, disposeRings, type FileRing, type FileRingOptions } from "./file_ring.ts";
import { endLeaks, type Leak, type LeakReport, leaksOf, noteMade, watchLeaks } from "./leaks.ts";
import type { ManagedBuffer } from "./managed_buffer.ts";
import { PerformanceMonitor, type PerformanceMonitorOptions } from "./performance_monitor.ts";
import {
  createPinnedBuffer,
  type PinnedBuffer,
  type PinnedBufferOptions,
} from "./pinned_buffer.ts";
import { createPinnedPool, type PinnedPool, type PinnedPoolOptions } from "./pinned_pool.ts";
import { createPool, type MemoryPool, type PoolOptions } from "./pool.ts";
import { type BufferOptions, createBuffer, createManagedBuffer } from "./reservation.ts";
import {
  createScratchArena,
  type ScratchArena,
  type ScratchArenaOptions,
} from "./scratch_arena.ts";
import { type SimOptions, simName } from "./sim.ts";
import { type DeviceSnapshot, takeSnapshot } from "./snapshot.ts";
import {
  type DeviceStats,
  type MemoryClass,
  type MemoryStats,
  readMemoryStats,
  readStats,
} from "./stats.ts";
import { Stream } from "./stream.ts";

/**
 * Which device: `"auto"` is the first CUDA device where one is usable, else the CPU. Test builds of the library also open
 * `"sim"`, a CPU that is late or fails on purpose.
 */
export type DeviceKind = "auto" | "cpu" | `cuda:${number}` | "sim";

/** Options of {@linkcode Device.open}. */
export interface DeviceOptions extends SimOptions {
  /** CPU worker threads; 0, the default, means one per available core. Results do not depend on it. */
  readonly threads?: number;
  /**
   * Debug mode, for finding mistakes: pool blocks get red zones that are looked at when they are given back (which then
   * waits) and by {@linkcode MemoryPool.check}, freed memory is filled with 0xFF, the last 4,096 calls are kept for
   * {@linkcode Device.snapshot}, and {@linkcode Device.leaks} knows where everything was made. Default false.
   */
  readonly debug?: boolean;
  /**
   * Debug mode: called when the device closes, or the process ends, with objects that were not disposed. Not where a signal
   * ends the process, nor, on Deno, an error that nobody catches.
   */
  readonly onLeak?: (report: LeakReport) => void;
}

/** What is known about a device; fields beyond these depend on its kind. */
export interface DeviceInfo {
  /** As {@linkcode Device.kind}. */
  readonly kind: string;
  /** Why `"auto"` did not take a CUDA device. */
  readonly noCuda?: string;
  readonly [key: string]: unknown;
}

/** Options of {@linkcode Device.createStream}. */
export interface StreamOptions {
  /** 0, the default, is normal; negative is more urgent. */
  readonly priority?: number;
}

const TEXT_BYTES = 4096;

/** A CPU or GPU, with everything that lives on it. */
export class Device extends NativeObject implements AsyncDisposable {
  /** What was opened, such as `"cpu"` or `"cuda:0"`; never `"auto"`. */
  readonly kind: string;

  /** Whether it is in debug mode. */
  readonly debug: boolean;

  readonly #noCuda: string | undefined;
  /** Streams and pools that are open now; shared with their cells, which leave them. */
  readonly #streams = new Set<Cell>();
  readonly #pools = new Set<Cell>();

  private constructor(kind: string, ctx: Ptr, noCuda: string | undefined, options: DeviceOptions) {
    super({
      label: `Device "${kind}"`,
      pointer: ctx,
      parent: null,
      destroy: native().fn.lm_ctx_destroy,
    });
    this.kind = kind;
    this.#noCuda = noCuda;
    this.debug = options.debug === true;
    if (!this.debug) return;
    const status = native().fn.lm_debug_enable(ctx);
    if (status < 0) {
      const error = nativeError(native(), ctx, status, "Device.open");
      disposeNow(this);
      throw error;
    }
    watchLeaks(this, options.onLeak);
  }

  /**
   * Opens a device; the first call opens the native library.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("auto");
   * console.log(device.kind, device.info().noCuda);
   * ```
   *
   * @param kind Which device.
   * @param options How many threads, debug mode, and what a `"sim"` device does on purpose.
   * @returns The device. Dispose it last; what lives on it becomes unusable.
   * @throws {LoramemError} `NATIVE_LIBRARY` where the library is not built, `UNSUPPORTED` on another platform, `DEVICE`
   * where the device is missing or fails.
   */
  static async open(kind: DeviceKind = "auto", options: DeviceOptions = {}): Promise<Device> {
    const op = "Device.open";
    const { threads = 0 } = options;
    if (!/^(auto|cpu|cuda:\d{1,3}|sim)$/.test(String(kind))) {
      badArgument(
        op,
        `unknown device: ${String(kind)}: use "auto", "cpu" or "cuda:<n>"`,
        "kind",
        kind,
      );
    }
    checkInteger(op, "threads", threads, 0, 4096);
    const first = kind === "auto" ? "cuda:0" : kind;
    const name = simName(op, first, options);
    await openLibrary();
    const opened = openContext(name, threads);
    if (typeof opened !== "string") return new Device(first, opened, undefined, options);
    if (kind !== "auto") throw new LoramemError("DEVICE", `${op}: ${opened}`);
    const cpu = openContext("cpu", threads);
    if (typeof cpu === "string") throw new LoramemError("DEVICE", `${op}: ${cpu}`);
    return new Device("cpu", cpu, opened, options);
  }

  /**
   * What is known about the device: name, threads, instruction set, memory.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  info(): DeviceInfo {
    const ctx = pointerOf(this);
    const { fn } = native();
    const needed = fn.lm_ctx_info(ctx, new Uint8Array(1), 1n);
    check(native(), ctx, needed, "Device.info");
    const text = new Uint8Array(needed);
    check(native(), ctx, fn.lm_ctx_info(ctx, text, BigInt(needed)), "Device.info");
    const noCuda = this.#noCuda === undefined ? {} : { noCuda: this.#noCuda };
    return { ...JSON.parse(decodeText(text)), kind: this.kind, ...noCuda };
  }

  /**
   * Memory and work counters.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  stats(): DeviceStats {
    const ctx = pointerOf(this);
    return readStats<DeviceStats>("Device.stats", this, "lm_stats", (buf) =>
      native().fn.lm_ctx_stats(ctx, buf),
    );
  }

  /**
   * What is held from the system, by class of memory.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  memoryStats(): Record<MemoryClass, MemoryStats> {
    return readMemoryStats(this);
  }

  /**
   * Lets every peak of the device and of its pools start again from what is held now.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  resetPeaks(): void {
    const ctx = pointerOf(this);
    const { fn } = native();
    check(native(), ctx, fn.lm_ctx_reset_peaks(ctx), "Device.resetPeaks");
    for (const { pointer } of this.#pools) fn.lm_pool_reset_peaks(pointer);
  }

  /**
   * Makes a queue for work.
   *
   * @throws {LoramemError} `DISPOSED`, `DEVICE`, `OUT_OF_MEMORY`.
   */
  createStream(options: StreamOptions = {}): Stream {
    const op = "Device.createStream";
    const { priority = 0 } = options;
    checkInteger(op, "priority", priority, -100, 100);
    const { fn } = native();
    const pointer = this.#created(op, fn.lm_stream_create(pointerOf(this), priority));
    const streams = this.#streams;
    const cell: Cell = {
      label: "Stream",
      pointer,
      parent: cellOf(this),
      destroy: (stream) => {
        streams.delete(cell);
        fn.lm_stream_destroy(stream);
      },
    };
    streams.add(cell);
    noteMade(this, cell);
    return new Stream(this, cell);
  }

  /**
   * Makes an event; {@linkcode Stream.record} sets it.
   *
   * @throws {LoramemError} `DISPOSED`, `DEVICE`, `OUT_OF_MEMORY`.
   */
  createEvent(): Event {
    const { fn } = native();
    const pointer = this.#created("Device.createEvent", fn.lm_event_create(pointerOf(this)));
    const cell: Cell = {
      label: "Event",
      pointer,
      parent: cellOf(this),
      destroy: fn.lm_event_destroy,
    };
    noteMade(this, cell);
    return new Event(this, cell);
  }

  /**
   * Takes device memory from the system: 4096-byte aligned, content undefined. Costs a driver call; for blocks that come
   * and go use {@linkcode Device.createPool}.
   *
   * @param bytes Size, at least 1.
   * @param options A name.
   * @returns The memory. Disposing it while streams are busy gives it back when they are not.
   * @throws {LoramemError} `OUT_OF_MEMORY`, `BAD_ARGUMENT`, `DISPOSED`.
   */
  createBuffer(bytes: number, options: BufferOptions = {}): DeviceBuffer {
    return createBuffer(this, this.#streams, bytes, options);
  }

  /**
   * Takes managed memory, which host and device both reach. Refused where it is larger than what is free on the device.
   *
   * @param bytes Size, at least 1.
   * @param options A name.
   * @throws {LoramemError} `OUT_OF_MEMORY`, `UNSUPPORTED` where the device has none, `BAD_ARGUMENT`, `DISPOSED`.
   */
  createManagedBuffer(bytes: number, options: BufferOptions = {}): ManagedBuffer {
    return createManagedBuffer(this, this.#streams, bytes, options);
  }

  /**
   * Makes a stream-ordered pool.
   *
   * @throws {LoramemError} `DISPOSED`, `BAD_ARGUMENT`, `OUT_OF_MEMORY`.
   */
  createPool(options: PoolOptions = {}): MemoryPool {
    return createPool(this, this.#pools, options);
  }

  /**
   * Makes an arena for buffers that live one forward or backward pass.
   *
   * @param bytes Size of the whole arena, at least 1.
   * @param options The stream it belongs to, and where its memory comes from.
   * @throws {LoramemError} `OUT_OF_MEMORY`, `BAD_ARGUMENT`, `DISPOSED`.
   */
  createScratchArena(bytes: number, options: ScratchArenaOptions): ScratchArena {
    return createScratchArena(this, bytes, options);
  }

  /**
   * Takes page-locked host memory.
   *
   * @param bytes Size, at least 1.
   * @param options Whether it is write-combined, and a name.
   * @throws {LoramemError} `OUT_OF_MEMORY` where the system locks no more pages, `BAD_ARGUMENT`, `DISPOSED`.
   */
  createPinnedBuffer(bytes: number, options: PinnedBufferOptions = {}): PinnedBuffer {
    return createPinnedBuffer(this, bytes, options);
  }

  /**
   * Makes a pool of page-locked host memory.
   *
   * @throws {LoramemError} `DISPOSED`, `BAD_ARGUMENT`, `OUT_OF_MEMORY`.
   */
  createPinnedPool(options: PinnedPoolOptions = {}): PinnedPool {
    return createPinnedPool(this, options);
  }

  /**
   * Makes a monitor that times steps on the device.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * await using stream = device.createStream();
   * using buffer = device.createBuffer(1 << 20);
   * using monitor = device.createPerformanceMonitor({ peakFlops: 1e12 });
   * monitor.begin(stream);
   * stream.fill(buffer, 0);
   * monitor.end(stream, { tokens: 4096, flops: 1e9 });
   * await stream.done();
   * const step = monitor.take();
   * console.log(step?.seconds, step?.tokensPerSecond, step?.modelFlopUtilization);
   * console.log(monitor.summary().memory.reserved);
   * ```
   *
   * @param options What counts as all of the device's arithmetic.
   * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `OUT_OF_MEMORY`.
   */
  createPerformanceMonitor(options: PerformanceMonitorOptions = {}): PerformanceMonitor {
    return new PerformanceMonitor(this, options);
  }

  /**
   * Makes a ring for file work: page-locked slots and threads. One serves loading, saving, offload and streaming.
   *
   * @throws {LoramemError} `OUT_OF_MEMORY` where so much memory cannot be locked, `BAD_ARGUMENT`, `DISPOSED`.
   */
  createFileRing(options: FileRingOptions = {}): FileRing {
    return createFileRing(this, options);
  }

  /**
   * Everything that the device holds, with owners and times, as plain data for `JSON.stringify`.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  snapshot(): DeviceSnapshot {
    return takeSnapshot(this, this.#pools);
  }

  /** Debug mode: what was made on the device and not disposed yet, oldest first; empty otherwise. */
  leaks(): Leak[] {
    return leaksOf(this);
  }

  /** Closes its file rings, waits for the work of every stream without blocking the event loop, then gives everything back. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.disposed) return;
    const ctx = pointerOf(this);
    await disposeRings(this);
    const streams = [...this.#streams].flatMap(({ pointer }) => pointer ?? []);
    await Promise.allSettled(
      streams.map((stream) => streamDone(native(), ctx, stream, "Device.dispose")),
    );
    await disposeWaiter(this);
    endLeaks(this);
    disposeNow(this);
  }

  /** {@linkcode Device[Symbol.asyncDispose]} by name. */
  dispose(): Promise<void> {
    return this[Symbol.asyncDispose]();
  }

  #created(op: string, pointer: Ptr | null): Ptr {
    if (pointer !== null) return pointer;
    throw creationError(native(), pointerOf(this), op);
  }
}

/** The context, or why there is none. */
function openContext(device: string, threads: number): Ptr | string {
  const text = new Uint8Array(TEXT_BYTES);
  const name = new TextEncoder().encode(`${device}\0`);
  const ctx = native().fn.lm_ctx_open(name, threads, text, BigInt(TEXT_BYTES));
  return ctx ?? (decodeText(text) || `${device} cannot be opened`);
}
