/**
 * Promises for native work: one thread-safe callback for all of them, told apart by a tag. The process is kept alive only
 * while something is pending.
 */
import type { Native } from "./load.ts";
import { creationError, nativeError, STATUS } from "./status.ts";
import type { NativeCallback, Ptr } from "./types.ts";

const pending = new Map<bigint, (status: number) => void>();
let callback: NativeCallback | null | undefined;
let lastTag = 0n;

function completed(tag: bigint, status: number): void {
  const resolve = pending.get(tag);
  pending.delete(tag);
  callback?.unref();
  resolve?.(status);
}

/**
 * Resolves when everything enqueued on a stream so far has ended.
 *
 * @param ctx Context of the stream; the caller keeps it until then.
 * @throws {LoramemError} Rejects with the failure of the stream.
 */
export async function streamDone(native: Native, ctx: Ptr, stream: Ptr, op: string): Promise<void> {
  if (callback === undefined) callback = native.runtime.callback(completed);
  const status = await (callback === null
    ? polled(native, ctx, stream, op)
    : called(native, stream, callback));
  if (status < 0) throw nativeError(native, ctx, status, op);
}

function called(native: Native, stream: Ptr, { pointer, ref }: NativeCallback): Promise<number> {
  const { promise, resolve } = Promise.withResolvers<number>();
  const tag = ++lastTag;
  pending.set(tag, resolve);
  ref();
  const status = native.fn.lm_stream_on_done(stream, pointer, tag);
  if (status < 0) completed(tag, status);
  return promise;
}

/** File work that the library has accepted: owned by the caller, who destroys it after `done`. */
export interface Started {
  readonly request: Ptr;
  /** Resolves with the status of the work; never rejects. */
  readonly done: Promise<number>;
}

/**
 * Starts work that ends with one callback of its own.
 *
 * @param submit Calls the native function with a callback, or with none where this thread can have none.
 * @returns Null where the work was not accepted.
 */
export function startRequest(
  native: Native,
  submit: (callback: Ptr | null, tag: bigint) => Ptr | null,
): Started | null {
  if (callback === undefined) callback = native.runtime.callback(completed);
  if (callback === null) {
    const request = submit(null, 0n);
    return request === null ? null : { request, done: polledRequest(native, request) };
  }
  const { promise, resolve } = Promise.withResolvers<number>();
  const tag = ++lastTag;
  pending.set(tag, resolve);
  callback.ref();
  const request = submit(callback.pointer, tag);
  if (request !== null) return { request, done: promise };
  completed(tag, 0);
  return null;
}

async function polledRequest({ fn }: Native, request: Ptr): Promise<number> {
  for (;;) {
    const status = fn.lm_file_request_query(request);
    if (status !== STATUS.LM_NOT_READY.value) return status;
    await new Promise((resolve) => setTimeout(resolve, 1));
  }
}

/** For threads that can have no callback: asks once a millisecond. */
async function polled(native: Native, ctx: Ptr, stream: Ptr, op: string): Promise<number> {
  const { fn } = native;
  const event = fn.lm_event_create(ctx);
  if (event === null) throw creationError(native, ctx, op);
  try {
    let status = fn.lm_event_record(event, stream);
    if (status === STATUS.LM_OK.value) status = fn.lm_event_query(event);
    while (status === STATUS.LM_NOT_READY.value) {
      await new Promise((resolve) => setTimeout(resolve, 1));
      status = fn.lm_event_query(event);
    }
    return status;
  } finally {
    fn.lm_event_destroy(event);
  }
}
