/**
 * Fits a run into a byte budget: the fastest combination of weight place, save points and loss chunk whose plan fits, or
 * what would help. Weights stay on the device where that fits; they are streamed where the budget needs it, from a file
 * where host memory does not hold them either. The choice changes when values are computed and for how long they stay, never
 * what they are, and never which documents form a step.
 */
import { LoramemError } from "../../ffi/error.ts";
import type { Program, ProgramName } from "../graph/program.ts";
import { aligned, bytesOf, type MemoryClass, makeValue, type Value } from "../graph/value.ts";
import type { OffloadedInput } from "../graph/weave.ts";
import { type Backend, buildPrograms, type ModelParts } from "../nn/programs.ts";
import {
  estimateBytes,
  estimateSeconds,
  policyShares,
  type Schedule,
  scheduleOf,
  trainShares,
} from "../plan/estimate.ts";
import { programBuffers } from "../plan/liveness.ts";
import { maximumLive } from "../plan/placement.ts";
import type { DeviceProfile } from "../plan/profiles.ts";
import { formatBytes } from "../plan/report.ts";
import {
  arrange,
  countPolicies,
  describePoints,
  isOffloaded,
  type SavePoints,
  uniform,
} from "../plan/save_points.ts";
import { opSeconds, type StepLoad } from "../plan/time.ts";
import {
  modelParts,
  planRun,
  type RunPlan,
  type RunSpec,
  WEIGHT_PLACES,
  type WeightPlace,
} from "./run_plan.ts";

/** What may be chosen, and what the choice is judged by. */
export interface FitOptions {
  /** Save points that were asked for; null = choose. */
  readonly savePoints: SavePoints | null;
  /** Rows of logits that exist at a time, as asked for; null = choose. */
  readonly lossChunkTokens: number | null;
  /** Place of the weights, as asked for; null, the default = choose. */
  readonly weights?: WeightPlace | null;
  /** Page-locked host bytes that weights and layer inputs may take. Default: no limit. */
  readonly hostBudget?: number;
  readonly profile: DeviceProfile;
  readonly step: StepLoad;
}

/** One combination, as estimated. */
export interface Candidate {
  readonly weights: WeightPlace;
  readonly savePoints: SavePoints;
  readonly lossChunkTokens: number;
  /** Bytes of weights, trainables and activations. */
  readonly deviceBytes: number;
  /** Page-locked host bytes of streamed weights and offloaded layer inputs. */
  readonly hostBytes: number;
  /** Seconds of an optimizer step. */
  readonly seconds: number;
}

/**
 * Loss chunks to choose from. Larger ones gain nothing, smaller ones read the output head too often. On a GPU the number of
 * rows decides in which order a product is summed: with one choice no budget changes a bit.
 */
const LOSS_CHUNKS: Readonly<Record<Backend, readonly [number, ...number[]]>> = {
  cpu: [1024, 512, 256, 128],
  cuda: [512],
};

/** A chunk that can be asked for where the budget is short. */
const SMALL_CHUNK = 128;

/** "tokensPerMicroBatch" in advice is a multiple of this. */
const TOKEN_STEP = 64;

/** Combinations try at most this many numbers of offloaded layers. */
const OFFLOAD_COUNTS = 8;

/** All combinations of a run: by the place of the weights first, then the fastest first. */
export class FitSearch {
  readonly spec: RunSpec;
  readonly options: FitOptions;
  readonly candidates: readonly Candidate[];
  /** Bytes of the class that no choice changes. */
  readonly trainableBytes: number;

  /** @param mixes Save points to choose from. */
  constructor(spec: RunSpec, options: FitOptions, mixes = mixesOf(spec, options)) {
    this.spec = spec;
    this.options = options;
    const parts = modelParts(spec, uniform("checkpoint", spec.config.layers));
    this.trainableBytes = bytesOfAll(parts.adapters.values);
    this.candidates = this.#enumerate(parts, mixes).sort(
      (a, b) =>
        WEIGHT_PLACES.indexOf(a.weights) - WEIGHT_PLACES.indexOf(b.weights) ||
        a.seconds - b.seconds ||
        a.hostBytes - b.hostBytes ||
        a.deviceBytes - b.deviceBytes,
    );
  }

  /** The leanest combination that host memory allows; without one, the leanest. */
  get smallest(): Candidate {
    return leanestOf(this.candidates, this.#hostBudget);
  }

  /** Those combinations that a budget would get, leanest first. */
  frontier(): Candidate[] {
    const front: Candidate[] = [];
    for (const candidate of this.candidates) {
      const leanest = front[0];
      if (candidate.hostBytes > this.#hostBudget) continue;
      if (leanest === undefined || candidate.deviceBytes < leanest.deviceBytes)
        front.unshift(candidate);
    }
    return front;
  }

  /** The plan of a combination, made for a budget. */
  plan({ weights, savePoints, lossChunkTokens }: Candidate, budget?: number): RunPlan {
    const spec = { ...this.spec, weights, dims: { ...this.spec.dims, lossChunkTokens } };
    return planRun(spec, savePoints, { timing: this.options, budget });
  }

  /**
   * Plans the first combination whose device bytes fit `budget`, and its host bytes theirs.
   *
   * @throws {LoramemError} OUT_OF_MEMORY naming the smallest budget that would work, and what would help.
   */
  fit(budget: number): RunPlan {
    for (const candidate of this.candidates) {
      if (candidate.deviceBytes > budget || candidate.hostBytes > this.#hostBudget) continue;
      const run = this.plan(candidate, budget);
      if (run.plan.deviceBytes <= budget) return run;
    }
    throw this.#refusal(budget);
  }

  get #hostBudget(): number {
    return this.options.hostBudget ?? Number.POSITIVE_INFINITY;
  }

  #enumerate(parts: ModelParts, mixes: readonly SavePoints[]): Candidate[] {
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
    const shares = policyShares(
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
    const places = this.#places();
    return chunks.flatMap((lossChunkTokens) => {
      const outside = trainShares(build("train", parts.savePoints, lossChunkTokens), secondsOf);
      const others = Math.max(most(withLoss, lossChunkTokens), rest);
      return mixes.flatMap((savePoints) => {
        const train = estimateBytes(shares, outside.head, savePoints);
        return places.map(({ weights, deviceBytes, hostBytes, scheduleFor }): Candidate => {
          const { schedule, bytes } = scheduleFor(savePoints, outside.runs);
          const seconds = estimateSeconds(shares, outside.runs, savePoints, schedule, profile);
          return {
            weights,
            savePoints,
            lossChunkTokens,
            deviceBytes: deviceBytes + this.trainableBytes + Math.max(train, others),
            hostBytes: hostBytes + bytes,
            seconds: seconds * step.microBatches + optimizerSeconds,
          };
        });
      });
    });
  }

  /** The places of the weights to choose from, with what they take and how they are copied. */
  #places() {
    const asked = this.options.weights ?? null;
    return (asked === null ? WEIGHT_PLACES : [asked]).map((weights) => {
      const { weights: values, type, config, dims } = modelParts({ ...this.spec, weights }, []);
      const layers = values.stream?.layers ?? [];
      const input = [dims.tokensPerMicroBatch, config.hiddenSize];
      const offload = (layer: number): OffloadedInput => {
        const make = (memory: MemoryClass) => makeValue("hidden", type, input, { memory, layer });
        const [restored, host] = [make("activations"), make("host")];
        return { layer, input: make("activations"), host, restored };
      };
      // The copies of a mix depend on its offloaded layers alone.
      const known = new Map<string, { schedule: Schedule; bytes: number }>();
      const scheduleFor = (points: SavePoints, runs: Parameters<typeof scheduleOf>[0]) => {
        const offloaded = [...points.keys()].filter((layer) => isOffloaded(points, layer));
        const key = String(offloaded);
        const inputs = offloaded.map(offload);
        const made = known.get(key) ?? {
          schedule: scheduleOf(runs, values.stream, inputs),
          bytes: bytesOfAll(inputs.map(({ host }) => host)),
        };
        known.set(key, made);
        return made;
      };
      const onDevice = values.values.filter((value) => !layers.includes(value));
      const deviceBytes = bytesOfAll(onDevice);
      const hostBytes = bytesOfAll(layers.filter(({ memory }) => memory === "host"));
      return { weights, deviceBytes, hostBytes, scheduleFor };
    });
  }

  #lossChunks(): number[] {
    const { backend, dims } = this.spec;
    const { tokensPerMicroBatch } = dims;
    const asked = this.options.lossChunkTokens;
    const chunks = asked === null ? LOSS_CHUNKS[backend] : [asked];
    return [...new Set(chunks.map((chunk) => Math.min(chunk, tokensPerMicroBatch)))];
  }

  #refusal(budget: number): LoramemError {
    const { plan, savePoints, spec } = this.plan(this.smallest);
    const { weights, trainable, activations } = plan.classes;
    const streamed = spec.weights === "resident" ? "" : " and streamed weights";
    const message =
      `plan: the run does not fit the memory budget: ${formatBytes(budget)} given, ` +
      `${formatBytes(plan.deviceBytes)} (${plan.deviceBytes} bytes) needed even with save points ` +
      `${describePoints(savePoints)}${streamed}: weights ${formatBytes(weights)}, trainable ` +
      `${formatBytes(trainable)}, activations ${formatBytes(activations)}: ${this.#advice(budget)}`;
    return new LoramemError("OUT_OF_MEMORY", message, {
      requested: plan.deviceBytes,
      totalFree: budget,
    });
  }

  /** What would make the run fit, by the first class that does not. */
  #advice(budget: number): string {
    const { plan } = this.plan(this.smallest);
    const { weights, trainable } = plan.classes;
    const ways = ["raise memoryBudget"];
    const sorted = this.candidates.toSorted((a, b) => a.hostBytes - b.hostBytes);
    const lacksHost = sorted.find(({ deviceBytes }) => deviceBytes <= budget);
    if (lacksHost !== undefined) {
      const [needed, given] = [lacksHost.hostBytes, this.#hostBudget].map(formatBytes);
      ways.push(`give ${needed} of host memory with hostMemoryBudget (${given} now)`);
    }
    if (this.options.weights === "resident" && this.#streamedBytes() <= budget)
      ways.push(
        'set weights to "auto" or "stream", which keeps those of the layers in host memory, or "file"',
      );
    if (weights > budget)
      return `the weights alone do not fit: ${[...ways, "take a smaller model"].join(", or ")}`;
    if (weights + trainable > budget)
      return `weights and adapters alone do not fit: ${[...ways, "lower the LoRA rank"].join(", or ")}`;
    const { tokensPerMicroBatch } = this.spec.dims;
    const tokens = largestTokens(this.spec, this.options, budget, tokensPerMicroBatch);
    if (tokens !== null) ways.push(`set tokensPerMicroBatch to ${tokens} or less`);
    if (this.options.savePoints !== null) ways.push('set savePoints to "auto"');
    if (this.options.lossChunkTokens !== null) ways.push('set lossChunkTokens to "auto"');
    const small = leanest(this.spec, { ...this.options, lossChunkTokens: SMALL_CHUNK });
    if (small.deviceBytes <= budget) ways.push(`set lossChunkTokens to ${SMALL_CHUNK}`);
    if (this.spec.precision === "fp32") ways.push('set precision to "bf16"');
    if (ways.length === 1) ways.push("lower the LoRA rank, promptTokens or answerTokens");
    return ways.join(", or ");
  }

  /** Bytes of the leanest combination with streamed weights. */
  #streamedBytes(): number {
    const options = { ...this.options, weights: "stream" } as const;
    return leanest(this.spec, options).deviceBytes;
  }
}

function bytesOfAll(values: readonly Value[]): number {
  return values.reduce((sum, value) => sum + aligned(bytesOf(value)), 0);
}

/** The mixes of policies to choose from, arranged for the lowest peak. */
function mixesOf({ config: { layers } }: RunSpec, { savePoints }: FitOptions): SavePoints[] {
  if (savePoints !== null) return [savePoints];
  const mixes: SavePoints[] = [];
  const stride = Math.ceil(layers / OFFLOAD_COUNTS);
  for (let keep = 0; keep <= layers; keep++) {
    for (let dropMlp = 0; keep + dropMlp <= layers; dropMlp++) {
      const rest = layers - keep - dropMlp;
      for (let offload = 0; offload <= rest; offload += stride)
        mixes.push(arrange({ keep, dropMlp, checkpoint: rest - offload, offload }));
    }
  }
  return mixes;
}

/** The leanest combination within the host budget, or else beyond it, found without trying all of them. */
function leanest(spec: RunSpec, options: FitOptions): Candidate {
  // The smallest chunk and the leanest policies are the leanest.
  const lossChunkTokens = options.lossChunkTokens ?? (LOSS_CHUNKS[spec.backend].at(-1) as number);
  // Host memory may be too little for the inputs of all layers; the last layer computes less again where it keeps more.
  const lean = mixesOf(spec, options).filter((points) => {
    const { keep, dropMlp } = countPolicies(points);
    return options.savePoints !== null || keep + dropMlp <= 1;
  });
  const found = new FitSearch(spec, { ...options, lossChunkTokens }, lean).candidates;
  return leanestOf(found, options.hostBudget ?? Number.POSITIVE_INFINITY);
}

/** The leanest candidate within a host budget; if there is none, the leanest. */
function leanestOf(candidates: readonly Candidate[], hostBudget: number): Candidate {
  const allowed = candidates.filter(({ hostBytes }) => hostBytes <= hostBudget);
  return (allowed.length > 0 ? allowed : candidates).reduce((least, one) =>
    one.deviceBytes < least.deviceBytes ? one : least,
  );
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
    return leanest({ ...spec, dims }, options).deviceBytes;
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
