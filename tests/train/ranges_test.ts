import assert from "node:assert/strict";
import { test } from "node:test";
import { Ranges } from "../../src/api/run/ranges.ts";
import { openGolden, readGolden } from "./support.ts";

const golden = await readGolden("llama");

/** Names of the ranges that were opened by calls after the first `seen`, each after those that it lies in. */
function rangesOf(operations: readonly { readonly op: string; readonly label?: string }[]) {
  const open: string[] = [];
  const paths: string[] = [];
  for (const { op, label = "" } of operations) {
    if (op === "lm_range_pop") open.pop();
    if (op !== "lm_range_push") continue;
    open.push(label);
    paths.push(open.join(" > "));
  }
  assert.deepEqual(open, [], "every range was closed");
  return paths;
}

// Mutants: leave out the pop in around(); cut groupOps() by layer alone; no range around a graph's launch.
test("Executor names segments, layers and phases for whoever looks", async () => {
  const programs = ["train", "optimizer"] as const;
  for (const mode of ["graph", "eager"] as const) {
    await using session = await openGolden(golden, {
      mode,
      programs,
      policy: "checkpoint",
      sim: { debug: true },
    });
    const { device } = session.executor;
    const known = device.snapshot().operations.at(-1)?.number ?? 0;
    const recorded = rangesOf(device.snapshot().operations);
    await session.trainStep(golden.batches[0] ?? [], golden.settings);
    const paths = rangesOf(device.snapshot().operations.filter(({ number }) => number > known));
    const inside = mode === "graph" ? recorded : paths.map((path) => path.split(" > ")[1] ?? "");
    for (const name of [
      "forward, layer 0",
      "forward, layer 1",
      "recompute, layer 1",
      "backward, layer 0",
      "optimizer",
    ]) {
      assert.ok(inside.includes(name), `${mode}: ${name} in ${inside.join("; ")}`);
    }
    const segments = paths.filter((path) => !path.includes(" > "));
    assert.deepEqual(
      [segments[0], segments.at(-2), segments.at(-1)],
      ["train: forward", "train: train", "optimizer: optimizer"],
      mode,
    );
  }
});

test("Ranges.of() is null where nobody looks", async () => {
  await using session = await openGolden(golden, { programs: ["train", "optimizer"] });
  assert.equal(Ranges.of(session.executor.device), null);
});
