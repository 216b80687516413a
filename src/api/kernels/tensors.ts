/** What kernels check of their arguments, and how they are enqueued. */
import { LoramemError } from "../../ffi/error.ts";
import type { Ptr } from "../../ffi/types.ts";
import { badArgument } from "../memory/arguments.ts";
import { type DType, dtypeInfo } from "../memory/dtype.ts";
import { addressOf, noteUse } from "../memory/internal.ts";
import { Stream } from "../memory/stream.ts";
import { TensorView } from "../memory/tensor_view.ts";
import { type KernelName, launchPacked, packKernelArgs } from "./launch.ts";

/** Options of every kernel. */
export interface KernelOptions {
  /** Where the work is enqueued. The tensors belong to it until it has passed. */
  readonly stream: Stream;
}

/** Options of kernels that go over rows. */
export interface RowOptions extends KernelOptions {
  /** i32 [1]: how many leading rows hold data; later rows are neither read nor written. Default: all. */
  readonly live?: TensorView | null | undefined;
}

/** A tensor, or nothing where an argument may be left out. */
export type MaybeTensor = TensorView | null | undefined;

/** `activation` is the one float type of a call, `float` any float type. */
type TypeRule = "activation" | "float" | DType;

/** What is expected of one argument: sizes by letter, such as `"T 2I"`; equal letters are equal sizes. */
interface Expected {
  readonly tensor: MaybeTensor;
  readonly shape: string;
  readonly type: TypeRule;
  /** Whether rows must follow each other without a gap. */
  readonly dense: boolean;
  /** Whether it may be left out. */
  readonly optional: boolean;
}

/** A tensor of the call's activation type. */
export const activation = (tensor: MaybeTensor, shape: string): Expected =>
  expect(tensor, shape, "activation");

/** A tensor of any float type, such as a weight. */
export const float = (tensor: MaybeTensor, shape: string): Expected =>
  expect(tensor, shape, "float");

/** A tensor of one element type. */
export function expect(tensor: MaybeTensor, shape: string, type: TypeRule): Expected {
  return { tensor, shape, type, dense: false, optional: false };
}

/** The same, without gaps between rows. */
export function dense(expected: Expected): Expected {
  return { ...expected, dense: true };
}

/** The same, or nothing. */
export function optional(expected: Expected): Expected {
  return { ...expected, optional: true };
}

/** The number of live rows. */
export function liveRows(options: RowOptions): Expected {
  return optional(expect(options?.live, "1", "i32"));
}

const ANY_SHAPE = "...";

const FLOATS: readonly DType[] = ["f32", "bf16", "f16"];

/** A size that was met, and where. */
interface Met {
  readonly size: number;
  readonly where: string;
}

/**
 * Checks every tensor of a call: that it is there, type, rank, sizes, gaps.
 *
 * @param known Sizes of letters that come from elsewhere.
 * @throws {LoramemError} `BAD_ARGUMENT` naming the two arguments that do not fit.
 */
export function checkTensors(
  op: string,
  tensors: Readonly<Record<string, Expected>>,
  known: Readonly<Record<string, number>> = {},
): void {
  const met = new Map<string, Met>();
  for (const [letter, size] of Object.entries(known))
    met.set(letter, { size, where: `${letter} is ${size}` });
  let typed: { readonly name: string; readonly tensor: TensorView } | undefined;
  for (const [name, expected] of Object.entries(tensors)) {
    const { tensor, type } = expected;
    if (expected.optional && (tensor === null || tensor === undefined)) continue;
    if (!(tensor instanceof TensorView)) {
      badArgument(
        op,
        `${name} must be a TensorView: it is ${typeof tensor}: make one with DeviceBuffer.as`,
        name,
      );
    }
    if (type === "activation") {
      checkType(op, name, tensor, FLOATS);
      typed ??= { name, tensor };
      if (tensor.dtype !== typed.tensor.dtype) {
        const what = `${typed.name} is ${typed.tensor}, ${name} is ${tensor}`;
        badArgument(op, `activations must share one dtype: ${what}: cast one of them`, name);
      }
    } else {
      checkType(op, name, tensor, type === "float" ? FLOATS : [type]);
    }
    if (expected.shape !== ANY_SHAPE) checkShape(op, name, tensor, expected.shape, met);
    if (expected.dense && !tensor.dense) {
      const what = `${tensor} has pitch ${tensor.pitch}`;
      badArgument(op, `${name} must have no gaps between rows: ${what}: copy it first`, name);
    }
  }
}

function checkType(op: string, name: string, tensor: TensorView, types: readonly DType[]): void {
  if (types.includes(tensor.dtype)) return;
  badArgument(
    op,
    `${name} must be ${types.join(", ")}: it is ${tensor}: cast it first`,
    name,
    tensor.dtype,
  );
}

function checkShape(
  op: string,
  name: string,
  tensor: TensorView,
  shape: string,
  met: Map<string, Met>,
): void {
  const letters = shape.split(" ");
  const sizes = `${name} is [${tensor.shape.join(", ")}]`;
  if (letters.length !== tensor.shape.length) {
    badArgument(
      op,
      `${name} has the wrong rank: ${sizes}: pass [${letters.join(", ")}]`,
      name,
      tensor.shape,
    );
  }
  for (const [index, token] of letters.entries()) {
    const size = tensor.shape[index] as number;
    const [, count = "", letter = ""] = /^(\d*)(\D*.*)$/.exec(token) as RegExpExecArray;
    const times = count === "" ? 1 : Number(count);
    if (letter === "") {
      if (size !== times)
        badArgument(op, `${name} has the wrong size: ${sizes}: pass [${letters.join(", ")}]`, name);
      continue;
    }
    const first = met.get(letter);
    if (first === undefined && size % times === 0)
      met.set(letter, { size: size / times, where: sizes });
    else if (first === undefined || first.size * times !== size) {
      const other = first === undefined ? `its last size is odd` : first.where;
      badArgument(
        op,
        `${letter} does not fit: ${other}, ${sizes}: pass [${letters.join(", ")}] as ${name}`,
        name,
      );
    }
  }
}

/** Checks tensors of one shape without gaps. @returns their number of elements */
export function checkElementwise(
  op: string,
  tensors: Readonly<Record<string, TensorView>>,
  type: TypeRule,
): number {
  const entries = Object.entries(tensors) as [[string, TensorView], ...[string, TensorView][]];
  const expected = entries.map(
    ([name, tensor]) => [name, dense(expect(tensor, ANY_SHAPE, type))] as const,
  );
  checkTensors(op, Object.fromEntries(expected));
  const [[firstName, first]] = entries;
  for (const [name, tensor] of entries) {
    if (String(tensor.shape) === String(first.shape)) continue;
    const what = `${firstName} is [${first.shape.join(", ")}], ${name} is [${tensor.shape.join(", ")}]`;
    badArgument(op, `shapes differ: ${what}: pass tensors of one shape`, name, tensor.shape);
  }
  return first.elements;
}

/** Code of a tensor's element type; `otherwise` where there is none. */
export function typeCode(tensor: MaybeTensor, otherwise = 0): number {
  return tensor === null || tensor === undefined
    ? otherwise
    : dtypeInfo(tensor.dtype, "kernel").code;
}

/** Fields of an argument struct: tensors stand for their addresses. */
export type Fields = Readonly<Record<string, MaybeTensor | number>>;

/**
 * Packs checked arguments and enqueues the kernel.
 *
 * @throws {LoramemError} `DISPOSED`, `BAD_ARGUMENT` for a tensor of another device, what the kernel reports.
 */
export function launch(op: string, name: KernelName, options: KernelOptions, fields: Fields): void {
  const stream = options?.stream;
  if (!(stream instanceof Stream))
    badArgument(op, "stream is missing: pass { stream }", "stream", stream);
  const packed: Record<string, Ptr | number | null> = {};
  for (const [field, value] of Object.entries(fields)) {
    if (value instanceof TensorView) {
      if (value.buffer.device !== stream.device) {
        badArgument(
          op,
          `${field} is on another device than the stream: ${value}: copy it there`,
          field,
        );
      }
      packed[field] = addressOf(value.buffer, value.offset);
    } else {
      packed[field] = value ?? null;
    }
  }
  launchPacked(stream.device, name, packKernelArgs(name, packed), stream);
  for (const value of Object.values(fields))
    if (value instanceof TensorView) noteUse(value.buffer, stream);
}

/** Throws where an argument that another one needs is missing. */
export function need(
  op: string,
  name: string,
  tensor: MaybeTensor,
  why: string,
): asserts tensor is TensorView {
  if (tensor !== null && tensor !== undefined) return;
  throw new LoramemError("BAD_ARGUMENT", `${op}: ${name} is missing: ${why}`, { name });
}
