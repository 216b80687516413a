/**
 * Memory primitives: devices, device memory, pools, scratch, page-locked and managed memory, streams, events and graphs.
 *
 * Only `Device` can be constructed, by `Device.open`; everything else is made by it.
 */

export {
  adviseMemory,
  type MemoryAdviceResult,
  type MemoryKind,
  type MemoryUse,
} from "./advise_memory.ts";
export type { MemoryBuffer, ViewType } from "./buffer.ts";
export type { DeviceInfo, DeviceKind, DeviceOptions, StreamOptions } from "./device.ts";
export { Device } from "./device.ts";
export type { DeviceBuffer } from "./device_buffer.ts";
export type {
  DeviceFile,
  FileExtent,
  FileReport,
  TransferOptions,
} from "./device_file.ts";
export type { DType } from "./dtype.ts";
export type { Event } from "./event.ts";
export { crc32c, FileLock } from "./file_lock.ts";
export type {
  FileRing,
  FileRingOptions,
  FileRingStats,
  OpenFileOptions,
} from "./file_ring.ts";
export type { Graph } from "./graph.ts";
export type { Leak, LeakReport } from "./leaks.ts";
export type { ManagedBuffer, MemoryAdvice, PrefetchOptions } from "./managed_buffer.ts";
export type {
  PerformanceMonitor,
  PerformanceMonitorOptions,
  PerformanceSummary,
  StepPerformance,
  StepWork,
} from "./performance_monitor.ts";
export type { PinnedBuffer, PinnedBufferOptions } from "./pinned_buffer.ts";
export type {
  AcquireOptions,
  PinnedPool,
  PinnedPoolOptions,
  PinnedPoolStats,
  RingOptions,
} from "./pinned_pool.ts";
export type { AllocOptions, MemoryPool, PoolOptions, PoolStats } from "./pool.ts";
export type { BufferOptions } from "./reservation.ts";
export type {
  ScratchArena,
  ScratchArenaOptions,
  ScratchOptions,
  ScratchScope,
  ScratchStats,
} from "./scratch_arena.ts";
export type { SimFileOptions, SimOptions } from "./sim.ts";
export type {
  BlockEntry,
  DeviceSnapshot,
  MemoryEntry,
  OperationEntry,
  SegmentEntry,
} from "./snapshot.ts";
export type { DeviceStats, MemoryClass, MemoryStats } from "./stats.ts";
export type { CopyOptions, FillOptions, Stream } from "./stream.ts";
export type { TensorView, TensorViewOptions } from "./tensor_view.ts";
