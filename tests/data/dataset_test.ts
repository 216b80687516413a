import assert from "node:assert/strict";
import { join } from "node:path";
import { test } from "node:test";
import { countLabels, encodeConversation } from "../../src/api/data/conversation.ts";
import { loadDataset, type Overlong } from "../../src/api/data/dataset.ts";
import { answersOf, conversation, demo, demoCodec, error, folderWith } from "./support.ts";

const long = conversation(["user", "Define: love"], ["assistant", "a b c d e f g h i j k l"]);
const short = conversation(["user", "a"], ["assistant", "b"]);
const lines = (...records: (typeof long)[]) =>
  folderWith({
    "d.jsonl": records.map(({ value }) => JSON.stringify(value)).join("\n"),
  });

async function options(overlong: Overlong, maxTokens?: number) {
  const what = "training data";
  return { ...(await demoCodec()), overlong, what, ...(maxTokens !== undefined && { maxTokens }) };
}

test("loadDataset() reads the demo data with the reference run's number of tokens", async () => {
  const train = await loadDataset(join(demo, "train.jsonl"), await options("error"));
  assert.equal(train.documents.length, 794);
  assert.equal(train.tokens, 52_585);
  assert.equal(train.labelledTokens, 42_403);
  assert.equal(train.longest, 228);
  const valid = await loadDataset(join(demo, "valid.jsonl"), await options("error", 214));
  assert.equal(valid.documents.length, 88);
  assert.equal(valid.tokens, 5_527);
  assert.equal(valid.labelledTokens, 4_394);
  assert.equal(valid.longest, 214);
});

test("loadDataset() gives the same documents for a file and for its records", async () => {
  async function* records() {
    yield long.value;
    yield short.value;
  }
  const fromFile = await loadDataset(join(lines(long, short), "*.jsonl"), await options("error"));
  const fromMemory = await loadDataset(records(), await options("error"));
  const content = ({ documents }: typeof fromFile) =>
    documents.map(({ ids, labelled }) => ({ ids, labelled }));
  assert.deepEqual(content(fromFile), content(fromMemory));
  assert.deepEqual(
    fromMemory.documents.map(({ where }) => where),
    ["record 1", "record 2"],
  );
});

test("loadDataset() refuses documents over the limit and names the size that fits", async () => {
  const file = join(lines(short, long, long), "d.jsonl");
  const { length } = encodeConversation(long, await demoCodec()).ids;
  const message = new RegExp(
    `d\\.jsonl:2 has ${length} tokens, the limit is 16 \\(2 such in the training data\\): ` +
      `set tokensPerMicroBatch to ${length} or more`,
  );
  await assert.rejects(
    loadDataset(file, await options("error", 16)),
    error("BAD_DATA", message, { file, line: 2 }),
  );
  assert.equal((await loadDataset(file, await options("error", length))).longest, length);
});

test("loadDataset() truncates on request", async () => {
  const codec = await demoCodec();
  const whole = encodeConversation(long, codec);
  const dataset = await loadDataset([long.value, short.value], await options("truncate", 16));
  const [cut] = dataset.documents;
  assert.deepEqual(cut?.ids, whole.ids.slice(0, 16));
  assert.deepEqual(cut?.labelled, whole.labelled.slice(0, 16));
  assert.equal(dataset.documents.length, 2);
  assert.equal(dataset.longest, 16);
});

test("loadDataset() refuses a document of which truncation leaves nothing to learn", async () => {
  await assert.rejects(
    loadDataset([long.value, short.value], await options("truncate", 8)),
    error("BAD_DATA", /no token to learn is left after cutting to 8 tokens: record 1/),
  );
});

test("loadDataset() splits on request so that every label is learnt once", async () => {
  const codec = await demoCodec();
  const whole = encodeConversation(long, codec);
  for (const maxTokens of [2, 3, 5, 7, whole.ids.length - 1]) {
    const { documents, labelledTokens } = await loadDataset(
      [long.value],
      await options("split", maxTokens),
    );
    assert(documents.length > 1 || maxTokens > 2);
    assert.equal(labelledTokens, countLabels(whole));
    const learnt: number[][] = [];
    for (const { ids, labelled } of documents) {
      assert(ids.length <= maxTokens);
      assert.equal(labelled[0], 0);
      assert(labelled.includes(1));
      for (let index = 1; index < ids.length; index++) {
        if (labelled[index] === 1) learnt.push([ids[index - 1] as number, ids[index] as number]);
      }
    }
    const expected = [...whole.ids.keys()]
      .filter((index) => whole.labelled[index] === 1)
      .map((index) => [...whole.ids.slice(index - 1, index + 1)]);
    assert.deepEqual(learnt, expected);
  }
});

test("loadDataset() names the pieces of a split document", async () => {
  const { documents } = await loadDataset([long.value], await options("split", 12));
  assert.match(documents.at(-1)?.where ?? "", /^record 1 \(piece (\d) of \1\)$/);
  const text = documents.flatMap((piece) => answersOf(piece, demoTokenizer)).join("");
  assert.equal(text, "a b c d e f g h i j k l<|im_end|>\n");
});
const { tokenizer: demoTokenizer } = await demoCodec();

test("loadDataset() passes on errors of records with their place", async () => {
  const folder = folderWith({ "d.jsonl": `${JSON.stringify(short.value)}\n{"text": "a"}\n` });
  const file = join(folder, "d.jsonl");
  await assert.rejects(
    loadDataset(file, await options("error")),
    error("BAD_DATA", /no messages list: .*d\.jsonl:2/, { file, line: 2 }),
  );
  await assert.rejects(loadDataset([], await options("error")), error("BAD_DATA", /no records/));
});

test("loadDataset() refuses unknown policies and limits", async () => {
  for (const maxTokens of [1, 2.5, Number.NaN]) {
    await assert.rejects(
      loadDataset([short.value], await options("error", maxTokens)),
      error("BAD_ARGUMENT", /maxTokens is not an integer of at least 2/),
    );
  }
  await assert.rejects(
    loadDataset([short.value], await options("drop" as Overlong)),
    error("BAD_ARGUMENT", /overlong is unknown: drop: use one of error, truncate, split/),
  );
});
