/** The copies of a plan: one stream per direction beside the stream of the ops, and events between them. */
import type { CopyCall } from "../graph/program.ts";
import { bytesOf, type MemoryClass, rootOf, type Value } from "../graph/value.ts";
import type { Device, DeviceBuffer, Event, PinnedBuffer, Stream } from "../memory/mod.ts";

/** Memory of a value and where it starts inside it. */
export interface Location {
  readonly buffer: DeviceBuffer | PinnedBuffer;
  readonly offset: number;
}

/** A copy with everything filled in. */
export interface BoundCopy {
  readonly to: Location;
  readonly from: Location;
  readonly bytes: number;
  readonly stream: Stream;
  /** Reached when the copy has ended. */
  readonly ended: Event;
}

/** Starts copies and waits for them, always from the stream of the ops. */
export class Copies {
  readonly #ops: Stream;
  readonly #toDevice: Stream;
  readonly #toHost: Stream;
  /** Reached when the ops before a copy have ended. One serves all copies: a wait keeps to the record it was made after. */
  readonly #reached: Event;
  readonly #ended = new Map<Value, Event>();
  readonly #device: Device;

  constructor(device: Device, ops: Stream) {
    using undo = new DisposableStack();
    const stream = () => undo.adopt(device.createStream(), (created) => created.dispose());
    this.#device = device;
    this.#ops = ops;
    this.#toDevice = stream();
    this.#toHost = stream();
    this.#reached = undo.use(device.createEvent());
    undo.move();
  }

  /** @param locate Memory of a value. */
  bind({ copyTo, copyFrom }: CopyCall, locate: (value: Value) => Location): BoundCopy {
    return {
      to: locate(copyTo),
      from: locate(copyFrom),
      bytes: bytesOf(copyFrom),
      stream: isOnHost(copyTo) ? this.#toHost : this.#toDevice,
      ended: this.ended(copyTo),
    };
  }

  /** The event of the last copy to a value. */
  ended(to: Value): Event {
    const event = this.#ended.get(to) ?? this.#device.createEvent();
    this.#ended.set(to, event);
    return event;
  }

  /** Enqueues a copy, to start after the ops enqueued so far. */
  start({ to, from, bytes, stream, ended }: BoundCopy): void {
    this.#ops.record(this.#reached);
    stream.waitEvent(this.#reached);
    stream.copy(to.buffer, from.buffer, { bytes, dstOffset: to.offset, srcOffset: from.offset });
    stream.record(ended);
  }

  /** Lets the ops enqueued from now on start after a copy. */
  await(ended: Event): void {
    this.#ops.waitEvent(ended);
  }

  /** Resolves when every copy enqueued so far has ended. */
  async done(): Promise<void> {
    await this.#toDevice.done();
    await this.#toHost.done();
  }

  /** Waits for the copies and gives streams and events back. */
  async dispose(): Promise<void> {
    for (const event of this.#ended.values()) event.dispose();
    this.#reached.dispose();
    await Promise.all([this.#toDevice.dispose(), this.#toHost.dispose()]);
  }
}

function isOnHost(value: Value): boolean {
  const memory: MemoryClass = rootOf(value).memory;
  return memory === "host";
}
