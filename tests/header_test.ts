import assert from "node:assert/strict";
import { test } from "node:test";
import { ABI, HEADER_HASH } from "../src/ffi/header_hash.ts";
import { STATUS } from "../src/ffi/status.ts";
import { STRUCTS } from "../src/ffi/structs.ts";
import { SYMBOLS } from "../src/ffi/symbols.ts";
import { type Abi, abiFaults, parseHeader } from "../tools/c_header.ts";
import { HEADERS, headerHash } from "../tools/header_hash.mjs";
import { ROOT, readText } from "./help.ts";

const TABLES: Abi = { functions: SYMBOLS, structs: STRUCTS, statuses: STATUS };

const TEXT = HEADERS.map(readText).join("");

/** A header with every kind of declaration, and its tables. */
const HEADER = `
#define LM_API __attribute__((visibility("default")))
#define LM_STATUS_MAP(X)        \\
  X(LM_OK, 0, "ok")             \\
  X(LM_ERR_BAD, -1, "a, (b)")   /* a note */

typedef struct lm_ctx lm_ctx; /* opaque; LM_API int32_t lm_no(void); */
typedef void (*lm_done_fn)(uint64_t tag, int32_t status);
typedef struct lm_x_args {
  uint32_t size; /* a; b */
  const void *x;
  lm_done_fn fn;
  double y;
} lm_x_args;
LM_API uint32_t lm_version(void);
// LM_API int32_t lm_not(void);
LM_API lm_ctx *lm_open(const char *name, int32_t threads, lm_done_fn fn,
                       uint64_t cap);
LM_API int32_t lm_x(lm_ctx *ctx, const lm_x_args *args, float eps);
`;
const GOOD: Abi = {
  functions: {
    lm_version: { args: [], ret: "u32" },
    lm_open: { args: ["buf", "i32", "fn", "u64"], ret: "ptr" },
    lm_x: { args: ["ptr", "buf", "f32"], ret: "i32" },
  },
  structs: { lm_x_args: { size: "u32", x: "ptr", fn: "ptr", y: "f64" } },
  statuses: { LM_OK: { value: 0, text: "ok" }, LM_ERR_BAD: { value: -1, text: "a, (b)" } },
};

/** Faults of the planted header against tables with one difference. */
function faultsWith(difference: Partial<Abi>): string[] {
  return abiFaults(parseHeader(HEADER), { ...GOOD, ...difference });
}

test("SYMBOLS, STRUCTS and STATUS agree with the header", () => {
  const header = parseHeader(TEXT);
  assert.ok(Object.keys(header.functions).length >= 40);
  assert.ok(Object.keys(header.structs).length >= 20);
  assert.ok(Object.keys(header.statuses).length >= 10);
  assert.deepEqual(abiFaults(header, TABLES), []);
});

test("parseHeader() misses no declaration of the header", () => {
  const declared = TEXT.match(/^LM_API\b/gm)?.length;
  assert.equal(Object.keys(parseHeader(TEXT).functions).length, declared);
  const bodies = TEXT.match(/^typedef struct \w+ \{/gm)?.length;
  assert.equal(Object.keys(parseHeader(TEXT).structs).length, bodies);
});

test("ABI and HEADER_HASH are those of the header (mend with `node tools/header_hash.mjs`)", () => {
  assert.equal(HEADER_HASH, headerHash(ROOT));
  const version = (part: string) => Number(new RegExp(`${part} (\\d+)`).exec(TEXT)?.[1]);
  assert.deepEqual(ABI, { major: version("LM_ABI_MAJOR"), minor: version("LM_ABI_MINOR") });
});

test("abiFaults() accepts tables that agree", () => {
  assert.deepEqual(faultsWith({}), []);
});

test("abiFaults() finds functions that one side lacks", () => {
  const { lm_x, ...functions } = GOOD.functions;
  assert.deepEqual(faultsWith({ functions: { ...functions, lm_y: lm_x as never } }), [
    "function lm_x is in the header only",
    "function lm_y is in the table only",
  ]);
});

test("abiFaults() finds wrong types, counts and results of functions", () => {
  const functions = {
    lm_version: { args: [], ret: "i32" },
    lm_open: { args: ["buf", "u32", "ptr"], ret: "buf" },
    lm_x: { args: ["buf", "fn", "f64"], ret: "i32" },
  };
  assert.deepEqual(faultsWith({ functions }), [
    "lm_version: returns u32 in C, i32 in the table",
    "lm_open: 4 arguments in C, 3 in the table",
    "lm_open: returns object in C, buf in the table",
    "lm_open: argument 1 is i32 in C, u32 in the table",
    "lm_open: argument 2 is fn in C, ptr in the table",
    "lm_x: argument 0 is object in C, buf in the table",
    "lm_x: argument 1 is data in C, fn in the table",
    "lm_x: argument 2 is f32 in C, f64 in the table",
  ]);
});

test("abiFaults() finds fields of other types and in another order", () => {
  const order = { size: "u32", fn: "ptr", x: "ptr", y: "f64" };
  const type = { size: "i32", x: "ptr", fn: "ptr", y: "f64" };
  for (const lm_x_args of [order, type]) {
    assert.match(faultsWith({ structs: { lm_x_args } }).join(), /^lm_x_args: \{.*in the table$/);
  }
  assert.deepEqual(faultsWith({ structs: {} }), ["struct lm_x_args is in the header only"]);
});

test("abiFaults() finds statuses of another value or text", () => {
  const LM_OK = { value: 0, text: "fine" };
  const LM_ERR_BAD = { value: -2, text: "a, (b)" };
  assert.deepEqual(faultsWith({ statuses: { LM_OK, LM_ERR_BAD } }), [
    'LM_OK: 0 "ok" in C, 0 "fine" in the table',
    'LM_ERR_BAD: -1 "a, (b)" in C, -2 "a, (b)" in the table',
  ]);
});

test("abiFaults() finds functions with more than 12 arguments", () => {
  const thirteen = Array(13).fill("float a").join(", ");
  const header = parseHeader(`\nLM_API void lm_long(${thirteen});`);
  assert.deepEqual(abiFaults(header, header), ["lm_long: 13 arguments, at most 12"]);
});

test("parseHeader() rejects types that may not cross the boundary", () => {
  for (const type of ["size_t", "int", "bool", "lm_x_args"]) {
    const header = `\nLM_API int32_t lm_x(${type} a);`;
    assert.throws(() => parseHeader(header), /lm_x: type \w+ may not cross the boundary/);
  }
});
