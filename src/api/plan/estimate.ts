/**
 * Estimates for mixes of save-point policies, from one program per policy: what a layer keeps, what it needs while it is
 * computed, how long it takes. Layers only meet in the values that are kept, so adding these up gives what a plan of the
 * mix would say, without building it. Every plan that is used is made for real; this only tells which one to make.
 */
import type { Op, Program } from "../graph/program.ts";
import { aligned } from "../graph/value.ts";
import { type Buffer, programBuffers } from "./liveness.ts";
import { SAVE_POLICIES, type SavePoints, type SavePolicy } from "./save_points.ts";

/** Bytes or seconds of one layer under one policy. */
interface LayerShare {
  /** Bytes that stay from forward to backward. */
  kept: number;
  /** Most bytes alive while the layer is computed, besides what layers below keep. */
  local: number;
  seconds: number;
}

/** A training program taken apart. */
export interface TrainShares {
  readonly layers: readonly LayerShare[];
  /** What is kept and belongs to no layer: the embedded tokens. */
  readonly kept: number;
  /** Most bytes alive between forward and backward, besides what layers keep: head and loss. */
  readonly head: number;
  /** Seconds outside the layers. */
  readonly seconds: number;
}

/** Takes a training program apart. `secondsOf` prices an op. */
export function trainShares(program: Program, secondsOf: (op: Op) => number): TrainShares {
  const { ops } = program;
  const buffers = programBuffers(program);
  const turn = ops.findIndex((op) => op.phase !== "forward");
  const layers: LayerShare[] = [];
  const share = (layer: number): LayerShare => {
    layers[layer] ??= { kept: 0, local: 0, seconds: 0 };
    return layers[layer];
  };
  let kept = 0;
  const owners = new Map<Buffer, number | null>();
  for (const buffer of buffers) {
    const owner = keptBy(buffer, turn);
    if (owner === undefined) continue;
    owners.set(buffer, owner);
    if (owner === null) kept += aligned(buffer.bytes);
    else share(owner).kept += aligned(buffer.bytes);
  }

  const starts = groupBy(buffers, (buffer) => buffer.first);
  const ends = groupBy(buffers, (buffer) => buffer.last);
  let [live, head, seconds] = [0, 0, 0];
  // Kept bytes that are alive now, by layer.
  const keptAlive = new Map<number | null, number>();
  const count = (buffer: Buffer, sign: 1 | -1) => {
    live += sign * aligned(buffer.bytes);
    const owner = owners.get(buffer);
    if (owner === undefined) return;
    keptAlive.set(owner, (keptAlive.get(owner) ?? 0) + sign * aligned(buffer.bytes));
  };
  ops.forEach((op, index) => {
    for (const buffer of starts.get(index) ?? []) count(buffer, 1);
    let besides = live;
    for (const [owner, bytes] of keptAlive) {
      if (op.layer === null || owner === null || owner < op.layer) besides -= bytes;
    }
    if (op.layer === null) {
      head = Math.max(head, besides);
      seconds += secondsOf(op);
    } else {
      const layer = share(op.layer);
      layer.local = Math.max(layer.local, besides);
      layer.seconds += secondsOf(op);
    }
    for (const buffer of ends.get(index) ?? []) count(buffer, -1);
  });
  return { layers, kept, head, seconds };
}

/** The layer whose value is kept in `buffer` over the turn from forward to backward; undefined if none is. */
function keptBy({ tenants, first, last }: Buffer, turn: number): number | null | undefined {
  if (first >= turn || last < turn) return undefined;
  const { value } = tenants.findLast(({ from }) => from < turn) as Buffer["tenants"][number];
  return value.role === null ? undefined : value.layer;
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

/**
 * Bytes of activations and seconds of a training program with mixed save points.
 *
 * @param shares The layers under every policy.
 * @param outside What is outside the layers; it depends on the loss chunk, not on the save points.
 */
export function estimateMix(
  shares: PolicyShares,
  outside: Omit<TrainShares, "layers">,
  points: SavePoints,
): { readonly bytes: number; readonly seconds: number } {
  let { kept, seconds } = outside;
  let bytes = 0;
  points.forEach((policy, layer) => {
    const share = shares[policy].layers[layer] as LayerShare;
    bytes = Math.max(bytes, kept + share.local);
    kept += share.kept;
    seconds += share.seconds;
  });
  return { bytes: Math.max(bytes, kept + outside.head), seconds };
}
