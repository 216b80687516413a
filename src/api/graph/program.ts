/**
 * Programs: flat lists of coarse ops over values. An op names what it reads, writes and updates; everything else
 * (lifetimes, offsets, replay) is worked out from that by src/api/plan and src/api/run.
 */
import type { KernelName } from "../kernels/launch.ts";
import type { Load, Work } from "./cost.ts";
import { type DType, makeValue, type SaveRole, type Value } from "./value.ts";

/** What an op does to its values. */
export interface OpUses {
  /** Read only. */
  readonly reads: readonly Value[];
  /** Written, earlier content does not matter. */
  readonly writes: readonly Value[];
  /** Read and written: accumulated or partly overwritten. */
  readonly updates?: readonly Value[];
  /** Scratch that lives during this op only. */
  readonly scratch?: readonly Value[];
  /** `[output, input]`: the output may take the input's memory when the input is not needed afterwards. */
  readonly inPlace?: readonly (readonly [Value, Value])[];
}

/** A native call: a kernel with its argument struct, values standing for their addresses. */
export interface KernelCall {
  readonly kernel: KernelName;
  readonly fields: Readonly<Record<string, Value | number | null>>;
}

/** A memory fill. */
export interface FillCall {
  readonly fill: Value;
}

/** A copy between host and device, or from a file to the device, beside the ops that follow. */
export interface CopyCall {
  readonly copyTo: Value;
  readonly copyFrom: Value;
}

/** The point where the ops that follow need a copy to have ended. */
export interface AwaitCall {
  /** What the copy wrote. */
  readonly awaited: Value;
  /** What it read. */
  readonly awaitedFrom: Value;
}

/** What an op is bound to. Copies and waits are calls of streams: they stand between recorded segments. */
export type OpCall = KernelCall | FillCall | CopyCall | AwaitCall;

/** A kind of op: shapes, native call and backward rule in one place (src/api/graph/ops, one file each). */
export interface OpKind<A> {
  readonly name: string;
  uses(attributes: A): OpUses;
  /** The kernels that the op runs under a load, and what each of them does. */
  cost(attributes: A, load: Load): readonly Work[];
  /** What runs, in order. */
  bind(attributes: A): OpCall | readonly KernelCall[];
  /** Emits the ops that turn the gradients of this op's outputs into those of its inputs. */
  backward?(attributes: A, walk: BackwardWalk): void;
  /** The backward rule can write the op's output again on its way, see {@linkcode BackwardWalk.restored}. */
  readonly restores?: true;
}

/** What a backward rule may ask of the reverse walk. */
export interface BackwardWalk {
  /** Gradient of a value, complete once all its consumers were walked; null if nothing depends on it. */
  gradient(value: Value): Value | null;
  /** Whether a gradient of this value is of use to anyone. */
  wants(value: Value): boolean;
  /** Adds a contribution to the gradient of a value. */
  contribute(value: Value, gradient: Value): void;
  /** Replaces the gradient: the rule has folded the earlier contribution into this one itself. */
  replace(value: Value, gradient: Value): void;
  /** The value itself if it is still there, or a recomputed copy with the same bits. */
  need(value: Value): Value;
  /** Recomputes now what will be needed for the gradient of `value`, before that gradient takes memory. */
  prepare(value: Value): void;
  /**
   * Calls `use` with the value: at once, or, where the value would have to be recomputed and its producer restores it, after
   * the producer's backward rule.
   */
  later(value: Value, use: (value: Value) => void): void;
  /** A copy of the rule's own output that it must write, if someone waits for it; else null. */
  restored(value: Value): Value | null;
  /** Appends an op of the backward pass. */
  emit<A>(kind: OpKind<A>, attributes: A): void;
  /** A new value shaped and typed like `value`. */
  gradientLike(value: Value): Value;
}

/** Where an op comes from; used by reports. */
export type Phase = "forward" | "recompute" | "backward" | "optimizer";

/** One op of a program. */
export interface Op {
  readonly kind: OpKind<unknown>;
  readonly attributes: unknown;
  readonly uses: OpUses;
  readonly phase: Phase;
  readonly layer: number | null;
}

/** Ops that run together: captured once as a graph and replayed. */
export interface Segment {
  readonly name: string;
  readonly from: number;
  readonly to: number;
  /** The segment handles this chunk of the labelled rows and is skipped when there are fewer chunks. */
  readonly headChunk: number | null;
}

/** The closed set of programs that share one plan. */
export type ProgramName =
  | "train"
  | "optimizer"
  | "evaluate"
  | "evaluateBase"
  | "logits"
  | "logitsBase"
  | "prefill"
  | "decode";

/** A flat list of ops. */
export interface Program {
  readonly name: ProgramName;
  readonly ops: readonly Op[];
  readonly segments: readonly Segment[];
  /** Values that live through the whole program, and across programs that carry the same ones, in placement order. */
  readonly carried: readonly Value[];
  /** Copies that fill the windows of streamed weights: what they hold when the program starts, and again when it ends. */
  readonly opening: readonly Transfer[];
}

/** A copy between host and device memory, or from a file to the device. */
export interface Transfer {
  readonly to: Value;
  readonly from: Value;
}

/** Collects the ops of one program. */
export class ProgramBuilder {
  readonly ops: Op[] = [];
  /** Decoder layer that the next ops and values belong to; null outside the layers. */
  layer: number | null = null;
  readonly #segments: Segment[] = [];
  #segmentStart = 0;

  /** Appends an op. */
  emit<A>(kind: OpKind<A>, attributes: A, phase: Phase = "forward"): void {
    const uses = kind.uses(attributes);
    this.ops.push({ kind: kind as OpKind<unknown>, attributes, uses, phase, layer: this.layer });
  }

  /** A new value in the current layer. */
  value(name: string, dtype: DType, shape: readonly number[], role: SaveRole | null = null): Value {
    return makeValue(name, dtype, shape, { layer: this.layer, role });
  }

  /** Ends the current segment, if it holds any op. */
  endSegment(name: string, headChunk: number | null = null): void {
    if (this.ops.length === this.#segmentStart) return;
    this.#segments.push({ name, from: this.#segmentStart, to: this.ops.length, headChunk });
    this.#segmentStart = this.ops.length;
  }

  /** The finished program. */
  finish(name: ProgramName, carried: readonly Value[]): Program {
    this.endSegment(name);
    return { name, ops: this.ops, segments: this.#segments, carried, opening: [] };
  }
}
