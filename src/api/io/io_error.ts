/**
 * Failures of the file system, as the one error class. Everything in `io` that touches a file goes
 * through here.
 */
import { LoramemError } from "../../ffi/error.ts";

/** What each errno means to the user and what mends it. */
const MEANING: ReadonlyMap<string, readonly [what: string, fix: string]> = new Map([
  ["ENOENT", ["no such file or folder", "check the path"]],
  ["ENOTDIR", ["a part of the path is a file, not a folder", "choose another path"]],
  ["EISDIR", ["the path is a folder, not a file", "choose another path"]],
  ["EACCES", ["permission denied", "check the owner and mode of the file and its folder"]],
  ["EPERM", ["permission denied", "check the owner and mode of the file and its folder"]],
  ["EROFS", ["the file system is read-only", "choose another folder"]],
  ["ENOSPC", ["the disk is full", "free some space; what was there before is unchanged"]],
  ["EDQUOT", ["the disk quota is used up", "free some space; what was there before is unchanged"]],
  ["EMFILE", ["too many open files", "raise the limit with ulimit -n"]],
  ["EIO", ["the disk failed", "look at the kernel log"]],
]);

/**
 * The errno name ("ENOSPC") of a file system failure, or the error's name where the runtime gives
 * no code.
 */
export function errnoOf(cause: unknown): string {
  if (!(cause instanceof Error)) return "unknown";
  const code = (cause as Error & { code?: unknown }).code;
  return typeof code === "string" ? code : cause.name;
}

/**
 * Wraps a file system failure as an `IO` error; a LoramemError passes through unchanged.
 *
 * @param op The function that failed, the first word of the message.
 * @param file The path that was touched.
 * @param cause What the runtime threw.
 */
export function ioError(op: string, file: string, cause: unknown): LoramemError {
  if (cause instanceof LoramemError) return cause;
  const errno = errnoOf(cause);
  const text = cause instanceof Error ? cause.message : String(cause);
  const [what, fix] = MEANING.get(errno) ?? [text, "check the path and the disk"];
  return new LoramemError(
    "IO",
    `${op}: ${what}: ${file} (${errno}): ${fix}`,
    { file, errno },
    {
      cause,
    },
  );
}
