/**
 * A session: a model with adapters on a device, and the moves a trainer makes with it. It knows documents and steps, but
 * neither epochs nor files of data.
 */
import { LoramemError } from "../../ffi/error.ts";
import { packScaler } from "../amp/scaler_bytes.ts";
import type { Document } from "../data/conversation.ts";
import {
  fillMicroBatch,
  type MicroBatchBlock,
  type PackedMicroBatch,
  packDocuments,
} from "../data/packing.ts";
import type { ProgramName } from "../graph/program.ts";
import { DTYPES, type Value } from "../graph/value.ts";
import { type ScalerSettings, scalerValues } from "../kernels/scaler.ts";
import {
  packOptimizerControl,
  readStepMetrics,
  type Schedule,
  type StepMetrics,
} from "../kernels/step_structs.ts";
import type { Device, Event } from "../memory/mod.ts";
import { type ExecutionMode, Executor } from "../run/executor.ts";
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

/** One of the two page-locked blocks through which micro-batches go. */
interface Slot {
  readonly value: Value;
  readonly ints: Int32Array;
  readonly floats: Float32Array;
  readonly block: MicroBatchBlock;
  /** Reached when the block was copied and may be filled again. */
  readonly copied: Event;
}

/** A planned run on a device. Weights and adapters must be loaded before the first step. */
export class Session {
  readonly run: RunPlan;
  readonly executor: Executor;
  readonly #slots: readonly Slot[];
  readonly #control: Uint8Array;
  readonly #metrics: Float64Array<ArrayBuffer>;
  #nextSlot = 0;
  /** Optimizer steps done, skipped ones included; the device counts those that were applied. */
  #steps = 0;
  /** Settings that are on the device. */
  #settings: OptimizerSettings | null = null;
  /** Reached when the state may change again. */
  #held: Event | null = null;

  private constructor(
    run: RunPlan,
    executor: Executor,
    copied: readonly Event[],
    scaler: ScalerSettings,
  ) {
    this.run = run;
    this.executor = executor;
    this.#slots = run.staging.batches.map((value, index) =>
      this.#makeSlot(value, copied[index] as Event),
    );
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
   */
  static commit(
    device: Device,
    run: RunPlan,
    mode: ExecutionMode,
    scaler: ScalerSettings = {},
  ): Session {
    using undo = new DisposableStack();
    const copied = run.staging.batches.map(() => undo.use(device.createEvent()));
    const executor = Executor.commit(device, run.plan, mode);
    undo.defer(() => void executor.dispose());
    const session = new Session(run, executor, copied, scaler);
    undo.move();
    return session;
  }

  /** Optimizer steps done, skipped ones included. */
  get steps(): number {
    return this.#steps;
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

  /** One optimizer step over `documents`; the loss is the mean over all their labelled tokens. */
  async trainStep(
    documents: readonly Document[],
    settings: OptimizerSettings,
  ): Promise<StepResult> {
    return await this.update(await this.accumulate(documents), settings);
  }

  /** The optimizer's part of a step: norm, clipping and update from the accumulated gradients, which are zeroed. */
  async update(labelled: number, settings: OptimizerSettings): Promise<StepResult> {
    this.#useSettings(settings);
    if (this.#held !== null) this.executor.stream.waitEvent(this.#held);
    this.#held = null;
    this.executor.run("optimizer");
    this.#steps++;
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
    return await this.#runBatches("train", documents);
  }

  /** Mean loss of `documents` in nats per labelled token; with `base`, without the adapters. */
  async evaluate(documents: readonly Document[], base = false): Promise<number> {
    const labelled = await this.#runBatches(base ? "evaluateBase" : "evaluate", documents);
    return (await this.#readMetrics()).lossSum / labelled;
  }

  /** Logits [tokens, V] of one micro-batch, in the order in which `pack` laid the documents out. */
  async logits(documents: readonly Document[], base = false): Promise<Float32Array> {
    const [batch, ...more] = this.pack(documents);
    const { logits } = this.run.set;
    if (batch === undefined || more.length > 0 || logits === null || logits.dtype !== "f32") {
      const what = "logits need one micro-batch, a plan with the program and fp32 activations";
      throw new LoramemError("OVER_PLAN", `session.logits: cannot run: ${what}: plan for it`);
    }
    await this.#enqueue(batch, 0, base ? "logitsBase" : "logits");
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
    for (const slot of this.#slots) slot.copied.dispose();
    await this.executor.dispose();
  }

  async #runBatches(name: ProgramName, documents: readonly Document[]): Promise<number> {
    const batches = this.pack(documents);
    const labelled = batches.reduce((sum, batch) => sum + batch.labelled, 0);
    if (labelled === 0) {
      throw new LoramemError(
        "BAD_DATA",
        "session: no labelled token: the documents have none: label at least one",
      );
    }
    this.executor.clear(this.run.adapters.metrics);
    for (const batch of batches) await this.#enqueue(batch, 1 / labelled, name);
    return labelled;
  }

  /** Packs one micro-batch into the next slot and enqueues its copy and program. */
  async #enqueue(batch: PackedMicroBatch, lossWeight: number, name: ProgramName): Promise<void> {
    await this.stage(batch, lossWeight);
    this.executor.run(name, this.headChunks(batch));
  }

  /** Chunks of labelled rows that a micro-batch needs. */
  headChunks(batch: PackedMicroBatch): number {
    const { lossChunkTokens, tokensPerMicroBatch } = this.run.spec.dims;
    return Math.ceil(batch.labelled / Math.min(lossChunkTokens, tokensPerMicroBatch));
  }

  /** Packs one micro-batch into the next slot and enqueues its copy; the program that reads it comes next. */
  async stage(batch: PackedMicroBatch, lossWeight: number): Promise<void> {
    const slot = this.#slots[this.#nextSlot] as Slot;
    this.#nextSlot = (this.#nextSlot + 1) % this.#slots.length;
    await slot.copied.done();
    fillMicroBatch(batch, slot.block);
    slot.ints[0] = batch.tokens;
    slot.ints[1] = batch.documents.length;
    slot.ints[2] = batch.labelled;
    slot.floats[3] = lossWeight;
    this.executor.upload(this.run.set.batch.block, slot.value);
    this.executor.stream.record(slot.copied);
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

  #makeSlot(value: Value, copied: Event): Slot {
    const { batch } = this.run.set;
    const ints = this.executor.hostView(value, Int32Array);
    const window = (of: Value) => {
      const start = of.view?.elements ?? 0;
      return ints.subarray(start, start + (of.shape[0] as number));
    };
    return {
      value,
      ints,
      floats: this.executor.hostView(value, Float32Array),
      block: {
        ids: window(batch.ids),
        positions: window(batch.positions),
        cuSeqlens: window(batch.cuSeqlens),
        labelRows: window(batch.labelRows),
        labelIds: window(batch.labelIds),
      },
      copied,
    };
  }
}
