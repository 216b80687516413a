/** Bump allocation with nested scopes. */
import { LoramemError } from "../../ffi/error.ts";
import { type Cell, cellOf, pointerOf } from "../../ffi/handle.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import { addressOf, usesOf } from "./buffer.ts";
import type { Device } from "./device.ts";
import { DeviceBuffer } from "./device_buffer.ts";
import { MemoryPool } from "./pool.ts";
import { followStream, Stream } from "./stream.ts";

/** Blocks start at multiples of this: what vector loads and copies of any device want. */
const ALIGNMENT = 256;

/** What debug mode fills memory with that was given back. */
const POISON = 0xff;

/** Options of {@linkcode Device.createScratchArena}. */
export interface ScratchArenaOptions {
  /** Stream whose work uses the arena: a scope's memory is used again in the order of this stream. */
  readonly stream: Stream;
  /** Pool that the arena takes one block of; without it the arena is a reservation of its own. */
  readonly pool?: MemoryPool;
  /** Name for messages. Default `"scratch"`. */
  readonly label?: string;
}

/** Options of {@linkcode ScratchArena.alloc}. */
export interface ScratchOptions {
  /** Name for messages. Default `"scratch"`. */
  readonly label?: string;
}

/** State of an arena, in bytes. */
export interface ScratchStats {
  /** Size of the arena. */
  readonly bytes: number;
  /** In use now, with the gaps that alignment leaves. */
  readonly used: number;
  /** Most of it at once: the high-water mark. */
  readonly peak: number;
  /** Scopes that are open now, a count. */
  readonly scopes: number;
}

/** The part of an arena that was allocated since {@linkcode ScratchArena.scope}; ends with `using`. */
export class ScratchScope implements Disposable {
  readonly #end: () => void;

  constructor(end: () => void) {
    this.#end = end;
  }

  /** Gives back everything allocated since the scope began, inner scopes with it. The second call does nothing. */
  dispose(): void {
    this.#end();
  }

  /** {@linkcode ScratchScope.dispose}, for `using`. */
  [Symbol.dispose](): void {
    this.#end();
  }
}

/** Where a scope began. */
interface Level {
  readonly offset: number;
  readonly buffers: number;
}

/**
 * One block of device memory that is handed out front to back and given back scope by scope. An allocation is an
 * addition; nothing native is called.
 */
export class ScratchArena implements Disposable {
  /** Device that made it. */
  readonly device: Device;
  /** Size. */
  readonly bytes: number;
  /** Name for messages. */
  readonly label: string;

  readonly #memory: DeviceBuffer;
  readonly #stream: Stream;
  readonly #levels: Level[] = [];
  readonly #buffers: DeviceBuffer[] = [];
  #used = 0;
  #peak = 0;

  constructor(memory: DeviceBuffer, stream: Stream) {
    this.device = memory.device;
    this.bytes = memory.bytes;
    this.label = memory.label;
    this.#memory = memory;
    this.#stream = stream;
  }

  /**
   * Takes the next bytes of the arena, 256-byte aligned, until the innermost open scope ends.
   *
   * The memory is usable at once in the stream of the arena; another stream has to wait for that stream first, as for a
   * block of a pool.
   *
   * @param bytes Size, at least 1.
   * @param options A name.
   * @returns The buffer; its content is undefined. Disposing it early only makes it unusable.
   * @throws {LoramemError} `OUT_OF_MEMORY` where the arena is too small, with the sizes; `DISPOSED`, `BAD_ARGUMENT`.
   */
  alloc(bytes: number, options: ScratchOptions = {}): DeviceBuffer {
    const op = "ScratchArena.alloc";
    checkInteger(op, "bytes", bytes, 1);
    pointerOf(this.#stream);
    const offset = this.#used;
    const memory = addressOf(this.#memory, offset);
    const label = options.label ?? "scratch";
    if (bytes > this.bytes - offset) throw this.#overflow(op, bytes, label);
    const cell: Cell = {
      label: `DeviceBuffer "${label}"`,
      pointer: memory,
      parent: cellOf(this.#memory),
      destroy: () => {},
      borrowed: true,
    };
    const buffer = new DeviceBuffer(this.device, cell, memory, bytes, label, new Set());
    this.#buffers.push(buffer);
    this.#used = Math.min(Math.ceil((offset + bytes) / ALIGNMENT) * ALIGNMENT, this.bytes);
    this.#peak = Math.max(this.#peak, this.#used);
    return buffer;
  }

  /**
   * Begins a scope: what is allocated from now on is given back when it ends. Scopes nest.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * await using stream = device.createStream();
   * using arena = device.createScratchArena(1 << 20, { stream });
   * const kept = arena.alloc(4096);
   * for (let layer = 0; layer < 3; layer++) {
   *   using scope = arena.scope();
   *   stream.copy(arena.alloc(4096), kept); // the same memory for every layer
   * }
   * console.log(arena.stats()); // used 4096, peak 8192
   * ```
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  scope(): ScratchScope {
    addressOf(this.#memory);
    const level: Level = { offset: this.#used, buffers: this.#buffers.length };
    this.#levels.push(level);
    return new ScratchScope(() => this.#end(level));
  }

  /** Ends every scope and gives everything back; the arena is empty and usable. */
  reset(): void {
    this.#levels.length = 0;
    this.#release({ offset: 0, buffers: 0 });
  }

  /** State of the arena. */
  stats(): ScratchStats {
    const { bytes } = this;
    return { bytes, used: this.#used, peak: this.#peak, scopes: this.#levels.length };
  }

  /** Sets the high-water mark back to what is in use now. */
  resetPeaks(): void {
    this.#peak = this.#used;
  }

  /** Whether it was disposed, or its device or pool was. */
  get disposed(): boolean {
    return this.#memory.disposed;
  }

  /** Gives the memory back in stream order, without waiting; every buffer of it becomes unusable. */
  dispose(): void {
    this.reset();
    this.#memory.dispose();
  }

  /** {@linkcode ScratchArena.dispose}, for `using`. */
  [Symbol.dispose](): void {
    this.dispose();
  }

  #end(level: Level): void {
    const depth = this.#levels.indexOf(level);
    if (depth < 0) return;
    this.#levels.length = depth;
    this.#release(level);
  }

  /** The next user of the memory works in the stream of the arena, after what other streams still do with it. */
  #release({ offset, buffers }: Level): void {
    const others = new Set<Stream>();
    for (const buffer of this.#buffers.splice(buffers)) {
      for (const stream of usesOf(buffer) ?? []) others.add(stream);
      buffer.dispose();
    }
    others.delete(this.#stream);
    for (const stream of others) {
      usesOf(this.#memory)?.add(stream);
      if (!stream.disposed && !this.#stream.disposed) followStream(this.#stream, stream);
    }
    const bytes = this.#used - offset;
    if (this.device.debug && bytes > 0 && !this.#memory.disposed && !this.#stream.disposed) {
      this.#stream.fill(this.#memory, POISON, { offset, bytes });
    }
    this.#used = offset;
  }

  #overflow(op: string, requested: number, label: string): LoramemError {
    const free = this.bytes - this.#used;
    const sizes = `requested=${requested} label="${label}" free=${free} used=${this.#used} bytes=${this.bytes}`;
    const what = `make it at least ${this.#used + requested} bytes, or end a scope first`;
    return new LoramemError("OUT_OF_MEMORY", `${op}: "${this.label}" is full: ${sizes}: ${what}`, {
      requested,
      largestFree: free,
      totalFree: free,
      fragmentation: 0,
      owners: this.#buffers
        .map((buffer) => ({ label: buffer.label, bytes: buffer.bytes }))
        .sort((a, b) => b.bytes - a.bytes)
        .slice(0, 10),
    });
  }
}

/** {@linkcode Device.createScratchArena}. */
export function createScratchArena(
  device: Device,
  bytes: number,
  options: ScratchArenaOptions,
): ScratchArena {
  const op = "Device.createScratchArena";
  checkInteger(op, "bytes", bytes, 1);
  const stream = options?.stream;
  if (!(stream instanceof Stream) || stream.device !== device) {
    badArgument(op, "stream must be a stream of this device: pass { stream }", "stream", stream);
  }
  const { pool, label = "scratch" } = options;
  if (pool === undefined) return new ScratchArena(device.createBuffer(bytes, { label }), stream);
  if (!(pool instanceof MemoryPool) || pool.device !== device) {
    badArgument(op, "pool must be a pool of this device", "pool", pool);
  }
  return new ScratchArena(pool.alloc(bytes, { stream, label }), stream);
}
