/** Sessions over random weights at real model shapes, for measuring without a checkpoint. */
import type { Document } from "../src/api/data/conversation.ts";
import { documentPairs, type Load } from "../src/api/graph/cost.ts";
import { Device, type DeviceBuffer } from "../src/api/memory/mod.ts";
import type { Algorithms } from "../src/api/run/choices.ts";
import { initializeAdapters } from "../src/api/train/adapter_state.ts";
import { randomWeights } from "../src/api/train/random_data.ts";
import type { RunPlan } from "../src/api/train/run_plan.ts";
import { Session } from "../src/api/train/session.ts";
import { SETTINGS } from "../tests/shapes/session.ts";

/** What a micro-batch of `count` random documents of `tokens` tokens holds, of models without a window. */
export function randomLoad(count: number, tokens: number): Load {
  return {
    tokens: count * tokens,
    labelled: count * (tokens - 1),
    pairs: count * documentPairs(tokens),
    windowPairs: count * documentPairs(tokens),
  };
}

/** How a plan is measured. */
export interface Measuring {
  /** `"cuda:0"`, or `"cpu"` to try the mechanics. */
  readonly device: "cpu" | `cuda:${number}`;
  /** Steps before those that are measured. */
  readonly warm: number;
  readonly steps: number;
  /**
   * Bytes that the run may take on the device; the rest is taken by a buffer meanwhile, so that a byte too many could not
   * be had. null = everything.
   */
  readonly limit?: number | null;
  /** Of matrix products; default `"timed"`, as in a run. */
  readonly algorithms?: Algorithms;
}

/** What was measured. */
export interface Measured {
  readonly planBytes: number;
  /** What the driver says that the run took, after `commit` and after the last step; null on the CPU. */
  readonly driverCommit: number | null;
  readonly driverEnd: number | null;
  /** Between the first and the last step. */
  readonly driverMoved: number | null;
  /** Median of the measured steps. */
  readonly seconds: number;
  readonly tokensPerSecond: number;
  /** Median of the steps on the device, by events. */
  readonly deviceSeconds: number;
  /** Most seconds that the device waited for input in a measured step. */
  readonly inputWaitSeconds: number;
  /** Of all steps together; null without a device profile. */
  readonly modelFlopUtilization: number | null;
  /** Of every step, the ones before those that are measured included. */
  readonly losses: readonly number[];
}

/** What the driver may take beside the plan: graphs, rounding, and the workspace of the stream that computes. */
const MARGIN = 96 << 20;

/** Commits a plan, fills it with random weights and trains on `documents`. */
export async function measureRun(
  run: RunPlan,
  documents: readonly Document[],
  { device: kind, warm, steps, limit = null, algorithms = "timed" }: Measuring,
): Promise<Measured> {
  await using device = await Device.open(kind);
  const info = device.info();
  const onGpu = kind !== "cpu";
  const free = () => Number(device.info().memoryFree);
  using _rest =
    limit === null || !onGpu ? null : takeRest(device, limit, Number(info.streamWorkspace));
  const before = free();
  const session = Session.commit(device, run, "graph", {}, algorithms);
  try {
    const driverCommit = before - free();
    await randomWeights(session);
    await initializeAdapters(session.executor, run, 0);
    const seconds: number[] = [];
    const onDevice: number[] = [];
    const waits: number[] = [];
    const driver: number[] = [];
    const losses: number[] = [];
    for (let step = 0; step < warm + steps; step++) {
      const start = performance.now();
      const { loss } = await session.trainStep(documents, SETTINGS, documents);
      losses.push(loss);
      if (step >= warm) {
        seconds.push((performance.now() - start) / 1000);
        onDevice.push(session.times.deviceSeconds);
        waits.push(session.times.inputWaitSeconds);
      }
      driver.push(before - free());
    }
    const middle = (values: number[]) => values.toSorted((a, b) => a - b)[steps >> 1] as number;
    const median = middle(seconds);
    const tokens = documents.reduce((sum, { ids }) => sum + ids.length, 0);
    const on = (bytes: number) => (onGpu ? bytes : null);
    return {
      planBytes: run.plan.deviceBytes,
      driverCommit: on(driverCommit),
      driverEnd: on(driver.at(-1) as number),
      driverMoved: on(Math.max(...driver) - Math.min(...driver)),
      seconds: median,
      tokensPerSecond: tokens / median,
      deviceSeconds: middle(onDevice),
      inputWaitSeconds: Math.max(...waits),
      modelFlopUtilization: session.performance().modelFlopUtilization,
      losses,
    };
  } finally {
    await session.dispose();
  }
}

/** Takes what is free beyond `limit` bytes and the margin. */
function takeRest(device: Device, limit: number, workspace: number): DeviceBuffer | null {
  const rest = Math.floor(Number(device.info().memoryFree) - limit - MARGIN - (workspace || 0));
  return rest > 0 ? device.createBuffer(rest, { label: "not for the run" }) : null;
}

/** GiB with two digits; a dash for what was not measured. */
export function gib(bytes: number | null): string {
  return bytes === null ? "-" : (bytes / 2 ** 30).toFixed(2);
}

/** A table of right-aligned columns. */
export function printTable(head: readonly string[], rows: readonly (readonly string[])[]): void {
  const widths = head.map((name, at) =>
    Math.max(name.length, ...rows.map((row) => (row[at] as string).length)),
  );
  for (const row of [head, ...rows]) {
    console.log(row.map((cell, at) => cell.padStart(widths[at] as number)).join("  "));
  }
}
