/** A window into device memory with a shape: what kernels take. */
import { badArgument, checkInteger } from "./arguments.ts";
import type { DeviceBuffer } from "./device_buffer.ts";
import { type DType, dtypeInfo } from "./dtype.ts";

/** Kernels take 32-bit sizes. */
const MOST = 2 ** 31 - 1;

/** Where a view lies inside its buffer. */
export interface TensorViewOptions {
  /** Bytes from the start of the buffer; a multiple of the element size. Default 0. */
  readonly offset?: number;
  /** Elements from one row to the next, at least the last size of the shape, which is the default. */
  readonly pitch?: number;
}

/**
 * Memory of a {@linkcode DeviceBuffer} read as a row-major tensor. It owns nothing, costs nothing native, and is usable
 * as long as its buffer is.
 */
export class TensorView {
  /** Memory that it looks into. */
  readonly buffer: DeviceBuffer;
  /** Element type. */
  readonly dtype: DType;
  /** Sizes, outermost first; the last one is contiguous. */
  readonly shape: readonly number[];
  /** Elements from one row to the next. */
  readonly pitch: number;
  /** Bytes from the start of the buffer. */
  readonly offset: number;
  /** Product of all sizes but the last; 1 for a vector. */
  readonly rows: number;
  /** Last size. */
  readonly width: number;

  constructor(
    buffer: DeviceBuffer,
    dtype: DType,
    shape: readonly number[],
    options: TensorViewOptions,
  ) {
    const op = "DeviceBuffer.as";
    const { bytes } = dtypeInfo(dtype, op);
    if (!Array.isArray(shape) || shape.length === 0) {
      badArgument(op, `shape must be a list of sizes: it is ${String(shape)}`, "shape", shape);
    }
    for (const size of shape) checkInteger(op, "a size of shape", size, 1, MOST);
    this.buffer = buffer;
    this.dtype = dtype;
    this.shape = [...shape];
    this.width = shape.at(-1) as number;
    this.rows = shape.slice(0, -1).reduce((product, size) => product * size, 1);
    this.pitch = options.pitch ?? this.width;
    this.offset = options.offset ?? 0;
    checkInteger(op, "the product of all sizes but the last", this.rows, 1, MOST);
    checkInteger(op, "pitch", this.pitch, this.width, MOST);
    checkInteger(op, "offset", this.offset, 0);
    if (this.offset % bytes !== 0) {
      badArgument(
        op,
        `offset must be a multiple of ${bytes} bytes for ${dtype}: it is ${this.offset}`,
        "offset",
        this.offset,
      );
    }
    const end = this.offset + ((this.rows - 1) * this.pitch + this.width) * bytes;
    if (end > buffer.bytes) {
      const what = `${dtype} [${this.shape.join(", ")}] with pitch ${this.pitch} at byte ${this.offset} ends at byte ${end}`;
      badArgument(
        op,
        `the view leaves the buffer "${buffer.label}": ${what}, the buffer has ${buffer.bytes}`,
        "shape",
        shape,
      );
    }
  }

  /** Whether rows follow each other without a gap. */
  get dense(): boolean {
    return this.pitch === this.width || this.rows === 1;
  }

  /** Elements without the gaps between rows. */
  get elements(): number {
    return this.rows * this.width;
  }

  /** Shape and type, such as `f32 [4, 8]`. */
  toString(): string {
    return `${this.dtype} [${this.shape.join(", ")}]`;
  }
}
