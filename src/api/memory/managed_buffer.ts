/** Managed (unified) memory. */
import { pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check } from "../../ffi/status.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import { addressOf, type ViewType, viewMemory } from "./buffer.ts";
import { DeviceBuffer } from "./device_buffer.ts";
import { noteUse, Stream } from "./stream.ts";

/** How managed memory will be used; each has an opposite that takes it back. */
export type MemoryAdvice =
  | "read-mostly"
  | "not-read-mostly"
  | "prefer-device"
  | "prefer-host"
  | "no-preference"
  | "accessed-by-device"
  | "not-accessed-by-device";

/** The native numbers. */
const ADVICE: Readonly<Record<MemoryAdvice, number>> = {
  "read-mostly": 1,
  "not-read-mostly": 2,
  "prefer-device": 3,
  "prefer-host": 4,
  "no-preference": 5,
  "accessed-by-device": 6,
  "not-accessed-by-device": 7,
};

/** Options of {@linkcode ManagedBuffer.prefetch}. */
export interface PrefetchOptions {
  /** Stream in whose order the memory moves. */
  readonly stream: Stream;
  /** Default 0. */
  readonly offset?: number;
  /** Default: to the end of the buffer. */
  readonly bytes?: number;
}

/**
 * Memory that host and device both reach through one address and that moves between them page by page, when it is touched
 * or prefetched. Never larger than what is free on the device: a device that swaps is slower than any copy, and stalls
 * others on it. On the CPU it is plain memory. The trainer never uses it; see {@linkcode adviseMemory} for when to.
 */
export class ManagedBuffer extends DeviceBuffer {
  /**
   * The memory as a typed array, without a copy; as {@linkcode PinnedBuffer.view}. The host may touch it while no work of
   * a stream does.
   *
   * @param type Constructor of the array, such as `Float32Array`.
   * @param byteOffset Where it starts; a multiple of the element size. Default 0.
   * @param length Elements. Default: to the end of the buffer.
   * @returns A view of the memory itself.
   * @throws {LoramemError} `BAD_ARGUMENT` for a window outside the buffer, `DISPOSED`.
   */
  view<V extends ArrayBufferView<ArrayBuffer>>(
    type: ViewType<V>,
    byteOffset = 0,
    length?: number,
  ): V {
    return viewMemory(this, "ManagedBuffer.view", type, byteOffset, length);
  }

  /**
   * Tells the driver how the whole buffer will be used. A hint: it changes no result.
   *
   * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
   */
  advise(advice: MemoryAdvice): void {
    const op = "ManagedBuffer.advise";
    if (!Object.hasOwn(ADVICE, advice)) {
      const known = Object.keys(ADVICE).join(", ");
      badArgument(op, `unknown advice: ${String(advice)}: use one of ${known}`, "advice", advice);
    }
    const ctx = pointerOf(this.device);
    const bytes = BigInt(this.bytes);
    const status = native().fn.lm_managed_advise(ctx, addressOf(this), bytes, ADVICE[advice]);
    check(native(), ctx, status, op);
  }

  /**
   * Moves memory ahead of its use, in stream order, without waiting.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * await using stream = device.createStream();
   * using table = device.createManagedBuffer(1 << 16);
   * table.view(Float32Array).fill(1);
   * table.advise("read-mostly");
   * table.prefetch("device", { stream });
   * await stream.done();
   * ```
   *
   * @param to Where the memory is needed next.
   * @param options The stream, and which bytes.
   * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
   */
  prefetch(to: "device" | "host", options: PrefetchOptions): void {
    const op = "ManagedBuffer.prefetch";
    if (to !== "device" && to !== "host") {
      badArgument(op, `to must be "device" or "host": it is ${String(to)}`, "to", to);
    }
    const { stream, offset = 0 } = options ?? {};
    if (!(stream instanceof Stream) || stream.device !== this.device) {
      badArgument(op, "stream must be a stream of this device: pass { stream }", "stream", stream);
    }
    checkInteger(op, "offset", offset, 0, this.bytes);
    const bytes = options.bytes ?? this.bytes - offset;
    checkInteger(op, "bytes", bytes, 0, this.bytes - offset);
    if (bytes === 0) return;
    const ctx = pointerOf(this.device);
    const host = to === "host" ? 1 : 0;
    const status = native().fn.lm_managed_prefetch(
      ctx,
      addressOf(this, offset),
      BigInt(bytes),
      host,
      pointerOf(stream),
    );
    check(native(), ctx, status, op);
    noteUse(this, stream);
  }
}
