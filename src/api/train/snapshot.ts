/** The copy of a run's state that a checkpoint is written from: taken on a stream of its own, beside the next step. */

import { bytesOf, type DType, type Value } from "../graph/value.ts";
import type { CheckpointPart } from "../io/checkpoint.ts";
import type { Dtype } from "../io/dtype.ts";
import type { Event, Stream } from "../memory/mod.ts";
import { rememberedValues } from "./run_plan.ts";
import type { Session } from "./session.ts";

const STORED: Readonly<Partial<Record<DType, Dtype>>> = { f32: "F32", f64: "F64" };

/** Tensors of a checkpoint in device memory, where it is read to. */
export function deviceParts({ executor, run }: Session): CheckpointPart[] {
  return rememberedValues(run.adapters).map((value) => {
    const { buffer, offset } = executor.locate(value);
    return partOf(value, buffer, offset);
  });
}

function partOf(
  value: Value,
  memory: CheckpointPart["memory"],
  memoryOffset: number,
): CheckpointPart {
  const { name, dtype, shape } = value;
  return {
    name,
    dtype: STORED[dtype] as Dtype,
    shape,
    bytes: bytesOf(value),
    memory,
    memoryOffset,
  };
}

/** The state as it was after a step, in planned host memory. */
export class Snapshot {
  /** Tensors of a checkpoint on the host, where it is written from. */
  readonly parts: readonly CheckpointPart[];
  /** Produces what `parts` hold. */
  readonly stream: Stream;
  readonly #session: Session;
  readonly #updated: Event;
  readonly #copied: Event;

  /** `session` must be planned with a snapshot. */
  constructor(session: Session) {
    const { executor, run } = session;
    using undo = new DisposableStack();
    this.#session = session;
    this.#updated = undo.use(executor.device.createEvent());
    this.#copied = undo.use(executor.device.createEvent());
    this.stream = executor.device.createStream();
    this.parts = run.snapshot.map(({ value, copy }) => {
      const { buffer, offset } = executor.locate(copy);
      return partOf(value, buffer, offset);
    });
    undo.move();
  }

  /**
   * Enqueues the copy. Nothing waits for it here: the copy stream waits for what the session has enqueued so far, and the
   * session's next update, which changes the state, waits for the copy.
   */
  take(): void {
    const { executor, run } = this.#session;
    executor.stream.record(this.#updated);
    this.stream.waitEvent(this.#updated);
    for (const { value, copy } of run.snapshot) {
      const from = executor.locate(value);
      const to = executor.locate(copy);
      const place = { bytes: bytesOf(value), dstOffset: to.offset, srcOffset: from.offset };
      this.stream.copy(to.buffer, from.buffer, place);
    }
    this.stream.record(this.#copied);
    this.#session.holdUpdate(this.#copied);
  }

  /** Waits for the copy under way and gives stream and events back. A copy that failed has failed its checkpoint. */
  async dispose(): Promise<void> {
    this.#updated.dispose();
    this.#copied.dispose();
    await this.stream.dispose().catch(() => undefined);
  }
}
