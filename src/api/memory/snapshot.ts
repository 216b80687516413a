/** Everything that a device holds, with owners and times, as plain data. */

import { type Cell, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check, decodeText } from "../../ffi/status.ts";
import type { Ptr } from "../../ffi/types.ts";
import type { Device } from "./device.ts";
import type { DeviceStats } from "./stats.ts";

/** Memory that was taken from the system. */
export interface MemoryEntry {
  /** `"pool"` is all that a pool holds. */
  readonly class: "device" | "pool" | "pinned" | "pageable" | "managed";
  /** Name that its owner gave it. */
  readonly label: string;
  /** Size. */
  readonly bytes: number;
  /** Milliseconds since it was taken. */
  readonly ageMs: number;
}

/** A part of a segment. */
export interface BlockEntry {
  /** Bytes from the start of the segment. */
  readonly offset: number;
  /** Size in whole granules. */
  readonly bytes: number;
  /** `"pending"`: given back, and its stream has not passed that point yet. */
  readonly state: "live" | "free" | "pending";
  /** Of a live block: its name. */
  readonly label?: string;
  /** Of a live block: bytes as asked for. */
  readonly requested?: number;
  /** Of a live block: milliseconds since it was taken. */
  readonly ageMs?: number;
}

/** Pages of a pool side by side, with their blocks in the order of their addresses. */
export interface SegmentEntry {
  readonly bytes: number;
  readonly blocks: readonly BlockEntry[];
}

/** A call that debug mode remembers. */
export interface OperationEntry {
  /** From 1, since the device was opened. */
  readonly number: number;
  /** Milliseconds since the device was opened. */
  readonly timeMs: number;
  /** Native function. */
  readonly op: string;
  readonly address: number;
  readonly bytes: number;
  /** Number of the stream, from 1 in the order of creation; 0 for none. */
  readonly stream: number;
  readonly label?: string;
}

/** {@linkcode Device.snapshot}. */
export interface DeviceSnapshot {
  readonly kind: string;
  /** Milliseconds since the device was opened. */
  readonly timeMs: number;
  readonly debug: boolean;
  readonly stats: DeviceStats;
  readonly memory: readonly MemoryEntry[];
  readonly pools: readonly { readonly label: string; readonly segments: readonly SegmentEntry[] }[];
  /** The last 4,096 calls, oldest first; empty without debug mode. */
  readonly operations: readonly OperationEntry[];
}

/** Lets a native function write JSON into a text that may grow meanwhile. */
function readJson(ctx: Ptr, op: string, write: (buf: Uint8Array<ArrayBuffer>) => number): unknown {
  let text = new Uint8Array(4096);
  for (;;) {
    const needed = write(text);
    check(native(), ctx, needed, op);
    if (needed <= text.length) return JSON.parse(decodeText(text));
    text = new Uint8Array(needed * 2);
  }
}

/** {@linkcode Device.snapshot}. */
export function takeSnapshot(device: Device, pools: Iterable<Cell>): DeviceSnapshot {
  const op = "Device.snapshot";
  const { fn } = native();
  const ctx = pointerOf(device);
  const stats = device.stats();
  const own = readJson(ctx, op, (buf) => fn.lm_ctx_snapshot(ctx, buf, BigInt(buf.length)));
  const poolEntries = [...pools].flatMap(({ label, pointer }) => {
    if (pointer === null) return [];
    const write = (buf: Uint8Array<ArrayBuffer>) =>
      fn.lm_pool_snapshot(pointer, buf, BigInt(buf.length));
    return [{ label, segments: readJson(ctx, op, write) as SegmentEntry[] }];
  });
  return {
    kind: device.kind,
    debug: device.debug,
    stats,
    pools: poolEntries,
    ...(own as Pick<DeviceSnapshot, "timeMs" | "memory" | "operations">),
  };
}
