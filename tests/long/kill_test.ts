/** The same as tests/cli/kill_test.ts, for long enough to meet every moment of a save. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { killRuns } from "../cli/kill_support.ts";

test("train survives 200 kills at random moments", { timeout: 3_600_000 }, async () => {
  const { killed, resumed, ended } = await killRuns("cpu", 200);
  console.log(`${killed} killed, ${resumed} resumed, ${ended} ended`);
  assert.ok(killed >= 200 && resumed > 50);
});
