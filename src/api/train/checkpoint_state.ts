/**
 * What a checkpoint says besides its tensors: where the run is, what must be the same for it to go on bit for bit, and what
 * it had chosen. Loads zod, like the options.
 */
import { z } from "zod";
import type { Precision } from "../amp/precision.ts";
import { badCheckpoint } from "../io/checkpoint_header.ts";
import type { LoraTarget } from "../nn/lora_config.ts";
import type { ResolvedOptions } from "./options.ts";
import { WEIGHT_PLACES } from "./run_plan.ts";

const count = () => z.int().min(0);

const schema = z.strictObject({
  /** Optimizer steps done, skipped ones included. */
  step: count(),
  /** The next step: passes over the data that are complete, and its place in the current one. */
  epoch: count(),
  batch: count(),
  /** What must be the same in the run that goes on, by name. */
  settings: z.record(z.string(), z.union([z.string(), z.number(), z.boolean()])),
  /** What `"auto"` came to, and under which plan. */
  chosen: z.strictObject({
    device: z.string(),
    weights: z.enum(WEIGHT_PLACES),
    savePoints: z.string(),
    lossChunkTokens: count(),
    algorithms: z.string(),
    plan: z.string(),
  }),
  /** The lowest evaluation loss so far, the step after which it was measured, and the data that it was measured on. */
  best: z.strictObject({ step: count(), loss: z.number(), data: z.string() }).nullable(),
  /** The options as given, for people. */
  options: z.record(z.string(), z.unknown()),
});

/** The state of a run between two steps. */
export type CheckpointState = z.output<typeof schema>;

/** What must be the same for a run to go on. */
export type RunSettings = CheckpointState["settings"];

/**
 * Checks a state that was read from a file.
 *
 * @throws {LoramemError} BAD_FILE.
 */
export function readState(json: unknown, file: string): CheckpointState {
  const parsed = schema.safeParse(json);
  if (parsed.success) return parsed.data;
  throw badCheckpoint(file, `its state is malformed at ${parsed.error.issues[0]?.path.join(".")}`);
}

/** What the settings of a run are made of. */
export interface SettingSources {
  readonly options: ResolvedOptions;
  readonly precision: Precision;
  readonly targets: readonly LoraTarget[];
  readonly tokensPerMicroBatch: number;
  readonly totalSteps: number;
  /** Fingerprints. */
  readonly model: string;
  readonly data: string;
}

/** Everything that the bits of a run depend on, by the names of the options. */
export function settingsOf(sources: SettingSources): RunSettings {
  const { options, precision, targets, tokensPerMicroBatch, totalSteps, model, data } = sources;
  const { lossScaleInterval, minLossScale, maxLossScale } = options;
  const lora = targets.map(({ path, rank, scale }) => [
    `lora of ${path}`,
    `rank ${rank}, scale ${scale}`,
  ]);
  return {
    model,
    data,
    precision,
    batchSize: options.batchSize,
    tokensPerMicroBatch,
    dropLast: options.dropLast,
    seed: options.seed,
    learningRate: options.learningRate,
    schedule: options.schedule,
    warmupSteps: options.warmupSteps,
    // A constant rate does not depend on the length of the run, which may then be changed.
    ...(options.schedule === "constant" ? {} : { totalSteps }),
    weightDecay: options.weightDecay,
    beta1: options.beta1,
    beta2: options.beta2,
    adamEps: options.adamEps,
    maxGradNorm: options.maxGradNorm,
    ...(precision === "fp16" ? { lossScaleInterval, minLossScale, maxLossScale } : {}),
    ...Object.fromEntries(lora),
  };
}

/** Differences that are listed by name. */
const LISTED = 4;

/** Characters of a name or value in a message. */
const CLIPPED = 80;

/** What differs between the settings of a run and of a checkpoint, in words; null = nothing. */
export function differences(run: RunSettings, checkpoint: RunSettings): string | null {
  const names = [...new Set([...Object.keys(run), ...Object.keys(checkpoint)])];
  const differing = names.filter((name) => run[name] !== checkpoint[name]);
  if (differing.length === 0) return null;
  const listed = differing.slice(0, LISTED).map((name) => {
    const [now, then] = [run[name] ?? "absent", checkpoint[name] ?? "none"];
    return `${clip(name)} is ${clip(now)}, the checkpoint has ${clip(then)}`;
  });
  const more = differing.length - listed.length;
  return `${listed.join("; ")}${more > 0 ? `; and ${more} more` : ""}`;
}

/** A value of a file that nobody vouches for, short enough for a message. */
export function clip(value: string | number | boolean): string {
  const text = String(value);
  return text.length > CLIPPED ? `${text.slice(0, CLIPPED)}...` : text;
}

/** Options as plain data, without records given in memory, and without the folders and checkpoints of this run. */
export function plainOptions(options: ResolvedOptions): Record<string, unknown> {
  const { data, evalData, runDir, weightsFolder, saveEvery, keepLast, resume, ...others } = options;
  const paths = Object.entries({ data, evalData }).filter(([, from]) => typeof from === "string");
  return JSON.parse(JSON.stringify({ ...Object.fromEntries(paths), ...others }));
}
