/** A device with tensors that tests can fill and read, and the comparison of results. */
import assert from "node:assert/strict";
import {
  Device,
  type DeviceBuffer,
  type DType,
  type Stream,
  type TensorView,
} from "../../src/api/memory/mod.ts";
import { type Matrix, matrix } from "../reference/matrix.ts";

/** Every device of this machine. */
export const KINDS: readonly ("cpu" | "cuda:0")[] = await presentKinds();

async function presentKinds(): Promise<readonly ("cpu" | "cuda:0")[]> {
  await using device = await Device.open("auto", { threads: 1 });
  return device.kind === "cuda:0" ? ["cpu", "cuda:0"] : ["cpu"];
}

/** Storage types of activations. */
export const FLOATS = ["f32", "bf16", "f16"] as const;

/** A storage type of activations. */
export type Float = (typeof FLOATS)[number];

/** Sizes around the widths of vectors and tiles. */
export const SIZES = [1, 63, 64, 65, 127, 129] as const;

/** Relative rounding error of one store, with room for fp32 sums. */
export const TOLERANCE: Readonly<Record<Float, number>> = {
  f32: 2e-5,
  bf16: 2 ** -8,
  f16: 2 ** -10,
};

const BYTES: Readonly<Record<DType, number>> = { f32: 4, bf16: 2, f16: 2, i32: 4, f64: 8 };

/** What fills the gaps between rows and everything that a kernel must not touch. */
const SENTINEL = 0x5b;

/** A tensor of a test, with gaps between its rows unless told otherwise. */
export interface Tensor {
  readonly view: TensorView;
  readonly buffer: DeviceBuffer;
}

/** Layout of a test tensor. */
export interface Layout {
  /** Extra elements after each row. Default 0. */
  readonly gap?: number;
}

/** An opened device with a stream. */
export class Rig implements AsyncDisposable {
  readonly device: Device;
  readonly stream: Stream;
  readonly #stack: AsyncDisposableStack;

  private constructor(device: Device, stack: AsyncDisposableStack) {
    this.device = device;
    this.#stack = stack;
    stack.use(device);
    this.stream = stack.use(device.createStream());
  }

  static async open(kind: "cpu" | "cuda:0", threads = 2): Promise<Rig> {
    return new Rig(await Device.open(kind, { threads }), new AsyncDisposableStack());
  }

  /** A tensor with values, or with the sentinel where there are none. */
  tensor(
    dtype: DType,
    shape: readonly number[],
    values?: ArrayLike<number>,
    layout: Layout = {},
  ): Tensor {
    const width = shape.at(-1) as number;
    const rows = shape.slice(0, -1).reduce((product, size) => product * size, 1);
    const pitch = width + (layout.gap ?? 0);
    const bytes = rows * pitch * BYTES[dtype];
    const buffer = this.#stack.use(this.device.createBuffer(bytes));
    const host = this.#stack.use(this.device.createPinnedBuffer(bytes));
    host.view(Uint8Array).fill(SENTINEL);
    if (values !== undefined) {
      for (let row = 0; row < rows; row++) {
        const encoded = encode(
          dtype,
          Array.from({ length: width }, (_, col) => values[row * width + col] as number),
        );
        host.view(Uint8Array, row * pitch * BYTES[dtype], encoded.length).set(encoded);
      }
    }
    this.stream.copy(buffer, host);
    return { buffer, view: buffer.as(dtype, shape, { pitch }) };
  }

  /** A tensor of a matrix. */
  matrix(dtype: DType, m: Matrix, layout: Layout = {}): Tensor {
    return this.tensor(dtype, [m.rows, m.cols], m.data, layout);
  }

  /** A vector of integers. */
  ints(values: readonly number[]): Tensor {
    return this.tensor("i32", [values.length], values);
  }

  /** A tensor of bytes of a struct. */
  struct(dtype: DType, bytes: Uint8Array): Tensor {
    const tensor = this.tensor(dtype, [bytes.length / BYTES[dtype]]);
    const host = this.#stack.use(this.device.createPinnedBuffer(bytes.length));
    host.view(Uint8Array).set(bytes);
    this.stream.copy(tensor.buffer, host);
    return tensor;
  }

  /**
   * Waits, then reads the values; fails if the gaps between rows, or rows from `live` on, were touched.
   */
  async read(tensor: Tensor, live: number = tensor.view.rows): Promise<Matrix> {
    const { buffer, view } = tensor;
    using host = this.device.createPinnedBuffer(buffer.bytes);
    this.stream.copy(host, buffer);
    await this.stream.done();
    const size = BYTES[view.dtype];
    const bytes = host.view(Uint8Array);
    for (let row = 0; row < view.rows; row++) {
      const start = (row * view.pitch + (row < live ? view.width : 0)) * size;
      const gap = bytes.subarray(start, (row + 1) * view.pitch * size);
      assert.ok(
        gap.every((byte) => byte === SENTINEL),
        `memory behind row ${row} was written`,
      );
    }
    const data = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    return matrix(live, view.width, (row, col) =>
      decode(view.dtype, data, (row * view.pitch + col) * size),
    );
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#stack.disposeAsync();
  }
}

function encode(dtype: DType, values: readonly number[]): Uint8Array {
  switch (dtype) {
    case "f32":
      return new Uint8Array(Float32Array.from(values).buffer);
    case "f64":
      return new Uint8Array(Float64Array.from(values).buffer);
    case "i32":
      return new Uint8Array(Int32Array.from(values).buffer);
    case "f16":
      return new Uint8Array(Float16Array.from(values).buffer);
    case "bf16":
      return new Uint8Array(Uint16Array.from(values, bfloat16Bits).buffer);
  }
}

/** Round to nearest, ties to even. */
function bfloat16Bits(value: number): number {
  const [bits = 0] = new Uint32Array(Float32Array.of(value).buffer);
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

/** The nearest value that a type can store. */
export function rounded(dtype: Float, value: number): number {
  if (dtype === "f32") return Math.fround(value);
  if (dtype === "f16") return Math.f16round(value);
  const [float = 0] = new Float32Array(Uint32Array.of(bfloat16Bits(value) << 16).buffer);
  return float;
}

function decode(dtype: DType, view: DataView, offset: number): number {
  switch (dtype) {
    case "f32":
      return view.getFloat32(offset, true);
    case "f64":
      return view.getFloat64(offset, true);
    case "i32":
      return view.getInt32(offset, true);
    case "f16":
      return view.getFloat16(offset, true);
    case "bf16": {
      const [float = 0] = new Float32Array(
        Uint32Array.of(view.getUint16(offset, true) << 16).buffer,
      );
      return float;
    }
  }
}

/** Deterministic numbers: normal, or uniform integers. */
export class Random {
  #state: number;

  constructor(seed: number) {
    this.#state = seed;
  }

  /** In [0, 1). */
  uniform(): number {
    this.#state = (this.#state + 0x6d2b79f5) | 0;
    let t = Math.imul(this.#state ^ (this.#state >>> 15), 1 | this.#state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  }

  /** In [0, n). */
  below(n: number): number {
    return Math.floor(this.uniform() * n);
  }

  /** Normal with the given deviation. */
  normal(deviation = 1): number {
    return (
      deviation *
      Math.sqrt(-2 * Math.log(1 - this.uniform())) *
      Math.cos(2 * Math.PI * this.uniform())
    );
  }

  /** A matrix of normal numbers that `dtype` stores exactly. */
  matrix(dtype: Float, rows: number, cols: number, deviation = 1): Matrix {
    return matrix(rows, cols, () => rounded(dtype, this.normal(deviation)));
  }
}

/** Root of the mean square. */
export function rms(values: Float64Array): number {
  return Math.sqrt(
    values.reduce((total, value) => total + value * value, 0) / Math.max(1, values.length),
  );
}

/** Fails unless every element is as near as the tolerance allows, relative to itself and to the whole. */
export function assertClose(got: Matrix, want: Matrix, tolerance: number, what: string): void {
  assert.deepEqual([got.rows, got.cols], [want.rows, want.cols], what);
  const scale = rms(want.data);
  for (let i = 0; i < want.data.length; i++) {
    const [a, b] = [got.data[i] as number, want.data[i] as number];
    const near = Math.abs(a - b) <= tolerance * (Math.abs(b) + scale);
    assert.ok(
      near,
      `${what}: element ${i} is ${a}, wanted ${b} (tolerance ${tolerance}, rms ${scale})`,
    );
  }
}

/**
 * Derivative of `f` with respect to elements of `m` by central differences, compared with a kernel's result.
 *
 * @param count How many elements are tried, spread over the matrix.
 */
export function assertGradient(
  got: Matrix,
  m: Matrix,
  f: () => number,
  tolerance: number,
  what: string,
  count = 24,
): void {
  assert.equal(got.data.length, m.data.length, what);
  const scale = rms(got.data);
  const random = new Random(m.data.length);
  const step = 1e-4;
  for (let i = 0; i < Math.min(count, m.data.length); i++) {
    const index = m.data.length <= count ? i : random.below(m.data.length);
    const value = m.data[index] as number;
    m.data[index] = value + step;
    const up = f();
    m.data[index] = value - step;
    const down = f();
    m.data[index] = value;
    const want = (up - down) / (2 * step);
    const near =
      Math.abs((got.data[index] as number) - want) <= tolerance * (Math.abs(want) + scale) + 1e-7;
    assert.ok(
      near,
      `${what}: element ${index} is ${got.data[index]}, differences give ${want} (rms ${scale})`,
    );
  }
}

/** sum(a * b). */
export function dot(a: Matrix, b: Matrix): number {
  return a.data.reduce((total, value, index) => total + value * (b.data[index] as number), 0);
}
