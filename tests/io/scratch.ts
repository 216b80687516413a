/** Helpers of the io tests: folders that go away, and safetensors files made byte by byte. */
import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { type ErrorCode, LoramemError } from "../../src/ffi/error.ts";

export const GOLDEN = fileURLToPath(new URL("../golden", import.meta.url));

/** Runs `body` with an empty folder that is removed afterwards. */
export async function withScratch(body: (dir: string) => Promise<void>): Promise<void> {
  const dir = await mkdtemp(join(tmpdir(), "loramem-io-"));
  try {
    await body(dir);
  } finally {
    await rm(dir, { recursive: true, force: true });
  }
}

/** A safetensors file: header length, header (an object or raw text) and data. */
export function safetensors(header: unknown, data: Uint8Array | number = 0): Uint8Array {
  const text = typeof header === "string" ? header : JSON.stringify(header);
  const json = new TextEncoder().encode(text);
  const bytes = typeof data === "number" ? new Uint8Array(data) : data;
  const file = new Uint8Array(8 + json.byteLength + bytes.byteLength);
  new DataView(file.buffer).setBigUint64(0, BigInt(json.byteLength), true);
  file.set(json, 8);
  file.set(bytes, 8 + json.byteLength);
  return file;
}

/** Expects a LoramemError with this code whose message matches every pattern. */
export async function rejects(
  body: () => unknown,
  code: ErrorCode,
  ...patterns: RegExp[]
): Promise<LoramemError> {
  try {
    await body();
  } catch (error) {
    assert.ok(error instanceof LoramemError, `not a LoramemError: ${error}`);
    assert.equal(error.code, code, error.message);
    for (const pattern of patterns) assert.match(error.message, pattern);
    return error;
  }
  assert.fail(`nothing was thrown, expected ${code}`);
}

/** CRC-32C (RFC 3720) bit by bit: the reference. */
export function crc32cReference(bytes: Uint8Array): number {
  let value = 0xffffffff;
  for (const byte of bytes) {
    value ^= byte;
    for (let bit = 0; bit < 8; bit++) value = (value >>> 1) ^ (value & 1 ? 0x82f63b78 : 0);
  }
  return ~value >>> 0;
}
