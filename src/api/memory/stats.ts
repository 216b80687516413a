/** Native counters as objects. */
import { pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check } from "../../ffi/status.ts";
import { readStruct, type StructName, structLayout } from "../../ffi/structs.ts";
import type { Device } from "./device.ts";

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

/** Memory of one class. Bytes unless named otherwise. */
export interface MemoryStats {
  /** Held from the system, in whole pages. */
  readonly current: number;
  /** Most of it at once. */
  readonly peak: number;
  /** Held, as asked for. */
  readonly requested: number;
  /** Pieces held, a count. */
  readonly count: number;
  /** Pieces taken, a count. */
  readonly allocs: number;
  /** Pieces given back, a count. */
  readonly frees: number;
  /** Requests that the system or the device refused, a count. */
  readonly failures: number;
}

/**
 * A class of memory: reservations of device memory (pages of pools are among them), page-locked host memory, pageable
 * memory that a {@linkcode PinnedPool} gave out in its place, managed memory.
 */
export type MemoryClass = "device" | "pinned" | "pageable" | "managed";

/** The classes by their native numbers. */
const CLASSES: readonly MemoryClass[] = ["device", "pinned", "pageable", "managed"];

/**
 * Lets a native function fill a struct and gives its fields camelCase names.
 *
 * @param fill Calls the native function; its status is checked.
 */
export function readStats<T>(
  op: string,
  device: Device,
  name: StructName,
  fill: (buf: DataView<ArrayBuffer>) => number,
): T {
  const view = new DataView(new ArrayBuffer(structLayout(name).size));
  check(native(), pointerOf(device), fill(view), op);
  const stats: Record<string, number> = {};
  const fields: Record<string, number> = readStruct(name, view);
  for (const key in fields) stats[camelCase(key)] = fields[key] as number;
  return stats as T;
}

/** Names of fields as TypeScript writes them, each worked out once. */
const names = new Map<string, string>();

function camelCase(key: string): string {
  let name = names.get(key);
  if (name === undefined) {
    name = key.replaceAll(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
    names.set(key, name);
  }
  return name;
}

/** {@linkcode Device.memoryStats}. */
export function readMemoryStats(device: Device): Record<MemoryClass, MemoryStats> {
  const ctx = pointerOf(device);
  const entries = CLASSES.map((name, index) => {
    const fill = (buf: DataView<ArrayBuffer>) => native().fn.lm_ctx_memory_stats(ctx, index, buf);
    return [name, readStats<MemoryStats>("Device.memoryStats", device, "lm_memory_stats", fill)];
  });
  return Object.fromEntries(entries);
}
