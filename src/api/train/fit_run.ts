/**
 * Fits a run into a byte budget: the fastest combination of save points and loss chunk whose plan fits, or what would
 * help. The choice changes when values are computed and for how long they stay, never what they are, and never which
 * documents form a step.
 */
import { LoramemError } from "../../ffi/error.ts";
import type { Program, ProgramName } from "../graph/program.ts";
import { aligned, bytesOf, type Value } from "../graph/value.ts";
import { buildPrograms, type ModelParts } from "../nn/programs.ts";
import { estimateMix, type PolicyShares, policyShares, trainShares } from "../plan/estimate.ts";
import { programBuffers } from "../plan/liveness.ts";
import { maximumLive } from "../plan/placement.ts";
import type { DeviceProfile } from "../plan/profiles.ts";
import { formatBytes } from "../plan/report.ts";
import { arrange, describePoints, type SavePoints, uniform } from "../plan/save_points.ts";
import { opSeconds, type StepLoad } from "../plan/time.ts";
import { modelParts, planRun, type RunPlan, type RunSpec } from "./run_plan.ts";

/** What may be chosen, and what the choice is judged by. */
export interface FitOptions {
  /** Save points that were asked for; null = choose. */
  readonly savePoints: SavePoints | null;
  /** Rows of logits that exist at a time, as asked for; null = choose. */
  readonly lossChunkTokens: number | null;
  readonly profile: DeviceProfile;
  readonly step: StepLoad;
}

/** One combination, as estimated. */
export interface Candidate {
  readonly savePoints: SavePoints;
  readonly lossChunkTokens: number;
  /** Bytes of weights, trainables and activations. */
  readonly deviceBytes: number;
  /** Seconds of an optimizer step. */
  readonly seconds: number;
}

/** Loss chunks to choose from. Larger ones gain nothing, smaller ones read the output head too often. */
const LOSS_CHUNKS = [1024, 512, 256, 128];

/** "tokensPerMicroBatch" in advice is a multiple of this. */
const TOKEN_STEP = 64;

/** All combinations of a run, fastest first. */
export class FitSearch {
  readonly spec: RunSpec;
  readonly options: FitOptions;
  readonly candidates: readonly Candidate[];
  /** Bytes of the classes that no choice changes: weights and trainables. */
  readonly residentBytes: { readonly weights: number; readonly trainable: number };

  constructor(spec: RunSpec, options: FitOptions) {
    this.spec = spec;
    this.options = options;
    const parts = modelParts(spec, uniform("checkpoint", spec.config.layers));
    const total = (values: readonly Value[]) =>
      values.reduce((sum, value) => sum + aligned(bytesOf(value)), 0);
    this.residentBytes = {
      weights: total(parts.weights.values),
      trainable: total(parts.adapters.values),
    };
    this.candidates = this.#enumerate(parts).sort(
      (a, b) => a.seconds - b.seconds || a.deviceBytes - b.deviceBytes,
    );
  }

  /** The leanest combination. */
  get smallest(): Candidate {
    return this.candidates.reduce((least, one) =>
      one.deviceBytes < least.deviceBytes ? one : least,
    );
  }

  /** Those combinations that no other beats in both bytes and seconds, leanest first. */
  frontier(): Candidate[] {
    const front: Candidate[] = [];
    for (const candidate of this.candidates) {
      const leanest = front[0];
      if (leanest === undefined || candidate.deviceBytes < leanest.deviceBytes)
        front.unshift(candidate);
    }
    return front;
  }

  /** The plan of a combination, made for a budget. */
  plan({ savePoints, lossChunkTokens }: Candidate, budget?: number): RunPlan {
    const spec = { ...this.spec, dims: { ...this.spec.dims, lossChunkTokens } };
    return planRun(spec, savePoints, { timing: this.options, budget });
  }

  /**
   * Plans the fastest combination whose device bytes fit `budget`.
   *
   * @throws {LoramemError} OUT_OF_MEMORY naming the smallest budget that would work, and what would help.
   */
  fit(budget: number): RunPlan {
    for (const candidate of this.candidates) {
      if (candidate.deviceBytes > budget) continue;
      const run = this.plan(candidate, budget);
      if (run.plan.deviceBytes <= budget) return run;
    }
    throw this.#refusal(budget);
  }

  #enumerate(parts: ModelParts): Candidate[] {
    const { profile, step } = this.options;
    const { layers } = parts.config;
    const secondsOf = (op: Program["ops"][number]) => opSeconds(op, profile, step.load);
    const build = (name: ProgramName, points: SavePoints, lossChunkTokens: number) => {
      const dims = { ...parts.dims, lossChunkTokens };
      const made = buildPrograms({ ...parts, dims, savePoints: points }, [name]);
      return made.programs[0] as Program;
    };
    const live = (program: Program) => maximumLive(programBuffers(program)).lowerBound;

    const chunks = this.#lossChunks();
    const shares: PolicyShares = policyShares(
      (policy) => build("train", uniform(policy, layers), chunks[0] as number),
      secondsOf,
    );
    const others = this.spec.programs.filter((name) => name !== "train");
    const withLoss = others.filter((name) => name.startsWith("evaluate"));
    const most = (names: readonly ProgramName[], lossChunkTokens: number) =>
      Math.max(0, ...names.map((name) => live(build(name, parts.savePoints, lossChunkTokens))));
    const rest = most(
      others.filter((name) => !withLoss.includes(name)),
      chunks[0] as number,
    );
    const optimizer = build("optimizer", parts.savePoints, chunks[0] as number);
    const optimizerSeconds = optimizer.ops.reduce((sum, op) => sum + secondsOf(op), 0);
    const resident = this.residentBytes.weights + this.residentBytes.trainable;
    const mixes = this.options.savePoints === null ? allMixes(layers) : [this.options.savePoints];
    return chunks.flatMap((lossChunkTokens) => {
      const outside = trainShares(build("train", parts.savePoints, lossChunkTokens), secondsOf);
      const evaluation = most(withLoss, lossChunkTokens);
      return mixes.map((savePoints): Candidate => {
        const train = estimateMix(shares, outside, savePoints);
        return {
          savePoints,
          lossChunkTokens,
          deviceBytes: resident + Math.max(train.bytes, evaluation, rest),
          seconds: train.seconds * step.microBatches + optimizerSeconds,
        };
      });
    });
  }

  #lossChunks(): number[] {
    const { tokensPerMicroBatch } = this.spec.dims;
    const asked = this.options.lossChunkTokens;
    const chunks = asked === null ? LOSS_CHUNKS : [asked];
    return [...new Set(chunks.map((chunk) => Math.min(chunk, tokensPerMicroBatch)))];
  }

  #refusal(budget: number): LoramemError {
    const { plan, savePoints } = this.plan(this.smallest);
    const { weights, trainable, activations } = plan.classes;
    const message =
      `plan: the run does not fit the memory budget: ${formatBytes(budget)} given, ` +
      `${formatBytes(plan.deviceBytes)} (${plan.deviceBytes} bytes) needed even with save points ` +
      `${describePoints(savePoints)}: weights ${formatBytes(weights)}, trainable ` +
      `${formatBytes(trainable)}, activations ${formatBytes(activations)}: ${this.#advice(budget)}`;
    return new LoramemError("OUT_OF_MEMORY", message, {
      requested: plan.deviceBytes,
      totalFree: budget,
    });
  }

  /** What would make the run fit, by the first class that does not. */
  #advice(budget: number): string {
    const { weights, trainable } = this.residentBytes;
    const raise = "raise memoryBudget";
    if (weights > budget) return `the weights alone do not fit: ${raise}, or take a smaller model`;
    if (weights + trainable > budget)
      return `weights and adapters alone do not fit: ${raise}, or lower the LoRA rank`;
    const ways = [raise];
    const { tokensPerMicroBatch } = this.spec.dims;
    const tokens = largestTokens(this.spec, this.options, budget, tokensPerMicroBatch);
    if (tokens !== null) ways.push(`set tokensPerMicroBatch to ${tokens} or less`);
    if (this.options.savePoints !== null) ways.push('set savePoints to "auto"');
    if (this.options.lossChunkTokens !== null) ways.push('set lossChunkTokens to "auto"');
    if (this.spec.precision === "fp32") ways.push('set precision to "bf16"');
    if (ways.length === 1) ways.push("lower the LoRA rank, promptTokens or answerTokens");
    return ways.join(", or ");
  }
}

/** Every mix of policies, arranged for the lowest peak. */
function allMixes(layers: number): SavePoints[] {
  const mixes: SavePoints[] = [];
  for (let keep = 0; keep <= layers; keep++) {
    for (let dropMlp = 0; keep + dropMlp <= layers; dropMlp++) {
      mixes.push(arrange({ keep, dropMlp, checkpoint: layers - keep - dropMlp }));
    }
  }
  return mixes;
}

/**
 * The largest tokensPerMicroBatch up to `limit` with which a run fits `budget`, and so its longest document; null if not
 * even the smallest does.
 */
export function largestTokens(
  spec: RunSpec,
  options: FitOptions,
  budget: number,
  limit: number,
): number | null {
  const bytesFor = (steps: number) => {
    const dims = { ...spec.dims, tokensPerMicroBatch: steps * TOKEN_STEP };
    // The smallest chunk is the leanest.
    const lossChunkTokens = options.lossChunkTokens ?? (LOSS_CHUNKS.at(-1) as number);
    return new FitSearch({ ...spec, dims }, { ...options, lossChunkTokens }).smallest.deviceBytes;
  };
  let [low, high] = [1, Math.floor(limit / TOKEN_STEP)];
  let [lowBytes, highBytes] = [bytesFor(low), bytesFor(Math.max(low, high))];
  if (lowBytes > budget || high < low) return null;
  if (highBytes <= budget) return high * TOKEN_STEP;
  // Bytes grow nearly linearly, so interpolation takes few tries; halving now and then bounds their number.
  for (let tries = 0; high - low > 1; tries++) {
    const share = tries % 3 === 2 ? 0.5 : (budget - lowBytes) / (highBytes - lowBytes);
    const guess = low + Math.floor(share * (high - low));
    const steps = Math.min(high - 1, Math.max(low + 1, guess));
    const bytes = bytesFor(steps);
    if (bytes <= budget) [low, lowBytes] = [steps, bytes];
    else [high, highBytes] = [steps, bytes];
  }
  return low * TOKEN_STEP;
}
