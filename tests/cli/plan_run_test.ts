/** `loramem plan` where there is no GPU, no weights and no native library. */
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { copyFile, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { MODELS } from "../plan/models.ts";
import { copyModel, DEMO, type Result, run, temporary } from "./support.ts";

/** A library that cannot be opened: whoever tries fails. */
const NO_LIBRARY = { LORAMEM_LIB: "/nowhere/libloramem.so" };

function plan(...args: string[]): Promise<Result> {
  return run("cli.ts", ["plan", ...args], { env: NO_LIBRARY });
}

/** A folder with nothing but the config of Llama-3.1-8B. */
async function configOnly(folder: string): Promise<string> {
  const model = join(folder, "llama");
  await mkdir(model);
  await writeFile(join(model, "config.json"), JSON.stringify(MODELS["Llama-3.1-8B"]));
  return model;
}

test("plan reads data with the model's tokenizer and prints bytes, peak, times and alternatives", async () => {
  const { code, stdout, stderr } = await plan(
    ...["--model", join(DEMO, "model"), "--data", join(DEMO, "train.jsonl")],
    ...["--device-profile", "rtx-3090", "--batch-size", "4"],
  );
  assert.equal(code, 0, stderr);
  for (const part of [
    /weights +\d+ B/,
    /device +\d+ B/,
    /Peak: \w+, op \d+ \(\w+/,
    /Predicted step: .* tokens\/s .*profile NVIDIA GeForce RTX 3090/,
    /Besides the plan: .*driver/,
    /Data: \d+ documents, \d+ tokens, the longest \d+/,
    /Alternatives\n.*budget.*tokens\/s/,
    /keep {2}\(chosen\)/,
  ]) {
    assert.match(stdout, part);
  }
});

test("plan says what the trainer plans", async () => {
  await using folder = await temporary();
  const flags = ["--model", join(DEMO, "model"), "--data", join(DEMO, "train.jsonl")];
  flags.push("--device", "cpu", "--memory-budget", "40MB");
  const planned = await plan(...flags);
  assert.equal(planned.code, 0, planned.stderr);
  const out = join(folder.path, "out");
  const trained = await run("cli.ts", ["train", ...flags, "--out", out, "--max-steps", "1"]);
  assert.equal(trained.code, 0, trained.stderr);
  const table = /Memory plan.*?\nPeak: .*?\n(?=Predicted)/s;
  assert.equal(table.exec(planned.stdout)?.[0], table.exec(trained.stdout)?.[0]);
  const { chosen } = JSON.parse(await readFile(join(out, "run.json"), "utf8"));
  assert.ok(planned.stdout.includes(`save points ${chosen.savePoints},`), chosen.savePoints);
});

test("plan needs nothing but a config, and takes the weights' dtype from it", async () => {
  await using folder = await temporary();
  const model = await configOnly(folder.path);
  for (const path of [model, join(model, "config.json")]) {
    const flags = ["--precision", "bf16", "--tokens-per-micro-batch", "2048", "--budget", "20GiB"];
    const { code, stdout, stderr } = await plan("--model", path, ...flags);
    assert.equal(code, 0, stderr);
    assert.match(stdout, /weights +1606\d{7} B +14\.96 GiB/);
    assert.match(stdout, /Data not read/);
    assert.match(stdout, /Longest document that this budget trains: \d+ tokens/);
  }
});

test("plan refuses a budget that nothing fits, and says what would help", async () => {
  await using folder = await temporary();
  const model = await configOnly(folder.path);
  const flags = ["--model", model, "--precision", "bf16", "--tokens-per-micro-batch", "4096"];
  for (const [budget, place, weights, ...help] of [
    ["15.8GiB", "resident", "14.96 GiB", /tokensPerMicroBatch to \d+ or less/, /weights to "auto"/],
    [
      "8GiB",
      "resident",
      "14.96 GiB",
      /the weights alone do not fit/,
      /weights to "auto" or "stream"/,
    ],
    ["3GiB", "auto", "2.77 GiB", /and streamed weights/, /weights and adapters alone do not fit/],
  ] as const) {
    const { code, stderr } = await plan(...flags, "--budget", budget, "--weights", place);
    assert.equal(code, 1);
    for (const text of help) assert.match(stderr, text);
    assert.ok(stderr.includes(`weights ${weights}`), stderr);
    assert.ok(!/\n\s+at /.test(stderr), stderr);
  }
  flags.push("--budget", "8GiB", "--host-memory-budget", "10GiB");
  const short = await plan(...flags, "--weights", "stream");
  assert.equal(short.code, 1);
  assert.match(short.stderr, /give 13\.\d\d GiB of host memory with hostMemoryBudget/);
  const { stdout } = await plan(...flags);
  assert.match(stdout, /\n {2}file +\d+ B +13\.\d\d GiB {2}on the disk/);
  assert.match(stdout, /Chosen: .*, weights streamed from a file/);
});

test("plan streams the weights of a model that is larger than the device", async () => {
  await using folder = await temporary();
  const model = await configOnly(folder.path);
  const flags = ["--model", model, "--precision", "bf16", "--tokens-per-micro-batch", "8192"];
  const file = join(folder.path, "plan.html");
  const { code, stdout, stderr } = await plan(...flags, "--budget", "6GiB", "--html", file);
  assert.equal(code, 0, stderr);
  for (const part of [
    /weights +\d+ B +2\.\d\d GiB/,
    /host +\d+ B +1\d\.\d\d GiB +page-locked host memory/,
    /waiting \d+ %/,
    /Chosen: save points .*, weights streamed/,
    /weights streamed {2}\(chosen\)/,
  ]) {
    assert.match(stdout, part);
  }
  const page = await readFile(file, "utf8");
  const json = /<script type="application\/json" id="plans">(.*?)<\/script>/s.exec(page)?.[1];
  const { plans } = JSON.parse(json ?? "");
  assert.ok(plans[0].classes.host > 13 * 2 ** 30 && plans[0].deviceBytes <= 6 * 2 ** 30);
});

test("plan without a tokenizer needs the tokens of a micro-batch", async () => {
  await using folder = await temporary();
  const model = await configOnly(folder.path);
  const data = join(DEMO, "train.jsonl");
  const { code, stderr } = await plan("--model", model, "--data", data);
  assert.equal(code, 1);
  assert.match(stderr, /no tokenizer beside the config: set tokensPerMicroBatch/);
  const nothing = await plan("--model", model);
  assert.match(nothing.stderr, /no data: set tokensPerMicroBatch/);
});

test("plan takes a device profile from a file, and refuses one that is none", async () => {
  await using folder = await temporary();
  const flags = ["--model", join(DEMO, "model"), "--data", join(DEMO, "train.jsonl")];
  const file = join(folder.path, "mine.json");
  const rates = { single: 1e12, half: 2e12 };
  const mine = { name: "mine", title: "my card", matrix: rates, attention: rates };
  await writeFile(file, JSON.stringify({ ...mine, bandwidth: 1e11, launch: 1e-5 }));
  const { code, stdout, stderr } = await plan(...flags, "--device-profile", file);
  assert.equal(code, 0, stderr);
  assert.match(stdout, /profile my card/);
  await writeFile(file, JSON.stringify({ ...mine, bandwidth: -1, launch: 1e-5 }));
  const negative = await plan(...flags, "--device-profile", file);
  assert.match(negative.stderr, /bandwidth is -1, not a positive number/);
  const unknown = await plan(...flags, "--device-profile", "h2oo");
  assert.equal(unknown.code, 1);
  assert.match(unknown.stderr, /h2oo.*h200, a100, rtx-4090, rtx-3090, cpu/);
});

test("plan --html writes one page that names nothing outside it", async () => {
  await using folder = await temporary();
  const file = join(folder.path, "plan.html");
  const flags = ["--model", join(DEMO, "model"), "--data", join(DEMO, "train.jsonl")];
  const { code, stdout, stderr } = await plan(...flags, "--html", file);
  assert.equal(code, 0, stderr);
  assert.match(stdout, /Page written to/);
  const page = await readFile(file, "utf8");
  assert.ok(
    !/https?:|src=|href=|@import|url\(/.test(page.replaceAll("http://www.w3.org/2000/svg", "")),
  );
  const { plans } = JSON.parse(
    /<script type="application\/json" id="plans">(.*?)<\/script>/s.exec(page)?.[1] ?? "",
  );
  assert.ok(stdout.includes(`device       ${String(plans[0].deviceBytes).padStart(15)} B`));

  const nowhere = await plan(...flags, "--html", join(folder.path, "no", "plan.html"));
  assert.equal(nowhere.code, 1);
  assert.match(nowhere.stderr, /--html: cannot be written/);
});

test("plan reads no weights", async () => {
  await using folder = await temporary();
  const model = await copyModel(folder.path);
  await rm(join(model, "model.safetensors"));
  const flags = ["--model", model, "--data", join(DEMO, "train.jsonl")];
  const { code, stderr } = await plan(...flags);
  assert.equal(code, 0, stderr);
  assert.ok(!existsSync(join(model, "model.safetensors")));
  await copyFile(join(DEMO, "train.jsonl"), join(model, "model.safetensors"));
  const damaged = await plan(...flags);
  assert.equal(damaged.code, 1);
  assert.match(damaged.stderr, /model\.safetensors/);
});
