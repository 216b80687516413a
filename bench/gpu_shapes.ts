/** The shapes that PEFT was measured at, as plans and as documents; on the CPU one small model stands for them. */
import type { Document } from "../src/api/data/conversation.ts";
import type { ProgramName } from "../src/api/graph/program.ts";
import { Device } from "../src/api/memory/mod.ts";
import { type DeviceProfile, profileOf } from "../src/api/plan/profiles.ts";
import { type Candidate, FitSearch } from "../src/api/train/fit_run.ts";
import type { RunSpec } from "../src/api/train/run_plan.ts";
import { type MODELS, specOf } from "../tests/plan/models.ts";
import { randomDocuments, randomLoad } from "./random_session.ts";

export type ModelName = keyof typeof MODELS;
export type DeviceName = "cpu" | `cuda:${number}`;

/** Model, documents, tokens of each. */
export type Shape = readonly [model: ModelName, count: number, tokens: number];

const GPU_SHAPES: readonly Shape[] = [
  ["Qwen2.5-0.5B", 8, 1024],
  ["Llama-3.2-1B", 4, 2048],
  ["Llama-3.1-8B", 2, 2048],
];
const CPU_SHAPES: readonly Shape[] = [["four layers", 2, 128]];

/** The shapes of a device. */
export function shapesOf(device: DeviceName): readonly Shape[] {
  return device === "cpu" ? CPU_SHAPES : GPU_SHAPES;
}

/** The device of a benchmark, `"auto"` resolved, and its profile as a training would choose it. */
export async function benchDevice(name: string) {
  await using opened = await Device.open(name as DeviceName | "auto");
  const profile = profileOf(opened.kind, String(opened.info().name ?? opened.kind));
  return { device: opened.kind as DeviceName, profile };
}

const PROGRAMS: readonly ProgramName[] = ["train", "optimizer"];

/** What a shape is planned from: bf16 on a GPU, r = 16 on all linears. */
export function shapeSpec(
  [model, count, tokens]: Shape,
  device: DeviceName,
  programs: readonly ProgramName[] = PROGRAMS,
): RunSpec {
  const generates = programs.includes("prefill");
  const spec = specOf(model, {
    tokensPerMicroBatch: count * tokens,
    documentsPerMicroBatch: count,
    ...(generates ? {} : { prefillTokens: 0, contextTokens: 0 }),
  });
  const backend = device === "cpu" ? ("cpu" as const) : ("cuda" as const);
  return { ...spec, backend, programs };
}

/** What plans of a shape may use. */
export interface ShapeChoices {
  /** Default: training alone. */
  readonly programs?: readonly ProgramName[];
  /** Page-locked host memory that weights and layer inputs may take. Default 0. */
  readonly hostBudget?: number;
  /** Default: wherever they are best. */
  readonly weights?: "resident" | "stream";
}

/** All combinations of a shape, priced by a profile. */
export function searchShape(
  shape: Shape,
  device: DeviceName,
  profile: DeviceProfile,
  { programs, ...choices }: ShapeChoices = {},
): FitSearch {
  const [, count, tokens] = shape;
  return new FitSearch(shapeSpec(shape, device, programs), {
    savePoints: null,
    lossChunkTokens: null,
    hostBudget: 0,
    weights: (choices.hostBudget ?? 0) > 0 ? null : "resident", // random weights go to memory, never to a file
    ...choices,
    profile,
    step: { load: randomLoad(count, tokens), microBatches: 1 },
  });
}

/** Documents of a shape. */
export function shapeDocuments([model, count, tokens]: Shape): Document[] {
  return randomDocuments(specOf(model).config.vocabSize, count, tokens);
}

/** Some of the combinations that no other beats, evenly over their bytes, both ends among them. */
export function spread(front: readonly Candidate[], count: number): Candidate[] {
  const [low, high] = [front[0]?.deviceBytes ?? 0, front.at(-1)?.deviceBytes ?? 0];
  const places = Array.from({ length: count }, (_, index) =>
    front.findLast(
      ({ deviceBytes }) => deviceBytes <= low + ((high - low) * index) / Math.max(1, count - 1),
    ),
  );
  return front.filter((candidate) => places.includes(candidate));
}
