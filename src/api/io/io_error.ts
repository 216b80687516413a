/**
 * Failures of the file system, as the one error class. Everything in `io` that touches a file goes
 * through here.
 */
import { errnoMeaning } from "../../ffi/errno.ts";
import { LoramemError } from "../../ffi/error.ts";

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
  const { what, fix } = errnoMeaning(errno, text);
  return new LoramemError(
    "IO",
    `${op}: ${what}: ${file} (${errno}): ${fix}`,
    { file, errno },
    {
      cause,
    },
  );
}
