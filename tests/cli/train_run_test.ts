/** Whole runs of the command line on the demo model. */
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { readAdapter } from "../../mod.ts";
import { DEMO, run, temporary } from "./support.ts";

function demoArgs(out: string): string[] {
  const model = join(DEMO, "model");
  return ["--model", model, "--data", join(DEMO, "train.jsonl"), "--out", out, "--device", "cpu"];
}

test("train writes an adapter and run.json, which starts the same run again", async () => {
  await using folder = await temporary();
  const [first, second] = [join(folder.path, "first"), join(folder.path, "second")];
  const flags = [
    "--max-steps",
    "3",
    "--batch-size",
    "4",
    "--rank",
    "4",
    "--sample",
    "Define: love",
    "--sample-tokens",
    "8",
  ];
  const result = await run("cli.ts", ["train", ...demoArgs(first), ...flags]);
  assert.equal(result.code, 0, result.stderr);
  for (const part of [
    /^Loaded \d+\.\d+ MiB of weights in \d+\.\d s, \d+\.\d\d GB\/s$/m,
    /Memory plan/,
    /Sample before: Define: love ->/,
    /step 3\/3 {2}loss \d/,
    /Sample after/,
    /Adapter written to/,
  ]) {
    assert.match(result.stdout, part);
  }
  const { options, chosen } = JSON.parse(await readFile(join(first, "run.json"), "utf8"));
  assert.equal(options.batchSize, 4);
  assert.equal(chosen.savePoints, "keep");

  const again = await run("cli.ts", [
    "train",
    "--config",
    join(first, "run.json"),
    "--out",
    second,
  ]);
  assert.equal(again.code, 0, again.stderr);
  const [a, b] = [
    await readAdapter(join(first, "adapter")),
    await readAdapter(join(second, "adapter")),
  ];
  assert.deepEqual(a.tensors, b.tensors);
  assert.ok(
    a.tensors.every(({ rank, b: matrix }) => rank === 4 && matrix.some((value) => value !== 0)),
  );
});

test("train says which steps of fp16 it skipped, and at which loss scale", async () => {
  await using folder = await temporary();
  const flags = ["--precision", "fp16", "--init-loss-scale", String(2 ** 40), "--max-steps", "1"];
  const out = join(folder.path, "out");
  const { code, stdout, stderr } = await run("cli.ts", ["train", ...demoArgs(out), ...flags]);
  assert.equal(code, 0, stderr);
  assert.match(stdout, /step 1\/1 {2}loss \d\.\d+ {2}skipped at loss scale 1099511627776 {2}\d/);
});

test("train accepts a byte-order mark and CRLF line ends", async () => {
  await using folder = await temporary();
  const [record] = (await readFile(join(DEMO, "train.jsonl"), "utf8")).split("\n");
  const file = join(folder.path, "data.jsonl");
  await writeFile(file, `\ufeff${record}\r\n${record}\r\n`);
  const flags = ["--data", file, "--batch-size", "2"];
  const result = await run("cli.ts", ["train", ...demoArgs(join(folder.path, "out")), ...flags]);
  assert.equal(result.code, 0, result.stderr);
});

for (const signal of ["SIGINT", "SIGTERM"] as const) {
  test(`train stops after its step on ${signal}, saves the adapter and says so`, async () => {
    await using folder = await temporary();
    const out = join(folder.path, "out");
    let sent = false;
    const { code, stdout } = await run("cli.ts", ["train", ...demoArgs(out), "--epochs", "50"], {
      onOutput: (text, kill) => {
        if (sent || !text.includes("step 1/")) return;
        sent = true;
        kill(signal);
      },
    });
    assert.equal(code, signal === "SIGINT" ? 130 : 143, stdout);
    assert.match(stdout, /Stopping after this step/);
    assert.match(stdout, /Stopped after step \d+ of 5000/);
    assert.ok(existsSync(join(out, "adapter", "adapter_model.safetensors")));
  });
}

test("train stops at once on the second signal", async () => {
  await using folder = await temporary();
  const out = join(folder.path, "out");
  const sent = new Set<string>();
  const { code } = await run(
    "cli.ts",
    ["train", ...demoArgs(out), "--epochs", "50", "--batch-size", "700"],
    {
      onOutput: (text, kill) => {
        for (const mark of ["Peak:", "Stopping after this step"]) {
          if (!text.includes(mark) || sent.has(mark)) continue;
          sent.add(mark);
          setTimeout(() => kill("SIGINT"), mark === "Peak:" ? 300 : 0);
        }
      },
    },
  );
  assert.equal(code, 130);
  assert.ok(!existsSync(join(out, "adapter")));
});

test("train goes on and saves when nobody reads its output any more", async () => {
  await using folder = await temporary();
  const out = join(folder.path, "out");
  const args = ["train", ...demoArgs(out), "--max-steps", "2", "--batch-size", "2"];
  const { code, stderr } = await run("cli.ts", args, { closeOutput: true });
  assert.equal(code, 0, stderr);
  assert.equal((await readAdapter(join(out, "adapter"))).config.rank, 16);
});

test("train.ts, the flat program, trains and saves", async () => {
  await using folder = await temporary();
  const out = join(folder.path, "out");
  const result = await run("train.ts", [...demoArgs(out), "--max-steps", "1", "--batch-size", "2"]);
  assert.equal(result.code, 0, result.stderr);
  assert.match(result.stdout, /step 1\/1 {2}loss/);
  assert.equal((await readAdapter(join(out, "adapter"))).config.rank, 16);
});
