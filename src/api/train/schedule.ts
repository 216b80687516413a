/**
 * Learning-rate schedules: pure functions of the step, so that a resumed run continues the same curve. The device works the
 * rate out by the same formula (csrc/core/step_rule.h): only there is known which steps were skipped.
 */
import type { Schedule } from "../kernels/step_structs.ts";

/** Names of the schedules. */
export const SCHEDULES = ["cosine", "linear", "constant"] as const satisfies readonly Schedule[];

export type { Schedule };

/** What a schedule depends on. */
export interface ScheduleOptions {
  readonly schedule: Schedule;
  /** Peak rate. */
  readonly learningRate: number;
  /** Steps of linear warm-up; step s of them runs at (s + 1) / warmupSteps of the schedule. */
  readonly warmupSteps: number;
  /** Steps of the whole run, warm-up included. */
  readonly totalSteps: number;
}

/**
 * The rate of the step after `step` applied updates: linear warm-up times a factor that falls from 1 to 0 over the run.
 *
 * `cosine` falls as (1 + cos(pi s / S)) / 2 (Loshchilov & Hutter 2016, arXiv:1608.03983), `linear` as 1 - s / S,
 * `constant` not at all.
 */
export function learningRateAt(step: number, options: ScheduleOptions): number {
  const { schedule, learningRate, warmupSteps, totalSteps } = options;
  const warmup = warmupSteps > 0 ? Math.min(1, (step + 1) / warmupSteps) : 1;
  const progress = Math.min(1, step / Math.max(1, totalSteps));
  const decay = {
    cosine: 0.5 * (1 + Math.cos(Math.PI * progress)),
    linear: 1 - progress,
    constant: 1,
  };
  return learningRate * warmup * decay[schedule];
}
