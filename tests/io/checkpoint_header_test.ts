/** The header of a checkpoint: what was written is read, and nothing else passes. */
import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import fc from "fast-check";
import { openSafetensors } from "../../mod.ts";
import { readCheckpointHeader } from "../../src/api/io/checkpoint.ts";
import {
  type CheckpointTensor,
  encodeCheckpointHeader,
  parseCheckpointHeader,
} from "../../src/api/io/checkpoint_header.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { crc32cReference, rejects, withScratch } from "./scratch.ts";

const TENSORS: readonly CheckpointTensor[] = [
  { name: "adapters.master", dtype: "F32", shape: [64], bytes: 256 },
  { name: "optimizer.state", dtype: "F64", shape: [2], bytes: 16 },
];
const STATE = { step: 7, best: null, settings: { model: "00ff", learningRate: 0.1 + 0.2 } };
const SUMS = [0xdeadbeef, 7];
const HEADER = encodeCheckpointHeader(TENSORS, STATE, SUMS);
const FILE_BYTES = HEADER.byteLength + 256 + 16;

const parse = (header: Uint8Array, bytes = FILE_BYTES) =>
  parseCheckpointHeader(header, bytes, "fuzz");

/** Anything but a result or an error that names what is wrong is a mistake. */
function parsesOrRefuses(header: Uint8Array, bytes: number): void {
  try {
    parse(header, bytes);
  } catch (error) {
    assert.ok(error instanceof LoramemError, String(error));
    assert.ok(error.is("BAD_FILE") || error.is("UNSUPPORTED"), error.message);
  }
}

test("parseCheckpointHeader() gives back what encodeCheckpointHeader() was given", () => {
  const { tensors, state } = parse(HEADER);
  assert.deepEqual(state, STATE);
  assert.deepEqual(
    [...tensors.values()].map(({ name, dtype, shape, bytes, checksum }) => [
      { name, dtype, shape, bytes },
      checksum,
    ]),
    TENSORS.map((tensor, index) => [tensor, SUMS[index]]),
  );
});

test("encodeCheckpointHeader() has one size for all checksums, a multiple of 4 KiB", () => {
  // Mutant: checksums as numbers, whose digits vary: the data would have to move.
  for (const sums of [[0, 0], [1, 0xffffffff], undefined]) {
    const header = encodeCheckpointHeader(TENSORS, STATE, sums);
    assert.equal(header.byteLength, HEADER.byteLength);
    assert.equal(header.byteLength % 4096, 0);
  }
  const long = encodeCheckpointHeader(TENSORS, { text: "x".repeat(9000) });
  assert.equal(long.byteLength, 3 * 4096);
});

test("a checkpoint is a safetensors file to every other reader", () =>
  withScratch(async (dir) => {
    const path = join(dir, "checkpoint-7.safetensors");
    await writeFile(path, new Uint8Array([...HEADER, ...new Uint8Array(272).fill(1)]));
    await using file = await openSafetensors(path);
    assert.deepEqual([...file.tensors.keys()], ["adapters.master", "optimizer.state"]);
    assert.equal(file.metadata.get("format"), "loramem-checkpoint");
    assert.equal((await readCheckpointHeader(path)).tensors.get("optimizer.state")?.checksum, 7);
  }));

test("parseCheckpointHeader() notices any changed bit", () => {
  // Mutants: the checksum is not compared; it leaves out the length, the padding or its own place.
  for (let at = 0; at < HEADER.byteLength; at++) {
    const changed = HEADER.slice();
    changed[at] = (changed[at] as number) ^ (1 << (at % 8));
    assert.throws(() => parse(changed), LoramemError, `byte ${at}`);
  }
});

test("readCheckpointHeader() notices a file that was cut anywhere, or grew", () =>
  withScratch(async (dir) => {
    const path = join(dir, "checkpoint-7.safetensors");
    const whole = new Uint8Array([...HEADER, ...new Uint8Array(272)]);
    const lengths = [0, 1, 7, 8, 9, 100, 4095, 4096, 4097, whole.byteLength - 1];
    for (const length of lengths) {
      await writeFile(path, whole.subarray(0, length));
      await rejects(() => readCheckpointHeader(path), "BAD_FILE", /checkpoint-7/);
    }
    await writeFile(path, new Uint8Array([...whole, 0]));
    await rejects(() => readCheckpointHeader(path), "BAD_FILE", /1 bytes follow/);
    // What a power cut leaves of a file whose size alone was written.
    await writeFile(path, new Uint8Array(whole.byteLength));
    await rejects(() => readCheckpointHeader(path), "BAD_FILE", /header length is 0/);
    await rejects(() => readCheckpointHeader(dir), "BAD_FILE", /not a regular file/);
    await rejects(() => readCheckpointHeader(join(dir, "none")), "IO", /no such file/);
  }));

test("parseCheckpointHeader() refuses a later version and another program's file", async () => {
  const text = new TextDecoder().decode(HEADER);
  const edit = (from: string, to: string) => {
    const at = text.indexOf(from);
    assert.ok(at > 0 && from.length === to.length);
    const changed = HEADER.slice();
    changed.set(new TextEncoder().encode(to), at);
    return sealed(changed);
  };
  await rejects(() => parse(edit('"version":"1"', '"version":"2"')), "UNSUPPORTED", /version 2/);
  await rejects(() => parse(edit("loramem-ch", "another-ch")), "BAD_FILE", /no checkpoint/);
  await rejects(() => parse(edit("deadbeef", "deadbeeg")), "BAD_FILE", /has no checksum/);
});

test("parseCheckpointHeader() answers any bytes with a result or an error", () => {
  const bytes = fc.uint8Array({ maxLength: 128 });
  fc.assert(
    fc.property(bytes, (header) => parsesOrRefuses(header, header.byteLength)),
    { numRuns: 2000 },
  );
});

test("parseCheckpointHeader() answers changed headers under a right checksum with a result or an error", () => {
  // The checksum keeps accidents out; what an attacker writes has a right one.
  const change = fc.tuple(fc.nat(900), fc.nat(255));
  const changes = fc.array(change, { minLength: 1, maxLength: 4 });
  fc.assert(
    fc.property(changes, fc.nat(8192), (list, bytes) => {
      const header = HEADER.slice();
      for (const [at, value] of list) header[at] = value;
      parsesOrRefuses(sealed(header), FILE_BYTES);
      parsesOrRefuses(sealed(header), bytes);
    }),
    { numRuns: 2000 },
  );
});

test("parseCheckpointHeader() answers any metadata with a result or an error", () => {
  const odd = fc.oneof(fc.string(), fc.json(), fc.constantFrom("{}", "[]", "null", "{", "1"));
  fc.assert(
    fc.property(odd, odd, (tensors, state) => {
      const metadata = {
        crc32c: "00000000",
        format: "loramem-checkpoint",
        version: "1",
        tensors,
        state,
      };
      const json = new TextEncoder().encode(JSON.stringify({ __metadata__: metadata }));
      const header = new Uint8Array(8 + json.byteLength);
      new DataView(header.buffer).setBigUint64(0, BigInt(json.byteLength), true);
      header.set(json, 8);
      parsesOrRefuses(sealed(header), header.byteLength);
    }),
    { numRuns: 1000 },
  );
});

/** A header with its checksum made right. */
function sealed(header: Uint8Array): Uint8Array {
  const at = 8 + '{"__metadata__":{"crc32c":"'.length;
  header.fill(0x30, at, at + 8);
  const digits = crc32cReference(header).toString(16).padStart(8, "0");
  header.set(new TextEncoder().encode(digits).subarray(0, Math.max(0, header.length - at)), at);
  return header;
}
