/** The shapes that PEFT was measured at, as searches and as documents; on the CPU one small model stands for them. */
import type { Document } from "../src/api/data/conversation.ts";
import type { ProgramName } from "../src/api/graph/program.ts";
import { Device } from "../src/api/memory/mod.ts";
import type { DeviceProfile } from "../src/api/plan/profiles.ts";
import { type Candidate, FitSearch } from "../src/api/train/fit_run.ts";
import { profileOfDevice } from "../src/api/train/own_profile.ts";
import { randomDocuments } from "../src/api/train/random_data.ts";
import { specOf } from "../tests/plan/models.ts";
import { SHAPES, type Shape, type ShapeSetup, shapeSpec } from "../tests/shapes/session.ts";
import { randomLoad } from "./random_session.ts";

export type DeviceName = ShapeSetup["device"];

/** The shapes of a device. */
export function shapesOf(device: DeviceName): readonly Shape[] {
  return device === "cpu" ? [SHAPES.small] : [SHAPES["0.5B"], SHAPES["1B"], SHAPES["8B"]];
}

/** The device of a benchmark, `"auto"` resolved, and its profile as a training would choose it. */
export async function benchDevice(name: string) {
  await using opened = await Device.open(name as DeviceName | "auto");
  const profile = await profileOfDevice(opened.kind, String(opened.info().name ?? opened.kind));
  return { device: opened.kind as DeviceName, profile };
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
  const { documents, tokens } = shape;
  const setup = { device, ...(programs === undefined ? {} : { programs }) };
  return new FitSearch(shapeSpec(shape, setup), {
    savePoints: null,
    lossChunkTokens: null,
    hostBudget: 0,
    weights: (choices.hostBudget ?? 0) > 0 ? null : "resident", // random weights go to memory, never to a file
    ...choices,
    profile,
    step: { load: randomLoad(documents, tokens), microBatches: 1 },
  });
}

/** Documents of a shape. */
export function shapeDocuments({ model, documents, tokens }: Shape): Document[] {
  return randomDocuments(specOf(model).config.vocabSize, documents, tokens);
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
