/**
 * The executor: takes one reservation per memory class, binds every op to one native call with its final addresses,
 * records each segment as a graph, and replays. After `commit` a step allocates nothing, here or in the library.
 */

import { LoramemError } from "../../ffi/error.ts";
import type { FillCall, KernelCall, Op, ProgramName } from "../graph/program.ts";
import { bytesOf, DTYPES, type MemoryClass, rootOf, type Value } from "../graph/value.ts";
import { type KernelName, launchPacked, packKernelArgs } from "../kernels/launch.ts";
import { addressOf, type Ptr } from "../memory/internal.ts";
import type { Device, DeviceBuffer, Graph, PinnedBuffer, Stream } from "../memory/mod.ts";
import type { Plan, ProgramPlan } from "../plan/plan.ts";
import { formatBytes } from "../plan/report.ts";

/** How segments run: replayed from a recording, or op by op. */
export type ExecutionMode = "graph" | "eager";

/** A native call with everything filled in. */
type BoundOp =
  | { readonly kernel: KernelName; readonly args: Uint8Array<ArrayBuffer> }
  | { readonly fill: DeviceBuffer; readonly offset: number; readonly bytes: number };

interface BoundSegment {
  readonly name: string;
  readonly headChunk: number | null;
  /** Index of the first op in its program. */
  readonly from: number;
  readonly ops: readonly BoundOp[];
  graph: Graph | null;
}

/** The classes that live on the device. */
const DEVICE_CLASSES = ["weights", "trainable", "activations"] as const;

/** A plan bound to a device. */
export class Executor {
  readonly device: Device;
  readonly stream: Stream;
  readonly plan: Plan;
  readonly #arenas: ReadonlyMap<MemoryClass, DeviceBuffer>;
  readonly #staging: PinnedBuffer;
  readonly #programs = new Map<ProgramName, readonly BoundSegment[]>();
  readonly #mode: ExecutionMode;

  private constructor(
    device: Device,
    stream: Stream,
    plan: Plan,
    mode: ExecutionMode,
    arenas: ReadonlyMap<MemoryClass, DeviceBuffer>,
    staging: PinnedBuffer,
  ) {
    this.device = device;
    this.stream = stream;
    this.plan = plan;
    this.#mode = mode;
    this.#arenas = arenas;
    this.#staging = staging;
  }

  /**
   * Reserves the plan's memory and binds its programs. Nothing stays reserved if a reservation fails.
   *
   * @throws {LoramemError} OUT_OF_MEMORY naming the class, its bytes and the budget.
   */
  static commit(device: Device, plan: Plan, mode: ExecutionMode = "graph"): Executor {
    using undo = new DisposableStack();
    const arenas = new Map<MemoryClass, DeviceBuffer>();
    const reserve = <T extends Disposable>(memory: MemoryClass, make: (bytes: number) => T): T => {
      try {
        return undo.use(make(plan.classes[memory]));
      } catch (error) {
        throw notReserved(error, memory, plan);
      }
    };
    for (const memory of DEVICE_CLASSES) {
      if (plan.classes[memory] === 0) continue;
      const make = (bytes: number) => device.createBuffer(bytes, { label: memory });
      arenas.set(memory, reserve(memory, make));
    }
    const staging = reserve("staging", (bytes) => device.createPinnedBuffer(bytes));
    const stream = undo.adopt(device.createStream(), (created) => created.dispose());
    const executor = new Executor(device, stream, plan, mode, arenas, staging);
    undo.defer(() => executor.#disposeGraphs());
    executor.#bind();
    undo.move();
    return executor;
  }

  /** Waits for the device and gives everything back. */
  async dispose(): Promise<void> {
    this.#disposeGraphs();
    await this.stream[Symbol.asyncDispose]();
    for (const arena of this.#arenas.values()) arena.dispose();
    this.#staging.dispose();
  }

  /** Memory of a value and where it starts inside it. */
  locate(value: Value): { readonly buffer: DeviceBuffer; readonly offset: number } {
    return {
      buffer: this.#arenas.get(rootOf(value).memory) as DeviceBuffer,
      offset: this.plan.offset(value),
    };
  }

  /** The activations as plain memory: they hold nothing between programs. */
  get workspace(): DeviceBuffer {
    return this.#arenas.get("activations") as DeviceBuffer;
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
  upload(to: Value, from: Value, bytes: number = bytesOf(from), toByte = 0, fromByte = 0): void {
    const { buffer, offset } = this.locate(to);
    const srcOffset = this.plan.offset(from) + fromByte;
    this.stream.copy(buffer, this.#staging, { bytes, dstOffset: offset + toByte, srcOffset });
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
    this.#launch(this.#bindCall(call));
  }

  /**
   * Enqueues one program.
   *
   * @param headChunks Chunks of labelled rows that hold data; the segments of later ones are skipped.
   */
  run(name: ProgramName, headChunks: number = Number.POSITIVE_INFINITY): void {
    for (const segment of this.#programs.get(name) as readonly BoundSegment[]) {
      if (segment.headChunk !== null && segment.headChunk >= headChunks) continue;
      if (segment.graph !== null) segment.graph.launch(this.stream);
      else for (const op of segment.ops) this.#launch(op);
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
    const { ops } = (this.plan.programs.get(name) as ProgramPlan).program;
    for (const segment of this.#programs.get(name) as readonly BoundSegment[]) {
      if (segment.headChunk !== null && segment.headChunk >= headChunks) continue;
      for (const [index, bound] of segment.ops.entries()) {
        await visit(ops[segment.from + index] as Op, () => this.#launch(bound));
      }
    }
  }

  #disposeGraphs(): void {
    for (const segments of this.#programs.values()) {
      for (const segment of segments) segment.graph?.dispose();
    }
  }

  #bind(): void {
    for (const { program } of this.plan.programs.values()) {
      const segments = program.segments.map(({ name, headChunk, from, to }): BoundSegment => {
        const ops = program.ops.slice(from, to).map((op) => this.#bindOp(op));
        return { name, headChunk, from, ops, graph: null };
      });
      this.#programs.set(program.name, segments);
      if (this.#mode === "eager") continue;
      for (const segment of segments) {
        segment.graph = this.stream.capture(() => {
          for (const op of segment.ops) this.#launch(op);
        });
      }
    }
  }

  #bindOp(op: Op): BoundOp {
    return this.#bindCall(op.kind.bind(op.attributes));
  }

  #bindCall(call: KernelCall | FillCall): BoundOp {
    if ("fill" in call) {
      const { buffer, offset } = this.locate(call.fill);
      return { fill: buffer, offset, bytes: bytesOf(call.fill) };
    }
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

  #launch(op: BoundOp): void {
    if ("fill" in op) this.stream.fill(op.fill, 0, { bytes: op.bytes, offset: op.offset });
    else launchPacked(this.device, op.kernel, op.args, this.stream);
  }
}

/** Says which class could not be reserved, and what the plan was made for. */
function notReserved(error: unknown, memory: MemoryClass, plan: Plan): unknown {
  if (!(error instanceof LoramemError && error.is("OUT_OF_MEMORY"))) return error;
  const bytes = plan.classes[memory];
  const budget =
    plan.budget === Number.POSITIVE_INFINITY ? "" : `, for a budget of ${formatBytes(plan.budget)}`;
  const advice =
    memory === "staging"
      ? "allow more page-locked memory, or end other programs"
      : "lower memoryBudget, or end other programs on the device";
  const message =
    `commit: memory cannot be reserved: ${memory}, ${formatBytes(bytes)} (${bytes} bytes) of a plan of ` +
    `${formatBytes(plan.deviceBytes)}${budget} (${error.message}): ${advice}`;
  const details = { ...error.details, requested: bytes };
  return new LoramemError("OUT_OF_MEMORY", message, details, { cause: error });
}
