/** The part of opening a run that concerns its checkpoints: before the plan, and after the memory is reserved. */
import { dirname, resolve } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import { listCheckpoints } from "../io/checkpoint.ts";
import type { FileRing } from "../memory/mod.ts";
import { type CheckpointState, plainOptions } from "./checkpoint_state.ts";
import { type CheckpointPolicy, Checkpoints } from "./checkpoints.ts";
import type { NoticeListener } from "./notice.ts";
import type { ResolvedOptions } from "./options.ts";
import { Resume } from "./resume.ts";
import { changedChoices, chosenBy, type RunIdentity } from "./run_identity.ts";
import type { Session } from "./session.ts";

/**
 * Checks what the schema cannot: checkpoints need a folder.
 *
 * @throws {LoramemError} BAD_ARGUMENT.
 */
export function checkRunDir({ runDir, saveEvery, resume }: ResolvedOptions): void {
  const name =
    saveEvery !== undefined ? "saveEvery" : resume === "auto" ? 'resume: "auto"' : undefined;
  if (name === undefined || runDir !== undefined) return;
  const message = `options: ${name} needs the folder of the run: runDir is missing: set it`;
  throw new LoramemError("BAD_ARGUMENT", message, { name: "runDir" });
}

/** Checkpoints that are to be read and written. */
export class CheckpointSetup {
  readonly #ring: FileRing;
  readonly #options: ResolvedOptions;
  readonly #identity: RunIdentity;
  readonly #resume: Resume | null;
  readonly #notice: NoticeListener;

  private constructor(
    ring: FileRing,
    options: ResolvedOptions,
    identity: RunIdentity,
    resume: Resume | null,
    notice: NoticeListener,
  ) {
    this.#ring = ring;
    this.#options = options;
    this.#identity = identity;
    this.#resume = resume;
    this.#notice = notice;
  }

  /**
   * Finds the checkpoint that `options.resume` means.
   *
   * @throws {LoramemError} BAD_ARGUMENT where it is of another run, or where a run that starts from the beginning or from
   * elsewhere would write among the checkpoints of an earlier one; BAD_FILE where none is whole; IO.
   */
  static async prepare(
    ring: FileRing,
    options: ResolvedOptions,
    identity: RunIdentity,
    notice: NoticeListener = () => undefined,
  ): Promise<CheckpointSetup> {
    const { runDir, resume, saveEvery } = options;
    if (runDir !== undefined && saveEvery !== undefined && !isFrom(resume, runDir)) {
      refuseOverwrite((await listCheckpoints(runDir)).checkpoints[0]?.path);
    }
    const where = resume === "auto" ? runDir : resume;
    const found = where === undefined ? null : await Resume.find(where, identity.settings, notice);
    if (found === null && resume !== undefined && resume !== "auto") {
      const message = `resume: the folder holds no checkpoint: ${resume}: check the path`;
      throw new LoramemError("BAD_FILE", message, { file: resume });
    }
    return new CheckpointSetup(ring, options, identity, found, notice);
  }

  /** Options to plan with; what a checkpoint had chosen is chosen again. */
  get planned(): ResolvedOptions {
    return this.#resume?.planned(this.#options) ?? this.#options;
  }

  /** Loads the state of the checkpoint; null where the run starts from the beginning. */
  async load(session: Session): Promise<CheckpointState | null> {
    if (this.#resume === null) return null;
    const file = await this.#resume.load(session, this.#ring);
    const { state } = this.#resume;
    const changed = changedChoices(chosenBy(session), state.chosen);
    if (changed !== null) {
      const message = `Not planned as for the checkpoint, which may round otherwise: ${changed}`;
      this.#notice({ kind: "planChanged", file, message });
    }
    return state;
  }

  /** Gets ready to write checkpoints; null where the options ask for none. */
  async start(session: Session, resumed: CheckpointState | null): Promise<Checkpoints | null> {
    const { runDir: dir, saveEvery, keepLast } = this.#options;
    if (dir === undefined || saveEvery === undefined) return null;
    const policy: CheckpointPolicy = { dir, saveEvery, keepLast };
    const facts = {
      settings: this.#identity.settings,
      chosen: chosenBy(session),
      options: plainOptions(this.#options),
    };
    const about = { facts, evalData: this.#identity.evalData, notice: this.#notice };
    return await Checkpoints.open(this.#ring, session, policy, about, resumed);
  }
}

/** Whether `resume` is a checkpoint of the run's folder, or the folder itself. */
function isFrom(resume: string | undefined, runDir: string): boolean {
  if (resume === undefined || resume === "auto") return resume === "auto";
  const path = resolve(resume);
  return path === resolve(runDir) || dirname(path) === resolve(runDir);
}

function refuseOverwrite(newest: string | undefined): void {
  if (newest === undefined) return;
  const message =
    `checkpoints: the run folder holds those of an earlier run: ${newest}: ` +
    'set resume to "auto" to go on from there, or choose another folder';
  throw new LoramemError("BAD_ARGUMENT", message, { name: "runDir", value: newest });
}
