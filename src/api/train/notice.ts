/** What a run tells its user without failing. */

/** Something that happened to the checkpoints of a run, see {@linkcode TrainOptions.onNotice}. */
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

/** Takes notices; called between steps, never from inside one. */
export type NoticeListener = (notice: Notice) => void;
