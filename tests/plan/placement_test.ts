import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { aligned, makeValue, type Value } from "../../src/api/graph/value.ts";
import { placeWithin } from "../../src/api/plan/exact.ts";
import { type Buffer, programBuffers } from "../../src/api/plan/liveness.ts";
import { maximumLive, place, placeSorted } from "../../src/api/plan/placement.ts";
import { makePlan } from "../../src/api/plan/plan.ts";
import { randomProgram } from "./random_programs.ts";

function buffer(bytes: number, first: number, last: number): Buffer {
  const value = makeValue("v", "i32", [Math.ceil(bytes / 4)]);
  return { tenants: [{ value, from: first }], bytes, first, last };
}

const buffers = fc.array(
  fc
    .tuple(
      fc.integer({ min: 1, max: 5000 }),
      fc.integer({ min: 0, max: 20 }),
      fc.integer({ min: 0, max: 6 }),
    )
    .map(([bytes, first, length]) => buffer(bytes, first, first + length)),
  { minLength: 1, maxLength: 40 },
);

test("place() never overlaps buffers that live at the same time, and never beats the lower bound", () => {
  fc.assert(
    fc.property(buffers, (all) => {
      const { offsets, bytes, lowerBound } = place(all, 0);
      assert.ok(bytes >= lowerBound);
      for (const a of all) {
        const start = offsets.get(a) ?? -1;
        assert.ok(start >= 0 && start % 256 === 0 && start + a.bytes <= bytes);
        for (const b of all) {
          if (a === b || a.last < b.first || b.last < a.first) continue;
          const other = offsets.get(b) ?? -1;
          assert.ok(start + a.bytes <= other || other + b.bytes <= start);
        }
      }
    }),
  );
});

test("place() reports the op with most live bytes", () => {
  const all = [buffer(1000, 0, 4), buffer(500, 1, 1), buffer(700, 3, 3), buffer(100, 3, 5)];
  const { lowerBound, peakOp, bytes } = place(all, 0);
  assert.equal(peakOp, 3);
  assert.equal(lowerBound, 1024 + 768 + 256);
  assert.equal(bytes, lowerBound);
});

test("place() puts the fixed buffers to the bottom in their order", () => {
  const all = [buffer(300, 0, 9), buffer(10, 0, 9), buffer(9000, 2, 3)];
  const { offsets } = place(all, 2);
  assert.deepEqual(
    all.map((one) => offsets.get(one)),
    [0, 512, 768],
  );
});

/** The fewest bytes of any placement, by trying every order on the lowest free offset. */
function smallest(all: readonly Buffer[]): number {
  let best = Number.POSITIVE_INFINITY;
  const visit = (rest: readonly Buffer[], offsets: Map<Buffer, number>, bytes: number): void => {
    if (rest.length === 0) best = Math.min(best, bytes);
    if (bytes >= best) return;
    for (const next of rest) {
      // Canonical placements only: on the highest of those that are placed and live at the same time.
      let start = 0;
      for (const [other, offset] of offsets) {
        if (other.last < next.first || next.last < other.first) continue;
        start = Math.max(start, offset + aligned(other.bytes));
      }
      const placed = new Map(offsets).set(next, start);
      const end = Math.max(bytes, start + aligned(next.bytes));
      visit(
        rest.filter((one) => one !== next),
        placed,
        end,
      );
    }
  };
  visit(all, new Map(), 0);
  return best;
}

test("placeWithin() finds a placement in the smallest capacity, and proves that less is impossible", () => {
  const few = fc.array(
    fc
      .tuple(
        fc.integer({ min: 1, max: 6 }),
        fc.integer({ min: 0, max: 5 }),
        fc.integer({ min: 0, max: 3 }),
      )
      .map(([granules, first, length]) => buffer(granules * 256, first, first + length)),
    { minLength: 1, maxLength: 6 },
  );
  fc.assert(
    fc.property(few, (all) => {
      const bytes = smallest(all);
      const found = placeWithin(all, bytes);
      assert.ok(found instanceof Map);
      for (const a of all) {
        const start = found.get(a) as number;
        assert.ok(start + aligned(a.bytes) <= bytes);
        for (const b of all) {
          if (a === b || a.last < b.first || b.last < a.first) continue;
          const other = found.get(b) as number;
          assert.ok(start + a.bytes <= other || other + b.bytes <= start);
        }
      }
      assert.equal(placeWithin(all, bytes - 256), "none");
    }),
    { seed: 5 },
  );
});

// Mutant: without the upper end in nested().
test("placeSorted() leaves room in one piece on both sides of a peak without a free byte", () => {
  // The end of a layer, the head, and the backward pass of that layer; 12 units are alive at the peak, 11 on its sides.
  const unit = (units: number, first: number, last: number) => buffer(units * 256, first, last);
  const all = [
    unit(2, 0, 9), // kept values
    unit(2, 1, 7),
    unit(5, 2, 2), // the MLP's output
    unit(2, 2, 5), // hidden
    unit(2, 3, 4), // its norm
    unit(2, 3, 8), // the gradient of that
    unit(2, 4, 4), // logits
    unit(5, 6, 6), // the gradient of the MLP's output
  ];
  const { lowerBound, peakOp } = maximumLive(all);
  assert.equal(lowerBound, 12 * 256);
  assert.equal(peakOp, 4);
  assert.equal(placeSorted(all, 0).bytes, lowerBound);
});

test("place() meets the lower bound of 1000 random programs, and so their optimum", () => {
  let searched = 0;
  for (let seed = 0; seed < 1000; seed++) {
    const program = randomProgram(seed);
    const all = programBuffers(program);
    const { bytes, lowerBound } = place(all, program.carried.length);
    assert.equal(bytes, lowerBound, `seed ${seed}`);
    if (placeSorted(all, program.carried.length).bytes > lowerBound) searched++;
    const resident: readonly Value[] = [];
    // Planning runs the independent verifier.
    if (seed % 50 === 0) makePlan({ programs: [program], resident });
  }
  // What the exact search is for.
  assert.equal(searched, 5);
});

test("place() gives the optimum of a program that cannot be placed at the lower bound", () => {
  const all = (
    [
      [2, 0, 4],
      [1, 3, 6],
      [2, 7, 9],
      [2, 9, 9],
      [1, 3, 7],
      [1, 6, 8],
      [1, 5, 6],
      [2, 0, 2],
    ] as const
  ).map(([granules, first, last]) => buffer(granules * 256, first, last));
  const { bytes, lowerBound } = place(all, 0);
  assert.equal(lowerBound, 4 * 256);
  assert.equal(placeWithin(all, lowerBound), "none");
  assert.equal(bytes, 5 * 256);
  assert.equal(smallest(all), bytes);
});

// Mutant: end search() after the lower bound; 4.4 % over it is left.
test("place() gets close to the lower bound of a program on which the exact search gives up", () => {
  const all = programBuffers(randomProgram(1783));
  const { bytes, lowerBound } = place(all, 1);
  assert.ok(bytes > lowerBound && bytes <= lowerBound * 1.005, String(bytes / lowerBound));
});
