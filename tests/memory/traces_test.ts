import assert from "node:assert/strict";
import { test } from "node:test";
import { Device } from "../../src/api/mod.ts";
import { SLOW } from "../ffi/support.ts";
import { lowerBound, plannedTrace, replay, type Trace, traces } from "./traces.ts";

const PAGE = 2 << 20;

/**
 * What PyTorch's caching allocator held over the least on a GPU host, as a part of the least, trace by trace; the last is that
 * of the plan of Qwen2.5-0.5B.
 */
const TORCH = [0.205, 0.566, 0.155, 0.278, 0.321];

/** Replays in which pages may still go to and fro. */
const SETTLES = 30;

// rmm#1245, pytorch#110194. Mutants: let lm_zone_of put everything into one zone, or tiny blocks with the small ones; leave out
// `settled` in lm_pool_grow.
test(
  "MemoryPool holds at most half of what PyTorch's allocator holds over the least, and at last takes nothing",
  SLOW,
  async () => {
    await using device = await Device.open("cpu", { threads: 1 });
    const all = [...traces(), plannedTrace("four layers", "checkpoint", 3)];
    for (const [index, trace] of all.entries()) {
      await using stream = device.createStream();
      using pool = device.createPool();
      const least = lowerBound(trace);
      const bar = least * (1 + (TORCH[index] ?? 0) / 2);
      let calls = 0;
      for (let round = 0; round <= SETTLES; round++) {
        calls = pool.stats().driverCalls;
        const most = replay(trace, pool, stream);
        const allowed = round > 0 ? Math.ceil(bar / PAGE) * PAGE : bar; // settled: the last page is whole
        const over = `${trace.name}: ${(100 * (most / least - 1)).toFixed(1)} %`;
        assert.ok(most >= least && most <= allowed, over);
        if (round > 0 && /one length/.test(trace.name))
          assert.equal(pool.stats().driverCalls, calls);
      }
      const { peak, totalFree, largestFree, fragmentation, reserved, driverCalls } = pool.stats();
      assert.equal(driverCalls, calls, `${trace.name}: steps settle`);
      assert.equal(peak, least, trace.name);
      assert.equal(totalFree, reserved);
      assert.equal(fragmentation, 1 - largestFree / totalFree);
    }
  },
);

test("traces are the same in every run, and give back what they take", () => {
  for (const [index, trace] of traces().entries()) {
    assert.deepEqual(trace, traces()[index]);
    const live = new Set<number>();
    for (const [kind, id] of trace.ops) {
      if (kind === "a") assert.ok(!live.has(id));
      assert.ok(kind === "a" ? live.add(id) : live.delete(id), trace.name);
    }
    assert.equal(live.size, 0);
  }
});

test("lowerBound() is the most that is live at once, in granules", () => {
  const trace: Trace = {
    name: "small",
    ops: [
      ["a", 0, 1],
      ["a", 1, 257],
      ["f", 0],
      ["a", 2, 512],
      ["f", 2],
      ["f", 1],
    ],
  };
  assert.equal(lowerBound(trace), 1024);
});
