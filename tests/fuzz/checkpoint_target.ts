/** The header of a checkpoint as a target of the fuzzer. */
import assert from "node:assert/strict";
import type * as Header from "../../src/api/io/checkpoint_header.ts";
import { encodeCheckpointHeader } from "../../src/api/io/checkpoint_header.ts";
import { crc32c } from "../../src/api/io/crc32c.ts";
import type * as Errors from "../../src/ffi/error.ts";
import { type Instrumented, instrument } from "./instrument.ts";
import { FORMAT as SAFETENSORS } from "./safetensors_target.ts";

/** The modules that read a header. */
const MODULES = ["checkpoint_header", "safetensors_header", "json", "dtype"].map(
  (name) => `src/api/io/${name}.ts`,
);

/** Where the digits of the header's own checksum are. */
const DIGITS_AT = 8 + '{"__metadata__":{"crc32c":"'.length;

/** A file of two tensors, its header without the padding. */
function sample(): Uint8Array {
  const tensors = [
    { name: "a", dtype: "F32", shape: [2], bytes: 8 },
    { name: "b", dtype: "I64", shape: [1], bytes: 8 },
  ] as const;
  const header = encodeCheckpointHeader(tensors, { step: 7, list: [1, { x: null }] }, [1, 2]);
  const file = new Uint8Array([
    ...header.subarray(0, header.lastIndexOf(0x7d) + 1),
    ...new Uint8Array(16),
  ]);
  mend(file);
  return file;
}

/** Makes length field and checksum true, so that what follows them is reached. */
function mend(input: Uint8Array): void {
  SAFETENSORS.mend(input);
  if (input.byteLength < DIGITS_AT + 8) return;
  const end = 8 + Number(new DataView(input.buffer, input.byteOffset).getBigUint64(0, true));
  input.fill(0x30, DIGITS_AT, DIGITS_AT + 8);
  const digits = crc32c(input.subarray(0, end)).toString(16).padStart(8, "0");
  input.set(new TextEncoder().encode(digits), DIGITS_AT);
}

/** What the fuzzer has to know about the format. */
export const FORMAT = {
  ...SAFETENSORS,
  corpus: [sample()],
  dictionary: [...SAFETENSORS.dictionary, '\\"', '"state":"', '"tensors":"', '"version":"1"'],
  mend,
} as const;

/** A header reader with counters, and the check of one input. */
export async function openTarget(
  planted?: ReadonlyMap<string, string>,
): Promise<Instrumented & { check(input: Uint8Array): void }> {
  const modules = await instrument(MODULES, planted);
  const { parseCheckpointHeader } = await modules.load<typeof Header>(MODULES[0] as string);
  const { headerLength } = await modules.load<{
    headerLength: (prefix: Uint8Array, bytes: number, file: string) => number;
  }>("src/api/io/safetensors_header.ts");
  const { LoramemError } = await modules.load<typeof Errors>("src/ffi/error.ts");
  const check = (input: Uint8Array) => {
    try {
      const length = headerLength(input.subarray(0, 8), input.byteLength, "fuzz");
      const header = input.subarray(0, 8 + length);
      const { tensors } = parseCheckpointHeader(header, input.byteLength, "fuzz");
      for (const { checksum } of tensors.values()) {
        assert.ok(checksum === checksum >>> 0, `a checksum is ${checksum}`);
      }
    } catch (error) {
      const named =
        error instanceof LoramemError && ["BAD_FILE", "UNSUPPORTED"].includes(error.code);
      if (!named) throw error;
    }
  };
  return Object.assign(modules, { check });
}
