/** Sessions at the shapes that peers were measured at, and at one that any machine can run. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Precision } from "../../src/api/amp/precision.ts";
import type { ProgramName } from "../../src/api/graph/program.ts";
import { openSafetensors } from "../../src/api/io/safetensors.ts";
import type { ScalerSettings } from "../../src/api/kernels/mod.ts";
import { Device } from "../../src/api/memory/mod.ts";
import type { SavePolicy } from "../../src/api/plan/save_points.ts";
import type { ExecutionMode } from "../../src/api/run/executor.ts";
import { importAdapters } from "../../src/api/train/adapter_state.ts";
import { loadWeights } from "../../src/api/train/load_weights.ts";
import { planRun, type RunSpec } from "../../src/api/train/run_plan.ts";
import { type OptimizerSettings, Session } from "../../src/api/train/session.ts";
import { type MODELS, specOf } from "../plan/models.ts";
import { randomAdapter, randomCheckpoint, writeCheckpoint } from "./checkpoint.ts";

/** A model, and the documents of a step. */
export interface Shape {
  readonly model: keyof typeof MODELS;
  readonly documents: number;
  /** Of each document. */
  readonly tokens: number;
}

export const SHAPES = {
  "0.5B": { model: "Qwen2.5-0.5B", documents: 8, tokens: 1024 },
  "1B": { model: "Llama-3.2-1B", documents: 4, tokens: 2048 },
  "8B": { model: "Llama-3.1-8B", documents: 2, tokens: 2048 },
  small: { model: "four layers", documents: 4, tokens: 64 },
} as const satisfies Record<string, Shape>;

export type ShapeName = keyof typeof SHAPES;

/** AdamW as torch has it by default, with clipping. The learning rate is that of short runs. */
export const SETTINGS: OptimizerSettings = {
  learningRate: 3e-4,
  beta1: 0.9,
  beta2: 0.999,
  adamEps: 1e-8,
  weightDecay: 0.01,
  maxGradNorm: 1,
};

/** How a shape is run. */
export interface ShapeSetup {
  readonly device: "cpu" | `cuda:${number}`;
  readonly policy?: SavePolicy;
  readonly precision?: Precision;
  readonly mode?: ExecutionMode;
  readonly scaler?: ScalerSettings;
  readonly programs?: readonly ProgramName[];
  /** Default 1024. */
  readonly lossChunkTokens?: number;
}

/** What a shape is planned from: r = 16 on all linears, bf16 weights. */
export function shapeSpec({ model, documents, tokens }: Shape, setup: ShapeSetup): RunSpec {
  const { programs = ["train", "optimizer"] } = setup;
  const dims = {
    tokensPerMicroBatch: documents * tokens,
    documentsPerMicroBatch: documents,
    lossChunkTokens: setup.lossChunkTokens ?? 1024,
    ...(programs.includes("prefill") ? {} : { prefillTokens: 0, contextTokens: 0 }),
  };
  return {
    ...specOf(model, dims),
    precision: setup.precision ?? "bf16",
    backend: setup.device === "cpu" ? "cpu" : "cuda",
    programs,
  };
}

/** An opened shape. */
export interface ShapeSession extends AsyncDisposable {
  readonly device: Device;
  readonly session: Session;
  /** Bytes free on the device before anything was reserved. */
  readonly freeBefore: number;
}

/** Opens a shape with random weights and adapters. */
export async function openShape(
  name: ShapeName,
  setup: ShapeSetup,
  seed = 0,
): Promise<ShapeSession> {
  const spec = shapeSpec(SHAPES[name], setup);
  const opened = await commitShape(spec, setup);
  await loadShape(opened.session, seed);
  return opened;
}

/** Reserves the memory of a shape; weights and adapters are yet to be loaded. */
export async function commitShape(spec: RunSpec, setup: ShapeSetup): Promise<ShapeSession> {
  const { policy = "keep", mode = "graph", scaler = {} } = setup;
  await using undo = new AsyncDisposableStack();
  const device = undo.use(await Device.open(setup.device));
  const freeBefore = freeBytes(device);
  const session = Session.commit(device, planRun(spec, policy), mode, scaler);
  undo.defer(() => session.dispose());
  const stack = undo.move();
  return { device, session, freeBefore, [Symbol.asyncDispose]: () => stack.disposeAsync() };
}

/** Random weights and adapters, by way of files as in every run. */
export async function loadShape(session: Session, seed = 0): Promise<void> {
  const { executor, run } = session;
  const { config } = run.spec;
  const folder = await mkdtemp(join(tmpdir(), "loramem-"));
  try {
    await writeCheckpoint(folder, {}, randomCheckpoint(config, seed));
    await using files = await openSafetensors(folder);
    await using ring = executor.device.createFileRing();
    await loadWeights(executor, run, files, ring);
  } finally {
    await rm(folder, { recursive: true });
  }
  await importAdapters(executor, run, randomAdapter(config, seed));
}

/** Bytes free on the device, as its driver says. */
export function freeBytes(device: Device): number {
  return Number(device.info().memoryFree);
}
