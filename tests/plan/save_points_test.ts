import assert from "node:assert/strict";
import { test } from "node:test";
import {
  arrange,
  countPolicies,
  describePoints,
  parsePoints,
  SAVE_POLICIES,
  type SavePoints,
  uniform,
} from "../../src/api/plan/save_points.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { planModel } from "./models.ts";

/** Every way to give `layers` layers a policy each. */
function arrangements(layers: number): SavePoints[] {
  if (layers === 0) return [[]];
  return arrangements(layers - 1).flatMap((points) =>
    SAVE_POLICIES.map((policy) => [...points, policy]),
  );
}

test("arrange() gives the lowest peak of all orders of the same policies", () => {
  // Chunks that make either the head or the last layer the peak.
  for (const lossChunkTokens of [64, 512]) {
    const bytes = (points: SavePoints) => {
      const dims = { tokensPerMicroBatch: 512, lossChunkTokens };
      const { classes, programs } = planModel("four layers", points, dims).plan;
      assert.equal(classes.activations, programs.get("train")?.lowerBound, `${points}`);
      return classes.activations;
    };
    const arranged = new Map<string, number>();
    for (const points of arrangements(4)) {
      const counts = countPolicies(points);
      const key = JSON.stringify(counts);
      if (!arranged.has(key)) arranged.set(key, bytes(arrange(counts)));
      assert.ok(bytes(points) >= (arranged.get(key) ?? 0), `${lossChunkTokens}: ${points}`);
    }
    assert.equal(arranged.size, 35);
  }
});

test("planRun() needs less with every policy that is leaner", () => {
  const bytes = SAVE_POLICIES.map(
    (policy) => planModel("Llama-3.1-8B", policy).plan.classes.activations,
  );
  assert.deepEqual(
    bytes,
    bytes.toSorted((a, b) => b - a),
  );
  assert.equal(new Set(bytes).size, 4);
});

test("parsePoints() reads what describePoints() writes", () => {
  for (const points of [
    ...SAVE_POLICIES.map((policy) => uniform(policy, 5)),
    arrange({ keep: 2, dropMlp: 0, checkpoint: 3 }),
    arrange({ keep: 1, dropMlp: 3, checkpoint: 1 }),
  ]) {
    assert.deepEqual(parsePoints(describePoints(points), 5), points);
  }
  const mix = arrange({ keep: 20, dropMlp: 0, checkpoint: 12 });
  assert.equal(describePoints(mix), "20 keep + 12 checkpoint");
  assert.deepEqual(
    [mix[0], mix[11], mix[12], mix[31]],
    ["checkpoint", "checkpoint", "keep", "keep"],
  );
});

test("parsePoints() refuses what it does not understand", () => {
  for (const [text, what] of [
    ["keepp", /not a count and a policy/],
    ["3 keep + x checkpoint", /"x checkpoint"/],
    ["3 keep + 1 checkpoint", /4 layers named, the model has 5/],
  ] as const) {
    assert.throws(
      () => parsePoints(text, 5),
      (error: unknown) =>
        error instanceof LoramemError && error.code === "BAD_ARGUMENT" && what.test(error.message),
    );
  }
});
