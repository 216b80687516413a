/**
 * The file that weights of decoder layers are in where neither the device nor host memory holds them. It has no name: it is
 * unlinked as soon as it is open, so the disk gets its bytes back when the process ends, however it ends. Checksums stay here.
 */
import { randomUUID } from "node:crypto";
import { join } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import { bytesOf, type Value } from "../graph/value.ts";
import type { DeviceFile, FileExtent, FileRing, Stream } from "../memory/mod.ts";
import { formatBytes } from "../plan/report.ts";
import type { Location } from "./copies.ts";

/** A layer on its way from the file to the window that it is computed from. */
export interface LayerRead {
  readonly layer: Value;
  /** Byte of the file at which it starts. */
  readonly at: number;
  readonly window: Value;
  readonly to: Location;
}

/** Weights of layers in a file, each with its checksum: written once, read in every program. */
export class WeightsFile {
  readonly #file: DeviceFile;
  readonly #checksums = new Map<Value, number>();
  /** The last read into each window; it never rejects. */
  readonly #reads = new Map<Value, Promise<void>>();
  /** The first failure. From then on the windows do not hold what programs expect, so nothing runs any more. */
  #failure: unknown = null;

  private constructor(file: DeviceFile) {
    this.#file = file;
  }

  /**
   * Makes the file, with all its bytes.
   *
   * @param folder Where it is on the disk; it has a name there only while it is being made.
   * @throws {LoramemError} IO where the folder is missing or full.
   */
  static async create(ring: FileRing, folder: string, bytes: number): Promise<WeightsFile> {
    const free = await ring.freeBytes(folder);
    if (free < bytes) {
      const [needed, given] = [bytes, free].map(formatBytes);
      const message = `weights: the disk has too little space: ${folder}: ${needed} needed, ${given} free: set weightsFolder to another disk`;
      throw new LoramemError("IO", message, { file: folder, errno: "ENOSPC" });
    }
    const path = join(folder, `loramem-weights-${randomUUID()}.tmp`);
    const file = await ring.open(path, { mode: "create", bytes });
    try {
      await ring.removeFile(path);
    } catch (error) {
      await file.dispose().catch(() => {}); // which removes it, or the folder is beyond help
      throw error;
    }
    return new WeightsFile(file);
  }

  /**
   * Writes a layer.
   *
   * @param at Byte of the file at which it starts.
   * @param from Where its bytes are, once `stream` has passed what was enqueued so far.
   */
  async write(layer: Value, at: number, from: Location, stream: Stream): Promise<void> {
    const extent = extentOf(layer, at, from);
    try {
      const { checksums } = await this.#file.write([extent], { stream, checksums: true });
      this.#checksums.set(layer, checksums[0] as number);
    } catch (error) {
      throw named(layer, "written", error);
    }
  }

  /** Begins to read a layer, once `ops` has passed what was enqueued so far: the last use of the window. */
  start(read: LayerRead, ops: Stream): void {
    this.#reads.set(read.window, this.#read(read, ops));
  }

  /**
   * Resolves when the last layer that was read into a window is there, and is what was written.
   *
   * @throws {LoramemError} The first failure of all: IO naming the layer, DEVICE.
   */
  async arrived(window: Value): Promise<void> {
    await this.#reads.get(window);
    if (this.#failure !== null) throw this.#failure;
  }

  /** Resolves when no read is under way. */
  async done(): Promise<void> {
    await Promise.all(this.#reads.values());
  }

  /** Waits for what is under way and closes the file, which ends it. Nothing that is lost now matters. */
  async dispose(): Promise<void> {
    await this.#file.dispose().catch(() => {});
  }

  async #read({ layer, at, to }: LayerRead, stream: Stream): Promise<void> {
    try {
      const extent = extentOf(layer, at, to);
      const { checksums } = await this.#file.read([extent], { stream, checksums: true });
      const [found, written] = [checksums[0] as number, this.#checksums.get(layer)];
      if (found !== written) throw damaged(this.#file.path, at);
    } catch (error) {
      this.#failure ??= named(layer, "read", error);
    }
  }
}

function extentOf(layer: Value, offset: number, { buffer, offset: memoryOffset }: Location) {
  return { offset, bytes: bytesOf(layer), memory: buffer, memoryOffset } satisfies FileExtent;
}

function damaged(file: string, offset: number): LoramemError {
  const message = `its checksum is not that of what was written: ${file}, byte ${offset}: the disk or its memory is failing`;
  return new LoramemError("IO", message, { file, offset });
}

/** A failure with the layer that it concerns. */
function named({ layer }: Value, what: "read" | "written", error: unknown): unknown {
  if (!(error instanceof LoramemError && error.is("IO"))) return error;
  const message = `weights: layer ${layer} cannot be ${what}: ${error.message}`;
  return new LoramemError("IO", message, error.details, { cause: error });
}
