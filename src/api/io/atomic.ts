/**
 * Files and folders that appear whole or not at all.
 *
 * Everything is written under a temporary name beside its destination (a rename is atomic only
 * within one file system), synced, renamed, and the folder is synced so that the new name survives
 * a power cut. A failed write removes what it made; a killed process may leave one
 * `.<name>.<random>.tmp`, which nothing ever reads.
 */
import { randomBytes } from "node:crypto";
import { type FileHandle, mkdir, open, rename, rm, stat } from "node:fs/promises";
import { basename, dirname, join, resolve } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import { errnoOf, ioError } from "./io_error.ts";

/**
 * One call moves at most this many bytes: Linux cuts at 2 GiB, and a runtime that copies then
 * copies little.
 */
export const IO_CHUNK = 1 << 24;

/**
 * Writes a file atomically: afterwards `path` holds either all parts or what it held before.
 *
 * A symbolic link at `path` is replaced, not followed: its target may be shared (a download cache).
 *
 * @param path The destination; its folder must exist.
 * @param parts The bytes, in order; borrowed until the promise settles.
 * @throws {LoramemError} `IO` where the file system refuses; nothing is left behind.
 */
export async function writeFileAtomic(path: string, parts: readonly Uint8Array[]): Promise<void> {
  const temporary = temporaryName(path);
  let created = false;
  try {
    const handle = await open(temporary, "wx");
    created = true;
    try {
      for (const part of parts) await writeAll(handle, part);
      await handle.sync();
    } finally {
      await handle.close();
    }
    await rename(temporary, path);
    created = false;
    await syncFolder(dirname(path));
  } catch (error) {
    if (created) await rm(temporary, { force: true }).catch(() => {});
    throw ioError("writeFileAtomic", path, error);
  }
}

/**
 * Writes a folder of files. `fill` gets an empty staging folder on the same file system; only when
 * it returns do its files become visible.
 *
 * A folder that does not exist appears with one rename. Into an existing one the finished files are
 * renamed one after the other in the given order, so the file that makes the folder valid should
 * come last; a power cut between two of those renames leaves some files new and some old. Other
 * files in the folder are left alone.
 *
 * @param dir The destination; missing parents are made.
 * @param files Names of the files that `fill` makes, in the order in which they may appear.
 * @param fill Writes the files, synced, into the folder it is given; if it throws, `dir` stays as
 * it was.
 * @throws {LoramemError} `IO` where the file system refuses. What `fill` throws passes through.
 */
export async function writeFolderAtomic(
  dir: string,
  files: readonly string[],
  fill: (staging: string) => Promise<void>,
): Promise<void> {
  const op = "writeFolderAtomic";
  const target = resolve(dir);
  const exists = await folderExists(op, target);
  const staging = exists ? join(target, basename(temporaryName("staging"))) : temporaryName(target);
  let filling = false;
  try {
    if (!exists) await mkdir(dirname(target), { recursive: true });
    await mkdir(staging);
    filling = true;
    await fill(staging);
    filling = false;
    await syncFolder(staging);
    if (exists) {
      for (const name of files) await rename(join(staging, name), join(target, name));
      await syncFolder(target);
    } else {
      await rename(staging, target);
      await syncFolder(dirname(target));
    }
  } catch (error) {
    if (!filling) throw ioError(op, target, error);
    // The path of the staging folder would mean nothing to the caller.
    const isIo = error instanceof LoramemError && error.is("IO");
    throw isIo ? ioError(op, target, error.cause) : error;
  } finally {
    // After a good run this removes the empty staging folder, or nothing.
    await rm(staging, { recursive: true, force: true }).catch(() => {});
  }
}

function temporaryName(path: string): string {
  const unique = randomBytes(6).toString("hex");
  return join(dirname(path), `.${basename(path)}.${unique}.tmp`);
}

async function folderExists(op: string, path: string): Promise<boolean> {
  try {
    if ((await stat(path)).isDirectory()) return true;
  } catch (error) {
    if (errnoOf(error) === "ENOENT") return false;
    throw ioError(op, path, error);
  }
  const message = `${op}: a file is in the way of the folder: ${path}: choose another path`;
  throw new LoramemError("IO", message, { file: path, errno: "ENOTDIR" });
}

async function writeAll(handle: FileHandle, bytes: Uint8Array): Promise<void> {
  for (let at = 0; at < bytes.byteLength; ) {
    const length = Math.min(IO_CHUNK, bytes.byteLength - at);
    at += (await handle.write(bytes, at, length)).bytesWritten;
  }
}

/**
 * Makes renames in a folder durable; file systems that cannot sync a folder are taken as they are.
 */
async function syncFolder(path: string): Promise<void> {
  const handle = await open(path, "r");
  try {
    await handle.sync();
  } catch (error) {
    if (!["EINVAL", "ENOTSUP"].includes(errnoOf(error))) throw error;
  } finally {
    await handle.close();
  }
}
