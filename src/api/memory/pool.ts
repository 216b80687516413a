/** Stream-ordered memory pool. */
import { LoramemError } from "../../ffi/error.ts";
import { type Cell, cellOf, Handle, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check, creationError } from "../../ffi/status.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import type { StreamUses } from "./buffer.ts";
import type { Device } from "./device.ts";
import { DeviceBuffer } from "./device_buffer.ts";
import { encodeLabel } from "./label.ts";
import { noteMade } from "./leaks.ts";
import { readStats } from "./stats.ts";
import { followStream, Stream } from "./stream.ts";

/** Options of {@linkcode Device.createPool}. */
export interface PoolOptions {
  /** Most bytes in live blocks; the pool holds at most that in whole pages of 2 MiB. 0, the default, means no limit. */
  readonly limit?: number;
  /** Name for messages. Default `"pool"`. */
  readonly label?: string;
}

/** Options of {@linkcode MemoryPool.alloc}. */
export interface AllocOptions {
  /** Stream whose work uses the block: it is usable there at once, and given back in that order. */
  readonly stream: Stream;
  /** Name for statistics and messages. Default `"block"`. */
  readonly label?: string;
}

/** State of a pool. Bytes unless named otherwise. */
export interface PoolStats {
  /** In live blocks, rounded to granules of 256 bytes. */
  readonly current: number;
  /** Most of it at once. */
  readonly peak: number;
  /** In live blocks as asked for. */
  readonly requested: number;
  /** Held from the system. */
  readonly reserved: number;
  /** Largest block that would fit without more memory from the system, after pages were moved together. */
  readonly largestFree: number;
  /** Live blocks, a count. */
  readonly liveBlocks: number;
  /** Blocks taken, a count. */
  readonly allocs: number;
  /** Blocks given back, a count. */
  readonly frees: number;
  /** Requests that did not fit, a count. */
  readonly failures: number;
  /** Most bytes in live blocks; 0 = no limit. */
  readonly limit: number;
  /** Held and in no live block. */
  readonly totalFree: number;
  /** Requests met only by waiting for other work or by giving memory back, a count. */
  readonly retries: number;
  /** Pages taken from the system and given back, those that moved among them, a count. */
  readonly driverCalls: number;
  /** 1 - `largestFree` / `totalFree`; 0 where nothing is free. */
  readonly fragmentation: number;
}

/** Device memory in blocks of any size, taken and given back in the order of streams without asking the driver. */
export class MemoryPool extends Handle {
  /** Device that made it. */
  readonly device: Device;

  constructor(device: Device, cell: Cell) {
    super(cell);
    this.device = device;
  }

  /**
   * Takes a block; 256-byte aligned.
   *
   * Disposing the block never waits: it is used again once the work that uses it, on its own and on other streams, has
   * ended.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * await using stream = device.createStream();
   * using pool = device.createPool({ limit: 1 << 20 });
   * using x = pool.alloc(4096, { stream, label: "x" });
   * console.log(x.bytes, pool.stats().liveBlocks);
   * ```
   *
   * @param bytes Size, at least 1.
   * @param options The stream, and a name.
   * @returns The block; its content is undefined.
   * @throws {LoramemError} `OUT_OF_MEMORY` with the sizes in its details, `DISPOSED`, `BAD_ARGUMENT`.
   */
  alloc(bytes: number, options: AllocOptions): DeviceBuffer {
    const op = "MemoryPool.alloc";
    checkInteger(op, "bytes", bytes, 1);
    const stream = options?.stream;
    if (!(stream instanceof Stream)) {
      badArgument(op, "stream is missing: pass { stream }", "stream", stream);
    }
    if (stream.device !== this.device) {
      badArgument(
        op,
        "stream belongs to another device: make it with device.createStream()",
        "stream",
      );
    }
    const { fn } = native();
    const pool = pointerOf(this);
    const home = pointerOf(stream);
    const label = options.label ?? "block";
    const block = fn.lm_pool_alloc(pool, BigInt(bytes), encodeLabel(label), home);
    if (block === 0n) throw this.#allocError(op, bytes);
    const memory = fn.lm_pool_pointer(pool, block) as Ptr;
    const cell = new BlockCell(this, block, memory, label, stream);
    noteMade(this.device, cell, bytes);
    return new DeviceBuffer(this.device, cell, memory, bytes, label, cell);
  }

  /**
   * {@linkcode MemoryPool.alloc} that under memory pressure collects garbage, lets one macrotask pass, in which buffers
   * that nobody refers to are given back, and tries once more.
   *
   * @param bytes Size, at least 1.
   * @param options The stream, and a name.
   * @returns The block; its content is undefined.
   * @throws {LoramemError} Rejects as {@linkcode MemoryPool.alloc} throws.
   */
  async allocAsync(bytes: number, options: AllocOptions): Promise<DeviceBuffer> {
    try {
      return this.alloc(bytes, options);
    } catch (error) {
      if (!(error instanceof LoramemError && error.is("OUT_OF_MEMORY"))) throw error;
    }
    native().runtime.collectGarbage();
    await new Promise((resolve) => setTimeout(resolve, 0));
    return this.alloc(bytes, options);
  }

  /**
   * State of the pool.
   *
   * @returns A snapshot.
   * @throws {LoramemError} `DISPOSED`.
   */
  stats(): PoolStats {
    const pool = pointerOf(this);
    const status = (buf: DataView<ArrayBuffer>) => native().fn.lm_pool_stats_get(pool, buf);
    return readStats<PoolStats>("MemoryPool.stats", this.device, "lm_pool_stats", status);
  }

  /**
   * Gives pages of 2 MiB that hold no live block back to the system, after the streams that used them.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  trim(): void {
    check(
      native(),
      pointerOf(this.device),
      native().fn.lm_pool_trim(pointerOf(this)),
      "MemoryPool.trim",
    );
  }

  /**
   * Lets the peak start again from what is live now.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  resetPeaks(): void {
    const status = native().fn.lm_pool_reset_peaks(pointerOf(this));
    check(native(), pointerOf(this.device), status, "MemoryPool.resetPeaks");
  }

  /**
   * Debug mode: waits for the device and looks at the red zones of every live block.
   *
   * @throws {LoramemError} `CORRUPT_MEMORY` naming the block and the place, `BAD_ARGUMENT` without debug mode, `DISPOSED`.
   */
  check(): void {
    const status = native().fn.lm_pool_check(pointerOf(this));
    check(native(), pointerOf(this.device), status, "MemoryPool.check");
  }

  #allocError(op: string, bytes: number): Error {
    const details = (text: string) => {
      const { largestFree, totalFree, fragmentation } = this.stats();
      const owners = [...text.matchAll(/^ {2}(\d+) bytes in \d+ blocks: (.*)$/gm)].map(
        ([, size, label = ""]) => ({ label, bytes: Number(size) }),
      );
      return { requested: bytes, largestFree, totalFree, fragmentation, owners };
    };
    return creationError(native(), pointerOf(this.device), op, details);
  }
}

/** A block and the streams that use it; a class, since closures and a set for each block cost as much as the pool does. */
class BlockCell implements Cell, StreamUses {
  pointer: Ptr | null;
  readonly parent: Cell;
  // A block in use keeps its pool.
  readonly #pool: MemoryPool;
  readonly #handle: bigint;
  readonly #name: string;
  readonly #first: Stream;
  #others: Set<Stream> | undefined;

  constructor(pool: MemoryPool, handle: bigint, memory: Ptr, name: string, first: Stream) {
    this.pointer = memory;
    this.parent = cellOf(pool);
    this.#pool = pool;
    this.#handle = handle;
    this.#name = name;
    this.#first = first;
  }

  get label(): string {
    return `DeviceBuffer "${this.#name}"`;
  }

  add(stream: Stream): void {
    if (stream === this.#first) return;
    this.#others ??= new Set();
    this.#others.add(stream);
  }

  *[Symbol.iterator](): Iterator<Stream> {
    yield this.#first;
    if (this.#others !== undefined) yield* this.#others;
  }

  /** A pool that is gone took every block with it. */
  destroy(): void {
    if (this.#pool.disposed) return;
    if (this.#others === undefined && !this.#first.disposed) this.#free(pointerOf(this.#first));
    else this.#freeAfterAll();
  }

  #free(stream: Ptr): void {
    const status = native().fn.lm_pool_free(pointerOf(this.#pool), this.#handle, stream);
    check(native(), pointerOf(this.#pool.device), status, "DeviceBuffer.dispose");
  }

  /** In the order of the first stream that is there, after the others; one that is disposed has finished its work. */
  #freeAfterAll(): void {
    const [home, ...rest] = [...this].filter((stream) => !stream.disposed);
    if (home !== undefined) {
      for (const stream of rest) followStream(home, stream);
      this.#free(pointerOf(home));
      return;
    }
    const { fn } = native();
    const ctx = pointerOf(this.#pool.device);
    const spare = fn.lm_stream_create(ctx, 0); // any stream will do
    if (spare === null) throw creationError(native(), ctx, "DeviceBuffer.dispose");
    try {
      this.#free(spare);
    } finally {
      fn.lm_stream_destroy(spare);
    }
  }
}

/** {@linkcode Device.createPool}. */
export function createPool(device: Device, pools: Set<Cell>, options: PoolOptions): MemoryPool {
  const op = "Device.createPool";
  const limit = options.limit ?? 0;
  checkInteger(op, "limit", limit, 0);
  const { fn } = native();
  const ctx = pointerOf(device);
  const pool = fn.lm_pool_create(ctx, BigInt(limit));
  if (pool === null) throw creationError(native(), ctx, op);
  const cell: Cell = {
    label: `MemoryPool "${options.label ?? "pool"}"`,
    pointer: pool,
    parent: cellOf(device),
    destroy: (pointer) => {
      pools.delete(cell);
      fn.lm_pool_destroy(pointer);
    },
  };
  pools.add(cell);
  noteMade(device, cell);
  return new MemoryPool(device, cell);
}
