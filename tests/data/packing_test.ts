import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import type { Document } from "../../src/api/data/conversation.ts";
import {
  fillMicroBatch,
  type MicroBatchBlock,
  type PackedMicroBatch,
  packDocuments,
} from "../../src/api/data/packing.ts";
import { error } from "./support.ts";

function document(ids: number[], labelled: number[], where = "here"): Document {
  return { ids: Int32Array.from(ids), labelled: Uint8Array.from(labelled), where };
}

function ofLength(length: number, where: string): Document {
  return document(Array(length).fill(1), [0, ...Array(length - 1).fill(1)], where);
}

/** A block full of garbage, as one that was used before. */
function block(tokens: number, documents: number, labels: number): MicroBatchBlock {
  const array = (length: number) => new Int32Array(length).fill(-7);
  return {
    ids: array(tokens),
    positions: array(tokens),
    cuSeqlens: array(documents + 1),
    labelRows: array(labels),
    labelIds: array(labels),
  };
}

const wheres = (batches: PackedMicroBatch[]) =>
  batches.map(({ documents }) => documents.map(({ where }) => where).join(""));

test("packDocuments() places longest first, each into the first micro-batch with room", () => {
  const lengths = { a: 4, b: 8, c: 1, d: 4, e: 2, f: 4 };
  const documents = Object.entries(lengths).map(([name, length]) => ofLength(length, name));
  const batches = packDocuments(documents, 10);
  assert.deepEqual(wheres(batches), ["be", "adc", "f"]);
  assert.deepEqual(
    batches.map(({ tokens, labelled }) => [tokens, labelled]),
    [
      [10, 8],
      [9, 6],
      [4, 3],
    ],
  );
});

test("packDocuments() keeps to the most documents of a micro-batch", () => {
  const documents = ["a", "b", "c", "d", "e"].map((name) => ofLength(2, name));
  assert.deepEqual(wheres(packDocuments(documents, 100, 2)), ["ab", "cd", "e"]);
  assert.deepEqual(packDocuments([], 100, 2), []);
});

test("packDocuments() refuses a document that fits no micro-batch, and bad limits", () => {
  assert.throws(
    () => packDocuments([ofLength(11, "x.jsonl:3")], 10),
    error("BAD_DATA", /x\.jsonl:3 has 11 tokens, the limit is 10: .* 11 or more/),
  );
  assert.throws(() => packDocuments([], 0), error("BAD_ARGUMENT", /tokensPerMicroBatch.*: 0/));
  assert.throws(() => packDocuments([], 4, 1.5), error("BAD_ARGUMENT", /maxDocuments.*: 1\.5/));
});

test("fillMicroBatch() writes ids, positions, offsets and labels over what was there", () => {
  const first = document([5, 6, 7], [0, 1, 1]);
  const second = document([8, 9], [1, 1]); // a label on the first token has no predecessor
  const target = block(8, 4, 5);
  const [batch] = packDocuments([first, second], 8);
  assert.deepEqual(batch, { documents: [first, second], tokens: 5, labelled: 3 });
  fillMicroBatch(batch, target);
  assert.deepEqual(target, {
    ids: Int32Array.of(5, 6, 7, 8, 9, 0, 0, 0),
    positions: Int32Array.of(0, 1, 2, 0, 1, 0, 0, 0),
    cuSeqlens: Int32Array.of(0, 3, 5, 5, 5),
    labelRows: Int32Array.of(0, 1, 3, 0, 0),
    labelIds: Int32Array.of(6, 7, 9, 0, 0),
  });
});

test("fillMicroBatch() refuses a micro-batch larger than the block and writes nothing", () => {
  const [batch] = packDocuments([ofLength(3, "a"), ofLength(3, "b")], 8);
  assert(batch !== undefined);
  for (const [target, message] of [
    [block(5, 2, 4), /more tokens than planned: 6 of 5/],
    [block(6, 1, 4), /more documents than planned: 2 of 1/],
    [block(6, 2, 3), /more labels than planned: 4 of 3/],
  ] as const) {
    assert.throws(() => fillMicroBatch(batch, target), error("OVER_PLAN", message));
    assert(Object.values(target).every((array) => array.every((value: number) => value === -7)));
  }
});

test("packDocuments() and fillMicroBatch() keep every document and every label once", () => {
  const documents = fc.array(
    fc.array(fc.tuple(fc.nat(999), fc.nat(1)), { minLength: 1, maxLength: 40 }).map((tokens) =>
      document(
        tokens.map(([id]) => id),
        tokens.map(([, labelled], position) => (position === 0 ? 0 : labelled)),
      ),
    ),
    { maxLength: 60 },
  );
  const limits = [fc.integer({ min: 40, max: 120 }), fc.integer({ min: 1, max: 5 })] as const;
  fc.assert(
    fc.property(documents, ...limits, (all, tokensPerMicroBatch, maxDocuments) => {
      const batches = packDocuments(all, tokensPerMicroBatch, maxDocuments);
      assert.deepEqual(packDocuments(all, tokensPerMicroBatch, maxDocuments), batches);
      const packed = batches.flatMap((batch) => batch.documents);
      assert.equal(packed.length, all.length);
      assert.deepEqual(new Set(packed), new Set(all));
      for (const batch of batches) checkFilled(batch, tokensPerMicroBatch, maxDocuments);
    }),
    { numRuns: 60, seed: 1 },
  );
});

/** Reads a filled block back, by its offsets alone. */
function checkFilled(batch: PackedMicroBatch, tokensPerMicroBatch: number, maxDocuments: number) {
  const target = block(tokensPerMicroBatch, maxDocuments, batch.labelled);
  fillMicroBatch(batch, target);
  const { ids, positions, cuSeqlens, labelRows, labelIds } = target;
  const expected: [row: number, id: number][] = [];
  for (const [index, { ids: own, labelled }] of batch.documents.entries()) {
    const start = cuSeqlens[index] as number;
    assert.equal(cuSeqlens[index + 1], start + own.length);
    assert.deepEqual(ids.slice(start, start + own.length), own);
    assert.deepEqual([...positions.slice(start, start + own.length)], [...own.keys()]);
    for (const [position, id] of own.entries()) {
      if (labelled[position] === 1) expected.push([start + position - 1, id]);
    }
  }
  assert.equal(cuSeqlens[0], 0);
  assert(cuSeqlens.slice(batch.documents.length).every((offset) => offset === batch.tokens));
  assert(ids.slice(batch.tokens).every((id) => id === 0));
  assert.deepEqual(
    expected,
    [...labelRows].map((row, index) => [row, labelIds[index]]),
  );
}
