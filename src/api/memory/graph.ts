/** Recorded work. */
import { type Cell, Handle, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check } from "../../ffi/status.ts";
import { addressOf, type MemoryBuffer, usesOf } from "./buffer.ts";
import type { Device } from "./device.ts";
import type { Stream } from "./stream.ts";

/** Work recorded by {@linkcode Stream.capture}, to be enqueued again with one call. */
export class Graph extends Handle {
  /** Device that made it. */
  readonly device: Device;
  /** How many kernels, copies and fills were recorded. */
  readonly nodes: number;

  readonly #buffers: readonly MemoryBuffer[];

  constructor(device: Device, cell: Cell, buffers: readonly MemoryBuffer[]) {
    super(cell);
    this.device = device;
    this.nodes = native().fn.lm_graph_nodes(pointerOf(this));
    this.#buffers = buffers;
  }

  /**
   * Enqueues the recorded work on a stream, with the addresses and sizes of the recording.
   *
   * @param stream Any stream of the same device.
   * @throws {LoramemError} `DISPOSED` if the graph, the stream or a buffer of the recording is gone.
   */
  launch(stream: Stream): void {
    for (const buffer of this.#buffers) {
      addressOf(buffer);
      usesOf(buffer)?.add(stream);
    }
    const status = native().fn.lm_graph_launch(pointerOf(this), pointerOf(stream));
    check(native(), pointerOf(this.device), status, "Graph.launch");
  }
}
