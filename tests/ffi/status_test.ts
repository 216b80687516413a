import assert from "node:assert/strict";
import { test } from "node:test";
import type { Native } from "../../src/ffi/load.ts";
import { check, creationError, nativeError, STATUS } from "../../src/ffi/status.ts";
import type { Ptr } from "../../src/ffi/types.ts";

const CTX = {} as Ptr;

/** A library whose last failure has this text and status. */
function failing(text: string, status: number): Native {
  const lm_last_error = (_ctx: Ptr, buf: Uint8Array) => {
    buf.set(new TextEncoder().encode(text).subarray(0, buf.length - 1));
    return status;
  };
  return { fn: { lm_last_error } } as unknown as Native;
}

test("nativeError() gives every status an error code", () => {
  const codes = Object.values(STATUS).map(
    ({ value }) => nativeError(failing("t", value), CTX, value, "op").code,
  );
  assert.deepEqual(codes.slice(2), [
    "BAD_ARGUMENT",
    "BAD_ARGUMENT",
    "OUT_OF_MEMORY",
    "OUT_OF_MEMORY",
    "STALE_HANDLE",
    "OUT_OF_MEMORY",
    "CORRUPT_MEMORY",
    "DEVICE",
    "DEVICE",
    "DEVICE",
    "UNSUPPORTED",
    "IO",
    "BUSY",
    "CANCELLED",
    "INTERNAL",
  ]);
  assert.equal(nativeError(failing("", 0), CTX, -77, "op").message, "op: status -77");
  assert.equal(nativeError(failing("", 0), CTX, -77, "op").code, "INTERNAL");
});

test("nativeError() takes the text of the context, or that of the status", () => {
  assert.equal(
    nativeError(failing("it broke", -22), CTX, -22, "Stream.copy").message,
    "Stream.copy: it broke",
  );
  assert.equal(
    nativeError(failing("", 0), CTX, -22, "Stream.copy").message,
    "Stream.copy: device failed",
  );
});

test("creationError() reads the status from the context and details from the text", () => {
  const native = failing("needs 12 bytes", STATUS.LM_ERR_OUT_OF_MEMORY.value);
  const details = (text: string) => ({ requested: Number(/\d+/.exec(text)?.[0]) });
  assert.deepEqual(creationError(native, CTX, "op", details).details, { requested: 12 });
});

test("check() throws for failures only", () => {
  check(failing("", 0), CTX, STATUS.LM_OK.value, "op");
  check(failing("", 0), CTX, STATUS.LM_NOT_READY.value, "op");
  assert.throws(() => check(failing("x", -1), CTX, -1, "op"), {
    code: "BAD_ARGUMENT",
    message: "op: x",
  });
});
