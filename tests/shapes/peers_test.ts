/** The mechanics of the comparison with PEFT, on the CPU and without Python. */
import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { makeCase, readBatches, readCase } from "../../bench/peers/case.ts";
import { compare, mergeRows, type Row, runLoramem, runPeft } from "../../bench/peers/measure.ts";
import { readAdapter } from "../../src/api/io/adapter.ts";
import { openSafetensors } from "../../src/api/io/safetensors.ts";
import { readModelConfig } from "../../src/api/nn/config.ts";
import { validateCheckpoint } from "../../src/api/nn/config_tensors.ts";
import { randomCheckpoint } from "./checkpoint.ts";
import { markovBatch } from "./markov.ts";
import { bf16Round } from "./random.ts";

function scratch(): Disposable & { path: string } {
  const path = mkdtempSync(join(tmpdir(), "loramem-"));
  return { path, [Symbol.dispose]: () => rmSync(path, { recursive: true }) };
}

test("makeCase() writes a checkpoint, an adapter that bf16 holds, and the tokens of every step", async () => {
  using folder = scratch();
  const path = await makeCase(folder.path, "small", 3);
  const config = await readModelConfig(join(path, "model"));
  await using files = await openSafetensors(join(path, "model"));
  validateCheckpoint(config, files.tensors);
  const random = randomCheckpoint(config, 3);
  for (const name of ["model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight"]) {
    const entry = files.tensors.get(name);
    assert.ok(entry);
    const [stored, whole] = [new Uint8Array(entry.bytes), new Uint8Array(entry.bytes)];
    await files.read(entry, stored);
    const { read, tensors } = random;
    const from = tensors.get(name);
    assert.ok(from);
    for (const [at, end] of [
      [0, 1000],
      [1000, entry.bytes],
    ] as const)
      await read(from, whole.subarray(at, end), at);
    assert.deepEqual(stored, whole);
  }
  const { tensors } = await readAdapter(join(path, "adapter"));
  assert.equal(tensors.length, 7 * config.layers);
  for (const { a, b } of tensors) assert.ok([...a, ...b].every((x) => x === bf16Round(x)));
  const about = await readCase(path);
  const batches = await readBatches(path, about);
  const { vocabSize } = config;
  const { documents, tokens, seed } = about;
  const expected = markovBatch({ vocabSize, documents, tokens, seed, step: 5 });
  assert.deepEqual(
    batches[5]?.map(({ ids }) => ids),
    expected.map(({ ids }) => ids),
  );
  assert.notDeepEqual(batches[4]?.[0]?.ids, batches[5]?.[0]?.ids);
  assert.ok(new Set(batches.flat().flatMap(({ ids }) => [...ids])).size <= 256);
});

test("runLoramem() measures a case in a process of its own; the losses do not depend on the save points", async () => {
  using folder = scratch();
  const path = await makeCase(folder.path, "small", 0);
  const flags = { device: "cpu", warm: 1, steps: 3 };
  const rows: Row[] = [];
  for (const policy of ["keep", "checkpoint"]) {
    rows.push(await runLoramem(path, policy, { ...flags, policy }, 60));
  }
  const [keep, checkpoint] = rows;
  assert.equal(keep?.error, undefined);
  assert.equal(keep?.losses?.length, 4);
  assert.deepEqual(checkpoint?.losses, keep?.losses);
  assert.ok((checkpoint?.planGiB ?? 1) < (keep?.planGiB ?? 0));
});

test("runLoramem() and runPeft() give a row with the reason where a side cannot run", async () => {
  using folder = scratch();
  const ours = await runLoramem(folder.path, "keep", {}, 60);
  assert.match(ours.error ?? "", /ENOENT|NotFound/);
  const [theirs, ...more] = await runPeft(folder.path, ["no such setting"], { device: "cpu" }, 60);
  assert.deepEqual(more, []);
  assert.equal(theirs?.setting, "no such setting");
  assert.match(theirs?.error ?? "", /unknown setting|Error/);
});

test("mergeRows() replaces a row by a later one, but a measurement never by a failure", async () => {
  using folder = scratch();
  const file = join(folder.path, "rows.json");
  const row = (setting: string, more: Partial<Row>): Row => ({ system: "peft", setting, ...more });
  await mergeRows(file, { seed: 0 }, "1B", [row("a", { stepMs: 1 }), row("b", { error: "no" })]);
  await mergeRows(file, { seed: 0 }, "8B", [row("a", { stepMs: 8 })]);
  await mergeRows(file, { seed: 0 }, "1B", [row("a", { error: "no" }), row("b", { stepMs: 2 })]);
  const { rows, seed } = JSON.parse(readFileSync(file, "utf8"));
  assert.equal(seed, 0);
  assert.deepEqual(
    rows.map(({ shape, setting, stepMs }: Row) => [shape, setting, stepMs]),
    [
      ["1B", "a", 1],
      ["1B", "b", 2],
      ["8B", "a", 8],
    ],
  );
});

test("compare() sets ours beside the fastest and the leanest peer of its shape", () => {
  const peer = (setting: string, shape: string, tokensPerSecond: number, gib: number): Row => {
    return { system: "peft", setting, shape, tokensPerSecond, allocatorPeakGiB: gib };
  };
  const rows: Row[] = [
    peer("default", "1B", 10, 8),
    peer("compile", "1B", 20, 6),
    peer("checkpoint", "1B", 5, 2),
    peer("fp32", "1B", 99, 1),
    { system: "peft", setting: "liger", shape: "1B", error: "not installed" },
    peer("compile", "8B", 99, 1),
    { system: "loramem", setting: "keep", shape: "1B", tokensPerSecond: 30, driverGiB: 3 },
  ];
  const ours = { shape: "1B", setting: "keep" };
  assert.deepEqual(compare(rows), [
    { ...ours, peer: "compile", best: "fastest", tokensPerSecond: 1.5, memory: 0.5 },
    { ...ours, peer: "checkpoint", best: "leanest", tokensPerSecond: 6, memory: 1.5 },
  ]);
});
