/**
 * The shadow run: executes a program op by op and, around every op, covers all memory that the op did not declare with
 * poison (0xff bytes: NaN in every float type). A hidden write shows as changed poison, a hidden read as a wrong result.
 */
import assert from "node:assert/strict";
import type { Op, ProgramName } from "../../src/api/graph/program.ts";
import {
  bytesOf,
  MEMORY_CLASSES,
  type MemoryClass,
  rootOf,
  type Value,
} from "../../src/api/graph/value.ts";
import { hostView } from "../../src/api/memory/internal.ts";
import type { DeviceBuffer, PinnedBuffer } from "../../src/api/memory/mod.ts";
import type { Session } from "../../src/api/train/session.ts";

const CLASSES = ["weights", "trainable", "activations", "host"] as const;

/** What a shadow run saw. */
export interface ShadowReport {
  /** End of the highest byte of the activations that an op changed. */
  highest: number;
  /** Values that an op of the run could write. */
  readonly writable: Set<Value>;
  /** Those of them that were written to within the last 256 bytes of their slot. */
  readonly full: Set<Value>;
  readonly ops: number;
}

type Ranges = Record<MemoryClass, [start: number, end: number][]>;

/** The memory of a session, class by class, as the host sees it: the memory itself on the CPU, elsewhere a copy. */
class Arenas implements Disposable {
  readonly memory: Record<MemoryClass, Uint8Array>;
  readonly #session: Session;
  /** Where the bytes are on a device, and the page-locked copy of them. */
  readonly #copies: { readonly device: DeviceBuffer; readonly host: PinnedBuffer }[] = [];

  constructor(session: Session, name: ProgramName) {
    this.#session = session;
    const { device, plan } = session.executor;
    const view = (memoryClass: MemoryClass): Uint8Array => {
      if (plan.classes[memoryClass] === 0) return new Uint8Array(0);
      const anyValue =
        plan.resident.find((value) => value.memory === memoryClass) ?? activationOf(session, name);
      const { buffer } = session.executor.locate(anyValue);
      if ("view" in buffer) return buffer.view(Uint8Array);
      if (device.kind === "cpu") return hostView(buffer, Uint8Array);
      const host = device.createPinnedBuffer(buffer.bytes);
      this.#copies.push({ device: buffer, host });
      return host.view(Uint8Array);
    };
    this.memory = Object.fromEntries(CLASSES.map((c) => [c, view(c)])) as typeof this.memory;
  }

  /** Brings the copies in line with the device, once its work has ended. */
  async read(): Promise<void> {
    const { executor } = this.#session;
    await executor.done(); // copies beside the ops, too
    for (const { device, host } of this.#copies) executor.stream.copy(host, device);
    await executor.stream.done();
  }

  /** Brings the device in line with the copies. */
  async write(): Promise<void> {
    const { stream } = this.#session.executor;
    for (const { device, host } of this.#copies) stream.copy(device, host);
    await stream.done();
  }

  [Symbol.dispose](): void {
    for (const { host } of this.#copies) host.dispose();
  }
}

/** Runs `name` under the shadow; throws where an op touches undeclared memory. */
export async function shadowRun(
  session: Session,
  name: ProgramName,
  headChunks: number,
): Promise<ShadowReport> {
  const { executor } = session;
  const { plan } = executor;
  await executor.done();
  const report: ShadowReport = {
    highest: 0,
    writable: new Set(),
    full: new Set(),
    ops: plan.programs.get(name)?.program.ops.length ?? 0,
  };
  using arenas = new Arenas(session, name);
  const { memory } = arenas;
  await arenas.read();

  const rangesOf = (values: readonly Value[]): Ranges => {
    const ranges = Object.fromEntries(
      MEMORY_CLASSES.map((name) => [name, []]),
    ) as unknown as Ranges;
    for (const value of values) {
      const start = plan.offset(value);
      ranges[value.memory].push([start, start + bytesOf(value)]);
    }
    return ranges;
  };
  const written = new Set<Value>();
  await executor.runEach(name, headChunks, async (op: Op, launch: () => void) => {
    const { reads, writes, updates = [], scratch = [] } = op.uses;
    const declared = rangesOf([...reads, ...writes, ...updates, ...scratch]);
    // What was not written before has no content yet: it is poisoned too, so that every write shows.
    const defined = (value: Value) => value.memory !== "activations" || written.has(rootOf(value));
    const needed = rangesOf([...reads, ...updates.filter(defined)]);
    const writable = rangesOf([...writes, ...updates, ...scratch]);
    const before = Object.fromEntries(CLASSES.map((c) => [c, memory[c].slice()])) as typeof memory;
    for (const c of CLASSES)
      outside(needed[c], memory[c].length, (start, end) => memory[c].fill(0xff, start, end));
    const poisoned = Object.fromEntries(
      CLASSES.map((c) => [c, memory[c].slice()]),
    ) as typeof memory;
    await arenas.write();
    launch();
    await executor.done();
    await arenas.read();
    for (const c of CLASSES) {
      outside(writable[c], memory[c].length, (start, end) => {
        const [now, then] = [memory[c].subarray(start, end), poisoned[c].subarray(start, end)];
        assert.ok(
          equal(now, then),
          `${name}: ${op.kind.name} wrote ${c} outside its values, in ${start}..${end}`,
        );
      });
      outside(declared[c], memory[c].length, (start, end) =>
        memory[c].set(before[c].subarray(start, end), start),
      );
    }
    for (const value of [...writes, ...updates, ...scratch].map(rootOf)) {
      written.add(value);
      report.writable.add(value);
      const [start, bytes] = [plan.slot(value).offset, bytesOf(value)];
      const end = lastChange(memory[value.memory], poisoned[value.memory], start, start + bytes);
      if (end > start + bytes - 256) report.full.add(value);
      if (value.memory === "activations") report.highest = Math.max(report.highest, end);
    }
  });
  await arenas.write();
  return report;
}

function activationOf(session: Session, name: ProgramName): Value {
  const buffer = session.executor.plan.programs.get(name)?.buffers[0];
  return buffer?.tenants[0]?.value as Value;
}

/** Calls `visit` for every stretch of [0, length) that no range covers. */
function outside(
  ranges: readonly [number, number][],
  length: number,
  visit: (start: number, end: number) => void,
) {
  let cursor = 0;
  for (const [start, end] of [...ranges].sort(([a], [b]) => a - b)) {
    if (start > cursor) visit(cursor, start);
    cursor = Math.max(cursor, end);
  }
  if (cursor < length) visit(cursor, length);
}

function equal(a: Uint8Array, b: Uint8Array): boolean {
  return Buffer.compare(a, b) === 0;
}

/** One past the last byte in [start, end) that differs; `start` if none does. */
function lastChange(now: Uint8Array, then: Uint8Array, start: number, end: number): number {
  for (let at = end; at > start; at--) if (now[at - 1] !== then[at - 1]) return at;
  return start;
}
