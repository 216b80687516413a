/** The safetensors header as a target of the fuzzer: what must hold for any bytes at all. */
import assert from "node:assert/strict";
import type * as Header from "../../src/api/io/safetensors_header.ts";
import type * as Errors from "../../src/ffi/error.ts";
import { safetensors } from "../io/scratch.ts";
import type { Random } from "./fuzz.ts";
import { type Instrumented, instrument } from "./instrument.ts";

/** The modules that read a header. */
const MODULES = ["safetensors_header", "json", "dtype"].map((name) => `src/api/io/${name}.ts`);

/** Valid files to start from. */
const CORPUS: readonly Uint8Array[] = [
  safetensors({}),
  safetensors({ __metadata__: { format: "pt", "a\u00e9": "b" } }),
  safetensors(
    {
      a: { dtype: "F32", shape: [2, 2], data_offsets: [0, 16] },
      "b.weight": { dtype: "BF16", shape: [3], data_offsets: [16, 22] },
      empty: { dtype: "F16", shape: [0, 5], data_offsets: [22, 22] },
      packed: { dtype: "F4", shape: [2], data_offsets: [22, 23] },
    },
    23,
  ),
];

/** The words of the format. */
const DICTIONARY: readonly string[] = [
  '"dtype":',
  '"shape":[',
  '"data_offsets":[0,',
  '"__metadata__":{',
  '"__proto__":',
  '"\\u0061":',
  '"F32"',
  '"F6_E2M3"',
  ...'{ } [ ] , : " \\ '.trim().split(" "),
];

/** Makes the length field true, so that what follows it is reached. */
function mendLength(input: Uint8Array): void {
  if (input.byteLength < 8) return;
  let end = input.lastIndexOf(0x7d) + 1; // "}"
  if (end < 10) end = input.byteLength;
  new DataView(input.buffer, input.byteOffset).setBigUint64(0, BigInt(end - 8), true);
}

/** One change to the JSON of a header: a value replaced, shifted, taken out, or put at another place. */
function reshapeHeader(input: Uint8Array, random: Random): Uint8Array {
  const end = input.lastIndexOf(0x7d) + 1;
  let root: Json;
  try {
    root = JSON.parse(new TextDecoder().decode(input.subarray(8, end)));
  } catch {
    return input;
  }
  const places = placesIn(root);
  const pick = (): Place | undefined => places[random(places.length)];
  const [to, from] = [pick(), pick()];
  if (to === undefined || from === undefined) return input;
  const value = to.in[to.key];
  const kind = random(5);
  if (kind === 0) delete to.in[to.key];
  else if (kind === 1) to.in[to.key] = ODD[random(ODD.length)] as Json;
  else if (kind === 2) to.in[to.key] = from.in[from.key] as Json;
  else if (kind === 3) to.in[`${to.key}${random(3)}`] = from.in[from.key] as Json;
  else if (typeof value === "number") to.in[to.key] = value + random(33) - 16;
  try {
    return safetensors(JSON.stringify(root), input.subarray(end));
  } catch {
    return input; // a value was put inside itself
  }
}

type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

interface Place {
  readonly in: Record<string, Json>;
  readonly key: string;
}

const ODD: readonly Json[] = [
  null,
  true,
  -1,
  0,
  0.5,
  2 ** 32,
  2 ** 53,
  "",
  "null",
  "F8_E4M3",
  [],
  {},
];

/** Every value in an object or list, however deep. */
function placesIn(value: Json): Place[] {
  if (typeof value !== "object" || value === null) return [];
  const inside = value as Record<string, Json>;
  return Object.keys(inside).flatMap((key) => [
    { in: inside, key },
    ...placesIn(inside[key] as Json),
  ]);
}

/** What the fuzzer has to know about the format. */
export const FORMAT = {
  corpus: CORPUS,
  dictionary: DICTIONARY,
  mend: mendLength,
  reshape: reshapeHeader,
} as const;

/** A header reader with counters, and the check of one input. */
export async function openTarget(
  planted?: ReadonlyMap<string, string>,
): Promise<Instrumented & { check(input: Uint8Array): void }> {
  const modules = await instrument(MODULES, planted);
  const { headerLength, parseHeader } = await modules.load<typeof Header>(MODULES[0] as string);
  const { LoramemError } = await modules.load<typeof Errors>("src/ffi/error.ts");
  const check = (input: Uint8Array) => {
    try {
      const size = input.byteLength;
      const length = headerLength(input.subarray(0, 8), size, "fuzz");
      assert.ok(length <= size, `it would allocate ${length} bytes for a file of ${size}`);
      const { tensors } = parseHeader(input.subarray(8, 8 + length), size, "fuzz");
      let covered = 8 + length;
      for (const { offset, bytes } of tensors.values()) {
        assert.ok(offset >= 8 + length && offset + bytes <= size, "a tensor lies outside the file");
        covered += bytes;
      }
      assert.equal(covered, size, "the tensors do not tile the data");
    } catch (error) {
      if (!(error instanceof LoramemError) || error.code !== "BAD_FILE") throw error;
    }
  };
  return Object.assign(modules, { check });
}
