import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { philox4x32, shuffledOrder } from "../../src/api/data/order.ts";
import { error } from "./support.ts";

test("philox4x32() gives the known answers of its authors", () => {
  const ones = 0xffffffff;
  const cases: [number[], number[], number[]][] = [
    [
      [0, 0, 0, 0],
      [0, 0],
      [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8],
    ],
    [
      [ones, ones, ones, ones],
      [ones, ones],
      [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd],
    ],
    [
      [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
      [0xa4093822, 0x299f31d0],
      [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
    ],
  ];
  for (const [counter, key, expected] of cases) {
    const out = new Uint32Array(4);
    philox4x32(out, Uint32Array.from(counter), Uint32Array.from(key));
    assert.deepEqual([...out], expected);
  }
});

test("shuffledOrder() gives the same order everywhere", () => {
  assert.deepEqual([...shuffledOrder(8, 0, 0)], [2, 1, 4, 0, 7, 6, 5, 3]);
  assert.deepEqual([...shuffledOrder(8, 0, 1)], [5, 1, 6, 0, 4, 2, 7, 3]);
  assert.deepEqual([...shuffledOrder(8, 2 ** 40 + 1, 0)], [2, 4, 7, 3, 1, 5, 6, 0]);
  assert.notDeepEqual(shuffledOrder(8, 2 ** 40 + 1, 0), shuffledOrder(8, 1, 0));
});

test("shuffledOrder() is a permutation, shared out among the ranks", () => {
  const arguments_ = [
    fc.nat(300),
    fc.maxSafeNat(),
    fc.nat(9),
    fc.integer({ min: 1, max: 9 }),
  ] as const;
  fc.assert(
    fc.property(...arguments_, (count, seed, epoch, worldSize) => {
      const whole = shuffledOrder(count, seed, epoch);
      assert.deepEqual(
        [...whole].sort((a, b) => a - b),
        [...Array(count).keys()],
      );
      const together = new Uint32Array(count);
      for (let rank = 0; rank < worldSize; rank++) {
        const share = shuffledOrder(count, seed, epoch, rank, worldSize);
        assert.equal(share.length, Math.floor((count - rank + worldSize - 1) / worldSize));
        for (const [step, index] of share.entries()) together[step * worldSize + rank] = index;
      }
      assert.deepEqual(together, whole);
    }),
    { seed: 1 },
  );
});

test("shuffledOrder() makes all orders equally likely", () => {
  const counts = new Map<string, number>();
  for (let seed = 0; seed < 6000; seed++) {
    const order = shuffledOrder(3, seed, 0).join("");
    counts.set(order, (counts.get(order) ?? 0) + 1);
  }
  assert.equal(counts.size, 6);
  for (const [order, count] of counts) assert(Math.abs(count - 1000) < 120, `${order}: ${count}`);
});

test("shuffledOrder() refuses arguments that are not such integers", () => {
  const refused: [number, number, number, number, number, RegExp][] = [
    [-1, 0, 0, 0, 1, /count/],
    [8, 0.5, 0, 0, 1, /seed/],
    [8, 2 ** 53, 0, 0, 1, /seed/],
    [8, 0, -1, 0, 1, /epoch/],
    [8, 0, 0, 0, 0, /worldSize/],
    [8, 0, 0, 2, 2, /rank is not an integer from 0 to 1: 2/],
  ];
  for (const [count, seed, epoch, rank, worldSize, message] of refused) {
    assert.throws(
      () => shuffledOrder(count, seed, epoch, rank, worldSize),
      error("BAD_ARGUMENT", message),
    );
  }
});
