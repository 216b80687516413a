/** Ordered queues of work. */
import { streamDone } from "../../ffi/completion.ts";
import { type Cell, cellOf, disposeNow, NativeObject, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check, creationError } from "../../ffi/status.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import { addressOf, MemoryBuffer, usesOf } from "./buffer.ts";
import type { Device } from "./device.ts";
import { Event } from "./event.ts";
import { Graph } from "./graph.ts";
import { noteMade } from "./leaks.ts";

/** What a copy moves; offsets and sizes in bytes. */
export interface CopyOptions {
  /** Default: what the source holds from `srcOffset` on. */
  readonly bytes?: number;
  /** Default 0. */
  readonly dstOffset?: number;
  /** Default 0. */
  readonly srcOffset?: number;
}

/** What a fill covers, in bytes. */
export interface FillOptions {
  /** Default: to the end of the buffer. */
  readonly bytes?: number;
  /** Default 0. */
  readonly offset?: number;
}

/** Remembers that work of a stream uses a buffer: it is given back after that work, and a recording refers to it. */
export let noteUse: (buffer: MemoryBuffer, stream: Stream) => void;

/**
 * A queue of a device. Work runs in the order in which it was enqueued, beside the work of other streams; every call but
 * `done` returns at once.
 *
 * Memory that enqueued work uses may be disposed: it is given back after that work.
 */
export class Stream extends NativeObject implements AsyncDisposable {
  /** Device that made it. */
  readonly device: Device;

  #recording: Set<MemoryBuffer> | null = null;
  #failureSeen = false;

  static {
    noteUse = (buffer, stream) => {
      usesOf(buffer)?.add(stream);
      stream.#recording?.add(buffer);
    };
  }

  constructor(device: Device, cell: Cell) {
    super(cell);
    this.device = device;
  }

  /**
   * Copies bytes between device memory and page-locked host memory, in any direction.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * await using stream = device.createStream();
   * using host = device.createPinnedBuffer(1024);
   * using buffer = device.createBuffer(4096);
   * stream.copy(buffer, host, { bytes: 512, dstOffset: 1024 });
   * await stream.done();
   * ```
   *
   * @param dst Written.
   * @param src Read.
   * @param options Sizes and offsets.
   * @throws {LoramemError} `BAD_ARGUMENT` where the copy would leave a buffer, `DISPOSED`, `DEVICE`.
   */
  copy(dst: MemoryBuffer, src: MemoryBuffer, options: CopyOptions = {}): void {
    const op = "Stream.copy";
    const { dstOffset = 0, srcOffset = 0 } = options;
    this.#checkBuffer(op, "dst", dst);
    this.#checkBuffer(op, "src", src);
    checkInteger(op, "srcOffset", srcOffset, 0, src.bytes);
    checkInteger(op, "dstOffset", dstOffset, 0, dst.bytes);
    const bytes = options.bytes ?? src.bytes - srcOffset;
    checkInteger(op, "bytes", bytes, 0);
    checkEnd(op, "src", src, srcOffset, bytes);
    checkEnd(op, "dst", dst, dstOffset, bytes);
    if (bytes === 0) return;
    const { fn } = native();
    const ctx = pointerOf(this.device);
    const to = addressOf(dst, dstOffset);
    const from = addressOf(src, srcOffset);
    const status = fn.lm_mem_copy(ctx, to, from, BigInt(bytes), pointerOf(this));
    check(native(), ctx, status, op);
    noteUse(dst, this);
    noteUse(src, this);
  }

  /**
   * Sets bytes to one value.
   *
   * @param dst Written.
   * @param value Integer from 0 to 255.
   * @param options Which bytes.
   * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
   */
  fill(dst: MemoryBuffer, value: number, options: FillOptions = {}): void {
    const op = "Stream.fill";
    const { offset = 0 } = options;
    this.#checkBuffer(op, "dst", dst);
    checkInteger(op, "value", value, 0, 255);
    checkInteger(op, "offset", offset, 0, dst.bytes);
    const bytes = options.bytes ?? dst.bytes - offset;
    checkInteger(op, "bytes", bytes, 0);
    checkEnd(op, "dst", dst, offset, bytes);
    if (bytes === 0) return;
    const ctx = pointerOf(this.device);
    const status = native().fn.lm_mem_fill(
      ctx,
      addressOf(dst, offset),
      value,
      BigInt(bytes),
      pointerOf(this),
    );
    check(native(), ctx, status, op);
    noteUse(dst, this);
  }

  /**
   * Resolves when everything enqueued so far has ended; the event loop goes on meanwhile.
   *
   * @throws {LoramemError} Rejects with the failure of the work, or with `DISPOSED`.
   */
  async done(): Promise<void> {
    const stream = pointerOf(this);
    try {
      await streamDone(native(), pointerOf(this.device), stream, "Stream.done");
    } catch (error) {
      this.#failureSeen = true;
      throw error;
    }
  }

  /**
   * Whether everything enqueued so far has ended; never waits.
   *
   * @throws {LoramemError} The failure of the work, `DISPOSED`.
   */
  query(): boolean {
    const status = native().fn.lm_stream_query(pointerOf(this));
    check(native(), pointerOf(this.device), status, "Stream.query");
    return status === 0;
  }

  /**
   * Sets an event at this point of the stream; a second record replaces the first.
   *
   * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
   */
  record(event: Event): void {
    const op = "Stream.record";
    this.#checkEvent(op, event);
    check(
      native(),
      pointerOf(this.device),
      native().fn.lm_event_record(pointerOf(event), pointerOf(this)),
      op,
    );
  }

  /**
   * Lets work enqueued from now on start after an event of any stream of the device.
   *
   * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
   */
  waitEvent(event: Event): void {
    const op = "Stream.waitEvent";
    this.#checkEvent(op, event);
    const status = native().fn.lm_stream_wait_event(pointerOf(this), pointerOf(event));
    check(native(), pointerOf(this.device), status, op);
  }

  /**
   * Records what `enqueue` enqueues on this stream instead of running it.
   *
   * @example Usage
   * ```ts
   * import { Device } from "./mod.ts";
   * await using device = await Device.open("cpu");
   * await using stream = device.createStream();
   * using buffer = device.createBuffer(1024);
   * using graph = stream.capture(() => stream.fill(buffer, 7));
   * for (let step = 0; step < 3; step++) graph.launch(stream);
   * await stream.done();
   * ```
   *
   * @param enqueue Enqueues copies, fills and kernels; synchronous.
   * @returns The recorded work. It refers to the memory that was used; dispose that later.
   * @throws {LoramemError} `BAD_ARGUMENT` while the stream records already; what `enqueue` throws.
   */
  capture(enqueue: () => void): Graph {
    const op = "Stream.capture";
    const { fn } = native();
    const ctx = pointerOf(this.device);
    const stream = pointerOf(this);
    check(native(), ctx, fn.lm_graph_begin(stream), op);
    const buffers = new Set<MemoryBuffer>();
    this.#recording = buffers;
    let finished = false;
    try {
      enqueue();
      finished = true;
    } finally {
      this.#recording = null;
      if (!finished) fn.lm_graph_destroy(fn.lm_graph_end(stream));
    }
    const graph = fn.lm_graph_end(stream);
    if (graph === null) throw creationError(native(), ctx, op);
    const cell: Cell = {
      label: "Graph",
      pointer: graph,
      parent: cellOf(this.device),
      destroy: fn.lm_graph_destroy,
    };
    noteMade(this.device, cell);
    return new Graph(this.device, cell, [...buffers]);
  }

  /**
   * Waits for the enqueued work without blocking the event loop, then gives the stream back.
   *
   * @throws {LoramemError} Rejects with the failure of the work unless `done` reported it.
   */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.disposed) return disposeNow(this);
    try {
      await streamDone(native(), pointerOf(this.device), pointerOf(this), "Stream.dispose");
    } catch (error) {
      if (!this.#failureSeen) throw error;
    } finally {
      disposeNow(this);
    }
  }

  /** {@linkcode Stream[Symbol.asyncDispose]} by name. */
  dispose(): Promise<void> {
    return this[Symbol.asyncDispose]();
  }

  #checkBuffer(op: string, name: string, buffer: MemoryBuffer): void {
    if (!(buffer instanceof MemoryBuffer)) {
      badArgument(
        op,
        `${name} must be a DeviceBuffer or PinnedBuffer: it is ${typeof buffer}`,
        name,
        buffer,
      );
    }
    if (buffer.device !== this.device) {
      badArgument(
        op,
        `${name} belongs to another device: "${buffer.label}": copy through pinned memory of its own`,
        name,
      );
    }
  }

  #checkEvent(op: string, event: Event): void {
    if (!(event instanceof Event))
      badArgument(op, `event must be an Event: it is ${typeof event}`, "event", event);
    if (event.device !== this.device) badArgument(op, "event belongs to another device", "event");
  }
}

function checkEnd(
  op: string,
  name: string,
  buffer: MemoryBuffer,
  offset: number,
  bytes: number,
): void {
  if (offset + bytes <= buffer.bytes) return;
  const what = `${bytes} bytes from byte ${offset} on, "${buffer.label}" has ${buffer.bytes}`;
  badArgument(op, `the range leaves ${name}: ${what}: pass smaller bytes or offsets`, name);
}

/** Lets `stream` go on after what `other` has enqueued so far. */
export function followStream(stream: Stream, other: Stream): void {
  const { fn } = native();
  const event = fn.lm_event_create(pointerOf(stream.device));
  const follows =
    event !== null &&
    fn.lm_event_record(event, pointerOf(other)) === 0 &&
    fn.lm_stream_wait_event(pointerOf(stream), event) === 0;
  if (!follows) fn.lm_stream_wait(pointerOf(other)); // without an event the only safe order is to wait here
  fn.lm_event_destroy(event);
}
