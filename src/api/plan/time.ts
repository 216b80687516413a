/**
 * The time model: an op takes as long as its arithmetic or its memory traffic, whichever is slower, plus a launch
 * (roofline: Williams, Waterman, Patterson 2009). Good enough to tell which plan is faster, and by how much.
 */
import type { Load, Work } from "../graph/cost.ts";
import type { Op, Phase, Program } from "../graph/program.ts";
import { DTYPES } from "../graph/value.ts";
import type { DeviceProfile } from "./profiles.ts";

/** How an optimizer step is made up. */
export interface StepLoad {
  /** The mean micro-batch. */
  readonly load: Load;
  /** Micro-batches of a step, on average. */
  readonly microBatches: number;
}

/** A predicted optimizer step. */
export interface StepForecast {
  readonly seconds: number;
  readonly tokensPerSecond: number;
  /** Seconds by phase; the head and its loss count as forward. */
  readonly phases: Readonly<Record<Phase, number>>;
  readonly profile: DeviceProfile;
  readonly step: StepLoad;
}

/** One document that fills the micro-batch, every token labelled: the slowest load of a plan for T tokens. */
export function fullLoad(tokens: number): StepLoad {
  const pairs = (tokens * (tokens + 1)) / 2;
  return { load: { tokens, labelled: tokens, pairs }, microBatches: 1 };
}

/** Seconds of one kernel. */
export function workSeconds({ flops, bytes, unit, type }: Work, profile: DeviceProfile): number {
  const traffic = bytes / profile.bandwidth;
  if (unit === "memory") return profile.launch + traffic;
  const rate = profile[unit][DTYPES[type].bytes < 4 ? "half" : "single"];
  return profile.launch + Math.max(flops / rate, traffic);
}

/** Seconds of one op. */
export function opSeconds(op: Op, profile: DeviceProfile, load: Load): number {
  return op.kind
    .cost(op.attributes, load)
    .reduce((seconds, work) => seconds + workSeconds(work, profile), 0);
}

/** Predicts a step from the programs of a plan. */
export function forecastStep(
  programs: Iterable<Program>,
  profile: DeviceProfile,
  step: StepLoad,
): StepForecast {
  const phases: Record<Phase, number> = { forward: 0, recompute: 0, backward: 0, optimizer: 0 };
  for (const { name, ops } of programs) {
    const times = name === "train" ? step.microBatches : 1;
    if (name !== "train" && name !== "optimizer") continue;
    for (const op of ops) phases[op.phase] += times * opSeconds(op, profile, step.load);
  }
  const seconds = Object.values(phases).reduce((sum, part) => sum + part, 0);
  const tokensPerSecond = (step.load.tokens * step.microBatches) / seconds;
  return { seconds, tokensPerSecond, phases, profile, step };
}
