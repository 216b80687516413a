import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { crc32c } from "../../src/api/io/crc32c.ts";
import { crc32cReference } from "./scratch.ts";

test("crc32c() has the values of RFC 3720", () => {
  const counting = Uint8Array.from({ length: 32 }, (_, index) => index);
  assert.equal(crc32c(new Uint8Array(32)), 0x8a9136aa);
  assert.equal(crc32c(new Uint8Array(32).fill(255)), 0x62a8ab43);
  assert.equal(crc32c(counting), 0x46dd794e);
  assert.equal(crc32c(counting.toReversed()), 0x113fdb5c);
  assert.equal(crc32c(new Uint8Array(0)), 0);
});

test("crc32c() is that of the definition, at any place in memory, in one call or two", () => {
  fc.assert(
    fc.property(fc.uint8Array({ maxLength: 100 }), fc.nat(8), fc.nat(100), (bytes, skip, cut) => {
      const placed = new Uint8Array(skip + bytes.length);
      placed.set(bytes, skip);
      const whole = placed.subarray(skip);
      const expected = crc32cReference(bytes);
      assert.equal(crc32c(whole), expected); // mutant: the view begins at the start of the buffer
      assert.equal(crc32c(whole.subarray(cut), crc32c(whole.subarray(0, cut))), expected);
    }),
    { numRuns: 500 },
  );
});
