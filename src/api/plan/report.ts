/** The plan in words: a table by memory class, what each program needs, and the largest values at the peak. */
import { aligned, bytesOf, MEMORY_CLASSES, type MemoryClass, type Value } from "../graph/value.ts";
import { type Buffer, keptValue } from "./liveness.ts";
import type { Plan, ProgramPlan } from "./plan.ts";
import type { StepForecast } from "./time.ts";

const WHAT: Readonly<Record<MemoryClass, string>> = {
  weights: "frozen weights, constants",
  trainable: "adapters: masters, gradients, moments, step state",
  activations: "everything inside a step, evaluation, generation",
  staging: "page-locked host memory: inputs and results",
  host: "page-locked host memory: streamed weights, offloaded layer inputs, the state that is saved",
  file: "on the disk: weights that are streamed from a file",
};

/** Largest values listed at the peak. */
const LISTED = 10;

/** Bytes as a person reads them, binary units. */
export function formatBytes(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let amount = bytes;
  let unit = 0;
  while (amount >= 1024 && unit < units.length - 1) {
    amount /= 1024;
    unit++;
  }
  return unit === 0 ? `${bytes} B` : `${amount.toFixed(2)} ${units[unit]}`;
}

/** The program with the largest activations. */
function peakProgram(plan: Plan): ProgramPlan | null {
  let peak: ProgramPlan | null = null;
  for (const program of plan.programs.values()) {
    if (peak === null || program.bytes > peak.bytes) peak = program;
  }
  return peak;
}

/** The buffers alive at the op where a program needs most, largest first. */
function liveAtPeak(planned: ProgramPlan): Buffer[] {
  return planned.buffers
    .filter((buffer) => buffer.first <= planned.peakOp && planned.peakOp <= buffer.last)
    .sort((a, b) => b.bytes - a.bytes);
}

/** Bytes that one layer keeps from forward to backward; null if the plan does not train. */
export function keptBytesOfLayer(plan: Plan, layer: number): number | null {
  const train = plan.programs.get("train");
  if (train === undefined) return null;
  const firstBackward = train.program.ops.findIndex((op) => op.phase === "backward");
  let bytes = 0;
  for (const buffer of train.buffers) {
    const kept = keptValue(buffer, firstBackward);
    if (kept?.layer === layer) bytes += bytesOf(kept);
  }
  return bytes;
}

/** The table that `String(plan)` gives. */
export function describePlan(plan: Plan): string {
  const lines: string[] = [];
  const row = (name: string, bytes: number, note: string) =>
    lines.push(
      `  ${name.padEnd(12)} ${String(bytes).padStart(15)} B  ${formatBytes(bytes).padStart(11)}  ${note}`,
    );
  lines.push("Memory plan, every byte before the first step");
  for (const memory of MEMORY_CLASSES) {
    const bytes = plan.classes[memory];
    if (bytes > 0) row(memory, bytes, WHAT[memory]);
  }
  const budget = Number.isFinite(plan.budget) ? `, of a budget of ${formatBytes(plan.budget)}` : "";
  row("device", plan.deviceBytes, `weights + trainable + activations${budget}`);
  const peak = peakProgram(plan);
  if (peak !== null) {
    lines.push("Activations by program");
    for (const { program, bytes, lowerBound } of plan.programs.values()) {
      const gap = lowerBound === 0 ? 0 : (100 * (bytes - lowerBound)) / lowerBound;
      row(
        program.name,
        bytes,
        `${program.ops.length} ops, ${gap.toFixed(3)} % over the lower bound`,
      );
    }
    const op = peak.program.ops[peak.peakOp];
    const where = op?.layer === null || op === undefined ? "" : `, layer ${op.layer}`;
    lines.push(
      `Peak: ${peak.program.name}, op ${peak.peakOp} (${op?.kind.name}${where}); largest values there`,
    );
    for (const buffer of liveAtPeak(peak).slice(0, LISTED)) {
      const value = buffer.tenants.findLast(({ from }) => from <= peak.peakOp)?.value as Value;
      const shape = `[${value.shape.join(", ")}] ${value.dtype}`;
      row(
        "",
        aligned(buffer.bytes),
        `${value.name}${value.layer === null ? "" : ` of layer ${value.layer}`} ${shape}`,
      );
    }
  }
  if (plan.forecast !== null) lines.push(...describeForecast(plan.forecast));
  return lines.join("\n");
}

/** The predicted step, and what the driver takes besides the plan. */
function describeForecast({ seconds, tokensPerSecond, phases, profile }: StepForecast): string[] {
  const shares = Object.entries(phases)
    .filter(([, part]) => part > 0)
    .map(([phase, part]) => `${phase} ${Math.round((100 * part) / seconds)} %`);
  const speed = `${formatSeconds(seconds)}, ${Math.round(tokensPerSecond)} tokens/s`;
  const driver =
    profile.driver === null
      ? "what the driver takes for itself was not measured on this device"
      : `the driver takes about ${formatBytes(profile.driver)} for context, libraries and graphs`;
  return [
    `Predicted step: ${speed} (${shares.join(", ")}), profile ${profile.title}`,
    `Besides the plan: ${driver}`,
  ];
}

/** Seconds as a person reads them. */
export function formatSeconds(seconds: number): string {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${(seconds * 1e6).toFixed(0)} us`;
}
