import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { type RecordSource, readRecords } from "../../src/api/data/records.ts";
import { error, folderWith, temporaryFolder } from "./support.ts";

async function collect(source: RecordSource) {
  const records = [];
  for await (const record of readRecords(source)) records.push(record);
  return records;
}

test("readRecords() accepts a byte-order mark, CRLF and blank lines, and counts lines", async () => {
  const file = join(folderWith({ "a.jsonl": '\uFEFF{"a":1}\r\n\r\n  \n{"a":"é"}' }), "a.jsonl");
  assert.deepEqual(await collect(file), [
    { value: { a: 1 }, where: `${file}:1`, details: { file, line: 1 } },
    { value: { a: "é" }, where: `${file}:4`, details: { file, line: 4 } },
  ]);
});

test("readRecords() joins lines and UTF-8 sequences that span read chunks", async () => {
  const texts = [1, 2, 3].map((shift) => "x".repeat(shift) + "é漢😀".repeat(40_000));
  const lines = texts.map((text) => `${JSON.stringify(text)}\n`).join("");
  const file = join(folderWith({ "long.jsonl": lines }), "long.jsonl");
  assert.deepEqual(
    (await collect(file)).map(({ value }) => value),
    texts,
  );
});

test("readRecords() reads the files of a glob in the order of their paths", async () => {
  const folder = folderWith({ "b.jsonl": "3\n", "a10.jsonl": "1", "a2.jsonl": "2", "c.txt": "9" });
  const records = await collect(join(folder, "*.jsonl"));
  assert.deepEqual(
    records.map(({ value }) => value),
    [1, 2, 3],
  );
  assert.equal(records[2]?.where, `${join(folder, "b.jsonl")}:1`);
});

test("readRecords() takes a path that exists literally, glob characters included", async () => {
  const folder = folderWith({ "x[1].jsonl": "1", "x1.jsonl": "2" });
  assert.equal((await collect(join(folder, "x[1].jsonl")))[0]?.value, 1);
});

test("readRecords() accepts iterables and async iterables and counts records from 1", async () => {
  async function* generate() {
    yield { n: 1 };
    yield { n: 2 };
  }
  const expected = [
    { value: { n: 1 }, where: "record 1", details: {} },
    { value: { n: 2 }, where: "record 2", details: {} },
  ];
  assert.deepEqual(await collect(generate()), expected);
  assert.deepEqual(await collect([{ n: 1 }, { n: 2 }]), expected);
});

test("readRecords() takes values one at a time and closes the source when left early", async () => {
  let taken = 0;
  let closed = false;
  function* generate() {
    try {
      for (;;) yield ++taken;
    } finally {
      closed = true;
    }
  }
  for await (const { value } of readRecords(generate())) if (value === 3) break;
  assert.equal(taken, 3);
  assert(closed);
});

test("readRecords() names file and line of a line that is not JSON", async () => {
  const file = join(folderWith({ "a.jsonl": '{"a":1}\n\n{"a":\n' }), "a.jsonl");
  await assert.rejects(
    collect(file),
    error("BAD_DATA", /not JSON: .*a\.jsonl:3/, { file, line: 3 }),
  );
});

test("readRecords() names file and line of a line that is not UTF-8", async () => {
  const bytes = new Uint8Array([0x31, 0x0a, 0x22, 0xc3, 0x22, 0x0a]);
  const file = join(folderWith({ "a.jsonl": bytes }), "a.jsonl");
  await assert.rejects(
    collect(file),
    error("BAD_DATA", /not UTF-8.*a\.jsonl:2/, { file, line: 2 }),
  );
});

test("readRecords() refuses empty files, blank files, and empty iterables", async () => {
  const folder = folderWith({ "empty.jsonl": "", "blank.jsonl": "\uFEFF\r\n \n" });
  const empty = join(folder, "empty.jsonl");
  await assert.rejects(
    collect(empty),
    error("BAD_DATA", /no records: .*empty\.jsonl: the file is empty/, { file: empty }),
  );
  await assert.rejects(
    collect(join(folder, "blank.jsonl")),
    error("BAD_DATA", /no records: .*blank\.jsonl: every line is blank/),
  );
  await assert.rejects(collect([]), error("BAD_DATA", /no records: the iterable is empty/));
});

test("readRecords() refuses missing files, folders, and globs without a match", async () => {
  const folder = temporaryFolder();
  const missing = join(folder, "no.jsonl");
  await assert.rejects(
    collect(missing),
    error("BAD_DATA", /no\.jsonl: no such file/, { file: missing }),
  );
  mkdirSync(join(folder, "inner"));
  await assert.rejects(collect(join(folder, "inner")), error("BAD_DATA", /inner: a folder/));
  await assert.rejects(
    collect(join(folder, "*.jsonl")),
    error("BAD_DATA", /no file matches: .*\*\.jsonl/),
  );
});

test("readRecords() refuses a source that is neither a path nor iterable", async () => {
  for (const source of [undefined, null, 3, { messages: [] }]) {
    await assert.rejects(
      collect(source as unknown as RecordSource),
      error("BAD_ARGUMENT", /not a path and not iterable/),
    );
  }
});
