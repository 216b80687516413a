/** What device memory and page-locked host memory have in common: bytes with an address, an owner and host views. */
import { LoramemError } from "../../ffi/error.ts";
import { type Cell, Handle, pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument, checkInteger } from "./arguments.ts";
import type { Device } from "./device.ts";
import type { Stream } from "./stream.ts";

/** Constructor of a typed array. */
export interface ViewType<V extends ArrayBufferView<ArrayBuffer>> {
  new (buffer: ArrayBuffer, byteOffset: number, length: number): V;
  readonly BYTES_PER_ELEMENT: number;
}

/** Bun cannot make an ArrayBuffer of more than 4 GiB. */
const MOST_VIEWED = 2 ** 32 - 1;

/** Addresses kept per buffer; a plan uses few, a loader that walks a buffer may use any number. */
const MOST_ADDRESSES = 1024;

/** A view keeps the buffer that owns its memory alive. */
const owners = new WeakMap<ArrayBuffer, MemoryBuffer>();

/**
 * Address of a byte of a buffer.
 *
 * @throws {LoramemError} `DISPOSED`.
 */
export let addressOf: (buffer: MemoryBuffer, byteOffset?: number) => Ptr;

/** Streams whose work uses a buffer, each once. */
export interface StreamUses extends Iterable<Stream> {
  add(stream: Stream): unknown;
}

/** What a buffer's uses are noted in; null where giving it back waits for all streams anyway. */
export let usesOf: (buffer: MemoryBuffer) => StreamUses | null;

/** A typed array over the memory itself; it is detached when the buffer is disposed. */
export let viewMemory: <V extends ArrayBufferView<ArrayBuffer>>(
  buffer: MemoryBuffer,
  op: string,
  type: ViewType<V>,
  byteOffset: number,
  length: number | undefined,
) => V;

/** Bytes that belong to a {@linkcode Device}. */
export abstract class MemoryBuffer extends Handle {
  /** Device that made it. */
  readonly device: Device;
  /** Size. */
  readonly bytes: number;
  /** Name for messages and statistics. */
  readonly label: string;

  readonly #memory: Ptr;
  readonly #uses: StreamUses | null;
  #addresses: Map<number, Ptr> | undefined;
  #viewed: ArrayBuffer | undefined;

  static {
    addressOf = (buffer, byteOffset = 0) => {
      pointerOf(buffer);
      return byteOffset === 0 ? buffer.#memory : buffer.#address(byteOffset);
    };
    usesOf = (buffer) => buffer.#uses;
    viewMemory = (buffer, op, type, byteOffset, length) => {
      pointerOf(buffer);
      const size = type.BYTES_PER_ELEMENT;
      checkInteger(op, "byteOffset", byteOffset, 0, buffer.bytes);
      if (byteOffset % size !== 0) {
        const what = `byteOffset must be a multiple of ${size}: it is ${byteOffset}`;
        badArgument(op, what, "byteOffset", byteOffset);
      }
      const most = Math.floor((buffer.bytes - byteOffset) / size);
      if (length !== undefined) checkInteger(op, "length", length, 0, most);
      return new type(buffer.#view(op), byteOffset, length ?? most);
    };
  }

  /**
   * @param memory Address of the first byte.
   * @param uses Shared with the cell; see {@linkcode usesOf}.
   */
  constructor(
    device: Device,
    cell: Cell,
    memory: Ptr,
    bytes: number,
    label: string,
    uses: StreamUses | null,
  ) {
    super(cell);
    this.device = device;
    this.#memory = memory;
    this.bytes = bytes;
    this.label = label;
    this.#uses = uses;
  }

  /** Gives the memory back once the work enqueued so far has ended, without waiting; detaches every view of it. */
  override dispose(): void {
    if (this.#viewed !== undefined && !this.#viewed.detached) this.#viewed.transfer(0);
    this.#viewed = undefined;
    super.dispose();
  }

  #address(byteOffset: number): Ptr {
    this.#addresses ??= new Map();
    const addresses = this.#addresses;
    let address = addresses.get(byteOffset);
    if (address === undefined) {
      if (addresses.size === MOST_ADDRESSES) addresses.clear();
      address = native().fn.lm_ptr_add(this.#memory, BigInt(byteOffset)) as Ptr;
      addresses.set(byteOffset, address);
    }
    return address;
  }

  #view(op: string): ArrayBuffer {
    if (this.#viewed === undefined || this.#viewed.detached) {
      if (this.bytes > MOST_VIEWED) {
        const message = `${op}: a buffer of more than 4 GiB - 1 cannot be viewed: ${this.bytes} bytes: use several buffers`;
        throw new LoramemError("UNSUPPORTED", message, { what: "view" });
      }
      this.#viewed = native().runtime.view(this.#memory, this.bytes);
      owners.set(this.#viewed, this);
    }
    return this.#viewed;
  }
}
