/**
 * Liveness: from a program's ops to buffers with lifetimes. Lifetimes follow the order of the ops, never timing, so the
 * peak cannot depend on how fast anything ran.
 */
import type { Op, Program } from "../graph/program.ts";
import { bytesOf, rootOf, type Value } from "../graph/value.ts";

/** Memory for one or more values that follow each other in place. */
export interface Buffer {
  /** Who holds the memory from which op on, in order. */
  readonly tenants: { readonly value: Value; readonly from: number }[];
  bytes: number;
  /** Index of the first and of the last op that touches it; both inclusive. */
  first: number;
  last: number;
}

/** The values that live inside one program, merged where an op may work in place. Carried values come first. */
export function programBuffers(program: Program): Buffer[] {
  const buffers = new Map<Value, Buffer>();
  const last = program.ops.length - 1;
  for (const value of program.carried) {
    buffers.set(value, makeBuffer(value, 0, last));
  }
  program.ops.forEach((op, index) => {
    for (const value of touched(op)) {
      const buffer = buffers.get(value);
      if (buffer === undefined) buffers.set(value, makeBuffer(value, index, index));
      else buffer.last = Math.max(buffer.last, index);
    }
  });
  program.ops.forEach((op, index) => {
    mergeInPlace(op, index, buffers, new Set(program.carried));
  });
  return [...new Set(buffers.values())];
}

/** The value that a save-point policy keeps in `buffer` over op `turn`, where the backward pass begins; null if none. */
export function keptValue({ tenants, first, last }: Buffer, turn: number): Value | null {
  if (first >= turn || last < turn) return null;
  const { value } = tenants.findLast(({ from }) => from < turn) as Buffer["tenants"][number];
  return value.role === null ? null : value;
}

function makeBuffer(value: Value, first: number, last: number): Buffer {
  return { tenants: [{ value, from: first }], bytes: bytesOf(value), first, last };
}

/** Values of class activations that an op touches, each once, in a stable order. */
function touched(op: Op): Value[] {
  const { reads, writes, updates = [], scratch = [] } = op.uses;
  const roots = [...writes, ...updates, ...reads, ...scratch].map(rootOf);
  return [...new Set(roots)].filter((value) => value.memory === "activations");
}

function mergeInPlace(
  op: Op,
  index: number,
  buffers: Map<Value, Buffer>,
  carried: ReadonlySet<Value>,
): void {
  const taken = new Set<Value>();
  for (const [output, input] of op.uses.inPlace ?? []) {
    if (taken.has(output) || !mayShare(output, input) || carried.has(input)) continue;
    const into = buffers.get(input);
    const from = buffers.get(output);
    if (into === undefined || from === undefined || into === from) continue;
    if (into.last !== index || from.first !== index) continue;
    into.tenants.push(...from.tenants);
    into.bytes = Math.max(into.bytes, from.bytes);
    into.last = from.last;
    for (const { value } of from.tenants) buffers.set(value, into);
    taken.add(output);
  }
}

/** In place works row by row, so both must be laid out alike and own their memory. */
function mayShare(output: Value, input: Value): boolean {
  return (
    output.view === null &&
    input.view === null &&
    input.memory === "activations" &&
    output.dtype === input.dtype &&
    output.pitch === input.pitch &&
    bytesOf(output) === bytesOf(input)
  );
}
