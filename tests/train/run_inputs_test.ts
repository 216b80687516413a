import assert from "node:assert/strict";
import { test } from "node:test";
import type { Document } from "../../src/api/data/conversation.ts";
import { fullLoad } from "../../src/api/plan/time.ts";
import { resolveOptions } from "../../src/api/train/options.ts";
import { stepLoadOf } from "../../src/api/train/run_inputs.ts";
import { LoramemError } from "../../src/ffi/error.ts";

function document(tokens: number): Document {
  const labelled = new Uint8Array(tokens).fill(1).fill(0, 0, 1);
  return { ids: new Int32Array(tokens), labelled, where: "test" };
}

/** A model without a window. */
const FULL = { windows: [0, 0] };

const options = (more: object) => resolveOptions({ model: "m", data: [], ...more });

test("stepLoadOf() gives the mean micro-batch of an epoch, as it will be packed", () => {
  // Two steps of two documents; 10 + 6 fit into one micro-batch of 16, whichever way they are drawn.
  const documents = [10, 10, 6, 6].map(document);
  const { load, microBatches } = stepLoadOf(options({ batchSize: 4 }), FULL, 16, documents);
  assert.equal(microBatches, 2);
  assert.deepEqual(load, { tokens: 16, labelled: 14, pairs: 55 + 21, windowPairs: 55 + 21 });
  // With a window of 7, the last three of ten tokens see 7 each.
  const slid = stepLoadOf(options({ batchSize: 4 }), { windows: [0, 7] }, 16, documents).load;
  assert.deepEqual(slid, { ...load, windowPairs: 28 + 3 * 7 + 21 });
  const tight = stepLoadOf(options({ batchSize: 4 }), FULL, 10, documents);
  assert.equal(tight.microBatches, 4);
  assert.equal(tight.load.tokens, 8);
});

test("stepLoadOf() assumes full micro-batches where the documents are not known", () => {
  assert.deepEqual(stepLoadOf(options({}), FULL, 64, null), fullLoad(64));
  assert.equal(stepLoadOf(options({}), { windows: [4] }, 64, null).load.windowPairs, 10 + 60 * 4);
});

test("resolveOptions() takes save points as a policy or as counts", () => {
  for (const savePoints of ["auto", "keep", "dropMlp", "checkpoint", "3 keep + 1 checkpoint"]) {
    assert.equal(options({ savePoints }).savePoints, savePoints);
  }
  for (const savePoints of ["kept", "3keep", "3 keep +", "keep + 1 checkpoint"]) {
    assert.throws(
      () => options({ savePoints }),
      (error: unknown) =>
        error instanceof LoramemError && /savePoints: expected "auto", keep, /.test(error.message),
    );
  }
});
