/**
 * Memory primitives: devices, device memory, pools, page-locked memory, streams, events and graphs.
 *
 * Only `Device` can be constructed, by `Device.open`; everything else is made by it.
 */

export type { MemoryBuffer, ViewType } from "./buffer.ts";
export type {
  BufferOptions,
  DeviceInfo,
  DeviceKind,
  DeviceOptions,
  DeviceStats,
  StreamOptions,
} from "./device.ts";
export { Device } from "./device.ts";
export type { DeviceBuffer } from "./device_buffer.ts";
export type { DType } from "./dtype.ts";
export type { Event } from "./event.ts";
export type { Graph } from "./graph.ts";
export type { PinnedBuffer, PinnedBufferOptions } from "./pinned_buffer.ts";
export type { AllocOptions, MemoryPool, PoolOptions, PoolStats } from "./pool.ts";
export type {
  ScratchArena,
  ScratchArenaOptions,
  ScratchOptions,
  ScratchScope,
  ScratchStats,
} from "./scratch_arena.ts";
export type { CopyOptions, FillOptions, Stream } from "./stream.ts";
export type { TensorView, TensorViewOptions } from "./tensor_view.ts";
