/** Page-locked host memory. */

import { type Cell, cellOf, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { creationError } from "../../ffi/status.ts";
import type { Ptr } from "../../ffi/types.ts";
import { checkInteger } from "./arguments.ts";
import { MemoryBuffer, type ViewType, viewMemory } from "./buffer.ts";
import type { Device } from "./device.ts";
import { encodeLabel } from "./label.ts";
import { noteMade } from "./leaks.ts";

/** Options of {@linkcode Device.createPinnedBuffer}. */
export interface PinnedBufferOptions {
  /** Host to device only: faster for the device to read, very slow to read on the host. Default false. */
  readonly writeCombined?: boolean;
  /** Name for messages. Default `"pinned"`. */
  readonly label?: string;
}

/** Page-locked host memory: the host end of copies that run beside other work. */
export class PinnedBuffer extends MemoryBuffer {
  /** Whether the memory is page-locked; a {@linkcode PinnedPool} may have to hand out pageable memory. */
  readonly pinned: boolean;

  /** As {@linkcode MemoryBuffer}. */
  constructor(
    device: Device,
    cell: Cell,
    memory: Ptr,
    bytes: number,
    label: string,
    uses: null,
    pinned: boolean,
  ) {
    super(device, cell, memory, bytes, label, uses);
    this.pinned = pinned;
  }

  /**
   * The memory as a typed array, without a copy.
   *
   * Work of a stream reads and writes the memory while it runs: what the host reads is defined after `stream.done()`, and
   * what it writes must not change before the copy out of it has ended. The view keeps the buffer alive; do not
   * transfer it. Disposing the buffer detaches the view, which then has length 0; copies still running keep the pages.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * using host = device.createPinnedBuffer(4096);
   * host.view(Float32Array).fill(1);
   * console.log(host.view(Uint8Array, 16, 4)[2]); // 128
   * ```
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
    return viewMemory(this, "PinnedBuffer.view", type, byteOffset, length);
  }
}

/** {@linkcode Device.createPinnedBuffer}. */
export function createPinnedBuffer(
  device: Device,
  bytes: number,
  options: PinnedBufferOptions,
): PinnedBuffer {
  const op = "Device.createPinnedBuffer";
  checkInteger(op, "bytes", bytes, 1);
  const { fn } = native();
  const ctx = pointerOf(device);
  const label = options.label ?? "pinned";
  const pinned = fn.lm_pinned_create(ctx, BigInt(bytes), options.writeCombined === true ? 1 : 0);
  if (pinned === null) throw creationError(native(), ctx, op, () => ({ requested: bytes }));
  const memory = fn.lm_pinned_data(pinned) as Ptr;
  fn.lm_mem_label(ctx, memory, encodeLabel(label));
  const cell: Cell = {
    label: `PinnedBuffer "${label}"`,
    pointer: pinned,
    parent: cellOf(device),
    destroy: fn.lm_pinned_destroy,
  };
  noteMade(device, cell, bytes);
  return new PinnedBuffer(device, cell, memory, bytes, label, null, true);
}
