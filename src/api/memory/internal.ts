/** What the kernels and the executor need of memory objects, and no user. */

import { LoramemError } from "../../ffi/error.ts";
import { pointerOf } from "../../ffi/handle.ts";
import type { Ptr } from "../../ffi/types.ts";
import { type MemoryBuffer, type ViewType, viewMemory } from "./buffer.ts";
import type { Device } from "./device.ts";
import type { Stream } from "./stream.ts";

export type { Ptr } from "../../ffi/types.ts";
export { addressOf } from "./buffer.ts";
export { noteUse } from "./stream.ts";

/** The native context; throws `DISPOSED`. */
export function ctxPtr(device: Device): Ptr {
  return pointerOf(device);
}

/** The native stream; throws `DISPOSED`. */
export function streamPtr(stream: Stream): Ptr {
  return pointerOf(stream);
}

/**
 * Device memory of the CPU and sim backends as a typed array, without a copy; the planner's proofs look through it. Detached with
 * the buffer; not to be used once its pool or its device is disposed.
 *
 * @throws {LoramemError} `UNSUPPORTED` on another backend.
 */
export function hostView<V extends ArrayBufferView<ArrayBuffer>>(
  buffer: MemoryBuffer,
  type: ViewType<V>,
  byteOffset = 0,
  length?: number,
): V {
  const op = "hostView";
  if (buffer.device.kind.startsWith("cuda")) {
    const message = `${op}: the host cannot see device memory: ${buffer.device.kind}: copy it to a PinnedBuffer`;
    throw new LoramemError("UNSUPPORTED", message, { what: "hostView" });
  }
  return viewMemory(buffer, op, type, byteOffset, length);
}
