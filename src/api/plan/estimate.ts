/**
 * Estimates for mixes of save-point policies, from one program per policy: what a layer keeps, what it needs while it is
 * computed, how long it takes. Layers only meet in the values that are kept or on their way back from the host, so adding
 * these up gives what a plan of the mix would say, without building it. Every plan that is used is made for real; this only
 * tells which one to make.
 */
import type { Op, OpKind, Program } from "../graph/program.ts";
import { aligned, bytesOf, type Value } from "../graph/value.ts";
import { type OffloadedInput, type WeightStream, weaveTransfers } from "../graph/weave.ts";
import { type Buffer, keptValue, programBuffers } from "./liveness.ts";
import type { DeviceProfile } from "./profiles.ts";
import { isOffloaded, SAVE_POLICIES, type SavePoints, type SavePolicy } from "./save_points.ts";
import { type Direction, directionOf, StepClock } from "./time.ts";

/** Bytes of one layer under one policy. */
interface LayerShare {
  /** Bytes that stay from forward to backward. */
  kept: number;
  /** Most bytes alive in its forward pass and in its backward pass, besides what other layers keep or get back. */
  forward: number;
  backward: number;
  /** Bytes that come back from the host while the layer above is in its backward pass. */
  restored: number;
}

/** Ops of one layer, or of none, that follow each other. */
interface Run {
  readonly layer: number | null;
  seconds: number;
}

/** A training program taken apart. */
export interface TrainShares {
  readonly layers: readonly LayerShare[];
  /** Most bytes alive outside the layers, besides what layers keep: head and loss. */
  readonly head: number;
  /** The same for every policy but for their seconds. */
  readonly runs: readonly Run[];
}

/** Takes a training program apart. `secondsOf` prices an op. */
export function trainShares(program: Program, secondsOf: (op: Op) => number): TrainShares {
  const { ops } = program;
  const buffers = programBuffers(program);
  const turn = ops.findIndex((op) => op.phase !== "forward");
  const layers: LayerShare[] = [];
  const share = (layer: number): LayerShare => {
    layers[layer] ??= { kept: 0, forward: 0, backward: 0, restored: 0 };
    return layers[layer];
  };
  const keepers = new Map<Buffer, number>();
  const restored = new Map<Buffer, number>();
  for (const buffer of buffers) {
    const first = (buffer.tenants[0] as { value: Value }).value;
    const kept = keptValue(buffer, turn);
    if (kept !== null) {
      keepers.set(buffer, kept.layer as number);
      share(kept.layer as number).kept += aligned(buffer.bytes);
    } else if (first.role === "restored") {
      restored.set(buffer, first.layer as number);
      share(first.layer as number).restored = aligned(buffer.bytes);
    }
  }

  const starts = groupBy(buffers, (buffer) => buffer.first);
  const ends = groupBy(buffers, (buffer) => buffer.last);
  let [live, head] = [0, 0];
  const runs: Run[] = [];
  // Bytes that are kept or restored, and alive now, by layer.
  const keptAlive = new Map<number, number>();
  const restoredAlive = new Map<number, number>();
  const count = (buffer: Buffer, sign: 1 | -1) => {
    live += sign * aligned(buffer.bytes);
    const tally = (alive: Map<number, number>, owner: number | undefined) => {
      if (owner !== undefined)
        alive.set(owner, (alive.get(owner) ?? 0) + sign * aligned(buffer.bytes));
    };
    tally(keptAlive, keepers.get(buffer));
    tally(restoredAlive, restored.get(buffer));
  };
  ops.forEach((op, index) => {
    const { layer } = op;
    for (const buffer of starts.get(index) ?? []) count(buffer, 1);
    let besides = live;
    for (const [owner, bytes] of keptAlive) if (layer === null || owner < layer) besides -= bytes;
    for (const [owner, bytes] of restoredAlive) if (owner !== layer) besides -= bytes;
    if (layer === null) {
      head = Math.max(head, besides);
    } else {
      const pass = index < turn ? "forward" : "backward";
      share(layer)[pass] = Math.max(share(layer)[pass], besides);
    }
    if (runs.at(-1)?.layer !== layer) runs.push({ layer, seconds: 0 });
    (runs.at(-1) as Run).seconds += secondsOf(op);
    for (const buffer of ends.get(index) ?? []) count(buffer, -1);
  });
  return { layers, head, runs };
}

function groupBy(buffers: readonly Buffer[], op: (buffer: Buffer) => number) {
  const groups = new Map<number, Buffer[]>();
  for (const buffer of buffers) {
    const group = groups.get(op(buffer));
    if (group === undefined) groups.set(op(buffer), [buffer]);
    else group.push(buffer);
  }
  return groups;
}

/** One program per policy, taken apart. */
export type PolicyShares = Readonly<Record<SavePolicy, TrainShares>>;

/** Takes one program per policy apart. */
export function policyShares(
  build: (policy: SavePolicy) => Program,
  secondsOf: (op: Op) => number,
): PolicyShares {
  const entries = SAVE_POLICIES.map((policy) => [policy, trainShares(build(policy), secondsOf)]);
  return Object.fromEntries(entries) as PolicyShares;
}

/** What happens between the runs of a training program, in order: a number is the run of that index. */
export type Schedule = readonly (
  | number
  | { readonly to: Value; readonly bytes: number; readonly direction: Direction }
  | { readonly awaited: Value }
)[];

/** Weaves copies into the runs of a program, as they are woven into its ops. */
export function scheduleOf(
  runs: readonly Run[],
  weights: WeightStream | null,
  offloaded: readonly OffloadedInput[],
): Schedule {
  const kind: OpKind<unknown> = {
    name: "run",
    uses: () => ({ reads: [], writes: [] }),
    cost: () => [],
    bind: (value) => ({ fill: value as Value }),
  };
  const ops = runs.map(({ layer }, index): Op => {
    return { kind, attributes: index, uses: { reads: [], writes: [] }, phase: "forward", layer };
  });
  const segments = [{ name: "train", from: 0, to: ops.length, headChunk: null }];
  const program: Program = { name: "train", ops, segments, carried: [], opening: [] };
  return weaveTransfers(program, weights, offloaded).ops.map((op) => {
    if (op.kind === kind) return op.attributes as number;
    const call = op.kind.bind(op.attributes);
    if ("awaited" in call) return call;
    const { copyTo: to, copyFrom: from } = call as { copyTo: Value; copyFrom: Value };
    return { to, bytes: bytesOf(from), direction: directionOf({ to, from }) };
  });
}

/**
 * Bytes of activations of a training program with mixed save points.
 *
 * @param shares The layers under every policy.
 * @param head Bytes outside the layers; they depend on the loss chunk, not on the save points.
 */
export function estimateBytes(shares: PolicyShares, head: number, points: SavePoints): number {
  const shareOf = (layer: number) =>
    shares[points[layer] as SavePolicy].layers[layer] as LayerShare;
  let [kept, bytes] = [0, 0];
  for (const layer of points.keys()) {
    const { forward, backward, kept: more } = shareOf(layer);
    const below = layer > 0 && isOffloaded(points, layer - 1) ? shareOf(layer - 1).restored : 0;
    bytes = Math.max(bytes, kept + Math.max(forward, backward + below));
    kept += more;
  }
  return Math.max(bytes, kept + head);
}

/**
 * Seconds of a training program with mixed save points.
 *
 * @param outside The runs outside the layers; they depend on the loss chunk.
 */
export function estimateSeconds(
  shares: PolicyShares,
  outside: readonly Run[],
  points: SavePoints,
  schedule: Schedule,
  profile: DeviceProfile,
): number {
  const clock = new StepClock(profile);
  for (const step of schedule) {
    if (typeof step === "number") {
      const { layer, seconds } = outside[step] as Run;
      const policy = layer === null ? null : (points[layer] as SavePolicy);
      clock.run(policy === null ? seconds : (shares[policy].runs[step] as Run).seconds);
    } else if ("awaited" in step) clock.await(step.awaited);
    else clock.copy(step.to, step.bytes, step.direction);
  }
  return clock.ops;
}
