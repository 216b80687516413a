/**
 * A session: a model with adapters on a device, and the moves a trainer makes with it. It knows documents and steps, but
 * neither epochs nor files of data.
 */
import { LoramemError } from "../../ffi/error.ts";
import { activationType } from "../amp/precision.ts";
import { packScaler } from "../amp/scaler_bytes.ts";
import type { Document } from "../data/conversation.ts";
import { type PackedMicroBatch, packDocuments } from "../data/packing.ts";
import type { Load } from "../graph/cost.ts";
import type { ProgramName } from "../graph/program.ts";
import { DTYPES } from "../graph/value.ts";
import { type ScalerSettings, scalerValues } from "../kernels/scaler.ts";
import {
  packOptimizerControl,
  readStepMetrics,
  type Schedule,
  type StepMetrics,
} from "../kernels/step_structs.ts";
import type {
  Device,
  Event,
  PerformanceMonitor,
  PerformanceSummary,
  StepPerformance,
} from "../memory/mod.ts";
import { modelFlops, peakFlops } from "../plan/model_flops.ts";
import type { Algorithms } from "../run/choices.ts";
import { type ExecutionMode, Executor } from "../run/executor.ts";
import { InputEvents, InputPipeline } from "./input_pipeline.ts";
import { loadOf } from "./run_inputs.ts";
import type { RunPlan } from "./run_plan.ts";

/** Settings of the optimizer. */
export interface OptimizerSettings {
  /** Peak learning rate. */
  readonly learningRate: number;
  /** Default `"constant"`. */
  readonly schedule?: Schedule;
  readonly warmupSteps?: number;
  /** Steps of the run, which the schedule needs. Default 1. */
  readonly totalSteps?: number;
  readonly beta1: number;
  readonly beta2: number;
  readonly adamEps: number;
  readonly weightDecay: number;
  /** 0 = do not clip. */
  readonly maxGradNorm: number;
}

/** What an optimizer step measured. */
export interface StepResult {
  /** Mean loss per labelled token, in nats. */
  readonly loss: number;
  /** L2 norm of the gradient before clipping; NaN if the gradient is not finite. */
  readonly gradNorm: number;
  readonly learningRate: number;
  /** What the gradient was multiplied by; 1 unless activations are f16. */
  readonly lossScale: number;
  /** Whether the update was left out: the gradient was not finite, and nothing but the loss scale changed. */
  readonly skipped: boolean;
  /** Adapter matrix with the first gradient that is not finite, or null. */
  readonly badTensor: string | null;
}

/** How long a training step took on the device. */
export interface StepTimes {
  /** From the first kernel to the end of the update. */
  readonly deviceSeconds: number;
  /** Seconds of them in which the device waited for input. */
  readonly inputWaitSeconds: number;
  /** Share of the device's arithmetic, 0 to 1; null where the plan's device profile has no peak. */
  readonly modelFlopUtilization: number | null;
}

/** Documents packed into micro-batches. */
interface PackedStep {
  readonly documents: readonly Document[];
  readonly batches: readonly PackedMicroBatch[];
  readonly load: Load;
}

/** A planned run on a device. Weights and adapters must be loaded before the first step. */
export class Session {
  readonly run: RunPlan;
  readonly executor: Executor;
  readonly #input: InputPipeline;
  readonly #monitor: PerformanceMonitor;
  readonly #flops: (load: Load) => number;
  readonly #control: Uint8Array;
  readonly #metrics: Float64Array<ArrayBuffer>;
  /** The step whose first micro-batch is on its way to the device already. */
  #ahead: PackedStep | null = null;
  /** Optimizer steps done, skipped ones included; the device counts those that were applied. */
  #steps = 0;
  #times: StepTimes = { deviceSeconds: 0, inputWaitSeconds: 0, modelFlopUtilization: null };
  /** Settings that are on the device. */
  #settings: OptimizerSettings | null = null;
  /** Reached when the state may change again. */
  #held: Event | null = null;

  private constructor(
    run: RunPlan,
    executor: Executor,
    input: InputPipeline,
    monitor: PerformanceMonitor,
    scaler: ScalerSettings,
  ) {
    this.run = run;
    this.executor = executor;
    this.#input = input;
    this.#monitor = monitor;
    const train = run.plan.programs.get("train")?.program;
    this.#flops =
      train === undefined ? () => 0 : modelFlops(train, run.spec.dims.tokensPerMicroBatch);
    this.#control = executor.hostView(run.staging.control, Uint8Array);
    this.#metrics = executor.hostView(run.staging.metrics, Float64Array);
    executor.clear(run.adapters.control); // defined, but of no use before #useSettings
    if (run.adapters.scaler !== null && run.staging.scaler !== null) {
      const bytes = packScaler(scalerValues(scaler, "session"));
      executor.hostView(run.staging.scaler, Uint8Array).set(bytes);
      executor.upload(run.adapters.scaler, run.staging.scaler);
    }
  }

  /**
   * Reserves the memory of `run` on `device` and binds its programs.
   *
   * @param scaler Settings of the gradient scaler of a run with f16 activations.
   * @param algorithms Which ways matrix products are computed in on a GPU.
   */
  static commit(
    device: Device,
    run: RunPlan,
    mode: ExecutionMode,
    scaler: ScalerSettings = {},
    algorithms: Algorithms = "estimated",
  ): Session {
    using undo = new DisposableStack();
    const events = undo.use(new InputEvents(device));
    const profile = run.plan.forecast?.profile;
    const type = activationType(run.spec.precision);
    const peak = profile === undefined ? null : peakFlops(profile, type);
    const monitor = undo.use(device.createPerformanceMonitor({ peakFlops: peak ?? undefined }));
    const executor = Executor.commit(device, run.plan, mode, algorithms);
    undo.defer(() => void executor.dispose());
    const input = new InputPipeline(executor, run, events);
    const session = new Session(run, executor, input, monitor, scaler);
    undo.move();
    return session;
  }

  /** Optimizer steps done, skipped ones included. */
  get steps(): number {
    return this.#steps;
  }

  /** How long the last {@linkcode trainStep} took; all zero before it. */
  get times(): StepTimes {
    return this.#times;
  }

  /** All training steps so far, and the memory in use. */
  performance(): PerformanceSummary {
    return this.#monitor.summary();
  }

  /** Goes on after `steps` optimizer steps, whose state is on the device. */
  resumeAfter(steps: number): void {
    this.#steps = steps;
  }

  /** Lets the next update, but nothing before it, wait for `event` on the device: its state is being copied. */
  holdUpdate(event: Event): void {
    this.#held = event;
  }

  /** Packs documents into micro-batches of the planned size. */
  pack(documents: readonly Document[]): PackedMicroBatch[] {
    const { tokensPerMicroBatch, documentsPerMicroBatch } = this.run.spec.dims;
    return packDocuments(documents, tokensPerMicroBatch, documentsPerMicroBatch);
  }

  /**
   * One optimizer step over `documents`; the loss is the mean over all their labelled tokens.
   *
   * @param next Documents of the step after it, to be on the device by then.
   */
  async trainStep(
    documents: readonly Document[],
    settings: OptimizerSettings,
    next: readonly Document[] | null = null,
  ): Promise<StepResult> {
    const step = this.#packStep(documents);
    const ahead = next === null ? null : this.#packStep(next);
    const { tokens, labelled } = step.load;
    this.#monitor.begin(this.executor.stream);
    await this.#runStep("train", step);
    await this.#enqueueUpdate(settings);
    this.#monitor.end(this.executor.stream, { tokens, flops: this.#flops(step.load) });
    if (ahead !== null) {
      await this.#input.stage(ahead.batches[0] as PackedMicroBatch, 1 / ahead.load.labelled);
      this.#ahead = ahead;
    }
    const result = await this.#readResult(labelled);
    const { seconds, modelFlopUtilization } = this.#monitor.take() as StepPerformance;
    const inputWaitSeconds = this.#input.waited();
    this.#times = { deviceSeconds: seconds, inputWaitSeconds, modelFlopUtilization };
    return result;
  }

  /** The optimizer's part of a step: norm, clipping and update from the accumulated gradients, which are zeroed. */
  async update(labelled: number, settings: OptimizerSettings): Promise<StepResult> {
    await this.#enqueueUpdate(settings);
    return await this.#readResult(labelled);
  }

  async #enqueueUpdate(settings: OptimizerSettings): Promise<void> {
    this.#useSettings(settings);
    if (this.#held !== null) this.executor.stream.waitEvent(this.#held);
    this.#held = null;
    await this.executor.run("optimizer");
    this.#steps++;
  }

  async #readResult(labelled: number): Promise<StepResult> {
    const { lossSum, badElement, ...metrics } = await this.#readMetrics();
    const { gradNorm, learningRate, lossScale, skipped } = metrics;
    const badTensor = this.run.adapters.tensors.findLast(({ element }) => element <= badElement);
    return {
      loss: lossSum / labelled,
      gradNorm,
      learningRate,
      lossScale,
      skipped,
      badTensor: badTensor?.name ?? null,
    };
  }

  /** Forward and backward of `documents`; gradients add up in the arena. Gives the number of labelled tokens. */
  async accumulate(documents: readonly Document[]): Promise<number> {
    return await this.#runStep("train", this.#packStep(documents));
  }

  /** Mean loss of `documents` in nats per labelled token; with `base`, without the adapters. */
  async evaluate(documents: readonly Document[], base = false): Promise<number> {
    const step = this.#packStep(documents);
    const labelled = await this.#runStep(base ? "evaluateBase" : "evaluate", step);
    const { lossSum } = await this.#readMetrics();
    this.#input.waited(); // not the next step's
    return lossSum / labelled;
  }

  /** Logits [tokens, V] of one micro-batch, in the order in which `pack` laid the documents out. */
  async logits(documents: readonly Document[], base = false): Promise<Float32Array> {
    const [batch, ...more] = this.pack(documents);
    const { logits } = this.run.set;
    if (batch === undefined || more.length > 0 || logits === null || logits.dtype !== "f32") {
      const what = "logits need one micro-batch, a plan with the program and fp32 activations";
      throw new LoramemError("OVER_PLAN", `session.logits: cannot run: ${what}: plan for it`);
    }
    await this.stage(batch, 0);
    await this.executor.run(base ? "logitsBase" : "logits");
    const vocab = logits.shape[1] as number;
    const { transfer } = this.run.staging;
    const host = this.executor.hostView(transfer, Float32Array);
    const result = new Float32Array(batch.tokens * vocab);
    for (let at = 0; at < result.length; at += host.length) {
      const count = Math.min(host.length, result.length - at);
      this.executor.download(transfer, logits, count * DTYPES.f32.bytes, 0, at * DTYPES.f32.bytes);
      await this.executor.stream.done();
      result.set(host.subarray(0, count), at);
    }
    return result;
  }

  /** Waits for the device and gives everything back. */
  async dispose(): Promise<void> {
    this.#input[Symbol.dispose]();
    this.#monitor[Symbol.dispose]();
    await this.executor.dispose();
  }

  #packStep(documents: readonly Document[]): PackedStep {
    if (this.#ahead?.documents === documents) return this.#ahead;
    const batches = this.pack(documents);
    const load = loadOf(documents, this.run.spec.config);
    if (load.labelled > 0) return { documents, batches, load };
    throw new LoramemError(
      "BAD_DATA",
      "session: no labelled token: the documents have none: label at least one",
    );
  }

  /** Runs a program over all micro-batches; each is packed and copied while the one before it is computed. */
  async #runStep(name: ProgramName, step: PackedStep): Promise<number> {
    this.executor.clear(this.run.adapters.metrics);
    let ready = this.#ahead === step;
    for (const batch of step.batches) {
      if (ready) this.#take();
      else await this.stage(batch, 1 / step.load.labelled);
      ready = false;
      await this.executor.run(name, this.headChunks(batch));
    }
    return step.load.labelled;
  }

  /** Chunks of labelled rows that a micro-batch needs. */
  headChunks(batch: PackedMicroBatch): number {
    const { lossChunkTokens, tokensPerMicroBatch } = this.run.spec.dims;
    return Math.ceil(batch.labelled / Math.min(lossChunkTokens, tokensPerMicroBatch));
  }

  /** Packs one micro-batch and enqueues its way to the programs; the one that reads it comes next. */
  async stage(batch: PackedMicroBatch, lossWeight: number): Promise<void> {
    await this.#input.stage(batch, lossWeight);
    this.#take();
  }

  #take(): void {
    this.#input.take();
    this.#ahead = null; // taken, or what was staged since took its place
  }

  async #readMetrics(): Promise<StepMetrics> {
    this.executor.download(this.run.staging.metrics, this.run.adapters.metrics);
    await this.executor.stream.done();
    return readStepMetrics(this.#metrics);
  }

  /** Copies the settings to the device where they are not there yet; every earlier copy has ended by now. */
  #useSettings(settings: OptimizerSettings): void {
    if (settings === this.#settings) return;
    const { adamEps: eps, maxGradNorm: maxNorm, ...others } = settings;
    this.#control.set(packOptimizerControl({ ...others, eps, maxNorm }));
    this.executor.upload(this.run.adapters.control, this.run.staging.control);
    this.#settings = settings;
  }
}
