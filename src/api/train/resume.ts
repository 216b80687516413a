/** The checkpoint that a run goes on from: found before the memory is planned, loaded after it is reserved. */
import { stat } from "node:fs/promises";
import { LoramemError } from "../../ffi/error.ts";
import {
  type CheckpointName,
  listCheckpoints,
  readCheckpoint,
  readCheckpointHeader,
} from "../io/checkpoint.ts";
import type { CheckpointHeader } from "../io/checkpoint_header.ts";
import { ioError } from "../io/io_error.ts";
import type { FileRing } from "../memory/mod.ts";
import { castMasters, clearState } from "./adapter_state.ts";
import {
  type CheckpointState,
  differences,
  type RunSettings,
  readState,
} from "./checkpoint_state.ts";
import type { NoticeListener } from "./notice.ts";
import type { ResolvedOptions } from "./options.ts";
import type { Session } from "./session.ts";
import { deviceParts } from "./snapshot.ts";

/** A checkpoint whose header is sound and whose settings are those of the run. */
interface Found extends CheckpointName {
  readonly header: CheckpointHeader;
  readonly state: CheckpointState;
}

/** Goes through checkpoints, newest first, until one is whole. */
export class Resume {
  readonly #rest: CheckpointName[];
  readonly #settings: RunSettings;
  readonly #notice: NoticeListener;
  #found: Found;

  private constructor(
    rest: CheckpointName[],
    settings: RunSettings,
    notice: NoticeListener,
    found: Found,
  ) {
    this.#rest = rest;
    this.#settings = settings;
    this.#notice = notice;
    this.#found = found;
  }

  /**
   * Finds the newest checkpoint with a sound header.
   *
   * @param where A checkpoint, or a folder of checkpoints.
   * @param settings Those of the run.
   * @returns Null where a folder holds none.
   * @throws {LoramemError} `BAD_ARGUMENT` naming the settings that differ; `BAD_FILE` where all are damaged; `IO`.
   */
  static async find(
    where: string,
    settings: RunSettings,
    notice: NoticeListener,
  ): Promise<Resume | null> {
    const rest = await candidates(where);
    if (rest.length === 0) return null;
    return new Resume(rest, settings, notice, await nextFound(rest, settings, notice));
  }

  /** Of the checkpoint that is to be loaded, or was. */
  get state(): CheckpointState {
    return this.#found.state;
  }

  /** The options of the run, with what its checkpoint had chosen in place of `"auto"` and `"timed"`: another choice may round otherwise. */
  planned(options: ResolvedOptions): ResolvedOptions {
    const { weights, savePoints, lossChunkTokens, algorithms } = this.state.chosen;
    const { weights: place, savePoints: points, lossChunkTokens: chunk } = options;
    return {
      ...options,
      algorithms: options.algorithms === "timed" ? algorithms : options.algorithms,
      weights: place === "auto" ? weights : place,
      savePoints: points === "auto" ? savePoints : points,
      lossChunkTokens: chunk === "auto" ? lossChunkTokens : chunk,
    };
  }

  /**
   * Brings the state to the device. Where the data of a checkpoint turns out to be damaged, an earlier one is taken.
   *
   * @returns Path of the checkpoint.
   * @throws {LoramemError} `BAD_FILE` where all are damaged, and as {@linkcode Resume.find}.
   */
  async load(session: Session, ring: FileRing): Promise<string> {
    const { executor, run } = session;
    for (;;) {
      clearState(executor, run);
      const { path, step, header } = this.#found;
      try {
        await readCheckpoint(ring, path, header, deviceParts(session), executor.stream);
        await castMasters(executor, run);
        session.resumeAfter(this.state.step);
        this.#notice({
          kind: "resumed",
          file: path,
          message: `Resumed after step ${step} from ${path}`,
        });
        return path;
      } catch (error) {
        if (!isDamage(error)) throw error;
        skip(this.#notice, path, error);
        this.#found = await nextFound(this.#rest, this.#settings, this.#notice, error);
      }
    }
  }
}

async function candidates(where: string): Promise<CheckpointName[]> {
  const info = await stat(where).catch((error) => {
    throw ioError("resume", where, error);
  });
  if (info.isDirectory()) return (await listCheckpoints(where)).checkpoints;
  return [{ step: 0, path: where }];
}

/** Takes candidates from `rest` until the header of one is sound. */
async function nextFound(
  rest: CheckpointName[],
  settings: RunSettings,
  notice: NoticeListener,
  before?: unknown,
): Promise<Found> {
  let last = before;
  for (let name = rest.shift(); name !== undefined; name = rest.shift()) {
    try {
      const header = await readCheckpointHeader(name.path);
      const state = readState(header.state, name.path);
      const differing = differences(settings, state.settings);
      if (differing !== null) throw anotherRun(name.path, differing);
      return { ...name, step: state.step, header, state };
    } catch (error) {
      if (!isDamage(error)) throw error;
      skip(notice, name.path, error);
      last = error;
    }
  }
  const message = `resume: no checkpoint is whole: ${(last as Error).message}: delete them to start from the beginning`;
  throw new LoramemError("BAD_FILE", message, {}, { cause: last });
}

/** Whether another checkpoint may do: this one is damaged, or lies where the disk is. */
function isDamage(error: unknown): error is LoramemError {
  if (!(error instanceof LoramemError)) return false;
  return error.is("BAD_FILE") || (error.is("IO") && error.details.errno === "EIO");
}

function skip(notice: NoticeListener, file: string, error: LoramemError): void {
  notice({ kind: "checkpointSkipped", file, message: `Checkpoint skipped: ${error.message}` });
}

function anotherRun(file: string, differing: string): LoramemError {
  const message =
    `resume: the checkpoint is of another run: ${differing}: ${file}: ` +
    "give the options that it was made with, or start from the beginning in another folder";
  return new LoramemError("BAD_ARGUMENT", message, { name: "resume", value: file });
}
