/** What a run tells its user without failing. */
import type { LoadOptions } from "../io/load_tensors.ts";

/** Something that happened to the checkpoints of a run, see {@linkcode OpenOptions.onNotice}. */
export interface Notice {
  /**
   * `resumed`: the run goes on from a checkpoint. `checkpointSaved`: one is on the disk. `checkpointSkipped`: one is damaged,
   * an earlier one is taken. `checkpointFailed`: one could not be written; the run goes on, and earlier ones are intact.
   * `planChanged`: the plan or the device is not the one that the checkpoint was written under.
   */
  readonly kind:
    | "resumed"
    | "checkpointSaved"
    | "checkpointSkipped"
    | "checkpointFailed"
    | "planChanged";
  /** A sentence for people. */
  readonly message: string;
  /** Path of the checkpoint. */
  readonly file: string;
}

/** Takes notices. */
export type NoticeListener = (notice: Notice) => void;

/** How {@linkcode LoraTrainer.open} is followed, and the run after it. */
export interface OpenOptions extends LoadOptions {
  /** Called with what happens to checkpoints; without it nobody hears of it. */
  readonly onNotice?: NoticeListener;
}
