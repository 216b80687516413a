/**
 * The executor: takes one reservation per memory class, binds every op to one native call with its final addresses,
 * records each segment as a graph, and replays. After `commit` a step allocates nothing, here or in the library.
 */

import { LoramemError } from "../../ffi/error.ts";
import { disposeNow } from "../../ffi/handle.ts";
import type { Op, OpCall, ProgramName, Transfer } from "../graph/program.ts";
import {
  bytesOf,
  DTYPES,
  MEMORY_CLASSES,
  type MemoryClass,
  rootOf,
  type Value,
} from "../graph/value.ts";
import { isTransfer } from "../graph/weave.ts";
import { type KernelName, launchPacked, packKernelArgs } from "../kernels/launch.ts";
import { addressOf, type Ptr } from "../memory/internal.ts";
import type { Device, DeviceBuffer, Event, Graph, PinnedBuffer, Stream } from "../memory/mod.ts";
import type { Plan, ProgramPlan } from "../plan/plan.ts";
import { formatBytes } from "../plan/report.ts";
import { type Algorithms, choiceKey, readChoices, timeChoices, useChoices } from "./choices.ts";
import { type BoundCopy, Copies, type Location } from "./copies.ts";
import { groupOps, type OpGroup, type RangeName, Ranges, rangeName } from "./ranges.ts";
import type { LayerRead, WeightsFile } from "./weights_file.ts";

/** How segments run: replayed from a recording, or op by op. */
export type ExecutionMode = "graph" | "eager";

/** A native call with everything filled in. */
type BoundCall =
  | { readonly kernel: KernelName; readonly args: Uint8Array<ArrayBuffer> }
  | { readonly fill: Location; readonly bytes: number }
  | { readonly copy: BoundCopy }
  | { readonly awaited: Event }
  | { readonly read: LayerRead }
  | { readonly loaded: Value };

interface BoundSegment {
  readonly name: string;
  readonly headChunk: number | null;
  /** Index of the first op in its program. */
  readonly from: number;
  /** The calls of every op. */
  readonly ops: readonly (readonly BoundCall[])[];
  /** What profilers see: the segment, and its layers and phases. */
  readonly range: RangeName;
  readonly groups: readonly OpGroup[];
  /** The window that has to be read from the weights file before; null = none. */
  readonly loaded: Value | null;
  graph: Graph | null;
}

/** The classes that live on the device. */
const DEVICE_CLASSES: readonly MemoryClass[] = ["weights", "trainable", "activations"];

/** Everything that a plan is bound to. */
interface Reserved {
  readonly device: Device;
  readonly stream: Stream;
  readonly copyStream: Stream;
  /** Null if the plan copies nothing beside its ops. */
  readonly copies: Copies | null;
  readonly arenas: ReadonlyMap<MemoryClass, DeviceBuffer | PinnedBuffer>;
}

/** A plan bound to a device. */
export class Executor {
  readonly device: Device;
  /** Computes. */
  readonly stream: Stream;
  /** Copies input beside it. */
  readonly copyStream: Stream;
  readonly plan: Plan;
  readonly #reserved: Reserved;
  readonly #programs = new Map<ProgramName, readonly BoundSegment[]>();
  readonly #mode: ExecutionMode;
  readonly #ranges: Ranges | null;
  /** Copies that fill the windows before the first program; null once they are enqueued. */
  #opening: readonly Transfer[] | null;
  #weightsFile: WeightsFile | null = null;

  private constructor(plan: Plan, mode: ExecutionMode, reserved: Reserved) {
    this.device = reserved.device;
    this.stream = reserved.stream;
    this.copyStream = reserved.copyStream;
    this.plan = plan;
    this.#mode = mode;
    this.#ranges = Ranges.of(reserved.device);
    this.#reserved = reserved;
    // All programs that visit the layers start with the same.
    const opening = [...plan.programs.values()].map(({ program }) => program.opening);
    this.#opening = opening.find(({ length }) => length > 0) ?? null;
  }

  /**
   * Reserves the plan's memory and binds its programs. Nothing stays reserved if a reservation fails.
   *
   * @param algorithms Which ways matrix products are computed in on a GPU. Timing them overwrites the reserved memory.
   * @throws {LoramemError} OUT_OF_MEMORY naming the class, its bytes and the budget.
   */
  static commit(
    device: Device,
    plan: Plan,
    mode: ExecutionMode = "graph",
    algorithms: Algorithms = "estimated",
  ): Executor {
    using undo = new DisposableStack();
    const arenas = new Map<MemoryClass, DeviceBuffer | PinnedBuffer>();
    for (const memory of MEMORY_CLASSES) {
      const bytes = plan.classes[memory];
      if (bytes === 0 || memory === "file") continue;
      const options = { label: memory };
      try {
        const arena = DEVICE_CLASSES.includes(memory)
          ? device.createBuffer(bytes, options)
          : device.createPinnedBuffer(bytes, options);
        arenas.set(memory, undo.use(arena));
      } catch (error) {
        throw notReserved(error, memory, plan);
      }
    }
    // Nothing is enqueued until all is made, so there is nothing to wait for.
    const stream = undo.adopt(device.createStream(), disposeNow);
    const copies = hasCopies(plan) ? new Copies(device, stream) : null;
    undo.defer(() => void copies?.dispose());
    const copyStream = undo.adopt(device.createStream(), disposeNow);
    const executor = new Executor(plan, mode, { device, stream, copyStream, copies, arenas });
    undo.defer(() => executor.#disposeGraphs());
    executor.#choose(algorithms);
    executor.#bind();
    undo.move();
    return executor;
  }

  /** Waits for the device and gives everything back; rejects with a failure that nobody was told of yet. */
  async dispose(): Promise<void> {
    this.#disposeGraphs();
    const { copies, arenas } = this.#reserved;
    // What fails in a copy fails what waits for it in the stream of the ops, which reports it, or else was not needed.
    await Promise.allSettled([copies?.dispose(), this.copyStream.dispose()]);
    await this.#weightsFile?.dispose();
    try {
      await this.stream.dispose();
    } finally {
      for (const arena of arenas.values()) arena.dispose();
    }
  }

  /** Memory of a value and where it starts inside it. */
  locate(value: Value): Location {
    const buffer = this.#reserved.arenas.get(rootOf(value).memory);
    return { buffer: buffer as DeviceBuffer | PinnedBuffer, offset: this.plan.offset(value) };
  }

  /** Resolves when ops and copies enqueued so far have ended. */
  async done(): Promise<void> {
    await this.stream.done();
    await this.#reserved.copies?.done();
    await this.#weightsFile?.done();
  }

  /** Takes over the file that layers are streamed from, before the first program of a plan that needs one. */
  useWeightsFile(file: WeightsFile): void {
    this.#weightsFile = file;
  }

  /** The activations as plain memory: they hold nothing between programs. */
  get workspace(): DeviceBuffer {
    return this.#reserved.arenas.get("activations") as DeviceBuffer;
  }

  /** A typed view over a staging value. */
  hostView<T>(
    value: Value,
    type: { readonly BYTES_PER_ELEMENT: number } & (new (
      b: ArrayBuffer,
      o: number,
      n: number,
    ) => T),
  ): T {
    return this.#staging.view(
      type as never,
      this.plan.offset(value),
      bytesOf(value) / type.BYTES_PER_ELEMENT,
    ) as T;
  }

  /** Enqueues a copy of `bytes` from a staging value to a value on the device. */
  upload(
    to: Value,
    from: Value,
    bytes: number = bytesOf(from),
    toByte = 0,
    fromByte = 0,
    stream: Stream = this.stream,
  ): void {
    const { buffer, offset } = this.locate(to);
    const srcOffset = this.plan.offset(from) + fromByte;
    stream.copy(buffer, this.#staging, { bytes, dstOffset: offset + toByte, srcOffset });
  }

  /** Enqueues `to` = `from`, both on the device and alike. */
  move(to: Value, from: Value): void {
    const [target, source] = [this.locate(to), this.locate(from)];
    const offsets = { dstOffset: target.offset, srcOffset: source.offset };
    this.stream.copy(target.buffer, source.buffer, { bytes: bytesOf(to), ...offsets });
  }

  /** Enqueues a copy of `bytes` from a value on the device to a staging value. */
  download(to: Value, from: Value, bytes: number = bytesOf(from), toByte = 0, fromByte = 0): void {
    const { buffer, offset } = this.locate(from);
    const dstOffset = this.plan.offset(to) + toByte;
    this.stream.copy(this.#staging, buffer, { bytes, dstOffset, srcOffset: offset + fromByte });
  }

  /** Enqueues zero bytes over a value. */
  clear(value: Value): void {
    const { buffer, offset } = this.locate(value);
    this.stream.fill(buffer, 0, { bytes: bytesOf(value), offset });
  }

  /** Enqueues `to` = `from` in another element type; both are dense and of one length. */
  cast(to: Value, from: Value): void {
    const call = {
      kernel: "lm_cast",
      fields: {
        type: DTYPES[from.dtype].code,
        y: to,
        x: from,
        n: from.shape[0] as number,
        y_type: DTYPES[to.dtype].code,
      },
    } as const;
    this.#launch([this.#bindCall(call)]);
  }

  /**
   * Enqueues one program; resolves when all of it is. Only layers that come from a file make it wait: what computes them is
   * enqueued once they are there and their checksum is right.
   *
   * @param headChunks Chunks of labelled rows that hold data; the segments of later ones are skipped.
   * @throws {LoramemError} Rejects with IO naming the layer that could not be read, DEVICE. Nothing can be run from then on.
   */
  async run(name: ProgramName, headChunks: number = Number.POSITIVE_INFINITY): Promise<void> {
    if (this.#opening !== null) this.#open();
    for (const segment of this.#programs.get(name) as readonly BoundSegment[]) {
      if (segment.headChunk !== null && segment.headChunk >= headChunks) continue;
      if (segment.loaded !== null) await this.#layers.arrived(segment.loaded);
      if (this.#ranges === null) this.#play(segment);
      else this.#ranges.around(segment.range, () => this.#play(segment));
    }
  }

  /**
   * Runs one program op by op: `visit` gets every op and must call `launch` for it. For tools that look between ops.
   */
  async runEach(
    name: ProgramName,
    headChunks: number,
    visit: (op: Op, launch: () => void) => Promise<void>,
  ): Promise<void> {
    if (this.#opening !== null) this.#open();
    const { ops } = (this.plan.programs.get(name) as ProgramPlan).program;
    for (const segment of this.#programs.get(name) as readonly BoundSegment[]) {
      if (segment.headChunk !== null && segment.headChunk >= headChunks) continue;
      if (segment.loaded !== null) await this.#layers.arrived(segment.loaded);
      for (const [index, bound] of segment.ops.entries()) {
        await visit(ops[segment.from + index] as Op, () => this.#launch(bound));
      }
    }
  }

  get #staging(): PinnedBuffer {
    return this.#reserved.arenas.get("staging") as PinnedBuffer;
  }

  /** Fills the windows of streamed weights, before the first program; every program leaves them so. */
  #open(): void {
    for (const { to, from } of this.#opening ?? [])
      this.#launch([this.#bindCall({ copyTo: to, copyFrom: from })]);
    this.#opening = null;
  }

  #play(segment: BoundSegment): void {
    if (segment.graph !== null) segment.graph.launch(this.stream);
    else this.#launchOps(segment);
  }

  #launchOps({ ops, groups }: BoundSegment): void {
    if (this.#ranges === null) {
      for (const op of ops) this.#launch(op);
      return;
    }
    for (const { name, from, to } of groups) {
      this.#ranges.around(name, () => {
        for (const op of ops.slice(from, to)) this.#launch(op);
      });
    }
  }

  #disposeGraphs(): void {
    for (const segments of this.#programs.values()) {
      for (const segment of segments) segment.graph?.dispose();
    }
  }

  /** What was chosen for matrix products, to be given to a later run; `"estimated"` if nothing was. */
  get algorithms(): Algorithms {
    return readChoices(this.device) || "estimated";
  }

  /** Settles the algorithms of matrix products, before anything is recorded. */
  #choose(algorithms: Algorithms): void {
    if (!this.device.kind.startsWith("cuda") || algorithms === "estimated") return;
    if (algorithms !== "timed") {
      useChoices(this.device, algorithms);
      return;
    }
    const seen = new Set<string>();
    timeChoices(this.device, () => {
      for (const { program } of this.plan.programs.values()) {
        for (const { kind, attributes } of program.ops) {
          const bound = kind.bind(attributes);
          for (const call of Array.isArray(bound) ? bound : [bound]) {
            const key = "kernel" in call ? choiceKey(call) : null;
            if (key === null || seen.has(key)) continue;
            seen.add(key);
            this.#launch([this.#bindCall(call)]);
          }
        }
      }
    });
    // The gradient is added to, and expected to be zero.
    const trainable = this.#reserved.arenas.get("trainable");
    if (trainable !== undefined) this.stream.fill(trainable as DeviceBuffer, 0);
  }

  #bind(): void {
    for (const { program } of this.plan.programs.values()) {
      const segments = program.segments.map(({ name, headChunk, from, to }): BoundSegment => {
        const mine = program.ops.slice(from, to);
        const ops = mine.map((op) => this.#bindOp(op));
        const range = rangeName(`${program.name}: ${name}`);
        const wait = ops.flat().find((call) => "loaded" in call);
        const loaded = wait?.loaded ?? null;
        return { name, headChunk, from, ops, range, groups: groupOps(mine), loaded, graph: null };
      });
      this.#programs.set(program.name, segments);
      if (this.#mode === "eager") continue;
      for (const segment of segments.filter(({ ops }) => ops.every(isRecordable))) {
        segment.graph = this.stream.capture(() => this.#launchOps(segment));
      }
    }
  }

  #bindOp(op: Op): BoundCall[] {
    const calls = op.kind.bind(op.attributes);
    return (Array.isArray(calls) ? calls : [calls]).map((call) => this.#bindCall(call));
  }

  #bindCall(call: OpCall): BoundCall {
    if ("copyTo" in call) {
      const { copyTo: window, copyFrom: layer } = call;
      if (layer.memory !== "file")
        return { copy: this.#copies.bind(call, (value) => this.locate(value)) };
      return { read: { layer, at: this.plan.offset(layer), window, to: this.locate(window) } };
    }
    if ("awaited" in call) {
      if (call.awaitedFrom.memory === "file") return { loaded: call.awaited };
      return { awaited: this.#copies.ended(call.awaited) };
    }
    if ("fill" in call) return { fill: this.locate(call.fill), bytes: bytesOf(call.fill) };
    const fields: Record<string, Ptr | number | null> = {};
    for (const [field, value] of Object.entries(call.fields)) {
      if (value === null || typeof value === "number") {
        fields[field] = value;
      } else {
        const { buffer, offset } = this.locate(value);
        fields[field] = addressOf(buffer, offset);
      }
    }
    return { kernel: call.kernel, args: packKernelArgs(call.kernel, fields) };
  }

  #launch(calls: readonly BoundCall[]): void {
    for (const call of calls) {
      if ("kernel" in call) launchPacked(this.device, call.kernel, call.args, this.stream);
      else if ("copy" in call) this.#copies.start(call.copy);
      else if ("awaited" in call) this.#copies.await(call.awaited);
      else if ("read" in call) this.#layers.start(call.read, this.stream);
      else if ("fill" in call)
        this.stream.fill(call.fill.buffer, 0, { bytes: call.bytes, offset: call.fill.offset });
    }
  }

  get #copies(): Copies {
    return this.#reserved.copies as Copies;
  }

  get #layers(): WeightsFile {
    return this.#weightsFile as WeightsFile;
  }
}

function hasCopies({ programs }: Plan): boolean {
  return [...programs.values()].some(
    ({ program: { opening, ops } }) => opening.length > 0 || ops.some(isTransfer),
  );
}

/** Copies and waits are calls of streams, made anew in every run. */
function isRecordable(calls: readonly BoundCall[]): boolean {
  return calls.every((call) => "kernel" in call || "fill" in call);
}

/** Says which class could not be reserved, and what the plan was made for. */
function notReserved(error: unknown, memory: MemoryClass, plan: Plan): unknown {
  if (!(error instanceof LoramemError && error.is("OUT_OF_MEMORY"))) return error;
  const bytes = plan.classes[memory];
  const budget =
    plan.budget === Number.POSITIVE_INFINITY ? "" : `, for a budget of ${formatBytes(plan.budget)}`;
  const advice =
    memory === "staging" || memory === "host"
      ? "allow more page-locked memory, or end other programs"
      : "lower memoryBudget, or end other programs on the device";
  const message =
    `commit: memory cannot be reserved: ${memory}, ${formatBytes(bytes)} (${bytes} bytes) of a plan of ` +
    `${formatBytes(plan.deviceBytes)}${budget} (${error.message}): ${advice}`;
  const details = { ...error.details, requested: bytes };
  return new LoramemError("OUT_OF_MEMORY", message, details, { cause: error });
}
