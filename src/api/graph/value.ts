/**
 * Values: the symbolic matrices that programs are written over. A value has a shape, an element type, a row pitch and a
 * memory class; it gets an address only when a plan is bound (src/api/run).
 */
import { DTYPES, type DType } from "../memory/dtype.ts";

export { DTYPES, type DType };

/**
 * What a value's memory is reserved for; one reservation each.
 * `weights` frozen weights and constants, `trainable` masters, gradients, moments, copies and step state,
 * `activations` everything that lives inside one program, `staging` page-locked host memory for inputs and results, `host`
 * page-locked host memory for what visits the device only while it is needed (streamed weights, offloaded layer inputs)
 * and for the copy of the state that a checkpoint is written from, `file` bytes of a file from which weights are streamed.
 */
export type MemoryClass = "weights" | "trainable" | "activations" | "staging" | "host" | "file";

/** Every memory class, in the order of reports. */
export const MEMORY_CLASSES: readonly MemoryClass[] = [
  "weights",
  "trainable",
  "activations",
  "staging",
  "host",
  "file",
];

/** Every slot starts at a multiple of this many bytes, on every backend. */
export const ALIGNMENT = 256;

/** `bytes` rounded up to the alignment of slots. */
export function aligned(bytes: number): number {
  return Math.ceil(bytes / ALIGNMENT) * ALIGNMENT;
}

/** A symbolic matrix. Identity is the object; `id` gives a stable order. */
export interface Value {
  readonly id: number;
  readonly name: string;
  /** Rows first; the last dimension is contiguous. */
  readonly shape: readonly number[];
  readonly dtype: DType;
  /** Elements from one row to the next. */
  readonly pitch: number;
  readonly memory: MemoryClass;
  /** Decoder layer that the value belongs to, or null. */
  readonly layer: number | null;
  /** Name under which a save-point policy may keep the value for backward; null = never kept. */
  readonly role: SaveRole | null;
  /** A window into another value, `elements` after its start; it has no memory of its own. */
  readonly view: { readonly base: Value; readonly elements: number } | null;
}

/** The values of a layer that a save-point policy can name. */
export type SaveRole =
  /** The input of a decoder layer; belongs to the layer that reads it. */
  | "layerInput"
  /** A layer input that came back from the host. */
  | "restored"
  | "loraDown"
  | "mlpLoraDown"
  | "qkv"
  | "attention"
  | "logSumExp"
  | "midResidual"
  | "gateUp";

/** Options of {@linkcode makeValue}. */
export interface ValueOptions {
  readonly memory?: MemoryClass;
  readonly layer?: number | null;
  readonly role?: SaveRole | null;
  readonly pitch?: number;
}

let nextId = 0;

/** A new value; dense rows unless a pitch is given. */
export function makeValue(
  name: string,
  dtype: DType,
  shape: readonly number[],
  options: ValueOptions = {},
): Value {
  return {
    id: nextId++,
    name,
    shape,
    dtype,
    pitch: options.pitch ?? (shape[shape.length - 1] as number),
    memory: options.memory ?? "activations",
    layer: options.layer ?? null,
    role: options.role ?? null,
    view: null,
  };
}

/** A window into `base`, `elements` of its type after its start; rows keep the base's pitch unless one is given. */
export function viewOf(
  base: Value,
  name: string,
  shape: readonly number[],
  elements: number,
  pitch: number = base.pitch,
  dtype: DType = base.dtype,
): Value {
  const root = base.view === null ? base : base.view.base;
  const before = base.view === null ? 0 : base.view.elements;
  return {
    ...base,
    id: nextId++,
    name,
    shape,
    pitch,
    dtype,
    role: null,
    view: { base: root, elements: before + elements },
  };
}

/** The value that owns the memory of `value`. */
export function rootOf(value: Value): Value {
  return value.view === null ? value : value.view.base;
}

/** How many rows a value has: the product of all dimensions but the last. */
export function rowsOf(value: Value): number {
  return value.shape.slice(0, -1).reduce((product, size) => product * size, 1);
}

/** Bytes that the rows of a value span (the last row is not padded to the pitch). */
export function bytesOf(value: Value): number {
  const width = value.shape[value.shape.length - 1] as number;
  return ((rowsOf(value) - 1) * value.pitch + width) * DTYPES[value.dtype].bytes;
}

/** Byte offset of a value inside the value that owns its memory. */
export function byteOffsetOf(value: Value): number {
  return value.view === null ? 0 : value.view.elements * DTYPES[value.view.base.dtype].bytes;
}
