/**
 * Tensors of safetensors files straight to where they are needed: device memory or page-locked memory, through the ring of
 * the device. JavaScript never holds a tensor.
 */
import { LoramemError } from "../../ffi/error.ts";
import type {
  DeviceBuffer,
  DeviceFile,
  FileExtent,
  FileRing,
  PinnedBuffer,
} from "../memory/mod.ts";
import { badFile, type TensorEntry } from "./safetensors_header.ts";

const UNTOUCHED = "let no other program write to it";

/** One tensor and where its bytes go. */
export interface TensorTarget {
  /** From `TensorFile.tensors`. */
  readonly entry: TensorEntry;
  readonly memory: DeviceBuffer | PinnedBuffer;
  /** Bytes from the start of `memory`, any alignment. Default 0. */
  readonly offset?: number;
}

/** How far a load is. */
export interface LoadProgress {
  /** Bytes that are where they belong. */
  readonly bytes: number;
  readonly totalBytes: number;
  /** Wall-clock seconds since the load began. */
  readonly seconds: number;
  readonly bytesPerSecond: number;
}

/** Settings of {@linkcode loadTensors}. */
export interface LoadOptions {
  /** Ends the load with `CANCELLED`. */
  readonly signal?: AbortSignal;
  /** Called now and then, and at the end with everything. */
  readonly onProgress?: (progress: LoadProgress) => void;
}

/**
 * Loads tensors: file after file, each from its first byte to its last, whatever the order of `targets`. What lies side by
 * side in a file is read together. Host memory is the ring's and no more.
 *
 * @example Usage
 * ```ts
 * import { Device, loadTensors, openSafetensors } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using ring = device.createFileRing({ slots: 2, slotBytes: 1 << 20 });
 * await using file = await openSafetensors("examples/demo/model");
 * const entry = file.tensors.get("model.norm.weight")!;
 * using memory = device.createBuffer(entry.bytes);
 * const { bytes } = await loadTensors(ring, [{ entry, memory }]);
 * console.log(bytes); // 512
 * ```
 *
 * @param ring A ring of the device that `memory` is of.
 * @param targets Tensors of any number of files; empty tensors are fine.
 * @param options Signal and progress.
 * @returns Bytes and time of the whole.
 * @throws {LoramemError} `BAD_FILE` where a file is not as long as its header says, `IO` where the file system fails,
 * `CANCELLED`, `DISPOSED`, `DEVICE`. What `memory` then holds is undefined.
 */
export async function loadTensors(
  ring: FileRing,
  targets: readonly TensorTarget[],
  options: LoadOptions = {},
): Promise<LoadProgress> {
  const { signal, onProgress } = options;
  const totalBytes = targets.reduce((sum, { entry }) => sum + entry.bytes, 0);
  const start = performance.now();
  const progressAt = (bytes: number): LoadProgress => {
    const seconds = (performance.now() - start) / 1000;
    return { bytes, totalBytes, seconds, bytesPerSecond: bytes / seconds };
  };
  let done = 0;
  for (const [path, extents] of byFile(targets)) {
    const file = await ring.open(path, { mode: "read" });
    try {
      checkEnd(file, extents);
      const before = done;
      const { bytes } = await file.read(extents, {
        onProgress: (read) => {
          if (before + read < totalBytes) onProgress?.(progressAt(before + read));
        },
        ...(signal === undefined ? {} : { signal }),
      });
      done += bytes;
    } catch (error) {
      throw named(path, targets, error);
    } finally {
      await file.dispose().catch(() => {}); // nothing of a file that was only read can be lost
    }
  }
  const progress = progressAt(done);
  onProgress?.(progress);
  return progress;
}

/** A file that has become shorter since its header was read. */
function checkEnd({ path, bytes }: DeviceFile, extents: readonly FileExtent[]): void {
  const last = extents.at(-1) as FileExtent;
  const end = last.offset + last.bytes;
  if (bytes >= end) return;
  throw badFile(path, `it has ${bytes} bytes, its tensors end at ${end}`, undefined, UNTOUCHED);
}

/** A file that ends too early, with the tensor in which it does. */
function named(path: string, targets: readonly TensorTarget[], error: unknown): unknown {
  if (!(error instanceof LoramemError && error.is("IO"))) return error;
  const { errno, offset: at } = error.details;
  if (errno !== undefined || at === undefined) return error;
  // Reads begin at whole blocks, so the end may lie before the tensor that was wanted.
  const cut = targets
    .filter(({ entry: { file, offset, bytes } }) => file === path && offset + bytes > at)
    .sort((a, b) => a.entry.offset - b.entry.offset)[0];
  const what = `the file ends at byte ${at}; it became shorter while it was read`;
  return badFile(path, what, cut?.entry.name, UNTOUCHED);
}

/** The extents of each file, in the order of their bytes. */
function byFile(targets: readonly TensorTarget[]): Map<string, FileExtent[]> {
  const files = new Map<string, FileExtent[]>();
  for (const { entry, memory, offset: memoryOffset = 0 } of targets) {
    const extents = files.get(entry.file) ?? [];
    files.set(entry.file, extents);
    extents.push({ offset: entry.offset, bytes: entry.bytes, memory, memoryOffset });
  }
  for (const extents of files.values()) extents.sort((a, b) => a.offset - b.offset);
  return files;
}
