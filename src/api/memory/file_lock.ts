/** Locks of files between processes, and checksums. */
import { LoramemError } from "../../ffi/error.ts";
import { type Cell, cellOf, Handle, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { creationError } from "../../ffi/status.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import type { Device } from "./device.ts";
import { encodePath } from "./file_request.ts";
import { noteMade } from "./leaks.ts";

/**
 * An exclusive lock on a file (flock), for a folder that one run at a time may use. The system drops it when the process
 * ends, however it ends; the file stays.
 */
export class FileLock extends Handle {
  /** The file that is locked. */
  readonly path: string;

  private constructor(cell: Cell, path: string) {
    super(cell);
    this.path = path;
  }

  /**
   * Takes the lock; never waits.
   *
   * @example Usage
   * ```ts
   * import { Device, FileLock, LoramemError } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * using lock = FileLock.acquire(device, "run.lock");
   * try {
   *   FileLock.acquire(device, "run.lock");
   * } catch (error) {
   *   if (error instanceof LoramemError && error.is("BUSY")) console.log(lock.path, error.details.pid);
   * }
   * ```
   *
   * @param device Any; its library takes the lock.
   * @param path The file, made where it is missing; it holds the process id of the holder.
   * @returns The lock; disposing it drops it.
   * @throws {LoramemError} `BUSY` where it is held, also by this process; `IO`, `BAD_ARGUMENT`, `DISPOSED`.
   */
  static acquire(device: Device, path: string): FileLock {
    const op = "FileLock.acquire";
    const text = encodePath(op, path);
    const { fn } = native();
    const ctx = pointerOf(device);
    const holder = new Int32Array(new ArrayBuffer(4));
    const lock = fn.lm_file_lock_acquire(ctx, holder, text);
    if (lock === null) {
      const error = creationError(native(), ctx, op);
      if (!error.is("BUSY")) throw error;
      const pid = holder[0] ?? 0;
      const who = pid > 0 ? `process ${pid}` : "another process";
      const message = `${op}: ${who} holds the lock: ${path}: wait for it to end, or choose another folder`;
      throw new LoramemError("BUSY", message, pid > 0 ? { file: path, pid } : { file: path });
    }
    const cell: Cell = {
      label: `FileLock "${path}"`,
      pointer: lock,
      parent: cellOf(device),
      destroy: fn.lm_file_lock_destroy,
    };
    noteMade(device, cell);
    return new FileLock(cell, path);
  }
}

/**
 * CRC-32C (Castagnoli; RFC 3720, appendix B.4) of bytes.
 *
 * @example Usage
 * ```ts
 * import { crc32c, Device } from "./mod.ts";
 * await using _device = await Device.open("cpu"); // opens the library
 * console.log(crc32c(new TextEncoder().encode("123456789")) === 0xe3069283); // true
 * ```
 *
 * @param bytes The data.
 * @param before Checksum of what comes before it. Default 0: nothing.
 * @returns An unsigned 32-bit number.
 * @throws {LoramemError} `BAD_ARGUMENT`.
 */
export function crc32c(bytes: Uint8Array<ArrayBuffer>, before = 0): number {
  const op = "crc32c";
  if (!(bytes instanceof Uint8Array)) badArgument(op, "bytes must be a Uint8Array", "bytes", bytes);
  checkInteger(op, "before", before, 0, 2 ** 32 - 1);
  return native().fn.lm_crc32c(before, bytes, BigInt(bytes.byteLength));
}
