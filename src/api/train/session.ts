/**
 * A session: a model with adapters on a device, and the moves a trainer makes with it. It knows documents and steps, but
 * neither epochs nor files of data.
 */
import { LoramemError } from "../../ffi/error.ts";
import type { Document } from "../data/conversation.ts";
import {
  fillMicroBatch,
  type MicroBatchBlock,
  type PackedMicroBatch,
  packDocuments,
} from "../data/packing.ts";
import type { ProgramName } from "../graph/program.ts";
import { DTYPES, type Value } from "../graph/value.ts";
import type { Device, Event } from "../memory/mod.ts";
import { type ExecutionMode, Executor } from "../run/executor.ts";
import type { RunPlan } from "./run_plan.ts";

/** Settings of one optimizer step. */
export interface OptimizerSettings {
  readonly learningRate: number;
  readonly beta1: number;
  readonly beta2: number;
  readonly adamEps: number;
  readonly weightDecay: number;
  /** 0 = do not clip. */
  readonly maxGradNorm: number;
}

/** What a step or an evaluation measured. */
export interface StepMetrics {
  /** Mean loss per labelled token, in nats. */
  readonly loss: number;
  /** L2 norm of the gradient before clipping. */
  readonly gradNorm: number;
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
  readonly #control: Float32Array;
  readonly #metrics: Float64Array;
  #nextSlot = 0;
  /** Optimizer steps done; AdamW's bias correction counts them. */
  #steps = 0;

  private constructor(run: RunPlan, executor: Executor) {
    this.run = run;
    this.executor = executor;
    this.#slots = run.staging.batches.map((value) => this.#makeSlot(value));
    this.#control = executor.hostView(run.staging.control, Float32Array);
    this.#metrics = executor.hostView(run.staging.metrics, Float64Array);
  }

  /** Reserves the memory of `run` on `device` and binds its programs. */
  static commit(device: Device, run: RunPlan, mode: ExecutionMode): Session {
    return new Session(run, Executor.commit(device, run.plan, mode));
  }

  /** Optimizer steps done. */
  get steps(): number {
    return this.#steps;
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
  ): Promise<StepMetrics> {
    const labelled = await this.accumulate(documents);
    this.#fillControl(settings);
    const { adapters, staging } = this.run;
    this.executor.upload(adapters.control, staging.control);
    this.executor.run("optimizer");
    this.#steps++;
    return await this.#readMetrics(labelled);
  }

  /** Forward and backward of `documents`; gradients add up in the arena. Gives the number of labelled tokens. */
  async accumulate(documents: readonly Document[]): Promise<number> {
    return await this.#runBatches("train", documents);
  }

  /** Mean loss of `documents` in nats per labelled token; with `base`, without the adapters. */
  async evaluate(documents: readonly Document[], base = false): Promise<number> {
    const labelled = await this.#runBatches(base ? "evaluateBase" : "evaluate", documents);
    return (await this.#readMetrics(labelled)).loss;
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

  async #readMetrics(labelled: number): Promise<StepMetrics> {
    this.executor.download(this.run.staging.metrics, this.run.adapters.metrics);
    await this.executor.stream.done();
    return { loss: (this.#metrics[0] as number) / labelled, gradNorm: this.#metrics[1] as number };
  }

  #fillControl(settings: OptimizerSettings): void {
    const { learningRate, beta1, beta2, adamEps, weightDecay, maxGradNorm } = settings;
    const step = this.#steps + 1;
    const control = this.#control;
    control[0] = learningRate;
    control[1] = beta1;
    control[2] = beta2;
    control[3] = adamEps;
    control[4] = weightDecay;
    control[5] = 1 - beta1 ** step;
    control[6] = 1 - beta2 ** step;
    control[7] = maxGradNorm;
  }

  #makeSlot(value: Value): Slot {
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
      copied: this.executor.device.createEvent(),
    };
  }
}
