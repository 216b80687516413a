import assert from "node:assert/strict";
import { test } from "node:test";
import { type Dtype, isDtype, tensorBytes, toFloat32 } from "../../src/api/io/dtype.ts";
import { rejects } from "./scratch.ts";

const u16 = (...values: number[]) => new Uint8Array(new Uint16Array(values).buffer);

test("toFloat32() decodes bfloat16", () => {
  const values = toFloat32("BF16", u16(0x3f80, 0xc000, 0x0000, 0x8000, 0x7f80, 0x0001, 0x4049));
  assert.deepEqual([...values], [1, -2, 0, -0, Infinity, 2 ** -133, 3.140625]);
  assert.ok(Number.isNaN(toFloat32("BF16", u16(0x7fc0))[0]));
});

test("toFloat32() decodes float16 at every kind of value", () => {
  const bits = [
    0x3c00, 0xc000, 0x0000, 0x8000, 0x7c00, 0xfc00, 0x0001, 0x03ff, 0x0400, 0x7bff, 0x3555,
  ];
  const values = toFloat32("F16", u16(...bits));
  const expected = [
    1,
    -2,
    0,
    -0,
    Infinity,
    -Infinity,
    2 ** -24,
    1023 * 2 ** -24,
    2 ** -14,
    65504,
    0.333251953125,
  ];
  assert.deepEqual([...values], expected);
  assert.ok(Number.isNaN(toFloat32("F16", u16(0x7e00))[0]));
});

test("toFloat32() copies float32 from any alignment", () => {
  const bytes = new Uint8Array(9);
  bytes.set(new Uint8Array(new Float32Array([1.5, -2]).buffer), 1);
  const values = toFloat32("F32", bytes.subarray(1));
  bytes.fill(0);
  assert.deepEqual([...values], [1.5, -2]);
});

test("toFloat32() refuses other dtypes", async () => {
  for (const dtype of ["F64", "I32", "F8_E4M3"] as Dtype[]) {
    await rejects(() => toFloat32(dtype, new Uint8Array(8)), "UNSUPPORTED", new RegExp(dtype));
  }
});

test("tensorBytes() multiplies without overflow", () => {
  assert.equal(tensorBytes("F32", []), 4);
  assert.equal(tensorBytes("BF16", [3, 5]), 30);
  assert.equal(tensorBytes("F64", [0, 9]), 0);
  assert.equal(tensorBytes("F4", [2, 3]), 3);
  assert.equal(tensorBytes("F4", [3]), null);
  assert.equal(tensorBytes("U8", [2 ** 49]), 2 ** 49);
  assert.equal(tensorBytes("U8", [2 ** 51]), null);
  assert.equal(tensorBytes("U8", [2 ** 32, 2 ** 32]), null);
  for (const size of [-1, 1.5, Number.NaN, "2", null])
    assert.equal(tensorBytes("U8", [size]), null);
});

test("isDtype() knows the specification's names only", () => {
  for (const name of ["F32", "BF16", "F8_E8M0", "C64"]) assert.ok(isDtype(name));
  for (const name of ["f32", "toString", "", 7, null]) assert.ok(!isDtype(name));
});
