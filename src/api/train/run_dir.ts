/** The folder of a run: made where it is missing, and locked, as two runs in one folder would mix up their files. */
import { rm, rmdir, stat } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { type Device, FileLock, type FileRing } from "../memory/mod.ts";

/** Name of the lock's file, which stays: the lock is on the open file, and ends with the process. */
const LOCK = "run.lock";

/** A run folder that belongs to this process until it is disposed. */
export class RunDir implements Disposable {
  readonly path: string;
  readonly #lock: FileLock;
  /** Folders that were made for it, innermost first. */
  readonly #made: readonly string[];

  private constructor(path: string, lock: FileLock, made: readonly string[]) {
    this.path = path;
    this.#lock = lock;
    this.#made = made;
  }

  /**
   * Makes and locks the folder.
   *
   * @throws {LoramemError} `BUSY` naming the process that has it; `IO` where it cannot be made or written.
   */
  static async open(device: Device, ring: FileRing, path: string): Promise<RunDir> {
    const made = await missingFolders(path);
    await ring.makeFolder(path);
    return new RunDir(path, FileLock.acquire(device, join(path, LOCK)), made);
  }

  /** Lets another run have it. */
  [Symbol.dispose](): void {
    this.#lock.dispose();
  }

  /** Takes back what {@linkcode RunDir.open} made; for a run that did not come about. */
  async remove(): Promise<void> {
    if (this.#made.length === 0) return;
    await rm(join(this.path, LOCK), { force: true }).catch(() => undefined);
    // rmdir refuses a folder in which something else appeared.
    for (const folder of this.#made) await rmdir(folder).catch(() => undefined);
  }
}

async function missingFolders(path: string): Promise<string[]> {
  const missing: string[] = [];
  for (let at = resolve(path); ; at = dirname(at)) {
    const exists = await stat(at).then(
      () => true,
      () => false,
    );
    if (exists || at === dirname(at)) return missing;
    missing.push(at);
  }
}
