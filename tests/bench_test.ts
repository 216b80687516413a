import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { runFile, SLOW, temporaryFolder } from "./ffi/support.ts";
import { ROOT } from "./help.ts";

/** Runs a benchmark on the CPU with a small model; gives what it wrote. */
function bench(name: string, args: readonly string[]) {
  using folder = temporaryFolder();
  const out = join(folder.path, "result.json");
  const file = join(ROOT, "bench", name);
  const { code, stdout, stderr } = runFile(file, {
    args: [...args, "--device", "cpu", "--out", out],
  });
  assert.equal(code, 0, `${stdout}\n${stderr}`);
  return { result: JSON.parse(readFileSync(out, "utf8")), stdout };
}

test(
  "bench/budget_runs.ts puts predictions beside measurements, and keeps the refusals",
  SLOW,
  () => {
    const { result, stdout } = bench("budget_runs.ts", [
      "--steps",
      "1",
      "--algorithms",
      "estimated",
    ]);
    assert.equal(result.rungs.length, 4);
    assert.equal(result.budgets.length, 3);
    for (const row of result.budgets) assert.ok(row.planBytes <= row.budgetBytes);
    for (const row of [...result.budgets, ...result.rungs]) {
      assert.ok(row.predictedSeconds > 0 && row.seconds > 0 && Number.isFinite(row.losses[0]));
    }
    assert.deepEqual(result.otherBits, []);
    assert.match(result.refusals[0], /does not fit the memory budget/);
    assert.match(stdout, /median error of predicted times/);
  },
);

test("bench/checkpoint.ts goes on from a checkpoint with the same bits", SLOW, () => {
  const { result } = bench("checkpoint.ts", ["--turns", "2", "--steps", "2"]);
  const [row] = result.rows;
  assert.ok(row.sameBits && row.saveSeconds > 0 && row.slowdown > 0);
  assert.ok(row.checkpointBytes <= row.hostBytes && row.hostBytes < row.checkpointBytes + 2048);
});

test("bench/stream.ts keeps to its budget, and gets the loss of resident weights", SLOW, () => {
  const { result, stdout } = bench("stream.ts", ["--steps", "1"]);
  assert.equal(result.rows[0].sameLoss, true);
  for (const row of result.rows) {
    assert.ok(row.planBytes <= result.settings.budget && row.hostBytes > 0 && row.linkSeconds > 0);
  }
  assert.match(stdout, /same bits/);
});

test("bench/longest_context.ts runs the longest document that fits", SLOW, () => {
  const small = ["--models", "1B", "--cards", "20"];
  const { result } = bench("longest_context.ts", [...small, "--max-seconds", "60"]);
  const [alone, withHost] = result.rows;
  assert.ok(alone.tokens > 0 && alone.documents === 1 && alone.hostBytes === 0);
  assert.ok(alone.planBytes <= 20 << 20);
  assert.ok(withHost.tokens > alone.tokens && withHost.hostBytes > 0);
  // The same reservation on shorter documents.
  const short = bench("longest_context.ts", [...small, "--host", "4", "--max-seconds", "0"]);
  const [row] = short.result.rows;
  assert.ok(row.tokens === withHost.tokens && Number.isFinite(row.measured.losses[0]));
});

test(
  "bench/memory_curve.ts finds our speed in a peer's memory and our memory at its speed",
  SLOW,
  () => {
    const { result } = bench("memory_curve.ts", ["--steps", "1", "--points", "2"]);
    const [curve] = result.curves;
    assert.equal(curve.peers[1].atItsMemory, null);
    assert.ok(curve.peers[0].atItsMemory.planBytes <= curve.peers[0].gib * 2 ** 30);
    assert.equal(curve.peers[1].atItsSpeed.planBytes, curve.points[0].planBytes);
    assert.ok(result.mostTokens[0].tokens > result.mostTokens[0].peerTokens);
  },
);
