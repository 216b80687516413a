import assert from "node:assert/strict";
import { test } from "node:test";
import { killRuns } from "./kill_support.ts";

test("train that is killed at any moment goes on at once, and ends with the bits of a run that was not", async () => {
  const { killed, ended } = await killRuns(25);
  assert.ok(killed >= 25 && ended >= 1);
});
