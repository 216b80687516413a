import assert from "node:assert/strict";
import { test } from "node:test";
import { KINDS } from "../kernels/rig.ts";
import { killRuns } from "./kill_support.ts";

for (const device of KINDS) {
  const name = `train that is killed at any moment goes on at once to the bits of a run that was not, on ${device}`;
  test(name, { timeout: 600_000 }, async () => {
    const kills = device === "cpu" ? 25 : 10;
    const { killed, ended } = await killRuns(device, kills);
    assert.ok(killed >= kills && ended >= 1);
  });
}
