import assert from "node:assert/strict";
import { test } from "node:test";
import type { Llama3Rope, RopeConfig } from "../../src/api/nn/config.ts";
import { ropeInverseFrequencies, ropeTable } from "../../src/api/nn/rope.ts";
import { goldenConfig, refuses } from "./helpers.ts";

const LLAMA_31: Llama3Rope = {
  type: "llama3",
  theta: 500000,
  factor: 8,
  lowFreqFactor: 1,
  highFreqFactor: 4,
  originalMaxPositions: 8192,
};

/** Two units in the last place: float32 powers differ by one between mathematical libraries. */
function close(actual: number | undefined, expected: number, scale = Math.abs(expected)): void {
  const difference = Math.abs((actual as number) - expected);
  assert.ok(difference <= scale * 2 ** -22, `${actual} is not ${expected}`);
}

test("ropeInverseFrequencies() gives theta^(-2i/d)", () => {
  const frequencies = ropeInverseFrequencies({ type: "default", theta: 10000 }, 16);
  assert.ok(frequencies instanceof Float32Array);
  assert.equal(frequencies.length, 8);
  // 10000^(-i/8) = 10^(-i/2)
  const expected = [1, 0.31622776, 0.1, 0.031622776, 0.01, 0.0031622776, 0.001, 0.00031622776];
  for (const [i, value] of expected.entries()) close(frequencies[i], value);
});

test("ropeInverseFrequencies() rescales as Llama 3.1", () => {
  const plain = ropeInverseFrequencies({ type: "default", theta: 500000 }, 128);
  const scaled = ropeInverseFrequencies(LLAMA_31, 128);
  for (let i = 0; i < 64; i++) {
    const waveLength = (2 * Math.PI) / plain[i]!;
    if (waveLength < 2048) assert.equal(scaled[i], plain[i]);
    else if (waveLength > 8192) assert.equal(scaled[i], plain[i]! / 8);
    else assert.ok(scaled[i]! < plain[i]! && scaled[i]! > plain[i]! / 8);
  }
  // Wave lengths 2049 to 7886 tokens lie between: (1 - s) f / 8 + s f, with s = (8192 / waveLength
  // - 1) / 3.
  const between = [
    0.00216657063, 0.00137189368, 0.00085675146, 0.000524846022, 0.00031269365, 0.000178507791,
  ];
  for (const [i, value] of between.entries()) close(scaled[29 + i], value);
  close(scaled[28], 0.00321144611);
  close(scaled[35], 9.5562129e-5);
  close(scaled[36], 7.78465546e-5);
  close(scaled[63], 3.06892588e-7);
});

test("ropeInverseFrequencies() takes the form of a golden config", () => {
  const { rope, headDim } = goldenConfig("llama3-rope-tied");
  const frequencies = ropeInverseFrequencies(rope, headDim);
  for (const [i, value] of [1, 0.21466738, 0.0242403448, 0.0106746377, 0.00470075384].entries()) {
    close(frequencies[i], value);
  }
  close(frequencies[15], 5.6770881e-7);
});

test("ropeTable() holds the cosine and sine of position times frequency", () => {
  const { cos, sin } = ropeTable({ type: "default", theta: 10000 }, 16, 8192);
  assert.deepEqual([cos.length, sin.length], [8192 * 8, 8192 * 8]);
  assert.deepEqual([...cos.subarray(0, 8)], Array(8).fill(1));
  assert.deepEqual([...sin.subarray(0, 8)], Array(8).fill(0));
  close(cos[8], 0.540302306, 1); // cos 1
  close(sin[8], 0.841470985, 1);
  close(cos[8 + 4], 0.99995, 1); // cos 0.01
  close(sin[8 + 4], 0.00999983333, 1);
  close(cos[39 * 8], 0.266642928, 1);
  close(sin[39 * 8 + 3], 0.943582833, 1);
});

test("ropeTable() rounds angles to float32 as the reference does", () => {
  const rope: RopeConfig = { type: "default", theta: 500000 };
  const frequencies = ropeInverseFrequencies(rope, 128);
  const { cos } = ropeTable(rope, 128, 8192);
  // At position 8191 the rounded angle differs from the exact product by up to 2^-12.
  let differs = 0;
  for (const [i, frequency] of frequencies.entries()) {
    const angle = Math.fround(8191 * frequency);
    assert.equal(cos[8191 * 64 + i], Math.fround(Math.cos(angle)));
    if (Math.abs(Math.cos(angle) - Math.cos(8191 * frequency)) > 1e-6) differs++;
  }
  assert.ok(differs > 0);
});

test("ropeTable() refuses sizes that are not positive integers", () => {
  const rope: RopeConfig = { type: "default", theta: 10000 };
  for (const headDim of [0, -2, 15, 2.5, Number.NaN]) {
    refuses(() => ropeInverseFrequencies(rope, headDim), "BAD_ARGUMENT", /headDim/);
  }
  for (const positions of [0, -1, 1.5]) {
    refuses(() => ropeTable(rope, 16, positions), "BAD_ARGUMENT", /positions/);
  }
});
