/**
 * Rotary position embedding tables, rounded step by step as transformers computes them in float32,
 * so that long contexts see the angles that the checkpoint was trained with.
 *
 * Su et al., "RoFormer" (arXiv 2104.09864); llama3 rescaling: Meta's Llama 3.1, as in transformers'
 * `modeling_rope_utils`.
 */
import { LoramemError } from "../../ffi/error.ts";
import type { Llama3Rope, RopeConfig } from "./config.ts";

const { fround } = Math;

/** Cosines and sines of every position, both [positions, headDim / 2], row-major. */
export interface RopeTable {
  readonly cos: Float32Array;
  readonly sin: Float32Array;
}

/**
 * The angle that each pair of elements turns per position: theta^(-2i / headDim), rescaled as
 * `rope` says.
 *
 * @example Usage
 * ```ts
 * import { readModelConfig, ropeInverseFrequencies } from "./mod.ts";
 * const config = await readModelConfig("examples/demo/model");
 * console.log(ropeInverseFrequencies(config.rope, config.headDim)[0]); // 1
 * ```
 *
 * @param rope The model's form.
 * @param headDim Size of a head, even.
 * @returns [headDim / 2], radians per token.
 * @throws {LoramemError} `BAD_ARGUMENT` where `headDim` is not a positive even integer.
 */
export function ropeInverseFrequencies(rope: RopeConfig, headDim: number): Float32Array {
  checkArgument(
    "headDim",
    headDim,
    Number.isSafeInteger(headDim) && headDim > 0 && headDim % 2 === 0,
  );
  const frequencies = new Float32Array(headDim / 2);
  for (let i = 0; i < frequencies.length; i++) {
    const frequency = fround(1 / fround(fround(rope.theta) ** fround((2 * i) / headDim)));
    frequencies[i] = rope.type === "llama3" ? rescale(rope, frequency) : frequency;
  }
  return frequencies;
}

/**
 * Wave lengths beyond the trained context are stretched by `factor`, short ones stay, those between
 * are mixed.
 */
function rescale(rope: Llama3Rope, frequency: number): number {
  const { factor, lowFreqFactor, highFreqFactor, originalMaxPositions } = rope;
  // PyTorch divides a number by a tensor as reciprocal, then product: two roundings.
  const waveLength = fround(fround(1 / frequency) * fround(2 * Math.PI));
  if (waveLength > originalMaxPositions / lowFreqFactor) return fround(frequency / factor);
  if (waveLength < originalMaxPositions / highFreqFactor) return frequency;
  const turns = fround(fround(1 / waveLength) * originalMaxPositions);
  const smooth = fround(fround(turns - lowFreqFactor) / (highFreqFactor - lowFreqFactor));
  const stretched = fround(fround(fround(1 - smooth) * frequency) / factor);
  return fround(stretched + fround(smooth * frequency));
}

/**
 * Tabulates positions 0 to `positions` - 1. Element i of the first half of a head and element i of
 * the second half turn together by the angle in column i.
 *
 * @example Usage
 * ```ts
 * import { readModelConfig, ropeTable } from "./mod.ts";
 * const config = await readModelConfig("examples/demo/model");
 * console.log(ropeTable(config.rope, config.headDim, 8).cos[0]); // 1
 * ```
 *
 * @param rope The model's form.
 * @param headDim Size of a head, even.
 * @param positions Rows to compute; 8 bytes times `headDim / 2` each, and two transcendental
 * functions per element.
 * @returns cos and sin, each [positions, headDim / 2].
 * @throws {LoramemError} `BAD_ARGUMENT` where a size is not a positive integer.
 */
export function ropeTable(rope: RopeConfig, headDim: number, positions: number): RopeTable {
  checkArgument("positions", positions, Number.isSafeInteger(positions) && positions > 0);
  const frequencies = ropeInverseFrequencies(rope, headDim);
  const half = frequencies.length;
  const cos = new Float32Array(positions * half);
  const sin = new Float32Array(positions * half);
  for (let position = 0; position < positions; position++) {
    for (let i = 0; i < half; i++) {
      const angle = fround(position * (frequencies[i] as number));
      cos[position * half + i] = Math.cos(angle);
      sin[position * half + i] = Math.sin(angle);
    }
  }
  return { cos, sin };
}

function checkArgument(name: string, value: unknown, good: boolean): void {
  if (good) return;
  const message = `rope: out of range: ${name} = ${value}: give a positive integer (headDim even)`;
  throw new LoramemError("BAD_ARGUMENT", message, { name, value });
}
