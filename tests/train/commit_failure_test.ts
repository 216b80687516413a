/** A reservation that fails while a run is committed: nothing stays behind, and the message says which one it was. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Device } from "../../src/api/memory/mod.ts";
import { formatBytes } from "../../src/api/plan/report.ts";
import { commitWithin } from "../../src/api/train/open_run.ts";
import type { RunPlan } from "../../src/api/train/run_plan.ts";
import { planRun } from "../../src/api/train/run_plan.ts";
import { Session } from "../../src/api/train/session.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { planGolden, readGolden } from "./support.ts";

type Taking = "createBuffer" | "createPinnedBuffer" | "createStream" | "createEvent";
const RESERVING: readonly Taking[] = ["createBuffer", "createPinnedBuffer", "createStream"];

/** Lets the k-th (from 1) of the calls that take something from the device fail; gives the way back. */
function failAt(device: Device, k: number, names: readonly Taking[] = RESERVING): Disposable {
  let calls = 0;
  for (const name of names) {
    const original = device[name].bind(device) as (...args: unknown[]) => unknown;
    const failing = (...args: unknown[]) => {
      calls++;
      if (calls === k) throw new LoramemError("OUT_OF_MEMORY", "injected", { totalFree: 1 });
      return original(...args);
    };
    Object.defineProperty(device, name, { value: failing, configurable: true });
  }
  return {
    [Symbol.dispose]() {
      for (const name of names) Reflect.deleteProperty(device, name);
    },
  };
}

const held = ({ reserved, pinned }: ReturnType<Device["stats"]>) => ({ reserved, pinned });

test("Session.commit() gives everything back when any reservation fails, and names class, bytes and budget", async () => {
  const { spec } = await planGolden(await readGolden("llama"));
  const budget = 64 << 20;
  const run = planRun(spec, "keep", { budget });
  const { classes } = run.plan;
  await using device = await Device.open("cpu", { threads: 1 });
  const before = held(device.stats());
  const order = ["weights", "trainable", "activations", "staging"] as const;
  for (const [index, memory] of order.entries()) {
    using _failure = failAt(device, index + 1);
    assert.throws(
      () => Session.commit(device, run, "graph"),
      (error: unknown) => {
        assert.ok(error instanceof LoramemError && error.is("OUT_OF_MEMORY"));
        assert.equal(error.details.requested, classes[memory]);
        assert.equal((error.cause as Error).message, "injected");
        for (const part of [
          memory,
          `${classes[memory]} bytes`,
          formatBytes(run.plan.deviceBytes),
          "a budget of 64.00 MiB",
        ]) {
          assert.ok(error.message.includes(part), `${part}: ${error.message}`);
        }
        return true;
      },
    );
    assert.deepEqual(held(device.stats()), before, memory);
  }
  for (const stream of [1, 2]) {
    using _failure = failAt(device, order.length + stream);
    assert.throws(() => Session.commit(device, run, "graph"), /injected/);
    assert.deepEqual(held(device.stats()), before, `stream ${stream}`);
  }
  // The device is as good as before.
  const session = Session.commit(device, run, "graph");
  await session.dispose();
  assert.deepEqual(held(device.stats()), before);
});

test("Session.commit() leaves nothing behind when an event cannot be made", async () => {
  const run = await planGolden(await readGolden("llama"));
  await using device = await Device.open("cpu", { threads: 1, debug: true });
  const before = held(device.stats());
  for (const k of [1, 2, 4, 12]) {
    using _failure = failAt(device, k, ["createEvent"]);
    assert.throws(() => Session.commit(device, run, "graph"), /injected/);
    assert.deepEqual(device.leaks(), []);
    assert.deepEqual(held(device.stats()), before);
  }
});

test("commitWithin() plans once more, for less, if what was free is gone, and only then", async () => {
  const { spec } = await planGolden(await readGolden("llama"));
  const run = planRun(spec, "keep");
  const refusal = () => new LoramemError("OUT_OF_MEMORY", "gone");
  const outcome = (budget: number | null, failures: number, error: () => Error = refusal) => {
    const budgets: number[] = [];
    let left = failures;
    const fit = (bytes: number): RunPlan => {
      budgets.push(bytes);
      return run;
    };
    const commit = () => {
      if (left-- > 0) throw error();
      return "committed";
    };
    let result: string;
    try {
      result = commitWithin(budget, () => 1e9, fit, commit);
    } catch (thrown) {
      result = (thrown as Error).message;
    }
    return { result, budgets };
  };
  const less = Math.floor(run.plan.deviceBytes * 0.95);
  assert.deepEqual(outcome(null, 0), { result: "committed", budgets: [1e9] });
  assert.deepEqual(outcome(null, 1), { result: "committed", budgets: [1e9, less] });
  assert.deepEqual(outcome(null, 2), { result: "gone", budgets: [1e9, less] });
  assert.deepEqual(outcome(5e6, 1), { result: "gone", budgets: [5e6] });
  assert.deepEqual(
    outcome(null, 1, () => new Error("broken")),
    { result: "broken", budgets: [1e9] },
  );
});
