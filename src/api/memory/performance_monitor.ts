/** Times steps on the device, by events, and says what they amount to. */
import { badArgument, checkFinite } from "./arguments.ts";
import type { Device } from "./device.ts";
import type { Event } from "./event.ts";
import type { Stream } from "./stream.ts";

/** Options of {@linkcode Device.createPerformanceMonitor}. */
export interface PerformanceMonitorOptions {
  /** Arithmetic of the device that counts as all of it, FLOP/s. Without it there is no utilisation. */
  readonly peakFlops?: number | undefined;
}

/** What a step did. */
export interface StepWork {
  readonly tokens: number;
  /**
   * Arithmetic that the model needs for them, a multiplication and an addition counting as two. What is computed again to
   * save memory does not count.
   */
  readonly flops?: number | undefined;
}

/** One step, or the sum of several. */
export interface StepPerformance {
  readonly tokens: number;
  /** From the first to the last of its work, on the device. */
  readonly seconds: number;
  readonly tokensPerSecond: number;
  /** Model FLOP utilisation, 0 to 1: `flops` over `seconds` over `peakFlops`; null where one of them is not known. */
  readonly modelFlopUtilization: number | null;
}

/** All steps so far, and the memory in use. */
export interface PerformanceSummary extends StepPerformance {
  /** Steps that were measured, a count. */
  readonly steps: number;
  /** Bytes now. */
  readonly memory: {
    /** Device memory that this device has reserved. */
    readonly reserved: number;
    /** Page-locked host memory. */
    readonly pinned: number;
    /** What the driver says is in use on the device, by every process; null on the CPU. */
    readonly driver: number | null;
  };
}

interface Slot {
  readonly start: Event;
  readonly end: Event;
  work: StepWork;
}

/** Steps that may be under way at once; one that begins while so many have not ended is not measured. */
const DEPTH = 4;

const NOTHING: StepWork = { tokens: 0, flops: 0 };

/**
 * Times steps on the device. Two events a step; nothing waits, so a step takes as long as without it.
 *
 * Made by {@linkcode Device.createPerformanceMonitor}.
 */
export class PerformanceMonitor implements Disposable {
  /** Device that made it. */
  readonly device: Device;
  /** FLOP/s that count as all of the device; null = not known. */
  readonly peakFlops: number | null;
  readonly #slots: readonly Slot[];
  readonly #events: DisposableStack;
  /** Steps begun, and of these taken; slots go round. */
  #begun = 0;
  #taken = 0;
  #open: "no" | "measured" | "skipped" = "no";
  #total = { steps: 0, tokens: 0, seconds: 0, flops: 0 };

  constructor(device: Device, { peakFlops }: PerformanceMonitorOptions) {
    if (peakFlops !== undefined && !(Number.isFinite(peakFlops) && peakFlops > 0)) {
      const what = `peakFlops must be a positive number: it is ${String(peakFlops)}`;
      badArgument("Device.createPerformanceMonitor", what, "peakFlops", peakFlops);
    }
    using undo = new DisposableStack();
    const event = () => undo.use(device.createEvent());
    this.device = device;
    this.peakFlops = peakFlops ?? null;
    this.#slots = Array.from({ length: DEPTH }, () => ({
      start: event(),
      end: event(),
      work: NOTHING,
    }));
    this.#events = undo.move();
  }

  /**
   * Begins a step at this point of a stream.
   *
   * @throws {LoramemError} `BAD_ARGUMENT` while a step is begun already, `DISPOSED`.
   */
  begin(stream: Stream): void {
    const op = "PerformanceMonitor.begin";
    if (this.#open !== "no") badArgument(op, "a step has begun already: end it first", "stream");
    if (this.#begun - this.#taken === DEPTH && this.take() === null) {
      this.#open = "skipped";
      return;
    }
    stream.record(this.#slot(this.#begun).start);
    this.#begun++;
    this.#open = "measured";
  }

  /**
   * Ends the step at this point of a stream.
   *
   * @param stream The stream of `begin`, or one that runs after it.
   * @param work What the step did.
   * @throws {LoramemError} `BAD_ARGUMENT` if no step has begun, or for a number that is not finite; `DISPOSED`.
   */
  end(stream: Stream, work: StepWork): void {
    const op = "PerformanceMonitor.end";
    if (this.#open === "no") badArgument(op, "no step has begun: begin one first", "stream");
    checkFinite(op, "tokens", work.tokens);
    if (work.flops !== undefined) checkFinite(op, "flops", work.flops);
    if (this.#open === "measured") {
      const slot = this.#slot(this.#begun - 1);
      stream.record(slot.end);
      slot.work = work;
    }
    this.#open = "no";
  }

  /**
   * The oldest step that has ended and was not taken yet; never waits.
   *
   * @returns The step, or null if there is none.
   * @throws {LoramemError} `DISPOSED`, the failure of the device.
   */
  take(): StepPerformance | null {
    const complete = this.#begun - (this.#open === "measured" ? 1 : 0);
    if (this.#taken === complete) return null;
    const { start, end, work } = this.#slot(this.#taken);
    if (!end.query()) return null;
    this.#taken++;
    const seconds = end.elapsed(start) / 1000;
    const { tokens, flops = Number.NaN } = work;
    this.#total.steps++;
    this.#total.tokens += tokens;
    this.#total.seconds += seconds;
    this.#total.flops += flops;
    return this.#describe(tokens, seconds, flops);
  }

  /**
   * All steps that were taken, and the memory in use now. Asks the driver, so it is not for every step.
   *
   * @throws {LoramemError} `DISPOSED`.
   */
  summary(): PerformanceSummary {
    const { steps, tokens, seconds, flops } = this.#total;
    const { reserved, pinned } = this.device.stats();
    const { memoryTotal, memoryFree } = this.device.info();
    const onGpu = this.device.kind.startsWith("cuda");
    const driver = onGpu ? Number(memoryTotal) - Number(memoryFree) : null;
    return {
      steps,
      ...this.#describe(tokens, seconds, flops),
      memory: { reserved, pinned, driver },
    };
  }

  /** Gives the events back. */
  [Symbol.dispose](): void {
    this.#events.dispose();
  }

  #describe(tokens: number, seconds: number, flops: number): StepPerformance {
    const share = flops / seconds / (this.peakFlops ?? Number.NaN);
    return {
      tokens,
      seconds,
      tokensPerSecond: seconds > 0 ? tokens / seconds : 0,
      modelFlopUtilization: Number.isFinite(share) ? share : null,
    };
  }

  #slot(index: number): Slot {
    return this.#slots[index % DEPTH] as Slot;
  }
}
