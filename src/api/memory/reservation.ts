/** Memory with a native reservation of its own: device memory and managed memory. */
import { streamDone } from "../../ffi/completion.ts";
import { type Cell, cellOf, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { creationError, STATUS } from "../../ffi/status.ts";
import type { Ptr } from "../../ffi/types.ts";
import { checkInteger } from "./arguments.ts";
import type { Device } from "./device.ts";
import { DeviceBuffer } from "./device_buffer.ts";
import { encodeLabel } from "./label.ts";
import { noteMade } from "./leaks.ts";
import { ManagedBuffer } from "./managed_buffer.ts";

/** Options of {@linkcode Device.createBuffer} and {@linkcode Device.createManagedBuffer}. */
export interface BufferOptions {
  /** Name for messages and snapshots. Default `"buffer"`. */
  readonly label?: string;
}

interface Reserved {
  readonly cell: Cell;
  readonly memory: Ptr;
  readonly label: string;
}

function reserve(
  device: Device,
  streams: ReadonlySet<Cell>,
  op: string,
  kind: "DeviceBuffer" | "ManagedBuffer",
  bytes: number,
  options: BufferOptions,
): Reserved {
  checkInteger(op, "bytes", bytes, 1);
  const { fn } = native();
  const ctx = pointerOf(device);
  const managed = kind === "ManagedBuffer";
  const memory = (managed ? fn.lm_managed_reserve : fn.lm_mem_reserve)(ctx, BigInt(bytes));
  if (memory === null) throw creationError(native(), ctx, op, () => ({ requested: bytes }));
  const label = options.label ?? "buffer";
  fn.lm_mem_label(ctx, memory, encodeLabel(label));
  const release = () => void (managed ? fn.lm_managed_release : fn.lm_mem_release)(ctx, memory);
  const destroy = () => {
    // The native call waits for the device; wait for its streams here first, without blocking. The reservation keeps the
    // context alive, also when the device is disposed.
    const open = [...streams].flatMap(({ pointer }) => pointer ?? []);
    const busy = open.filter((stream) => fn.lm_stream_query(stream) === STATUS.LM_NOT_READY.value);
    if (busy.length === 0) return release();
    const ends = busy.map((stream) => streamDone(native(), ctx, stream, `${kind}.dispose`));
    void Promise.allSettled(ends).then(release);
  };
  const cell: Cell = {
    label: `${kind} "${label}"`,
    pointer: memory,
    parent: cellOf(device),
    destroy,
  };
  noteMade(device, cell, bytes);
  return { cell, memory, label };
}

/** {@linkcode Device.createBuffer}. */
export function createBuffer(
  device: Device,
  streams: ReadonlySet<Cell>,
  bytes: number,
  options: BufferOptions,
): DeviceBuffer {
  const op = "Device.createBuffer";
  const { cell, memory, label } = reserve(device, streams, op, "DeviceBuffer", bytes, options);
  return new DeviceBuffer(device, cell, memory, bytes, label, null);
}

/** {@linkcode Device.createManagedBuffer}. */
export function createManagedBuffer(
  device: Device,
  streams: ReadonlySet<Cell>,
  bytes: number,
  options: BufferOptions,
): ManagedBuffer {
  const op = "Device.createManagedBuffer";
  const { cell, memory, label } = reserve(device, streams, op, "ManagedBuffer", bytes, options);
  return new ManagedBuffer(device, cell, memory, bytes, label, null);
}
