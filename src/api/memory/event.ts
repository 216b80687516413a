/** Points in streams. */
import { streamDone } from "../../ffi/completion.ts";
import { type Cell, Handle, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check } from "../../ffi/status.ts";
import { badArgument } from "./arguments.ts";
import type { Device } from "./device.ts";
import type { Stream } from "./stream.ts";

/** The stream of each device that waits for events on behalf of {@linkcode Event.done}. */
const waiters = new WeakMap<Device, Stream>();

/** Ends the waiting stream of a device. */
export async function disposeWaiter(device: Device): Promise<void> {
  await waiters.get(device)?.dispose();
  waiters.delete(device);
}

/** A point in a stream, set by {@linkcode Stream.record}. Before that it counts as reached. */
export class Event extends Handle {
  /** Device that made it. */
  readonly device: Device;

  constructor(device: Device, cell: Cell) {
    super(cell);
    this.device = device;
  }

  /**
   * Whether the point was reached; never waits.
   *
   * @throws {LoramemError} `DISPOSED`, or the failure of the device.
   */
  query(): boolean {
    const status = native().fn.lm_event_query(pointerOf(this));
    check(native(), pointerOf(this.device), status, "Event.query");
    return status === 0;
  }

  /**
   * Resolves when the point is reached; an event that another `done()` of the device awaits may come first.
   *
   * @throws {LoramemError} Rejects with `DISPOSED`, or with the failure of the device.
   */
  async done(): Promise<void> {
    if (this.query()) return;
    const { device } = this;
    const waiter = waiters.get(device) ?? device.createStream();
    waiters.set(device, waiter);
    waiter.waitEvent(this);
    await streamDone(native(), pointerOf(device), pointerOf(waiter), "Event.done");
  }

  /**
   * Time from another event to this one on the device.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * await using stream = device.createStream();
   * using buffer = device.createBuffer(1 << 20);
   * using start = device.createEvent();
   * using end = device.createEvent();
   * stream.record(start);
   * stream.fill(buffer, 0);
   * stream.record(end);
   * await end.done();
   * console.log(end.elapsed(start) >= 0); // milliseconds
   * ```
   *
   * @param start The earlier event.
   * @returns Milliseconds.
   * @throws {LoramemError} `BAD_ARGUMENT` while one of them was not reached.
   */
  elapsed(start: Event): number {
    const op = "Event.elapsed";
    if (start.device !== this.device) badArgument(op, "start belongs to another device", "start");
    const ms = new Float32Array(1);
    const status = native().fn.lm_event_elapsed(ms, pointerOf(start), pointerOf(this));
    check(native(), pointerOf(this.device), status, op);
    return ms[0] as number;
  }
}
