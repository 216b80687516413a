/**
 * The verifier: replays a program over a map of owners and checks that every value read still holds its own memory. It
 * shares nothing with liveness and placement but the ops and the finished offsets.
 */
import { LoramemError } from "../../ffi/error.ts";
import type { Op, Program } from "../graph/program.ts";
import { aligned, bytesOf, type MemoryClass, rootOf, type Value } from "../graph/value.ts";
import { isTransfer } from "../graph/weave.ts";

/** The part of a plan that the verifier looks at. */
export interface PlacedValues {
  readonly classes: Readonly<Record<MemoryClass, number>>;
  readonly resident: readonly Value[];
  slot(value: Value): { readonly offset: number; readonly bytes: number };
}

/**
 * Checks one program.
 *
 * @throws {LoramemError} INTERNAL naming the op and the values, if memory is shared wrongly or a slot is too small.
 */
export function verifyProgram(program: Program, plan: PlacedValues): void {
  verifyResident(plan);
  const owners = new OwnerMap(plan);
  const copies = new CopyMap(program);
  for (const value of program.carried) owners.claim(value);
  program.ops.forEach((op, index) => {
    const where = `${program.name} op ${index} (${op.kind.name})`;
    owners.run(op, where);
    copies.run(op, where);
  });
  for (const value of program.carried) owners.mustOwn(value, `end of ${program.name}`);
  copies.end(program);
}

function verifyResident(plan: PlacedValues): void {
  const ends: Partial<Record<MemoryClass, number>> = {};
  for (const value of plan.resident) {
    const { offset } = plan.slot(value);
    if (offset < (ends[value.memory] ?? 0)) fail("resident values overlap", value.name);
    ends[value.memory] = offset + checkedSize(value, plan);
  }
}

function checkedSize(value: Value, plan: PlacedValues): number {
  const { offset, bytes } = plan.slot(value);
  const size = aligned(bytesOf(value));
  if (bytes < size) fail("slot is too small", `${value.name} needs ${size} bytes, has ${bytes}`);
  if (offset % 256 !== 0) fail("slot is not aligned", `${value.name} at ${offset}`);
  if (offset + size > plan.classes[value.memory])
    fail("slot ends past its reservation", value.name);
  return size;
}

function fail(what: string, values: string): never {
  throw new LoramemError("INTERNAL", `plan.verify: ${what}: ${values}: report this as a bug`);
}

class OwnerMap {
  readonly #plan: PlacedValues;
  #owned: { readonly start: number; readonly end: number; readonly value: Value }[] = [];

  constructor(plan: PlacedValues) {
    this.#plan = plan;
  }

  run(op: Op, where: string): void {
    const { reads, writes, updates = [], scratch = [], inPlace = [] } = op.uses;
    const mine = (values: readonly Value[]) =>
      [...new Set(values.map(rootOf))].filter((value) => value.memory === "activations");
    for (const value of mine(reads)) this.mustOwn(value, where);
    const writing = mine([...writes, ...updates, ...scratch]);
    for (const value of mine(updates)) if (!this.#owns(value)) this.claim(value);
    for (const value of writing) {
      for (const other of this.claim(value)) {
        const allowed = inPlace.some(([output, input]) => output === value && input === other);
        if (!allowed && mine([...reads, ...updates, ...writes, ...scratch]).includes(other)) {
          fail("op overwrites a value it uses", `${where}: ${value.name} over ${other.name}`);
        }
      }
    }
    for (const value of writing) this.mustOwn(value, where);
  }

  /** Gives the memory of `value` to it; returns the values that lost theirs. */
  claim(value: Value): Value[] {
    const size = checkedSize(value, this.#plan);
    const start = this.#plan.slot(value).offset;
    const end = start + size;
    const lost: Value[] = [];
    this.#owned = this.#owned.filter((entry) => {
      if (entry.value === value || entry.start >= end || entry.end <= start)
        return entry.value !== value;
      lost.push(entry.value);
      return false;
    });
    this.#owned.push({ start, end, value });
    return lost;
  }

  #owns(value: Value): boolean {
    return this.#owned.some((entry) => entry.value === value);
  }

  mustOwn(value: Value, where: string): void {
    if (!this.#owns(value))
      fail("a value was overwritten before its last use", `${where}: ${value.name}`);
  }
}

/** Follows the copies beside the ops: what is on its way is left alone, and a window holds the layer that is read. */
class CopyMap {
  /** What a value was copied from last. */
  readonly #held = new Map<Value, Value>();
  /** Copies that nothing has waited for yet, by what they write. Those of the program before may still run. */
  readonly #underWay = new Map<Value, Value>();

  constructor({ opening }: Program) {
    for (const { to, from } of opening) this.#start(to, from);
  }

  run(op: Op, where: string): void {
    if (this.#held.size === 0 && !isTransfer(op)) return;
    const call = op.kind.bind(op.attributes);
    if ("awaited" in call) {
      if (!this.#underWay.delete(call.awaited)) fail("nothing is copied to what is awaited", where);
      return;
    }
    const { reads, writes, updates = [], scratch = [] } = op.uses;
    const written = new Set([...writes, ...updates, ...scratch].map(rootOf));
    for (const [to, from] of this.#underWay) {
      if (written.has(to) || written.has(from) || reads.some((value) => rootOf(value) === to))
        fail("a value is used while it is copied", `${where}: ${from.name} to ${to.name}`);
    }
    for (const value of reads) {
      const held = this.#held.get(rootOf(value));
      if (value.view !== null && held !== undefined && held.layer !== value.layer)
        fail("a window holds another layer", `${where}: ${value.name} of layer ${value.layer}`);
    }
    if ("copyTo" in call) this.#start(call.copyTo, call.copyFrom);
  }

  /** Checks that the next program finds the windows as this one did. */
  end({ name, opening }: Program): void {
    for (const { to, from } of opening)
      if (this.#held.get(to) !== from)
        fail("a window ends with another layer", `${name}: ${to.name}`);
  }

  #start(to: Value, from: Value): void {
    this.#held.set(to, from);
    this.#underWay.set(to, from);
  }
}
