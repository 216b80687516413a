/** The checkpoints that a run writes: when, from which copy of its state, and which older ones then go. */
import { LoramemError } from "../../ffi/error.ts";
import {
  checkpointBytes,
  checkpointPath,
  listCheckpoints,
  writeCheckpoint,
} from "../io/checkpoint.ts";
import type { FileRing } from "../memory/mod.ts";
import { formatBytes } from "../plan/report.ts";
import type { CheckpointState } from "./checkpoint_state.ts";
import type { NoticeListener } from "./notice.ts";
import type { Session } from "./session.ts";
import { Snapshot } from "./snapshot.ts";

/** Where a run is. */
export type Position = Pick<CheckpointState, "step" | "epoch" | "batch">;

/** The run that checkpoints are of. */
export interface CheckpointedRun {
  /** What every checkpoint says alike. */
  readonly facts: Pick<CheckpointState, "settings" | "chosen" | "options">;
  /** Fingerprint of the evaluation data. */
  readonly evalData: string;
  readonly notice: NoticeListener;
}

/** How checkpoints are kept. */
export interface CheckpointPolicy {
  /** Folder of the run; this process holds its lock. */
  readonly dir: string;
  /** Optimizer steps from one checkpoint to the next. */
  readonly saveEvery: number;
  /** How many of the newest stay; the best one by evaluation loss stays besides. */
  readonly keepLast: number;
}

/** Writes checkpoints of a session in the background, one at a time. */
export class Checkpoints {
  readonly #ring: FileRing;
  readonly #snapshot: Snapshot;
  readonly #policy: CheckpointPolicy;
  readonly #run: CheckpointedRun;
  /** Steps of the checkpoints that are known to be whole, oldest first. */
  #whole: number[];
  #best: CheckpointState["best"];
  /** Step of the best checkpoint that is whole; -1 = none. Another best one may not have been written. */
  #bestWhole: number;
  /** Step of the last checkpoint that was begun, or resumed from; -1 = none. */
  #last: number;
  /** The write under way, or the last one: what the disk refused, or null. */
  #write: Promise<LoramemError | null> = Promise.resolve(null);

  private constructor(
    ring: FileRing,
    session: Session,
    policy: CheckpointPolicy,
    run: CheckpointedRun,
    resumed: CheckpointState | null,
    whole: number[],
  ) {
    this.#ring = ring;
    this.#snapshot = new Snapshot(session);
    this.#policy = policy;
    this.#run = run;
    this.#whole = whole;
    this.#last = resumed?.step ?? -1;
    // A loss on other data cannot be compared.
    this.#best = resumed?.best?.data === run.evalData ? resumed.best : null;
    this.#bestWhole = this.#best?.step ?? -1;
  }

  /**
   * Gets ready to write; removes what killed runs left unfinished.
   *
   * @param session Planned with a snapshot.
   * @param resumed State of the checkpoint that the run goes on from, or null.
   */
  static async open(
    ring: FileRing,
    session: Session,
    policy: CheckpointPolicy,
    run: CheckpointedRun,
    resumed: CheckpointState | null,
  ): Promise<Checkpoints> {
    const { checkpoints, leftovers } = await listCheckpoints(policy.dir);
    for (const leftover of leftovers) await ring.removeFile(leftover);
    // Newer ones than that which was resumed from are damaged, or this run will make them again.
    const whole = checkpoints
      .map(({ step }) => step)
      .filter((step) => step <= (resumed?.step ?? -1));
    return new Checkpoints(ring, session, policy, run, resumed, whole.reverse());
  }

  /** Whether a checkpoint should be written after `step`, where the run may stop. */
  due(step: number, stops: boolean): boolean {
    if (step === 0 || step === this.#last) return false;
    return stops || step % this.#policy.saveEvery === 0 || this.#best?.step === step;
  }

  /** Notes the evaluation loss after `step`. */
  evaluated(step: number, loss: number): void {
    if (step === 0 || !(loss < (this.#best?.loss ?? Number.POSITIVE_INFINITY))) return;
    this.#best = { step, loss, data: this.#run.evalData };
    this.#last = this.#last === step ? -1 : this.#last; // to be written again, with the new best
  }

  /**
   * Waits for the write before, copies the state on its own stream and begins to write it. A disk that refuses is a notice,
   * not an error.
   *
   * @throws {LoramemError} What is wrong with the device, now or during the write before.
   */
  async save(position: Position): Promise<void> {
    await this.#write;
    this.#last = position.step;
    this.#snapshot.take();
    this.#write = this.#writeNow({ ...position, ...this.#run.facts, best: this.#best });
    this.#write.catch(() => undefined); // reported to whoever waits for it
  }

  /**
   * Waits for the write under way.
   *
   * @returns What the disk refused, or null.
   */
  settled(): Promise<LoramemError | null> {
    return this.#write;
  }

  /** Waits for the write under way and gives everything back. */
  async dispose(): Promise<void> {
    await this.#write.catch(() => undefined);
    await this.#snapshot.dispose();
  }

  async #writeNow(state: CheckpointState): Promise<LoramemError | null> {
    const { dir } = this.#policy;
    const { parts, stream } = this.#snapshot;
    const file = checkpointPath(dir, state.step);
    try {
      const bytes = checkpointBytes(parts, state);
      await this.#checkSpace(file, bytes);
      await writeCheckpoint(this.#ring, dir, state.step, parts, state, stream);
      const message = `Checkpoint ${file} written (${formatBytes(bytes)})`;
      this.#run.notice({ kind: "checkpointSaved", file, message });
      this.#whole = [...this.#whole.filter((step) => step !== state.step), state.step];
      if (state.best?.step === state.step) this.#bestWhole = state.step;
    } catch (error) {
      return this.#refused(error, file, "not written");
    }
    await this.#removeOld();
    return null;
  }

  /** What the disk refuses is a notice; everything else is thrown on. */
  #refused(error: unknown, file: string, what: string): LoramemError {
    if (!(error instanceof LoramemError && error.is("IO"))) throw error;
    const message = `Checkpoint ${what}, the run goes on: ${error.message}`;
    this.#run.notice({ kind: "checkpointFailed", file, message });
    return error;
  }

  async #checkSpace(file: string, bytes: number): Promise<void> {
    const free = await this.#ring.freeBytes(this.#policy.dir);
    if (free >= bytes) return;
    const message =
      `checkpoint: the disk is full: ${file} takes ${formatBytes(bytes)}, ${formatBytes(free)} are free: ` +
      "free some space, or lower keepLast";
    throw new LoramemError("IO", message, { file, errno: "ENOSPC" });
  }

  /** Removes what is neither among the newest nor the best; only now, with a newer one on the disk. */
  async #removeOld(): Promise<void> {
    const newest = this.#whole.slice(-this.#policy.keepLast);
    for (const step of this.#whole) {
      if (newest.includes(step) || step === this.#bestWhole) continue;
      const file = checkpointPath(this.#policy.dir, step);
      this.#whole = this.#whole.filter((other) => other !== step);
      await this.#ring.removeFile(file).catch((error) => this.#refused(error, file, "not removed"));
    }
  }
}
