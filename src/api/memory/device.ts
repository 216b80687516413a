/** An opened device: the root of everything else. */
import { streamDone } from "../../ffi/completion.ts";
import { LoramemError } from "../../ffi/error.ts";
import { type Cell, cellOf, disposeNow, NativeObject, pointerOf } from "../../ffi/handle.ts";
import { native, openLibrary } from "../../ffi/load.ts";
import { check, creationError, decodeText, STATUS } from "../../ffi/status.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import { DeviceBuffer } from "./device_buffer.ts";
import { disposeWaiter, Event } from "./event.ts";
import {
  createPinnedBuffer,
  type PinnedBuffer,
  type PinnedBufferOptions,
} from "./pinned_buffer.ts";
import { createPool, type MemoryPool, type PoolOptions } from "./pool.ts";
import {
  createScratchArena,
  type ScratchArena,
  type ScratchArenaOptions,
} from "./scratch_arena.ts";
import { readStats } from "./stats.ts";
import { Stream } from "./stream.ts";

/**
 * Which device: `"auto"` is the first CUDA device where one is usable, else the CPU. Test builds of the library also open
 * `"sim"`, a CPU that is late or fails on purpose.
 */
export type DeviceKind = "auto" | "cpu" | `cuda:${number}` | "sim" | `sim:${string}`;

/** Options of {@linkcode Device.open}. */
export interface DeviceOptions {
  /** CPU worker threads; 0, the default, means one per available core. Results do not depend on it. */
  readonly threads?: number;
}

/** What is known about a device; fields beyond these depend on its kind. */
export interface DeviceInfo {
  /** As {@linkcode Device.kind}. */
  readonly kind: string;
  /** Why `"auto"` did not take a CUDA device. */
  readonly noCuda?: string;
  readonly [key: string]: unknown;
}

/** Counters since the device was opened. Bytes unless named otherwise. */
export interface DeviceStats {
  /** Device memory reserved now. */
  readonly reserved: number;
  /** Most device memory reserved at once. */
  readonly reservedPeak: number;
  /** Page-locked host memory now. */
  readonly pinned: number;
  /** Most page-locked host memory at once. */
  readonly pinnedPeak: number;
  /** Calls that took device or page-locked memory from the system. */
  readonly driverAllocs: number;
  /** Calls that gave it back. */
  readonly driverFrees: number;
  /** Host heap allocations that the library made for the device. */
  readonly heapAllocs: number;
  /** Kernels enqueued one by one or through a graph. */
  readonly kernelLaunches: number;
}

/** Options of {@linkcode Device.createStream}. */
export interface StreamOptions {
  /** 0, the default, is normal; negative is more urgent. */
  readonly priority?: number;
}

/** Options of {@linkcode Device.createBuffer}. */
export interface BufferOptions {
  /** Name for messages. Default `"buffer"`. */
  readonly label?: string;
}

const TEXT_BYTES = 4096;

/** A CPU or GPU, with everything that lives on it. */
export class Device extends NativeObject implements AsyncDisposable {
  /** What was opened, such as `"cpu"` or `"cuda:0"`; never `"auto"`. */
  readonly kind: string;

  readonly #noCuda: string | undefined;
  /** Streams that are open now; shared with their cells, which leave it. */
  readonly #streams = new Set<Cell>();

  private constructor(kind: string, ctx: Ptr, noCuda: string | undefined) {
    super({
      label: `Device "${kind}"`,
      pointer: ctx,
      parent: null,
      destroy: native().fn.lm_ctx_destroy,
    });
    this.kind = kind;
    this.#noCuda = noCuda;
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
   * @param options How many threads.
   * @returns The device. Dispose it last; what lives on it becomes unusable.
   * @throws {LoramemError} `NATIVE_LIBRARY` where the library is not built, `UNSUPPORTED` on another platform, `DEVICE`
   * where the device is missing or fails.
   */
  static async open(kind: DeviceKind = "auto", options: DeviceOptions = {}): Promise<Device> {
    const op = "Device.open";
    const { threads = 0 } = options;
    if (!/^(auto|cpu|cuda:\d{1,3}|sim(:[\w=,/]+)?)$/.test(String(kind))) {
      badArgument(
        op,
        `unknown device: ${String(kind)}: use "auto", "cpu" or "cuda:<n>"`,
        "kind",
        kind,
      );
    }
    checkInteger(op, "threads", threads, 0, 4096);
    await openLibrary();
    const first = kind === "auto" ? "cuda:0" : kind;
    const opened = openContext(first, threads);
    if (typeof opened !== "string") return new Device(first, opened, undefined);
    if (kind !== "auto") throw new LoramemError("DEVICE", `${op}: ${opened}`);
    const cpu = openContext("cpu", threads);
    if (typeof cpu === "string") throw new LoramemError("DEVICE", `${op}: ${cpu}`);
    return new Device("cpu", cpu, opened);
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
    return new Event(this, {
      label: "Event",
      pointer,
      parent: cellOf(this),
      destroy: fn.lm_event_destroy,
    });
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
    const op = "Device.createBuffer";
    checkInteger(op, "bytes", bytes, 1);
    const { fn } = native();
    const ctx = pointerOf(this);
    const memory = this.#created(op, fn.lm_mem_reserve(ctx, BigInt(bytes)), bytes);
    const label = options.label ?? "buffer";
    const streams = this.#streams;
    const destroy = () => {
      // The native call waits for the device; wait for its streams here first, without blocking. The reservation keeps the
      // context alive, also when the device is disposed.
      const open = [...streams].flatMap(({ pointer }) => pointer ?? []);
      const busy = open.filter(
        (stream) => fn.lm_stream_query(stream) === STATUS.LM_NOT_READY.value,
      );
      if (busy.length === 0) return void fn.lm_mem_release(ctx, memory);
      const ends = busy.map((stream) => streamDone(native(), ctx, stream, "DeviceBuffer.dispose"));
      void Promise.allSettled(ends).then(() => fn.lm_mem_release(ctx, memory));
    };
    const cell: Cell = {
      label: `DeviceBuffer "${label}"`,
      pointer: memory,
      parent: cellOf(this),
      destroy,
    };
    return new DeviceBuffer(this, cell, memory, bytes, label, null);
  }

  /**
   * Makes a stream-ordered pool.
   *
   * @throws {LoramemError} `DISPOSED`, `BAD_ARGUMENT`, `OUT_OF_MEMORY`.
   */
  createPool(options: PoolOptions = {}): MemoryPool {
    return createPool(this, options);
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

  /** Waits for the work of every stream without blocking the event loop, then gives everything back. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.disposed) return;
    const ctx = pointerOf(this);
    const streams = [...this.#streams].flatMap(({ pointer }) => pointer ?? []);
    await Promise.allSettled(
      streams.map((stream) => streamDone(native(), ctx, stream, "Device.dispose")),
    );
    await disposeWaiter(this);
    disposeNow(this);
  }

  /** {@linkcode Device[Symbol.asyncDispose]} by name. */
  dispose(): Promise<void> {
    return this[Symbol.asyncDispose]();
  }

  #created(op: string, pointer: Ptr | null, requested?: number): Ptr {
    if (pointer !== null) return pointer;
    throw creationError(
      native(),
      pointerOf(this),
      op,
      requested === undefined ? undefined : () => ({ requested }),
    );
  }
}

/** The context, or why there is none. */
function openContext(device: string, threads: number): Ptr | string {
  const text = new Uint8Array(TEXT_BYTES);
  const name = new TextEncoder().encode(`${device}\0`);
  const ctx = native().fn.lm_ctx_open(name, threads, text, BigInt(TEXT_BYTES));
  return ctx ?? (decodeText(text) || `${device} cannot be opened`);
}
