/** The statuses of the C ABI and the error codes that they become. */
import { type ErrorCode, type ErrorDetails, LoramemError } from "./error.ts";
import type { Native } from "./load.ts";
import type { Ptr } from "./types.ts";

/** `LM_STATUS_MAP` of csrc/include/loramem.h: symbol, value, text. */
export const STATUS = {
  LM_OK: { value: 0, text: "ok" },
  LM_NOT_READY: { value: 1, text: "not finished yet" },
  LM_ERR_ARGUMENT: { value: -1, text: "bad argument" },
  LM_ERR_STATE: { value: -2, text: "call not allowed in this state" },
  LM_ERR_OUT_OF_MEMORY: { value: -10, text: "out of memory" },
  LM_ERR_LIMIT: { value: -11, text: "limit exceeded" },
  LM_ERR_STALE_HANDLE: { value: -12, text: "handle was freed already" },
  LM_ERR_PINNED: { value: -13, text: "page-locked host memory is not available" },
  LM_ERR_CORRUPT: { value: -14, text: "memory was written outside a block" },
  LM_ERR_NO_DEVICE: { value: -20, text: "no such device" },
  LM_ERR_DRIVER: { value: -21, text: "device driver missing or too old" },
  LM_ERR_DEVICE: { value: -22, text: "device failed" },
  LM_ERR_UNSUPPORTED: { value: -23, text: "not supported" },
  LM_ERR_FILE: { value: -30, text: "the file system refused" },
  LM_ERR_BUSY: { value: -31, text: "locked by another process" },
  LM_ERR_CANCELLED: { value: -32, text: "cancelled" },
  LM_ERR_INTERNAL: { value: -90, text: "internal error" },
} as const;

/** Name of a status. */
export type StatusSymbol = keyof typeof STATUS;

const CODES: Readonly<Record<StatusSymbol, ErrorCode>> = {
  LM_OK: "INTERNAL",
  LM_NOT_READY: "INTERNAL",
  LM_ERR_ARGUMENT: "BAD_ARGUMENT",
  LM_ERR_STATE: "BAD_ARGUMENT",
  LM_ERR_OUT_OF_MEMORY: "OUT_OF_MEMORY",
  LM_ERR_LIMIT: "OUT_OF_MEMORY",
  LM_ERR_STALE_HANDLE: "STALE_HANDLE",
  LM_ERR_PINNED: "OUT_OF_MEMORY",
  LM_ERR_CORRUPT: "CORRUPT_MEMORY",
  LM_ERR_NO_DEVICE: "DEVICE",
  LM_ERR_DRIVER: "DEVICE",
  LM_ERR_DEVICE: "DEVICE",
  LM_ERR_UNSUPPORTED: "UNSUPPORTED",
  LM_ERR_FILE: "IO",
  LM_ERR_BUSY: "BUSY",
  LM_ERR_CANCELLED: "CANCELLED",
  LM_ERR_INTERNAL: "INTERNAL",
};

const SYMBOL_OF = new Map<number, StatusSymbol>(
  (Object.keys(STATUS) as StatusSymbol[]).map((symbol) => [STATUS[symbol].value, symbol]),
);

/** Longest text that the library keeps for one failure. */
const TEXT_BYTES = 2048;

/** Text of the last failure on a context. */
function lastErrorText(native: Native, ctx: Ptr): string {
  const text = new Uint8Array(TEXT_BYTES);
  native.fn.lm_last_error(ctx, text, BigInt(TEXT_BYTES));
  return decodeText(text);
}

/** A terminated native text. */
export function decodeText(bytes: Uint8Array): string {
  const end = bytes.indexOf(0);
  return new TextDecoder().decode(bytes.subarray(0, end < 0 ? bytes.length : end));
}

/** Details of an error that says that memory ran out, from its text. */
export type MemoryDetails = (text: string) => ErrorDetails["OUT_OF_MEMORY"];

/** The error code of a status. */
export function codeOf(status: number): ErrorCode {
  const symbol = SYMBOL_OF.get(status);
  return symbol === undefined ? "INTERNAL" : CODES[symbol];
}

/** The error of a failed native call: code from the status, text from the context. */
export function nativeError(
  native: Native,
  ctx: Ptr,
  status: number,
  op: string,
  memory: MemoryDetails = () => ({}),
): LoramemError {
  const code = codeOf(status);
  const symbol = SYMBOL_OF.get(status);
  const known = symbol === undefined ? `status ${status}` : STATUS[symbol].text;
  const text = lastErrorText(native, ctx) || known;
  const details = code === "OUT_OF_MEMORY" ? memory(text) : code === "DEVICE" ? { status } : {};
  return new LoramemError(code, `${op}: ${text}`, details);
}

/** The error of a create function that returned NULL: its status is kept in the context. */
export function creationError(
  native: Native,
  ctx: Ptr,
  op: string,
  memory?: MemoryDetails,
): LoramemError {
  const status = native.fn.lm_last_error(ctx, new Uint8Array(1), 1n);
  return nativeError(native, ctx, status, op, memory);
}

/** Throws unless a native call returned LM_OK or an information. */
export function check(native: Native, ctx: Ptr, status: number, op: string): void {
  if (status < 0) throw nativeError(native, ctx, status, op);
}
