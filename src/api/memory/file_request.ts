/** Requests to a file ring, and their failures. */
import { type Started, startRequest } from "../../ffi/completion.ts";
import { errnoMeaning, errnoName } from "../../ffi/errno.ts";
import { LoramemError } from "../../ffi/error.ts";
import { pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { codeOf, creationError, decodeText } from "../../ffi/status.ts";
import { readStruct, structLayout } from "../../ffi/structs.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument } from "./arguments.ts";
import type { Device } from "./device.ts";

/** `lm_file_result`. */
export type RequestResult = ReturnType<typeof requestResult>;

/** Calls a native function that submits a request. */
export type Submit = (callback: Ptr | null, tag: bigint) => Ptr | null;

const TEXT_BYTES = 2048;

/** A path as a terminated text. */
export function encodePath(op: string, path: string): Uint8Array<ArrayBuffer> {
  if (typeof path !== "string" || path === "" || path.includes("\0")) {
    badArgument(op, `path must be a text without NUL: it is ${JSON.stringify(path)}`, "path", path);
  }
  return new TextEncoder().encode(`${path}\0`);
}

/** `lm_file_request_result`. */
export function requestResult(request: Ptr) {
  const view = new DataView(new ArrayBuffer(structLayout("lm_file_result").size));
  native().fn.lm_file_request_result(request, view);
  return readStruct("lm_file_result", view);
}

/**
 * Runs a request to its end.
 *
 * @param file Path for messages.
 * @param submit Submits it.
 * @param take Takes more out of a request that ended well.
 * @throws {LoramemError} Rejects with the failure.
 */
export async function runRequest<T = RequestResult>(
  device: Device,
  op: string,
  file: string,
  submit: Submit,
  take: (request: Ptr, result: RequestResult) => T = (_, result) => result as T,
): Promise<T> {
  const started = submitRequest(device, op, submit);
  try {
    const status = await started.done;
    const result = requestResult(started.request);
    if (status < 0) throw requestError(op, file, started.request, result);
    return take(started.request, result);
  } finally {
    native().fn.lm_file_request_destroy(started.request);
  }
}

/** Submits a request; throws where it is not accepted. */
export function submitRequest(device: Device, op: string, submit: Submit): Started {
  const started = startRequest(native(), submit);
  if (started === null) throw creationError(native(), pointerOf(device), op);
  return started;
}

/** The failure of a request as an error. */
export function requestError(
  op: string,
  file: string,
  request: Ptr,
  { status, error, offset }: RequestResult,
): LoramemError {
  const text = new Uint8Array(TEXT_BYTES);
  native().fn.lm_file_request_error(request, text, BigInt(TEXT_BYTES));
  const native_ = decodeText(text);
  const code = codeOf(status);
  if (code === "CANCELLED") return new LoramemError(code, `${op}: cancelled: ${file}`);
  if (code !== "IO") return new LoramemError(code, `${op}: ${native_}: ${file}`);
  if (error === 0) {
    const message = `${op}: the file ends at byte ${offset}: ${file}: it was cut or is still being written`;
    return new LoramemError("IO", message, { file, offset });
  }
  const errno = errnoName(error);
  const [call = ""] = native_.split(":");
  const { what, fix } = errnoMeaning(errno, native_);
  const where = call.startsWith("p") ? `${call} at byte ${offset}` : call;
  const message = `${op}: ${what}: ${file} (${errno}, ${where}): ${fix}`;
  return new LoramemError("IO", message, { file, errno, offset });
}
