/**
 * The one error class of loramem. It lives in the lowest layer because every layer throws it.
 */

/** What `details` holds for each error code. */
export interface ErrorDetails {
  /** An argument, option or flag has a wrong type or value. */
  BAD_ARGUMENT: { readonly name?: string; readonly value?: unknown };
  /** config.json, tokenizer files or adapter_config.json ask for something unknown or contradictory. */
  BAD_CONFIG: { readonly file?: string; readonly key?: string };
  /** Training data is missing, empty or malformed. */
  BAD_DATA: { readonly file?: string; readonly line?: number };
  /** A binary file (safetensors, adapter, checkpoint) is missing, truncated or malformed. */
  BAD_FILE: { readonly file?: string; readonly tensor?: string };
  /** A request is understood but not supported by this build or platform. */
  UNSUPPORTED: { readonly what?: string };
  /** A pool, a limit or the machine has too few bytes left. */
  OUT_OF_MEMORY: {
    readonly requested?: number;
    readonly largestFree?: number;
    readonly totalFree?: number;
    readonly fragmentation?: number;
    readonly owners?: readonly { readonly label: string; readonly bytes: number }[];
  };
  /** A request is larger than the plan made for it. */
  OVER_PLAN: { readonly planned?: number; readonly requested?: number };
  /** The native library is missing, of another version, or failed to load. */
  NATIVE_LIBRARY: { readonly tried?: readonly string[] };
  /** A disposed object was used. */
  DISPOSED: { readonly label?: string };
  /** A handle was freed already (detected natively by its generation). */
  STALE_HANDLE: { readonly label?: string };
  /** Memory beside a block was written; found in debug mode. */
  CORRUPT_MEMORY: Record<never, never>;
  /** The file system refused: not found, not writable, full. `offset` is the byte of the file where a transfer stopped. */
  IO: { readonly file?: string; readonly errno?: string; readonly offset?: number };
  /** Another process holds the lock of a file; `pid` is its process id where it is known. */
  BUSY: { readonly file?: string; readonly pid?: number };
  /** The device or its driver failed. */
  DEVICE: { readonly status?: number };
  /** The run was cancelled by its signal. */
  CANCELLED: Record<never, never>;
  /** A loramem invariant broke: a bug in loramem. */
  INTERNAL: Record<never, never>;
}

/** Every error code; the string never changes meaning between versions. */
export type ErrorCode = keyof ErrorDetails;

/**
 * Every failure that loramem reports. The message reads `op: what is wrong: the values: what to do`.
 *
 * @example Usage
 * ```ts
 * import { LoramemError } from "./mod.ts";
 * try {
 *   throw new LoramemError("OUT_OF_MEMORY", "pool.alloc: 4096 bytes do not fit", { requested: 4096 });
 * } catch (error) {
 *   if (error instanceof LoramemError && error.is("OUT_OF_MEMORY")) console.log(error.details.requested);
 * }
 * ```
 */
export class LoramemError<C extends ErrorCode = ErrorCode> extends Error {
  /** What kind of failure this is. */
  readonly code: C;
  /** Values that belong to the failure; the type follows `code`. */
  readonly details: ErrorDetails[C];

  constructor(code: C, message: string, details?: ErrorDetails[C], options?: ErrorOptions) {
    super(message, options);
    this.name = "LoramemError";
    this.code = code;
    this.details = details ?? ({} as ErrorDetails[C]);
  }

  /** Narrows `details` to those of `code`. */
  is<K extends ErrorCode>(code: K): this is LoramemError<K> {
    return (this.code as string) === code;
  }
}
