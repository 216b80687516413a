/**
 * A disk that may lose whatever was not synced: the log of a simulated device's file calls is applied to it, and at any point
 * it can tell what a power cut would leave, for any choice among the changes that were not synced yet. Each write counts as
 * two changes, as half of it may arrive; names change in the order of the calls, but any of those changes may be missing.
 */
import { basename } from "node:path";

/** One call of the log. */
export interface LoggedCall {
  readonly call: string;
  readonly path?: string;
  readonly to?: string;
  readonly flags?: number;
  readonly fd?: number;
  readonly offset?: number;
  readonly bytes?: number;
  readonly result: number;
  readonly written: Uint8Array;
}

const O_CREAT = 0o100;
const O_TRUNC = 0o1000;
const O_DIRECTORY = 0o200000;

/** Reads a log: lines of JSON, each followed by as many raw bytes as it says. */
export function parseLog(log: Uint8Array): LoggedCall[] {
  const calls: LoggedCall[] = [];
  for (let at = 0; at < log.length; ) {
    const end = log.indexOf(0x0a, at);
    const { data, ...call } = JSON.parse(new TextDecoder().decode(log.subarray(at, end)));
    calls.push({ ...call, written: log.subarray(end + 1, end + 1 + data) });
    at = end + 1 + data;
  }
  return calls;
}

/** A file, whatever its names: what is safe, and what may be lost. */
class Inode {
  content: Uint8Array = new Uint8Array(0);
  pending: ((content: Uint8Array) => Uint8Array)[] = [];
}

type Names = Map<string, Inode>;

/** The state of a folder between two calls. */
export class CrashDisk {
  readonly #names: Names = new Map(); // with everything that was asked for
  readonly #safe: Names = new Map();
  #pending: ((names: Names) => void)[] = [];
  readonly #open = new Map<number, Inode | "folder">();

  /** Applies a call that succeeded. */
  apply({
    call,
    path = "",
    to = "",
    flags = 0,
    fd = -1,
    offset = 0,
    bytes = 0,
    result,
    written,
  }: LoggedCall): void {
    if (result < 0) return;
    const inode = this.#open.get(fd);
    const name = basename(path);
    if (call === "open") {
      if ((flags & O_DIRECTORY) !== 0) {
        this.#open.set(result, "folder");
        return;
      }
      let found = this.#names.get(name);
      if (found === undefined && (flags & O_CREAT) === 0) return; // not of this folder
      if (found === undefined) {
        const made = new Inode();
        found = made;
        this.#rename((names) => names.set(name, made));
      } else if ((flags & O_TRUNC) !== 0) {
        found.pending.push(() => new Uint8Array(0));
      }
      this.#open.set(result, found);
    } else if (call === "close") {
      this.#open.delete(fd);
    } else if (call === "rename") {
      const moved = this.#names.get(name);
      this.#rename((names) => {
        if (moved !== undefined) names.set(basename(to), moved);
        names.delete(name);
      });
    } else if (call === "unlink") {
      this.#rename((names) => names.delete(name));
    } else if (call === "fsync" && inode === "folder") {
      for (const change of this.#pending) change(this.#safe);
      this.#pending = [];
    } else if (inode instanceof Inode) {
      if (call === "fsync" || call === "fdatasync") {
        for (const change of inode.pending) inode.content = change(inode.content);
        inode.pending = [];
      } else if (call === "fallocate" || call === "ftruncate") {
        inode.pending.push((content) => resized(content, bytes));
      } else if (call === "pwrite") {
        const half = written.length >> 1;
        for (const [from, end] of [
          [0, half],
          [half, written.length],
        ] as const) {
          inode.pending.push((content) => {
            const grown = resized(content, Math.max(content.length, offset + end)).slice();
            grown.set(written.subarray(from, end), offset + from);
            return grown;
          });
        }
      }
    }
  }

  /** Changes that a power cut now may lose. */
  get unsynced(): number {
    const inodes = new Set([...this.#names.values(), ...this.#safe.values()]);
    return this.#pending.length + [...inodes].reduce((sum, { pending }) => sum + pending.length, 0);
  }

  /** What a power cut leaves: file contents by name. `kept` is asked about every unsynced change, by number. */
  after(kept: (change: number) => boolean): Map<string, Uint8Array> {
    let change = 0;
    const names = new Map(this.#safe);
    for (const apply of this.#pending) if (kept(change++)) apply(names);
    const contents = new Map<Inode, Uint8Array>();
    for (const inode of new Set([...this.#names.values(), ...this.#safe.values()])) {
      let { content } = inode;
      for (const apply of inode.pending) if (kept(change++)) content = apply(content);
      contents.set(inode, content);
    }
    return new Map([...names].map(([name, inode]) => [name, contents.get(inode) ?? inode.content]));
  }

  #rename(change: (names: Names) => void): void {
    change(this.#names);
    this.#pending.push(change);
  }
}

function resized(content: Uint8Array, bytes: number): Uint8Array {
  if (content.length === bytes) return content;
  const other = new Uint8Array(bytes);
  other.set(content.subarray(0, bytes));
  return other;
}
