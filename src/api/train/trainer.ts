/** The trainer: a base model, adapters and data on one device, planned to the byte before the first step. */
import { LoramemError } from "../../ffi/error.ts";
import type { ChatMessage, ChatTemplate } from "../data/chat_template.ts";
import type { Document } from "../data/conversation.ts";
import type { Dataset } from "../data/dataset.ts";
import { shuffledOrder } from "../data/order.ts";
import type { Tokenizer } from "../data/tokenizer.ts";
import { generateTokens } from "../generate/generate.ts";
import { writeAdapter } from "../io/adapter.ts";
import type { Device, PerformanceSummary } from "../memory/mod.ts";
import { linearModules } from "../nn/config_tensors.ts";
import { compressTargets, type LoraConfig } from "../nn/lora_config.ts";
import type { Plan } from "../plan/plan.ts";
import { describePoints } from "../plan/save_points.ts";
import { exportAdapters } from "./adapter_state.ts";
import { checkStep } from "./check_step.ts";
import type { CheckpointState } from "./checkpoint_state.ts";
import type { Checkpoints, Position } from "./checkpoints.ts";
import type { OpenOptions } from "./notice.ts";
import type { ResolvedOptions, TrainOptions } from "./options.ts";
import { stepCounts } from "./run_inputs.ts";
import type { WeightPlace } from "./run_plan.ts";
import type { OptimizerSettings, Session } from "./session.ts";

/** What one optimizer step did. */
export interface StepInfo {
  /** Counted from 1. */
  readonly step: number;
  /** Counted from 1. */
  readonly epoch: number;
  /** Mean loss of the step's labelled tokens before the update, in nats. */
  readonly loss: number;
  /** Peak rate times the schedule at the number of updates applied so far. */
  readonly learningRate: number;
  /** L2 norm of the gradient before clipping; NaN where the step was skipped. */
  readonly gradNorm: number;
  /**
   * Whether the update was left out because the gradient overflowed (`precision: "fp16"` only). Adapters, moments and
   * schedule are as before; the loss scale has been lowered.
   */
  readonly skipped: boolean;
  /** What the loss was multiplied by for the backward pass; 1 unless `precision` is `"fp16"`. */
  readonly lossScale: number;
  /** Tokens of the step's documents. */
  readonly tokens: number;
  /** Wall-clock seconds of the step. */
  readonly seconds: number;
  readonly tokensPerSecond: number;
  /** Seconds on the device, from the first kernel to the end of the update. */
  readonly deviceSeconds: number;
  /** Seconds of them in which the device waited for input. */
  readonly inputWaitSeconds: number;
  /**
   * Model FLOP utilisation: arithmetic of the step, recomputation left out, over device seconds and the `peak` of the
   * device's profile. 0 to 1; null where that has none.
   */
  readonly modelFlopUtilization: number | null;
}

/** Everything that `open` puts together. */
export interface OpenedRun {
  readonly options: ResolvedOptions;
  readonly lora: LoraConfig;
  readonly device: Device;
  readonly session: Session;
  readonly tokenizer: Tokenizer;
  readonly template: ChatTemplate;
  readonly data: Dataset;
  readonly evalData: Dataset | null;
  /** Null where none are written. */
  readonly checkpoints: Checkpoints | null;
  /** Where the run goes on; null = at its beginning. */
  readonly resumed: CheckpointState | null;
  /** Everything that has to be given back. */
  readonly resources: AsyncDisposable;
}

/** The documents of a step to come. */
interface QueuedBatch {
  /** Counted from 1. */
  readonly epoch: number;
  /** Its place in the epoch, from 0. */
  readonly batch: number;
  readonly documents: readonly Document[];
}

/**
 * Fine-tunes a language model with LoRA (Hu et al. 2021, arXiv:2106.09685).
 *
 * @example Usage
 * ```ts
 * import { LoraTrainer } from "./mod.ts";
 * await using trainer = await LoraTrainer.open({
 *   model: "examples/demo/model",
 *   data: "examples/demo/train.jsonl",
 *   learningRate: 2e-3,
 *   maxSteps: 2,
 * });
 * console.log(String(trainer.plan)); // every byte, before the first step
 * for await (const step of trainer.steps()) console.log(step.step, step.loss);
 * console.log(await trainer.generate("Define: love", { maxTokens: 8 }));
 * ```
 */
export class LoraTrainer {
  readonly #run: OpenedRun;
  readonly #batches: QueuedBatch[] = [];
  #settings: OptimizerSettings | null = null;
  /** Passes over the data that are queued or done. */
  #epoch: number;
  /** Batches of the next pass that are done already. */
  #done: number;
  #busy = false;
  #disposed = false;

  private constructor(run: OpenedRun) {
    this.#run = run;
    this.#epoch = run.resumed?.epoch ?? 0;
    this.#done = run.resumed?.batch ?? 0;
  }

  /**
   * Reads model and data, plans and reserves the memory, loads the weights.
   *
   * @param options Everything but `model` and `data` has a default.
   * @param how Follows the load of the weights and stops it; hears what happens to checkpoints.
   * @returns A trainer to be disposed with `await using`.
   * @throws {LoramemError} BAD_ARGUMENT, BAD_CONFIG, BAD_DATA, BAD_FILE, UNSUPPORTED naming what to mend; OUT_OF_MEMORY
   * if the plan does not fit the budget, naming the one that would work; CANCELLED. Nothing stays reserved.
   */
  static async open(options: TrainOptions, how: OpenOptions = {}): Promise<LoraTrainer> {
    const { openRun } = await import("./open_run.ts"); // brings in zod
    return new LoraTrainer(await openRun(options, how));
  }

  /** The memory plan. `String(plan)` is a table. */
  get plan(): Plan {
    return this.#run.session.run.plan;
  }

  /** Options with defaults filled in. */
  get options(): ResolvedOptions {
    return this.#run.options;
  }

  /** The device that the run is on. */
  get device(): Device {
    return this.#run.device;
  }

  /** The save points that were chosen, such as `"keep"` or `"20 keep + 12 checkpoint"`. */
  get savePoints(): string {
    return describePoints(this.#run.session.run.savePoints);
  }

  /** The algorithms that matrix products use on a GPU, to be given to a later run as the option of that name. */
  get algorithms(): string {
    return this.#run.session.executor.algorithms;
  }

  /** Where the weights of the layers are. */
  get weights(): WeightPlace {
    return this.#run.session.run.spec.weights ?? "resident";
  }

  /** Tokens that are computed at once. */
  get tokensPerMicroBatch(): number {
    return this.#run.session.run.spec.dims.tokensPerMicroBatch;
  }

  /** Parameters that are trained. */
  get parameters(): number {
    return this.#run.session.run.adapters.parameters;
  }

  /** The training steps of this trainer together, timed on the device, and the memory in use now. Asks the driver. */
  performance(): PerformanceSummary {
    return this.#run.session.performance();
  }

  /** Optimizer steps in one pass over the data. */
  get stepsPerEpoch(): number {
    return stepCounts(this.options, this.#run.data.documents.length).perEpoch;
  }

  /** Optimizer steps of the whole run. */
  get totalSteps(): number {
    return stepCounts(this.options, this.#run.data.documents.length).total;
  }

  /** Optimizer steps done, skipped ones included. */
  get stepsDone(): number {
    return this.#run.session.steps;
  }

  /**
   * Trains, one optimizer step per iteration. Leaving the loop stops at a step boundary; the next call goes on there.
   *
   * With `saveEvery`, the checkpoint of a step is begun when the loop asks for the next one, so it knows of an evaluation in
   * between, and is written while training goes on. At the end, and where `signal` stops, one is written and awaited; after
   * a `break`, {@linkcode LoraTrainer.checkpoint} does that.
   *
   * @param options `signal` stops after the current step.
   * @returns What each step did.
   * @throws {LoramemError} DEVICE if the loss is not finite, or the gradient where no lower loss scale can help; the adapters
   * are as before that step.
   */
  async *steps(
    options: { readonly signal?: AbortSignal } = {},
  ): AsyncGenerator<StepInfo, void, void> {
    const { checkpoints } = this.#run;
    for (;;) {
      const stops = this.stepsDone >= this.totalSteps || options.signal?.aborted === true;
      if (checkpoints?.due(this.stepsDone, stops)) {
        await this.#exclusive("steps", () => checkpoints.save(this.#position()));
      }
      if (stops) break;
      yield await this.#exclusive("steps", () => this.#step());
    }
    await checkpoints?.settled();
  }

  /**
   * Mean loss per labelled token over the evaluation data, in nats.
   *
   * @throws {LoramemError} BAD_ARGUMENT if the run has no evaluation data.
   */
  async evaluate(): Promise<number> {
    const { evalData, session, checkpoints } = this.#run;
    if (evalData === null) {
      const message = "evaluate: the run has no evaluation data: give evalData when opening it";
      throw new LoramemError("BAD_ARGUMENT", message, { name: "evalData" });
    }
    const loss = await this.#exclusive("evaluate", () => session.evaluate(evalData.documents));
    checkpoints?.evaluated(this.stepsDone, loss);
    return loss;
  }

  /**
   * The most likely answer to a prompt (greedy decoding).
   *
   * @param prompt A user message, or a whole conversation.
   * @param options `maxTokens` of the answer, at most the planned `answerTokens`, which is the default.
   * @returns The answer as text, without control tokens.
   * @throws {LoramemError} OVER_PLAN if prompt and answer are longer than planned.
   */
  async generate(
    prompt: string | readonly ChatMessage[],
    options: { readonly maxTokens?: number; readonly signal?: AbortSignal } = {},
  ): Promise<string> {
    const { session, tokenizer, template } = this.#run;
    const maxTokens = options.maxTokens ?? this.options.answerTokens;
    if (!Number.isSafeInteger(maxTokens) || maxTokens < 1) {
      const message = `generate: maxTokens is not a positive integer: ${maxTokens}: give one`;
      throw new LoramemError("BAD_ARGUMENT", message, { name: "maxTokens", value: maxTokens });
    }
    const { generation } = session.run.set;
    const { staging, spec } = session.run;
    if (generation === null || staging.generation === null) {
      const message =
        "generate: the plan has no generation: promptTokens is 0: open the run with promptTokens";
      throw new LoramemError("OVER_PLAN", message, { planned: 0 });
    }
    const { encodePrompt } = await import("../data/conversation.ts");
    const messages = typeof prompt === "string" ? [{ role: "user", content: prompt }] : prompt;
    const ids = encodePrompt(messages, { tokenizer, template });
    const io = {
      executor: session.executor,
      block: generation,
      hostBlock: staging.generation,
      hostToken: staging.token,
      contextTokens: spec.dims.contextTokens,
    };
    const limits = { maxTokens, stopIds: new Set(tokenizer.eosTokenIds), signal: options.signal };
    const answer = await this.#exclusive("generate", () => generateTokens(io, ids, limits));
    return tokenizer.decode(answer, { skipSpecialTokens: true });
  }

  /**
   * Writes the adapter as PEFT reads it (`adapter_config.json`, `adapter_model.safetensors`). Everything is written aside
   * and read back first. A new folder then appears as a whole; over an earlier adapter the two files are renamed one
   * after the other, weights first.
   *
   * @example Usage
   * ```ts
   * import { LoraTrainer, readAdapter } from "./mod.ts";
   * const demo = { model: "examples/demo/model", data: "examples/demo/valid.jsonl" };
   * await using trainer = await LoraTrainer.open({ ...demo, evalData: demo.data, maxSteps: 1, device: "cpu" });
   * for await (const step of trainer.steps()) console.log(step.loss);
   * console.log(await trainer.evaluate()); // nats per labelled token
   * await trainer.save("out/example-adapter");
   * console.log((await readAdapter("out/example-adapter")).config.rank); // 16
   * ```
   *
   * @param dir Folder of the adapter.
   * @throws {LoramemError} IO if it cannot be written; what was there before is untouched.
   */
  async save(dir: string): Promise<void> {
    const { session, lora, options } = this.#run;
    const tensors = await this.#exclusive("save", () =>
      exportAdapters(session.executor, session.run),
    );
    const { config, targets } = session.run.spec;
    await writeAdapter(dir, {
      config: {
        baseModel: options.model,
        rank: lora.rank,
        alpha: lora.alpha,
        targetModules: compressTargets(targets, linearModules(config)),
        ...(lora.rankPattern === undefined ? {} : { rankPattern: lora.rankPattern }),
        ...(lora.alphaPattern === undefined ? {} : { alphaPattern: lora.alphaPattern }),
        ...(lora.useRslora === true ? { useRslora: true } : {}),
      },
      tensors,
    });
  }

  /**
   * Writes a checkpoint of the run as it is now, and waits until it is on the disk.
   *
   * @example Usage
   * ```ts
   * import { LoraTrainer } from "./mod.ts";
   * const demo = { model: "examples/demo/model", data: "examples/demo/valid.jsonl", maxSteps: 2 };
   * const options = { ...demo, runDir: "out/example-run", saveEvery: 100, resume: "auto" };
   * {
   *   await using trainer = await LoraTrainer.open(options);
   *   for await (const { step } of trainer.steps()) if (step === 1) break;
   *   await trainer.checkpoint();
   * }
   * await using trainer = await LoraTrainer.open(options);
   * console.log(trainer.stepsDone); // 1
   * ```
   *
   * @throws {LoramemError} BAD_ARGUMENT where the run was opened without `saveEvery`; IO if it cannot be written, and earlier
   * ones are intact.
   */
  async checkpoint(): Promise<void> {
    const { checkpoints } = this.#run;
    if (checkpoints === null) {
      const message =
        "checkpoint: the run has no memory planned for it: open it with runDir and saveEvery";
      throw new LoramemError("BAD_ARGUMENT", message, { name: "saveEvery" });
    }
    const refused = await this.#exclusive("checkpoint", async () => {
      await checkpoints.save(this.#position());
      return await checkpoints.settled();
    });
    if (refused !== null) throw refused;
  }

  /** Waits for the device and for a checkpoint under way, and gives everything back; twice is fine. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#disposed) return;
    this.#disposed = true;
    await this.#run.resources[Symbol.asyncDispose]();
  }

  async #step(): Promise<StepInfo> {
    const { options, session } = this.#run;
    while (this.#batches.length < 2) this.#queueEpoch();
    const { epoch, documents } = this.#batches.shift() as QueuedBatch;
    this.#settings ??= { ...options, totalSteps: this.totalSteps };
    const started = performance.now();
    const next = session.steps + 1 < this.totalSteps ? this.#batches[0]?.documents : null;
    const result = await session.trainStep(documents, this.#settings, next);
    const seconds = (performance.now() - started) / 1000;
    checkStep(session.steps, result, options);
    const tokens = documents.reduce((sum, document) => sum + document.ids.length, 0);
    const tokensPerSecond = tokens / seconds;
    const { badTensor: _, ...measured } = result;
    const speed = { tokens, seconds, tokensPerSecond, ...session.times };
    return { step: session.steps, epoch, ...measured, ...speed };
  }

  /** Where the next step stands in the order of the data. */
  #position(): Position {
    const [next] = this.#batches;
    const step = this.stepsDone;
    if (next === undefined) return { step, epoch: this.#epoch, batch: this.#done };
    return { step, epoch: next.epoch - 1, batch: next.batch };
  }

  /** Cuts the next epoch into batches. */
  #queueEpoch(): void {
    const { options, data } = this.#run;
    const { documents } = data;
    const order = shuffledOrder(documents.length, options.seed, this.#epoch);
    this.#epoch++;
    for (let batch = this.#done; batch < this.stepsPerEpoch; batch++) {
      const picked = order.subarray(batch * options.batchSize, (batch + 1) * options.batchSize);
      this.#batches.push({
        epoch: this.#epoch,
        batch,
        documents: Array.from(picked, (index) => documents[index] as Document),
      });
    }
    this.#done = 0;
  }

  /** One thing at a time: they share the device's activations. */
  async #exclusive<T>(what: string, work: () => Promise<T>): Promise<T> {
    if (this.#disposed) {
      throw new LoramemError("DISPOSED", `${what}: the trainer was disposed: open a new one`, {
        label: "LoraTrainer",
      });
    }
    if (this.#busy) {
      const message = `${what}: the trainer is busy: await the step, evaluation, answer or save under way`;
      throw new LoramemError("BAD_ARGUMENT", message, { name: what });
    }
    this.#busy = true;
    try {
      return await work();
    } finally {
      this.#busy = false;
    }
  }
}
