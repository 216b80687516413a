/**
 * The input pipeline: while a micro-batch is computed, the next one is packed into page-locked memory and copied to the
 * device on a stream of its own, into a block that no program reads. The stream that computes then takes it over with a copy
 * inside the device, a few microseconds, so that one recording of the programs serves every micro-batch.
 *
 *     host           pack 1 | pack 2 | ...            waits for `copied` before it fills a host block again
 *     copy stream      copy 1 |    copy 2 | ...       waits for `taken` before it overwrites the incoming block
 *     compute stream     take 1, compute 1 | take 2   waits for `filled` before it takes the incoming block
 */
import { fillMicroBatch, type MicroBatchBlock, type PackedMicroBatch } from "../data/packing.ts";
import type { Value } from "../graph/value.ts";
import type { Device, Event } from "../memory/mod.ts";
import type { Executor } from "../run/executor.ts";
import type { RunPlan } from "./run_plan.ts";

/** One of the two page-locked blocks. */
interface HostBlock {
  readonly value: Value;
  readonly ints: Int32Array;
  readonly floats: Float32Array;
  readonly block: MicroBatchBlock;
  /** Reached when the block was copied and may be filled again. */
  readonly copied: Event;
}

/** Where the compute stream began and ended to wait for input. */
interface Wait {
  readonly from: Event;
  readonly to: Event;
}

/** Waits whose times are not read yet. Two at most have not ended when the next one is enqueued, see `stage`. */
const WAITS = 4;

/** The events of a pipeline; made before anything is reserved, so that a failure leaves nothing to wait for. */
export class InputEvents implements Disposable {
  /** A host block was copied and may be filled again. */
  readonly copied: readonly [Event, Event];
  /** The incoming block holds what was staged last. */
  readonly filled: Event;
  /** The incoming block was taken over and may be overwritten. */
  readonly taken: Event;
  readonly waits: readonly Wait[];
  readonly #made: DisposableStack;

  constructor(device: Device) {
    using undo = new DisposableStack();
    const make = () => undo.use(device.createEvent());
    this.copied = [make(), make()];
    this.filled = make();
    this.taken = make();
    this.waits = Array.from({ length: WAITS }, () => ({ from: make(), to: make() }));
    this.#made = undo.move();
  }

  [Symbol.dispose](): void {
    this.#made.dispose();
  }
}

/** Brings micro-batches to the device, ahead of the programs that read them. */
export class InputPipeline {
  readonly #executor: Executor;
  readonly #run: RunPlan;
  readonly #events: InputEvents;
  readonly #blocks: readonly HostBlock[];
  #staged = 0;
  #takes = 0;
  #read = 0;
  #waited = 0;

  /** Owns `events` from now on. */
  constructor(executor: Executor, run: RunPlan, events: InputEvents) {
    this.#executor = executor;
    this.#run = run;
    this.#events = events;
    this.#blocks = run.staging.batches.map((value, index) =>
      hostBlock(executor, run, value, events.copied[index] as Event),
    );
  }

  /**
   * Packs a micro-batch and enqueues its copy to the device. What was staged before and not taken is forgotten.
   *
   * Waits only where the host is more than two micro-batches ahead of the device.
   */
  async stage(batch: PackedMicroBatch, lossWeight: number): Promise<void> {
    const { value, ints, floats, block, copied } = this.#blocks[
      this.#staged++ % this.#blocks.length
    ] as HostBlock;
    await copied.done();
    fillMicroBatch(batch, block);
    ints[0] = batch.tokens;
    ints[1] = batch.documents.length;
    ints[2] = batch.labelled;
    floats[3] = lossWeight;
    const { mlpTiles } = this.#run.set.batch;
    mlpTiles?.live.forEach(({ view }, index) => {
      const before = index * mlpTiles.rows;
      ints[view?.elements ?? 0] = Math.max(0, Math.min(mlpTiles.rows, batch.tokens - before));
    });
    const { copyStream } = this.#executor;
    copyStream.waitEvent(this.#events.taken);
    this.#executor.upload(this.#run.set.batch.incoming, value, undefined, 0, 0, copyStream);
    copyStream.record(copied);
    copyStream.record(this.#events.filled);
  }

  /** Lets the programs that are enqueued from now on read what was staged last. */
  take(): void {
    const { stream } = this.#executor;
    const { incoming, block } = this.#run.set.batch;
    const { filled, taken, waits } = this.#events;
    if (this.#takes - this.#read === WAITS) this.#readWait();
    const { from, to } = waits[this.#takes++ % WAITS] as Wait;
    stream.record(from);
    stream.waitEvent(filled);
    stream.record(to);
    this.#executor.move(block, incoming);
    stream.record(taken);
  }

  /** Seconds that the compute stream waited for input since the last call. Everything taken must have been reached. */
  waited(): number {
    while (this.#read < this.#takes) this.#readWait();
    const seconds = this.#waited;
    this.#waited = 0;
    return seconds;
  }

  /** Gives the events back. Copies under way are the executor's to wait for. */
  [Symbol.dispose](): void {
    this.#events[Symbol.dispose]();
  }

  /**
   * The oldest wait has ended: the host block of two stages ago was free before the last one was filled, and its copy came
   * after every take that was enqueued by then.
   */
  #readWait(): void {
    const { from, to } = this.#events.waits[this.#read++ % WAITS] as Wait;
    this.#waited += to.elapsed(from) / 1000;
  }
}

function hostBlock(executor: Executor, run: RunPlan, value: Value, copied: Event): HostBlock {
  const { batch } = run.set;
  const ints = executor.hostView(value, Int32Array);
  const window = (of: Value) => {
    const start = of.view?.elements ?? 0;
    return ints.subarray(start, start + (of.shape[0] as number));
  };
  return {
    value,
    ints,
    floats: executor.hostView(value, Float32Array),
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
