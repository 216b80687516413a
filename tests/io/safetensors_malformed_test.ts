import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { openSafetensors } from "../../src/api/io/safetensors.ts";
import { rejects, safetensors, withScratch } from "./scratch.ts";

/** An entry of 4 float32 at [begin, end]. */
const entry = (begin: unknown, end: unknown, shape: unknown = [4], dtype: unknown = "F32") => ({
  dtype,
  shape,
  data_offsets: [begin, end],
});

/** A valid file whose length field is replaced. */
function withLength(length: bigint): Uint8Array {
  const file = safetensors({ x: entry(0, 16) }, 16);
  new DataView(file.buffer).setBigUint64(0, length, true);
  return file;
}

const nested = (depth: number) => `{"x":${"[".repeat(depth)}${"]".repeat(depth)}}`;

const CASES: readonly [name: string, file: Uint8Array, message: RegExp][] = [
  ["an empty file", new Uint8Array(0), /0 bytes, less than the 8/],
  ["7 bytes", new Uint8Array(7), /7 bytes, less than the 8/],
  ["8 bytes of nothing", new Uint8Array(8), /header length is 0/],
  ["header length 0", withLength(0n), /header length is 0/],
  ["header length 1", withLength(1n), /header length is 1/],
  ["header length 7", withLength(7n), /not valid JSON/],
  ["header length over the file", withLength(1000n), /header length is 1000.*truncated/],
  [
    "header length one over",
    withLength(BigInt(safetensors({ x: entry(0, 16) }).length + 9)),
    /trunc/,
  ],
  ["header length 2^31", withLength(2n ** 31n), /over the format's limit/],
  ["header length 2^32 + 2", withLength(2n ** 32n + 2n), /over the format's limit/],
  ["header length 2^53 + 1", withLength(2n ** 53n + 1n), /over the format's limit/],
  ["header length 2^63", withLength(2n ** 63n), /over the format's limit/],
  ["header length 2^64 - 1", withLength(2n ** 64n - 1n), /over the format's limit/],
  ["header length 99 MB in a small file", withLength(99_000_000n), /only \d+ bytes/],
  ["a header that is an array", safetensors("[]      "), /does not start with \{/],
  ["a header that starts with a space", safetensors(" {}"), /does not start with \{/],
  ["a header with a byte order mark", safetensors("\ufeff{}"), /does not start with \{/],
  ["a header that is not JSON", safetensors("{x}"), /not valid JSON/],
  ["a header cut short", safetensors('{"x":{"dtype":"F32","sha'), /not valid JSON/],
  ["a header that is not UTF-8", safetensors("{}").with(9, 0xff), /not valid UTF-8/],
  ["text after the header object", safetensors("{}{}"), /not valid JSON/],
  ["a tensor named twice", safetensors('{"x":1,"x":2}'), /key "x" stands there twice/],
  [
    "a tensor named twice by escape",
    safetensors('{"x":1,"\\u0078":2}'),
    /key "x" stands there twice/,
  ],
  [
    "a field given twice",
    safetensors('{"x":{"dtype":"F32","dtype":"F16"}}'),
    /"dtype" stands there twi/,
  ],
  ["a depth bomb", safetensors(nested(200_000)), /nested deeper than 4/],
  ["an unclosed depth bomb", safetensors(`{"x":${"[".repeat(1_000_000)}`), /nested deeper than 4/],
  ["an entry that is null", safetensors({ x: null }), /entry is not an object/],
  ["an entry that is a list", safetensors({ x: [] }), /entry is not an object/],
  ["an unknown field", safetensors({ x: { ...entry(0, 16), y: 1 } }, 16), /unknown field "y"/],
  ["an unknown dtype", safetensors({ x: entry(0, 16, [4], "F33") }, 16), /unknown dtype "F33"/],
  [
    "an inherited name as dtype",
    safetensors({ x: entry(0, 16, [4], "toString") }, 16),
    /unknown dtype/,
  ],
  ["no dtype", safetensors({ x: { shape: [4], data_offsets: [0, 16] } }, 16), /unknown dtype/],
  ["no shape", safetensors({ x: { dtype: "F32", data_offsets: [0, 16] } }, 16), /shape .*missing/],
  ["a shape that is a number", safetensors({ x: entry(0, 16, 4) }, 16), /shape is not valid/],
  ["a negative size", safetensors({ x: entry(0, 16, [-4]) }, 16), /shape is not valid.*\[-4\]/],
  ["two negative sizes", safetensors({ x: entry(0, 16, [-2, -2]) }, 16), /shape is not valid/],
  ["a fractional size", safetensors({ x: entry(0, 16, [4.5]) }, 16), /shape is not valid/],
  ["a size as text", safetensors({ x: entry(0, 16, ["4"]) }, 16), /shape is not valid/],
  ["a size of 2^53", safetensors({ x: entry(0, 16, [2 ** 53]) }, 16), /shape is not valid/],
  [
    "a product over 2^64",
    safetensors({ x: entry(0, 0, [2 ** 33, 2 ** 33]) }),
    /shape is not valid/,
  ],
  [
    "an overflow hidden by a 0",
    safetensors({ x: entry(0, 0, [2 ** 52, 2 ** 52, 0]) }),
    /not valid/,
  ],
  [
    "4-bit elements in half a byte",
    safetensors({ x: entry(0, 2, [3], "F4") }, 2),
    /not valid for F4/,
  ],
  ["no offsets", safetensors({ x: { dtype: "F32", shape: [4] } }, 16), /data_offsets.*missing/],
  ["one offset", safetensors({ x: { ...entry(0, 0), data_offsets: [0] } }, 16), /data_offsets/],
  [
    "three offsets",
    safetensors({ x: { ...entry(0, 0), data_offsets: [0, 8, 16] } }, 16),
    /data_offsets/,
  ],
  ["a negative offset", safetensors({ x: entry(-16, 0) }, 16), /data_offsets.*\[-16,0\]/],
  ["a fractional offset", safetensors({ x: entry(0.5, 16.5) }, 17), /data_offsets.*0\.5/],
  ["an offset as text", safetensors({ x: entry("0", "16") }, 16), /data_offsets/],
  ["an offset of 2^53", safetensors({ x: entry(2 ** 53, 2 ** 53 + 16) }, 16), /data_offsets/],
  ["offsets the wrong way round", safetensors({ x: entry(16, 0) }, 16), /end before they begin/],
  ["data cut short", safetensors({ x: entry(0, 16) }, 15), /beyond the 15 bytes.*truncated/],
  ["a range too short for the shape", safetensors({ x: entry(0, 12) }, 12), /12 bytes.*needs 16/],
  ["a range too long for the shape", safetensors({ x: entry(0, 20) }, 20), /20 bytes.*needs 16/],
  ["overlapping tensors", safetensors({ x: entry(0, 16), y: entry(8, 24) }, 24), /overlaps.*by 8/],
  ["the same range twice", safetensors({ x: entry(0, 16), y: entry(0, 16) }, 16), /overlaps/],
  [
    "a hole between tensors",
    safetensors({ x: entry(0, 16), y: entry(20, 36) }, 36),
    /hole of 4 bytes/,
  ],
  ["a hole before the first", safetensors({ x: entry(4, 20) }, 20), /hole of 4 bytes/],
  ["bytes after the last tensor", safetensors({ x: entry(0, 16) }, 17), /1 bytes follow/],
  ["data but no tensor", safetensors({}, 8), /8 bytes follow/],
  ["metadata that is text", safetensors({ __metadata__: "pt" }), /__metadata__ is not an object/],
  [
    "a metadata value that is a number",
    safetensors({ __metadata__: { a: 1 } }),
    /__metadata__\.a is not/,
  ],
  [
    "a pickle",
    new TextEncoder().encode("PK\u0003\u0004 archive/data.pkl"),
    /over the format's limit/,
  ],
];

for (const [name, bytes, message] of CASES) {
  test(`openSafetensors() refuses ${name}`, () =>
    withScratch(async (dir) => {
      const file = join(dir, "model.safetensors");
      await writeFile(file, bytes);
      const largest = await largestAllocation(async () => {
        const error = await rejects(
          () => openSafetensors(file),
          "BAD_FILE",
          message,
          /: get|; get|: the/,
        );
        assert.ok(error.is("BAD_FILE") && error.details.file === file);
      });
      assert.ok(
        largest <= bytes.byteLength,
        `allocated ${largest} for a file of ${bytes.byteLength}`,
      );
    }));
}

/** The largest Uint8Array that is made by length while `body` runs. */
async function largestAllocation(body: () => Promise<void>): Promise<number> {
  const original = globalThis.Uint8Array;
  let largest = 0;
  globalThis.Uint8Array = new Proxy(original, {
    construct(target, args, newTarget) {
      if (typeof args[0] === "number") largest = Math.max(largest, args[0]);
      return Reflect.construct(
        target,
        args,
        newTarget === globalThis.Uint8Array ? target : newTarget,
      );
    },
  });
  try {
    await body();
  } finally {
    globalThis.Uint8Array = original;
  }
  return largest;
}
