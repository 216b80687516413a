/**
 * The time model: an op takes as long as its arithmetic or its memory traffic, whichever is slower, plus a launch
 * (roofline: Williams, Waterman, Patterson 2009). Good enough to tell which plan is faster, and by how much.
 */
import { documentPairs, type Load, type Work } from "../graph/cost.ts";
import type { Op, Phase, Program, Transfer } from "../graph/program.ts";
import { bytesOf, DTYPES } from "../graph/value.ts";
import type { DeviceProfile } from "./profiles.ts";

/** How an optimizer step is made up. */
export interface StepLoad {
  /** The mean micro-batch. */
  readonly load: Load;
  /** Micro-batches of a step, on average. */
  readonly microBatches: number;
}

/** What the time of a step goes to: the phases of its ops, and waiting for copies from and to the host. */
export type StepPhase = Phase | "waiting";

/** A predicted optimizer step. */
export interface StepForecast {
  readonly seconds: number;
  readonly tokensPerSecond: number;
  /** Seconds by phase; the head and its loss count as forward. */
  readonly phases: Readonly<Record<StepPhase, number>>;
  readonly profile: DeviceProfile;
  readonly step: StepLoad;
}

/**
 * One document that fills the micro-batch, every token labelled: the slowest load of a plan for T tokens.
 *
 * @param window Of the model's sliding layers; 0 = none.
 */
export function fullLoad(tokens: number, window = 0): StepLoad {
  const pairs = documentPairs(tokens);
  const windowPairs = documentPairs(tokens, window);
  return { load: { tokens, labelled: tokens, pairs, windowPairs }, microBatches: 1 };
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

/**
 * The clocks of a step: ops run one after the other, and beside them the copies of each direction. A copy starts when the
 * ops before it and the copies of its direction have ended.
 */
export class StepClock {
  /** When the ops so far have ended. */
  ops = 0;
  /** Seconds in which ops waited for copies. */
  waiting = 0;
  readonly #profile: DeviceProfile;
  readonly #links: Record<Direction, number> = { toDevice: 0, toHost: 0, fromFile: 0 };
  readonly #ended = new Map<unknown, number>();

  constructor(profile: DeviceProfile) {
    this.#profile = profile;
  }

  /** Lets ops run. */
  run(seconds: number): void {
    this.ops += seconds;
  }

  /** Starts a copy. @param to What it is awaited by. */
  copy(to: unknown, bytes: number, direction: Direction): void {
    this.#call();
    const { launch, link, disk } = this.#profile;
    const start = Math.max(this.#links[direction], this.ops);
    const end = start + launch + bytes / (direction === "fromFile" ? Math.min(disk, link) : link);
    this.#links[direction] = end;
    this.#ended.set(to, end);
  }

  /** Lets the ops wait for the last copy to something; one that was not started here has ended before. */
  await(to: unknown): void {
    this.#call();
    const end = Math.max(this.ops, this.#ended.get(to) ?? 0);
    this.waiting += end - this.ops;
    this.ops = end;
  }

  /** A call of a stream between two recordings costs a launch. */
  #call(): void {
    this.ops += this.#profile.launch;
    this.waiting += this.#profile.launch;
  }
}

/** Way of a copy; those of different ways run side by side. */
export type Direction = "toDevice" | "toHost" | "fromFile";

/** Way of a copy. */
export function directionOf({ to, from }: Transfer): Direction {
  if (from.memory === "file") return "fromFile";
  return to.memory === "host" ? "toHost" : "toDevice";
}

/** Predicts a step from the programs of a plan. */
export function forecastStep(
  programs: Iterable<Program>,
  profile: DeviceProfile,
  step: StepLoad,
): StepForecast {
  const phases: Record<StepPhase, number> = {
    forward: 0,
    recompute: 0,
    backward: 0,
    optimizer: 0,
    waiting: 0,
  };
  for (const { name, ops } of programs) {
    const times = name === "train" ? step.microBatches : 1;
    if (name !== "train" && name !== "optimizer") continue;
    const clock = new StepClock(profile);
    for (const op of ops) {
      const call = op.kind.bind(op.attributes);
      if ("copyTo" in call) {
        const { copyTo: to, copyFrom: from } = call;
        clock.copy(to, bytesOf(from), directionOf({ to, from }));
      }
      if ("awaited" in call) clock.await(call.awaited);
      for (const work of op.kind.cost(op.attributes, step.load)) {
        const seconds = workSeconds(work, profile);
        clock.run(seconds);
        phases[work.again === true ? "recompute" : op.phase] += times * seconds;
      }
    }
    phases.waiting += times * clock.waiting;
  }
  const seconds = Object.values(phases).reduce((sum, part) => sum + part, 0);
  const tokensPerSecond = (step.load.tokens * step.microBatches) / seconds;
  return { seconds, tokensPerSecond, phases, profile, step };
}
