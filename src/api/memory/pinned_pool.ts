/** Page-locked host memory that is used again. */
import { LoramemError } from "../../ffi/error.ts";
import { type Cell, cellOf, Handle, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check, creationError } from "../../ffi/status.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import type { Device } from "./device.ts";
import { encodeLabel } from "./label.ts";
import { noteMade } from "./leaks.ts";
import { PinnedBuffer, type PinnedBufferOptions } from "./pinned_buffer.ts";
import { readStats } from "./stats.ts";

/** Options of {@linkcode Device.createPinnedPool}. */
export interface PinnedPoolOptions {
  /** Most bytes it may lock. Default: a quarter of the memory that is available now, at most 2 GiB. */
  readonly limit?: number;
  /** Name for messages. Default `"pinned pool"`. */
  readonly label?: string;
}

/** Options of {@linkcode PinnedPool.acquire}. */
export interface AcquireOptions extends PinnedBufferOptions {
  /** What to do where nothing more can be locked: hand out pageable memory, the default, or throw. */
  readonly fallback?: "pageable" | "error";
}

/** Options of {@linkcode PinnedPool.ring}. */
export interface RingOptions extends PinnedBufferOptions {
  /** Fewest buffers that are of use. Default 2: one fills while the other empties. */
  readonly least?: number;
}

/** State of a pinned pool. Bytes unless named otherwise. */
export interface PinnedPoolStats {
  /** Page-locked now, idle or not. */
  readonly locked: number;
  /** Most of it at once. */
  readonly lockedPeak: number;
  /** In buffers that are out. */
  readonly current: number;
  /** Most of it at once. */
  readonly peak: number;
  /** In buffers that are out, as asked for. */
  readonly requested: number;
  /** Of `current`: not page-locked. */
  readonly pageable: number;
  /** Buffers that are out, a count. */
  readonly count: number;
  /** Buffers given out, a count. */
  readonly acquires: number;
  /** Buffers given back, a count. */
  readonly releases: number;
  /** Acquires that locked nothing new, a count. */
  readonly reuses: number;
  /** Acquires that got pageable memory, a count. */
  readonly fallbacks: number;
  /** Acquires that got nothing, a count. */
  readonly failures: number;
  /** Pieces of memory locked and unlocked, a count. */
  readonly driverCalls: number;
  /** Most bytes it may lock. */
  readonly limit: number;
}

/**
 * A pool of page-locked buffers. Locking pages costs milliseconds, so buffers that come back are kept and given out again:
 * whole, without rounding to powers of two, and only once the copies that use them have ended.
 */
export class PinnedPool extends Handle {
  /** Device that made it. */
  readonly device: Device;

  constructor(device: Device, cell: Cell) {
    super(cell);
    this.device = device;
  }

  /**
   * Takes a buffer; never waits. Disposing it gives it back.
   *
   * Where the limit is reached or the system locks no more, the buffer is pageable memory: `buffer.pinned` is false, and
   * copies from and to it make the caller wait until they have ended.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * using pool = device.createPinnedPool({ limit: 1 << 20 });
   * for (let batch = 0; batch < 3; batch++) {
   *   using host = pool.acquire(100_000); // the same pages every time
   *   console.log(host.pinned, pool.stats().driverCalls);
   * }
   * ```
   *
   * @param bytes Size, at least 1.
   * @param options A name, write-combined, and what to do where nothing more can be locked.
   * @returns The buffer; its content is undefined.
   * @throws {LoramemError} `OUT_OF_MEMORY`, `BAD_ARGUMENT`, `DISPOSED`.
   */
  acquire(bytes: number, options: AcquireOptions = {}): PinnedBuffer {
    const op = "PinnedPool.acquire";
    checkInteger(op, "bytes", bytes, 1);
    const { writeCombined = false, fallback = "pageable", label = "pinned" } = options;
    if (fallback !== "pageable" && fallback !== "error") {
      badArgument(op, `fallback must be "pageable" or "error": it is ${fallback}`, "fallback");
    }
    const { fn } = native();
    const ctx = pointerOf(this.device);
    const flags = (writeCombined ? 1 : 0) + (fallback === "error" ? 2 : 0);
    const pinned = fn.lm_pinned_pool_acquire(pointerOf(this), BigInt(bytes), flags);
    if (pinned === null) throw creationError(native(), ctx, op, () => ({ requested: bytes }));
    const memory = fn.lm_pinned_data(pinned) as Ptr;
    if (label !== "pinned") fn.lm_mem_label(ctx, memory, encodeLabel(label));
    // Lives inside the device, not the pool: a buffer that is out stays usable when its pool is disposed.
    const cell: Cell = {
      label: `PinnedBuffer "${label}"`,
      pointer: pinned,
      parent: cellOf(this.device),
      destroy: fn.lm_pinned_destroy,
    };
    noteMade(this.device, cell, bytes);
    const locked = fn.lm_pinned_locked(pinned) === 1;
    return new PinnedBuffer(this.device, cell, memory, bytes, label, null, locked);
  }

  /**
   * Takes a ring of equal buffers: `count` page-locked ones, or as many as can be locked if that is `least` or more, or
   * else `least` buffers of which some are pageable.
   *
   * @param count Buffers wanted, at least `least`.
   * @param bytes Size of each.
   * @param options Names, write-combined, and the fewest that are of use.
   * @returns The buffers, to be disposed one by one.
   * @throws {LoramemError} `OUT_OF_MEMORY` where the machine has not even pageable memory, `BAD_ARGUMENT`, `DISPOSED`.
   */
  ring(count: number, bytes: number, options: RingOptions = {}): PinnedBuffer[] {
    const op = "PinnedPool.ring";
    const { least = 2, ...rest } = options;
    checkInteger(op, "least", least, 1);
    checkInteger(op, "count", count, least, 4096);
    const buffers: PinnedBuffer[] = [];
    try {
      while (buffers.length < count) {
        buffers.push(this.acquire(bytes, { ...rest, fallback: "error" }));
      }
    } catch (error) {
      if (!(error instanceof LoramemError && error.is("OUT_OF_MEMORY"))) throw error;
    }
    try {
      while (buffers.length < least) buffers.push(this.acquire(bytes, rest));
    } catch (error) {
      for (const buffer of buffers) buffer.dispose();
      throw error;
    }
    return buffers;
  }

  /**
   * State of the pool.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  stats(): PinnedPoolStats {
    const pool = pointerOf(this);
    const fill = (buf: DataView<ArrayBuffer>) => native().fn.lm_pinned_pool_stats_get(pool, buf);
    return readStats("PinnedPool.stats", this.device, "lm_pinned_pool_stats", fill);
  }

  /**
   * Unlocks the buffers that are idle and that no copy uses any more.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  trim(): void {
    const status = native().fn.lm_pinned_pool_trim(pointerOf(this));
    check(native(), pointerOf(this.device), status, "PinnedPool.trim");
  }
}

/** {@linkcode Device.createPinnedPool}. */
export function createPinnedPool(device: Device, options: PinnedPoolOptions): PinnedPool {
  const op = "Device.createPinnedPool";
  const { limit } = options;
  if (limit !== undefined) checkInteger(op, "limit", limit, 1);
  const { fn } = native();
  const ctx = pointerOf(device);
  const pool = fn.lm_pinned_pool_create(ctx, BigInt(limit ?? 0));
  if (pool === null) throw creationError(native(), ctx, op);
  const cell: Cell = {
    label: `PinnedPool "${options.label ?? "pinned pool"}"`,
    pointer: pool,
    parent: cellOf(device),
    destroy: fn.lm_pinned_pool_destroy,
  };
  noteMade(device, cell);
  return new PinnedPool(device, cell);
}
