/** The simulated device: a CPU that is late or fails on purpose, each handle by its own options. */
import { constants } from "node:os";
import { badArgument, checkInteger } from "./arguments.ts";

/** What the file calls of a `"sim"` device do on purpose. Counts start at 1. */
export interface SimFileOptions {
  /** This system call of the file path fails, */
  readonly failAt?: number;
  /** and those after it, so many in all. Default 1. */
  readonly fails?: number;
  /** How it fails. `"EOF"` reads and writes nothing, as in a file that has shrunk. Default `"EIO"`. */
  readonly error?: "EIO" | "ENOSPC" | "EINTR" | "EINVAL" | "EOPNOTSUPP" | "EOF";
  /** Most bytes that one read or write moves. */
  readonly most?: number;
  /** The process is killed (SIGKILL) before this call. */
  readonly killAt?: number;
  /**
   * A file that every call is written to, in order: a line of JSON with `call`, its arguments, `result` and `data`, and so many
   * raw bytes after it: what a write wrote. No comma in its path.
   */
  readonly log?: string;
}

/** What a `"sim"` device does on purpose. Counts start at 1. */
export interface SimOptions {
  /** Microseconds before each operation of a stream, by order of stream creation; streams beyond the list have none. */
  readonly delays?: readonly number[];
  /** This call of the device fails at once. */
  readonly failAt?: number;
  /** This kernel, copy or fill fails later, on its stream. */
  readonly faultAt?: number;
  /** This heap allocation of the library fails. */
  readonly heapFailAt?: number;
  /** Bytes that can be page-locked. */
  readonly pinnedLimit?: number;
  /** Microseconds that taking memory from the system and giving it back last. */
  readonly driverDelay?: number;
  /** What its file calls do. */
  readonly files?: SimFileOptions;
}

/** What the native library calls the options, in the order of the device's name. */
const NAMES = {
  failAt: "fail_at",
  faultAt: "fault_at",
  heapFailAt: "heap_fail_at",
  pinnedLimit: "pinned_limit",
  driverDelay: "driver_delay",
} as const;

/** The same for its file calls. */
const FILE_NAMES = {
  failAt: "file_fail_at",
  fails: "file_fails",
  most: "file_most",
  killAt: "file_kill_at",
} as const;

const MOST_DELAYS = 16;
const MOST_LOG_PATH = 255;
const MOST = 2 ** 32 - 1;

/** The native name of a device: `kind`, or with options `sim:fail_at=7,delays=100/0`. */
export function simName(op: string, kind: string, options: SimOptions): string {
  const parts: string[] = [];
  for (const [key, name] of Object.entries(NAMES) as [keyof typeof NAMES, string][]) {
    const value = options[key];
    if (value === undefined) continue;
    checkInteger(op, key, value, 1, MOST);
    parts.push(`${name}=${value}`);
  }
  const { delays } = options;
  if (delays !== undefined) {
    if (!Array.isArray(delays) || delays.length === 0 || delays.length > MOST_DELAYS) {
      badArgument(op, `delays must be a list of 1 to ${MOST_DELAYS} numbers`, "delays", delays);
    }
    for (const delay of delays) checkInteger(op, "a value of delays", delay, 0, MOST);
    parts.push(`delays=${delays.join("/")}`);
  }
  if (options.files !== undefined) parts.push(...fileParts(op, options.files));
  if (parts.length === 0) return kind;
  if (kind !== "sim") {
    badArgument(
      op,
      `delays and failures are for "sim" only: the device is "${kind}"`,
      "kind",
      kind,
    );
  }
  return `sim:${parts.join(",")}`;
}

function fileParts(op: string, files: SimFileOptions): string[] {
  const parts: string[] = [];
  for (const [key, name] of Object.entries(FILE_NAMES) as [keyof typeof FILE_NAMES, string][]) {
    const value = files[key];
    if (value === undefined) continue;
    checkInteger(op, `files.${key}`, value, 1, MOST);
    parts.push(`${name}=${value}`);
  }
  const { error = "EIO", log } = files;
  const errno = error === "EOF" ? 0 : constants.errno[error];
  if (errno === undefined) badArgument(op, `unknown error: ${error}`, "files.error", error);
  parts.push(`file_error=${errno}`);
  if (log === undefined) return parts;
  const bytes = new TextEncoder().encode(log).length;
  if (log === "" || bytes > MOST_LOG_PATH || /[,\0]/.test(log)) {
    const what = `files.log must be a path of 1 to ${MOST_LOG_PATH} bytes without a comma`;
    badArgument(op, what, "files.log", log);
  }
  return [...parts, `file_log=${log}`];
}
