/** The arithmetic that a model needs for a load, by which utilisation is measured. */
import type { Load } from "../graph/cost.ts";
import type { Program } from "../graph/program.ts";
import { DTYPES, type DType } from "../graph/value.ts";
import type { DeviceProfile } from "./profiles.ts";

/**
 * Forward and backward of a training program; what is computed again to save memory does not count (model FLOPs of PaLM:
 * Chowdhery et al. 2022, arXiv:2204.02311). Frozen weights have no gradient, so a LoRA step needs about 4 FLOP per weight and
 * token where full training needs 6.
 *
 * @param tokens Rows that the program is planned for.
 * @returns FLOP by load. Costs follow tokens, labels and pairs linearly, so this is four multiplications.
 */
export function modelFlops(train: Program, tokens: number): (load: Load) => number {
  const ops = train.ops.filter(({ phase }) => phase !== "recompute");
  const none = { tokens: 0, labelled: 0, pairs: 0, windowPairs: 0 };
  const count = (load: Load) =>
    ops
      .flatMap(({ kind, attributes }) => kind.cost(attributes, load))
      .reduce((sum, { flops, again }) => (again === true ? sum : sum + flops), 0);
  const perToken = count({ ...none, tokens }) / tokens;
  const perLabel = count({ ...none, labelled: tokens }) / tokens;
  const perPair = count({ ...none, pairs: 1 });
  const perWindowPair = count({ ...none, windowPairs: 1 });
  return ({ tokens, labelled, pairs, windowPairs }) =>
    perToken * tokens + perLabel * labelled + perPair * pairs + perWindowPair * windowPairs;
}

/** FLOP/s of a device that count as all of it, for operands of a type; null where its data sheet is not known. */
export function peakFlops({ peak }: DeviceProfile, type: DType): number | null {
  return peak === null ? null : peak[DTYPES[type].bytes < 4 ? "half" : "single"];
}
