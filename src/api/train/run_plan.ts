/**
 * From sizes to a plan: builds the programs of a run and the staging blocks through which data comes and goes. Pure: no
 * device, no weights, no native library.
 */
import { activationType, type Precision, weightType } from "../amp/precision.ts";
import type { ProgramName } from "../graph/program.ts";
import { type DType, type MemoryClass, makeValue, type Value } from "../graph/value.ts";
import { type Adapters, layoutAdapters } from "../nn/adapters.ts";
import type { ModelConfig } from "../nn/config.ts";
import type { LoraTarget } from "../nn/lora_config.ts";
import {
  type Backend,
  buildPrograms,
  type ModelParts,
  type ProgramSet,
  type StepDims,
} from "../nn/programs.ts";
import { type DecoderWeights, layoutWeights, streamLayers } from "../nn/weights.ts";
import { makePlan, type Plan, type PlanInput } from "../plan/plan.ts";
import { type SavePoints, type SavePolicy, uniform } from "../plan/save_points.ts";

/** What a run is planned from. */
export interface RunSpec {
  readonly config: ModelConfig;
  readonly targets: readonly LoraTarget[];
  /** Element type in which the checkpoint stores a tensor. */
  readonly dtypeOf: (tensor: string) => DType;
  readonly precision: Precision;
  readonly backend: Backend;
  readonly dims: StepDims;
  readonly programs: readonly ProgramName[];
  /** Default `"resident"`. */
  readonly weights?: WeightPlace;
  /** Whether checkpoints are written, which takes host memory for one copy of the state. Default false. */
  readonly snapshot?: boolean;
}

/**
 * Where the weights of the decoder layers are: all of them on the device, or in page-locked host memory (`"stream"`) or in a
 * file, from where they come layer by layer, one ahead of the layer that computes.
 */
export type WeightPlace = "resident" | "stream" | "file";

/** Every place of the weights, fastest first. */
export const WEIGHT_PLACES: readonly WeightPlace[] = ["resident", "stream", "file"];

/** Page-locked host blocks. */
export interface Staging {
  /** Two, so that the next micro-batch is packed while the last one is copied. */
  readonly batches: readonly [Value, Value];
  readonly generation: Value | null;
  readonly token: Value;
  readonly control: Value;
  readonly scaler: Value | null;
  readonly metrics: Value;
  /** Bytes on their way between files and the device. */
  readonly transfer: Value;
}

/** A value on the device and the block on the host that it is copied to for a checkpoint. */
export interface SnapshotValue {
  readonly value: Value;
  readonly copy: Value;
}

/** A planned run. */
export interface RunPlan {
  readonly spec: RunSpec;
  readonly savePoints: SavePoints;
  readonly weights: DecoderWeights;
  readonly adapters: Adapters;
  readonly set: ProgramSet;
  readonly staging: Staging;
  /** What a run must remember to go on, and its copy on the host; empty without checkpoints. */
  readonly snapshot: readonly SnapshotValue[];
  readonly plan: Plan;
}

/** Bytes of the block through which weights are loaded and adapters saved. */
export const TRANSFER_BYTES = 4 << 20;

/** What programs are built from, under given save points. */
export function modelParts(spec: RunSpec, savePoints: SavePoints): ModelParts {
  const { config, dims, backend } = spec;
  const type = activationType(spec.precision);
  const positions = Math.max(dims.tokensPerMicroBatch, dims.contextTokens);
  const dtypeOf = (tensor: string) => weightType(spec.precision, spec.dtypeOf(tensor));
  const resident = layoutWeights(config, dtypeOf, positions);
  const { weights: place = "resident" } = spec;
  const weights =
    place === "resident" ? resident : streamLayers(resident, place === "stream" ? "host" : "file");
  const adapters = layoutAdapters(config, spec.targets, type);
  return { config, weights, adapters, type, dims, savePoints, backend };
}

/**
 * Plans a run under given save points: one policy for all layers, or one each.
 *
 * @param about What to predict times from, and the budget.
 */
export function planRun(
  spec: RunSpec,
  points: SavePolicy | SavePoints,
  about: Pick<PlanInput, "timing" | "budget"> = {},
): RunPlan {
  const savePoints = typeof points === "string" ? uniform(points, spec.config.layers) : points;
  const parts = modelParts(spec, savePoints);
  const { weights, adapters } = parts;
  const set = buildPrograms(parts, spec.programs);
  const like = (name: string, { dtype, shape }: Value, memory: MemoryClass) =>
    makeValue(name, dtype, shape, { memory });
  const hostLike = (name: string, of: Value) => like(name, of, "staging");
  const staging: Staging = {
    batches: [
      hostLike("staging.batch0", set.batch.block),
      hostLike("staging.batch1", set.batch.block),
    ],
    generation:
      set.generation === null ? null : hostLike("staging.generation", set.generation.block),
    token: makeValue("staging.token", "i32", [1], { memory: "staging" }),
    control: hostLike("staging.control", adapters.control),
    scaler: adapters.scaler === null ? null : hostLike("staging.scaler", adapters.scaler),
    metrics: hostLike("staging.metrics", adapters.metrics),
    transfer: makeValue("staging.transfer", "f32", [TRANSFER_BYTES / 4], { memory: "staging" }),
  };
  const blocks = [
    ...staging.batches,
    staging.generation,
    staging.token,
    staging.control,
    staging.scaler,
    staging.metrics,
  ];
  const snapshot = (spec.snapshot === true ? rememberedValues(adapters) : []).map((value) => ({
    value,
    copy: like(`snapshot.${value.name}`, value, "host"),
  }));
  const copies = snapshot.map(({ copy }) => copy);
  const host = [...blocks, staging.transfer, ...set.offloaded];
  // Copies of the state first: on a page border, as in the file, they are written without a detour.
  const resident = [...copies, ...weights.values, ...adapters.values, ...host];
  const plan = makePlan({
    programs: set.programs,
    resident: resident.filter((value) => value !== null),
    ...about,
  });
  return { spec, savePoints, weights, adapters, set, staging, snapshot, plan };
}

/** What changes from step to step and is needed for the next one, in the order of a checkpoint. */
export function rememberedValues({ master, m, v, state, scaler }: Adapters): Value[] {
  return [master, m, v, state, ...(scaler === null ? [] : [scaler])];
}
