import assert from "node:assert/strict";
import { test } from "node:test";
import { learningRateAt, type Schedule } from "../../src/api/train/schedule.ts";

const at = (schedule: Schedule, step: number, warmupSteps = 10) =>
  learningRateAt(step, { schedule, learningRate: 2, warmupSteps, totalSteps: 100 });

test("learningRateAt() warms up linearly, from the first step on", () => {
  assert.equal(at("constant", 0), 0.2);
  assert.equal(at("constant", 4), 1);
  assert.equal(at("constant", 9), 2);
  assert.equal(at("constant", 0, 0), 2);
});

test("learningRateAt() falls to zero over the run, by the schedule", () => {
  assert.equal(at("constant", 99), 2);
  assert.equal(at("linear", 50), 1);
  assert.equal(at("linear", 100), 0);
  assert.ok(Math.abs(at("cosine", 50) - 1) < 1e-12);
  assert.ok(Math.abs(at("cosine", 25) - (1 + Math.SQRT1_2)) < 1e-12);
  assert.ok(at("cosine", 99) > 0 && at("cosine", 99) < 1e-3);
});
