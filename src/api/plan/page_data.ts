/** What a page about plans shows, as plain data: every value of every program with its place in time and memory. */
import type { Op } from "../graph/program.ts";
import { aligned, MEMORY_CLASSES, type MemoryClass, type Value } from "../graph/value.ts";
import type { Plan, ProgramPlan } from "./plan.ts";

/** What a value is there for; decides its colour. */
export type ValueGroup = "input" | "kept" | "passing" | "head" | "recomputed" | "gradient";

/** One value: a bar on the timeline. */
export interface PageValue {
  readonly name: string;
  readonly shape: readonly number[];
  readonly dtype: string;
  readonly layer: number | null;
  /** Bytes of its slot, and where the slot starts in the activations. */
  readonly bytes: number;
  readonly offset: number;
  /** First op that holds it, and the first that does not any more. */
  readonly from: number;
  readonly to: number;
  readonly group: ValueGroup;
}

/** One program of a plan. */
export interface PageProgram {
  readonly name: string;
  /** Kind, phase and layer of every op. */
  readonly ops: readonly (readonly [kind: string, phase: string, layer: number | null])[];
  readonly values: readonly PageValue[];
  /** Bytes of activations that it needs, and the op where they are all in use. */
  readonly bytes: number;
  readonly peakOp: number;
}

/** One plan. */
export interface PagePlan {
  readonly name: string;
  readonly classes: Readonly<Record<MemoryClass, number>>;
  readonly deviceBytes: number;
  readonly programs: readonly PageProgram[];
  /** Null if the plan has no forecast. */
  readonly seconds: number | null;
  readonly tokensPerSecond: number | null;
  readonly profile: string | null;
}

/** Everything on the page. */
export interface PageData {
  readonly title: string;
  readonly plans: readonly PagePlan[];
}

/** Collects what the page shows. */
export function pageData(
  title: string,
  plans: readonly { readonly name: string; readonly plan: Plan }[],
): PageData {
  return { title, plans: plans.map(({ name, plan }) => planData(name, plan)) };
}

function planData(name: string, plan: Plan): PagePlan {
  const { forecast } = plan;
  const classes = Object.fromEntries(
    MEMORY_CLASSES.map((memory) => [memory, plan.classes[memory]]),
  ) as Record<MemoryClass, number>;
  return {
    name,
    classes,
    deviceBytes: plan.deviceBytes,
    programs: [...plan.programs.values()].map((planned) => programData(planned, plan)),
    seconds: forecast?.seconds ?? null,
    tokensPerSecond: forecast?.tokensPerSecond ?? null,
    profile: forecast?.profile.title ?? null,
  };
}

function programData(planned: ProgramPlan, plan: Plan): PageProgram {
  const { program, buffers, bytes, peakOp } = planned;
  const turn = program.ops.findIndex((op) => op.phase !== "forward");
  const carried = new Set(program.carried);
  const values = buffers.flatMap((buffer) =>
    buffer.tenants.map(({ value, from }, index): PageValue => {
      const to = buffer.tenants[index + 1]?.from ?? buffer.last + 1;
      const group = carried.has(value)
        ? "input"
        : groupOf(program.ops[from] as Op, value, turn >= 0 && from < turn && to > turn);
      return {
        name: value.name,
        shape: value.shape,
        dtype: value.dtype,
        layer: value.layer,
        bytes: aligned(buffer.bytes),
        offset: plan.slot(value).offset,
        from,
        to,
        group,
      };
    }),
  );
  return {
    name: program.name,
    ops: program.ops.map(({ kind, phase, layer }) => [kind.name, phase, layer]),
    values: values.filter(({ from, to }) => to > from),
    bytes,
    peakOp,
  };
}

function groupOf(producer: Op, value: Value, crosses: boolean): ValueGroup {
  if (value.role === "restored") return "kept";
  if (producer.phase === "recompute") return "recomputed";
  // The gradient that the loss adds to starts as zeros, the only fill.
  if (producer.phase === "backward" || producer.kind.name === "fill") return "gradient";
  if (crosses && value.role !== null) return "kept";
  return producer.kind.name === "linearCrossEntropy" ? "head" : "passing";
}
