import assert from "node:assert/strict";
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import fc from "fast-check";
import { openSafetensors } from "../../src/api/io/safetensors.ts";
import { headerLength, parseHeader } from "../../src/api/io/safetensors_header.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { GOLDEN, safetensors, withScratch } from "./scratch.ts";

const RUNS = 2000;

/** Parses a whole file in memory; the entries of an accepted one must tile its data. */
function parse(bytes: Uint8Array): void {
  try {
    const length = headerLength(bytes.subarray(0, 8), bytes.byteLength, "fuzz");
    assert.ok(length <= bytes.byteLength);
    const { tensors } = parseHeader(bytes.subarray(8, 8 + length), bytes.byteLength, "fuzz");
    let covered = 8 + length;
    for (const { offset, bytes: size } of tensors.values()) {
      assert.ok(offset >= 8 + length && offset + size <= bytes.byteLength);
      covered += size;
    }
    assert.equal(covered, bytes.byteLength);
  } catch (error) {
    assert.ok(error instanceof LoramemError && error.code === "BAD_FILE", String(error));
  }
}

const SAMPLE = safetensors(
  {
    __metadata__: { format: "pt" },
    a: { dtype: "F32", shape: [2, 2], data_offsets: [0, 16] },
    "b.weight": { dtype: "BF16", shape: [3], data_offsets: [16, 22] },
    empty: { dtype: "F16", shape: [0, 5], data_offsets: [22, 22] },
  },
  22,
);

test("parseHeader() answers any bytes with a result or BAD_FILE", () => {
  fc.assert(fc.property(fc.uint8Array({ maxLength: 64 }), parse), { numRuns: RUNS });
});

test("parseHeader() answers any header text with a result or BAD_FILE", () => {
  const text = fc.oneof(fc.string({ unit: "binary" }), fc.json()).map((json) => `{${json}}`);
  fc.assert(
    fc.property(text, (header) => parse(safetensors(header))),
    { numRuns: RUNS },
  );
});

test("parseHeader() answers a valid file with changed bytes with a result or BAD_FILE", () => {
  const change = fc.tuple(fc.nat(SAMPLE.byteLength - 1), fc.nat(255));
  const changes = fc.array(change, { minLength: 1, maxLength: 4 });
  fc.assert(
    fc.property(changes, fc.nat(SAMPLE.byteLength), (list, cut) => {
      const bytes = SAMPLE.slice();
      for (const [at, value] of list) bytes[at] = value;
      parse(bytes);
      parse(bytes.subarray(0, cut));
    }),
    { numRuns: RUNS },
  );
});

test("parseHeader() answers odd values in an entry with a result or BAD_FILE", () => {
  const odd = fc.oneof(
    fc.constantFrom(
      0,
      -0,
      -1,
      1.5,
      4,
      16,
      2 ** 31,
      2 ** 32,
      2 ** 53,
      2 ** 63,
      1e308,
      null,
      "16",
      [],
      {},
    ),
    fc.integer(),
    fc.double(),
  );
  const list = fc.oneof(odd, fc.array(odd, { maxLength: 4 }));
  const dtype = fc.oneof(fc.constantFrom("F32", "F4", "F6_E2M3", "BOOL", "C64"), odd);
  const entry = fc.record({ dtype, shape: list, data_offsets: list }, { requiredKeys: [] });
  const name = fc.oneof(
    fc.string(),
    fc.constantFrom("__proto__", "__metadata__", "constructor", ""),
  );
  const header = fc.dictionary(name, fc.oneof(entry, odd), { maxKeys: 4 });
  fc.assert(
    fc.property(header, fc.nat(64), (root, size) => parse(safetensors(root, size))),
    { numRuns: RUNS },
  );
});

test("parseHeader() answers changed golden headers with a result or BAD_FILE", async () => {
  const golden = await readFile(join(GOLDEN, "llama/adapter0/adapter_model.safetensors"));
  const header = 8 + headerLength(golden.subarray(0, 8), golden.byteLength, "golden");
  const change = fc.tuple(fc.nat(header - 1), fc.nat(255));
  fc.assert(
    fc.property(fc.array(change, { minLength: 1, maxLength: 3 }), (list) => {
      const bytes = new Uint8Array(golden);
      for (const [at, value] of list) bytes[at] = value;
      parse(bytes);
    }),
    { numRuns: 300 },
  );
});

/** Bytes of the largest array that is made while `body` runs. */
async function largestArray(body: () => Promise<void>): Promise<number> {
  const plain = globalThis.Uint8Array;
  let largest = 0;
  globalThis.Uint8Array = new Proxy(plain, {
    construct(target, args, newTarget) {
      if (typeof args[0] === "number") largest = Math.max(largest, args[0]);
      return Reflect.construct(target, args, newTarget);
    },
  });
  try {
    await body();
  } finally {
    globalThis.Uint8Array = plain;
  }
  return largest;
}

/** Opens a file or folder, which may be refused as BAD_FILE and as nothing else. */
async function tryOpen(path: string): Promise<void> {
  try {
    await (await openSafetensors(path)).close();
  } catch (error) {
    assert.ok(error instanceof LoramemError && error.code === "BAD_FILE", String(error));
  }
}

test("openSafetensors() makes no array larger than the file, whatever its bytes", () =>
  withScratch(async (dir) => {
    const file = join(dir, "x.safetensors");
    const length = fc.oneof(
      fc.bigInt({ min: 0n, max: 2n ** 64n - 1n }),
      fc.bigInt({ min: 0n, max: 300n }),
    );
    const size = fc.nat(SAMPLE.byteLength);
    await fc.assert(
      fc.asyncProperty(length, size, async (header, cut) => {
        const bytes = SAMPLE.slice(0, cut);
        if (cut >= 8) new DataView(bytes.buffer).setBigUint64(0, header, true);
        await writeFile(file, bytes);
        const largest = await largestArray(() => tryOpen(file));
        assert.ok(largest <= Math.max(cut, 8), `${largest} bytes for a file of ${cut}`);
      }), // mutant: headerLength() that does not look at the size of the file
      { numRuns: 300 },
    );
  }));

test("openSafetensors() answers any index with a result or BAD_FILE", () =>
  withScratch(async (dir) => {
    await writeFile(join(dir, "a.safetensors"), SAMPLE);
    const shard = fc.oneof(fc.constantFrom("a.safetensors", "b.safetensors", "../a"), fc.json());
    const name = fc.oneof(fc.constantFrom("a", "b.weight", "empty", "__proto__"), fc.string());
    const map = fc.dictionary(name, fc.oneof(shard, fc.jsonValue()));
    const whole = fc
      .oneof(map, fc.jsonValue())
      .map((weights) => JSON.stringify({ weight_map: weights }));
    const text = fc.oneof(whole, whole, fc.json(), fc.string());
    await fc.assert(
      fc.asyncProperty(text, async (index) => {
        await writeFile(join(dir, "model.safetensors.index.json"), index);
        await tryOpen(dir);
      }), // mutant: no check that weight_map is an object
      { numRuns: 300 },
    );
  }));
