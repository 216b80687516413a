/**
 * The plan: one number per memory class and one offset per value, known before any allocation. Pure TypeScript: it needs
 * neither the native library nor the weights.
 */
import { LoramemError } from "../../ffi/error.ts";
import type { Program, ProgramName } from "../graph/program.ts";
import {
  aligned,
  byteOffsetOf,
  bytesOf,
  MEMORY_CLASSES,
  type MemoryClass,
  rootOf,
  type Value,
} from "../graph/value.ts";
import { type Buffer, programBuffers } from "./liveness.ts";
import { place } from "./placement.ts";
import type { DeviceProfile } from "./profiles.ts";
import { describePlan } from "./report.ts";
import { forecastStep, type StepForecast, type StepLoad } from "./time.ts";
import { verifyProgram } from "./verify.ts";

/** Where a value lives. */
export interface Slot {
  /** Bytes from the start of the class's reservation. */
  readonly offset: number;
  readonly bytes: number;
}

/** What the placement of one program looks like. */
export interface ProgramPlan {
  readonly program: Program;
  readonly buffers: readonly Buffer[];
  /** Bytes of activations that the program needs. */
  readonly bytes: number;
  /** Most bytes alive at one op; the gap to it is `bytes - lowerBound`. */
  readonly lowerBound: number;
  readonly peakOp: number;
}

/** What a plan is made of. */
export interface PlanInput {
  readonly programs: readonly Program[];
  /** Values of all classes but activations, in placement order. */
  readonly resident: readonly Value[];
  /** What to predict times from; without it the plan has no forecast. */
  readonly timing?: { readonly profile: DeviceProfile; readonly step: StepLoad } | undefined;
  /** Device bytes that the plan is made to fit; without it there is no limit. */
  readonly budget?: number | undefined;
}

/** Every byte of a run. */
export class Plan {
  readonly #slots: ReadonlyMap<Value, Slot>;
  /** Bytes per memory class. */
  readonly classes: Readonly<Record<MemoryClass, number>>;
  readonly programs: ReadonlyMap<ProgramName, ProgramPlan>;
  readonly resident: readonly Value[];
  /** The predicted optimizer step, or null. */
  readonly forecast: StepForecast | null;
  /** Device bytes that the plan was made to fit; Infinity without a limit. */
  readonly budget: number;

  constructor(
    slots: ReadonlyMap<Value, Slot>,
    classes: Readonly<Record<MemoryClass, number>>,
    programs: ReadonlyMap<ProgramName, ProgramPlan>,
    { resident, timing, budget }: PlanInput,
  ) {
    this.#slots = slots;
    this.classes = classes;
    this.programs = programs;
    this.resident = resident;
    this.budget = budget ?? Number.POSITIVE_INFINITY;
    const every = [...programs.values()].map(({ program }) => program);
    this.forecast = timing === undefined ? null : forecastStep(every, timing.profile, timing.step);
  }

  /** Bytes on the device: all classes but those of page-locked host memory and of the weights file. */
  get deviceBytes(): number {
    return this.classes.weights + this.classes.trainable + this.classes.activations;
  }

  /** Bytes of everything, host memory and the weights file included. */
  get totalBytes(): number {
    return MEMORY_CLASSES.reduce((sum, memory) => sum + this.classes[memory], 0);
  }

  /** The slot that holds a value's memory. */
  slot(value: Value): Slot {
    const slot = this.#slots.get(rootOf(value));
    if (slot === undefined) {
      throw new LoramemError(
        "INTERNAL",
        `plan: value has no slot: ${value.name}: report this as a bug`,
      );
    }
    return slot;
  }

  /** Byte offset of a value inside its class's reservation. */
  offset(value: Value): number {
    return this.slot(value).offset + byteOffsetOf(value);
  }

  /** The plan as a table. */
  toString(): string {
    return describePlan(this);
  }
}

/**
 * Plans the memory of `programs`: resident classes one value after the other, activations by liveness. The programs run
 * one after the other, so they share the activations; what several programs carry keeps its address.
 */
export function makePlan(input: PlanInput): Plan {
  const { programs, resident } = input;
  const slots = new Map<Value, Slot>();
  const classes: Record<MemoryClass, number> = {
    weights: 0,
    trainable: 0,
    activations: 0,
    staging: 0,
    host: 0,
    file: 0,
  };
  for (const value of resident) {
    slots.set(value, { offset: classes[value.memory], bytes: aligned(bytesOf(value)) });
    classes[value.memory] += aligned(bytesOf(value));
  }
  const planned = new Map<ProgramName, ProgramPlan>();
  for (const program of programs) {
    const buffers = programBuffers(program);
    const { offsets, bytes, lowerBound, peakOp } = place(buffers, program.carried.length);
    for (const buffer of buffers) {
      const offset = offsets.get(buffer) as number;
      for (const { value } of buffer.tenants)
        slots.set(value, { offset, bytes: aligned(buffer.bytes) });
    }
    planned.set(program.name, { program, buffers, bytes, lowerBound, peakOp });
    classes.activations = Math.max(classes.activations, bytes);
  }
  const plan = new Plan(slots, classes, planned, input);
  for (const program of programs) verifyProgram(program, plan);
  return plan;
}
