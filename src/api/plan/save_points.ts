/**
 * Save points: which values of a layer stay in memory from forward to backward. Everything else is computed again, with
 * the same kernels and so the same bits (checkpointing: Chen et al. 2016, arXiv:1604.06174). Every layer has a policy of
 * its own; together they are the save points of a run.
 */
import { LoramemError } from "../../ffi/error.ts";
import type { SaveRole, Value } from "../graph/value.ts";

/**
 * What one layer holds, and what it computes again. Norms, rotations and activations cost no matrix product and are
 * recomputed under every policy.
 *
 * `keep` holds what the matrix products and attention produced. `dropMlp` holds all of that but gate|up, the largest, and
 * repeats that one product. `checkpoint` holds the layer's input and the few columns s = x A^T of its last product, and repeats
 * the layer up to that product. `offload` repeats as much and does not hold the input: that waits in page-locked host memory,
 * and comes back while the layer above is in its backward pass. The last layer's input is needed next and stays.
 */
export type SavePolicy = "keep" | "dropMlp" | "checkpoint" | "offload";

/** The policy of every layer, the first layer first. */
export type SavePoints = readonly SavePolicy[];

/** How many layers have which policy. */
export type PolicyCounts = Readonly<Record<SavePolicy, number>>;

/** Every policy, fastest first. */
export const SAVE_POLICIES: readonly SavePolicy[] = ["keep", "dropMlp", "checkpoint", "offload"];

const CHECKPOINT: readonly SaveRole[] = ["layerInput", "mlpLoraDown"];
const WITHOUT_MLP: readonly SaveRole[] = [
  ...CHECKPOINT,
  "loraDown",
  "qkv",
  "attention",
  "logSumExp",
  "midResidual",
];

const KEPT: Readonly<Record<SavePolicy, ReadonlySet<SaveRole>>> = {
  keep: new Set<SaveRole>([...WITHOUT_MLP, "gateUp"]),
  dropMlp: new Set(WITHOUT_MLP),
  checkpoint: new Set(CHECKPOINT),
  offload: new Set(CHECKPOINT), // the input of the last layer only
};

/** Whether `points` keep `value` on the device for the backward pass. */
export function isKept(points: SavePoints, value: Value): boolean {
  if (value.role === null || value.layer === null) return false;
  if (value.role === "layerInput" && isOffloaded(points, value.layer)) return false;
  return keepsRole(points, value.layer, value.role);
}

/** Whether the policy of a layer names a role. */
export function keepsRole(points: SavePoints, layer: number, role: SaveRole): boolean {
  return KEPT[points[layer] as SavePolicy].has(role);
}

/** Whether the input of a layer waits on the host. */
export function isOffloaded(points: SavePoints, layer: number): boolean {
  return points[layer] === "offload" && layer < points.length - 1;
}

/**
 * Gives the policies of `counts` to layers so that the peak is lowest: the leanest first.
 *
 * Backward runs from the last layer down and computes the whole of a layer again, so at layer l the kept values of the
 * layers below and one whole layer are alive. That sum is largest at the last layer, where what the policy holds is part
 * of the whole layer anyway: the last layer's policy is free, and must be the richest one. The order of the others does
 * not change the peak; lean ones first let the arena fill up late.
 */
export function arrange(counts: Partial<PolicyCounts>): SavePoints {
  return SAVE_POLICIES.toReversed().flatMap((policy) => uniform(policy, counts[policy] ?? 0));
}

/** One policy for all layers. */
export function uniform(policy: SavePolicy, layers: number): SavePoints {
  return Array.from({ length: layers }, () => policy);
}

/** How many layers of `points` have which policy. */
export function countPolicies(points: SavePoints): PolicyCounts {
  const counts = { keep: 0, dropMlp: 0, checkpoint: 0, offload: 0 };
  for (const policy of points) counts[policy]++;
  return counts;
}

/** Save points in words: `"keep"` if all layers have that policy, else counts such as `"20 keep + 12 checkpoint"`. */
export function describePoints(points: SavePoints): string {
  const counts = countPolicies(points);
  const used = SAVE_POLICIES.filter((policy) => counts[policy] > 0);
  if (used.length === 1) return used[0] as string;
  return used.map((policy) => `${counts[policy]} ${policy}`).join(" + ");
}

/**
 * Reads what {@linkcode describePoints} writes.
 *
 * @throws {LoramemError} BAD_ARGUMENT if a policy is unknown or the counts do not add up to `layers`.
 */
export function parsePoints(text: string, layers: number): SavePoints {
  const single = SAVE_POLICIES.find((policy) => policy === text);
  if (single !== undefined) return uniform(single, layers);
  const counts = { ...countPolicies([]) };
  let total = 0;
  for (const part of text.split("+")) {
    const [, count, name] = /^\s*(\d+)\s+(\w+)\s*$/.exec(part) ?? [];
    const policy = SAVE_POLICIES.find((known) => known === name);
    if (policy === undefined) throw badPoints(text, `"${part.trim()}" is not a count and a policy`);
    counts[policy] += Number(count);
    total += Number(count);
  }
  if (total !== layers) throw badPoints(text, `${total} layers named, the model has ${layers}`);
  return arrange(counts);
}

function badPoints(text: string, what: string): LoramemError {
  const advice = `write "auto", one of ${SAVE_POLICIES.join(", ")}, or counts such as "20 keep + 12 checkpoint"`;
  const message = `savePoints: not understood: ${JSON.stringify(text)}: ${what}: ${advice}`;
  return new LoramemError("BAD_ARGUMENT", message, { name: "savePoints", value: text });
}
