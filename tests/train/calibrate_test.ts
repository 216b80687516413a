import assert from "node:assert/strict";
import { test } from "node:test";
import { rateFor } from "../../src/api/train/calibrate_step.ts";

// Mutants: give `low` back; swap the halves.
test("rateFor() finds the rate behind a predicted time, between a sixteenth of the most and the most", () => {
  const predicted = (rate: number) => 2 + 100 / rate;
  const most = 50;
  for (const rate of [3.5, 10, 49]) {
    const found = rateFor(predicted(rate), most, predicted);
    assert.ok(Math.abs(found / rate - 1) < 1e-6, `${found}, not ${rate}`);
  }
  assert.equal(rateFor(1, most, predicted), most);
  assert.ok(Math.abs(rateFor(1000, most, predicted) - most / 16) < 1e-6);
});
