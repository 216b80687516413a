/** Everything that can be wrong with a training run: one clear error, exit status 1, nothing written. */
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { chmod, readFile, rename, rm, truncate, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { copyModel, DEMO, editJson, run, temporary } from "./support.ts";

interface Case {
  /** What the message must say. */
  readonly expect: RegExp;
  /** Damages a copy of the model. */
  readonly model?: (folder: string) => Promise<void>;
  /** Content of the data file; default: one good record. */
  readonly data?: string;
  readonly flags?: readonly string[];
  readonly env?: Readonly<Record<string, string>>;
}

const GOOD = `${JSON.stringify({
  messages: [
    { role: "user", content: "Define: love" },
    { role: "assistant", content: "A temporary insanity." },
  ],
})}\n`;

const config = (change: (json: Record<string, unknown>) => void) => (folder: string) =>
  editJson(join(folder, "config.json"), change);

const CASES: Readonly<Record<string, Case>> = {
  "a missing model file": {
    model: (folder) => rm(join(folder, "model.safetensors")),
    expect: /model\.safetensors/,
  },
  "a truncated model file": {
    model: (folder) => truncate(join(folder, "model.safetensors"), 5_000_000),
    expect: /model\.safetensors.*(truncated|damaged|beyond|past|end)/i,
  },
  "an index that names a missing shard": {
    model: async (folder) => {
      await rm(join(folder, "model.safetensors"));
      const index = {
        metadata: {},
        weight_map: { "model.norm.weight": "model-00002-of-00002.safetensors" },
      };
      await writeFile(join(folder, "model.safetensors.index.json"), JSON.stringify(index));
    },
    expect: /model-00002-of-00002\.safetensors/,
  },
  "a pickle instead of safetensors": {
    model: (folder) => rename(join(folder, "model.safetensors"), join(folder, "pytorch_model.bin")),
    expect: /pickle.*pytorch_model\.bin/s,
  },
  "an unknown architecture": {
    model: config((json) => {
      json.architectures = ["FooForCausalLM"];
    }),
    expect: /unknown architecture: .*FooForCausalLM/,
  },
  "an unknown RoPE type": {
    model: config((json) => {
      json.rope_parameters = { rope_type: "spiral", rope_theta: 10000 };
    }),
    expect: /spiral/,
  },
  "an unknown config key": {
    model: config((json) => {
      json.flux_capacitor = 3;
    }),
    expect: /flux_capacitor/,
  },
  "shapes that contradict the config": {
    model: config((json) => {
      json.intermediate_size = 512;
    }),
    expect: /gate_proj\.weight is \[688,256\], expected \[512,256\]|contradicts config\.json/,
  },
  "empty data": { data: "", expect: /no records/ },
  "blank data": { data: "\n \n\r\n", expect: /no records/ },
  "a line that is not JSON": { data: `${GOOD}{"messages": [}\n`, expect: /data\.jsonl:2/ },
  "a record without messages": {
    data: `${GOOD}{"text": "x"}\n`,
    expect: /data\.jsonl:2.*messages|messages.*data\.jsonl:2/,
  },
  "a document longer than T": {
    flags: ["--tokens-per-micro-batch", "8"],
    expect:
      /longer than tokensPerMicroBatch: .*data\.jsonl:1 has \d+ tokens.*set tokensPerMicroBatch to \d+/,
  },
  "a record without a labelled token": {
    data: `${JSON.stringify({ messages: [{ role: "user", content: "hello" }] })}\n`,
    expect: /data\.jsonl:1/,
  },
  "an unknown target module": {
    flags: ["--target-modules", "q_prj"],
    expect: /q_prj.*q_proj/s,
  },
  "an unknown flag": { flags: ["--learning-rat", "1"], expect: /--learning-rat.*--learning-rate/s },
  "a bad value": { flags: ["--batch-size", "zero"], expect: /--batch-size/ },
  "a value out of range": { flags: ["--rank", "0"], expect: /--rank/ },
  "a bad choice": { flags: ["--schedule", "sinus"], expect: /--schedule/ },
  "a bad device": { flags: ["--device", "tpu"], expect: /--device/ },
  "a budget that is too small": {
    flags: ["--memory-budget", "1MiB"],
    expect: /does not fit the memory budget: 1\.00 MiB given, .* needed/,
  },
  "a library that is not there": {
    env: { LORAMEM_LIB: "/nowhere/libloramem.so" },
    expect: /\/nowhere\/libloramem\.so/,
  },
  "an adapter of another model": {
    flags: ["--adapter", join(DEMO, "../../tests/golden/llama/adapter0")],
    expect: /adapter/,
  },
};

for (const [what, { expect, model, data, flags = [], env }] of Object.entries(CASES)) {
  test(`train refuses ${what}`, async () => {
    await using folder = await temporary();
    const file = join(folder.path, "data.jsonl");
    await writeFile(file, data ?? GOOD);
    let modelDir = join(DEMO, "model");
    if (model !== undefined) {
      modelDir = await copyModel(folder.path);
      await model(modelDir);
    }
    const out = join(folder.path, "out", "deep");
    const args = [
      "train",
      "--model",
      modelDir,
      "--data",
      file,
      "--out",
      out,
      "--device",
      "cpu",
      ...flags,
    ];
    const { code, stderr } = await run("cli.ts", args, env === undefined ? {} : { env });
    assert.equal(code, 1, stderr);
    assert.match(stderr, expect);
    assert.ok(!/\n\s+at /.test(stderr), `a named failure has no stack: ${stderr}`);
    assert.ok(!existsSync(join(folder.path, "out")), "nothing is written");
  });
}

test("train refuses an output folder that cannot be written, before it reads anything", async () => {
  await using folder = await temporary();
  const file = join(folder.path, "file");
  await writeFile(file, "in the way");
  const data = join(DEMO, "train.jsonl");
  const args = ["train", "--model", "nowhere", "--data", data, "--out", join(file, "out")];
  const { code, stderr } = await run("cli.ts", args);
  assert.equal(code, 1);
  assert.match(stderr, /--out: the folder cannot be written/);
  assert.equal(await readFile(file, "utf8"), "in the way");
  await chmod(file, 0o600);
});

test("train needs a model, data and an output folder", async () => {
  for (const [args, missing] of [
    [["--data", "x", "--out", "y"], /--model/],
    [["--model", "x", "--out", "y"], /--data/],
    [["--model", "x", "--data", "y"], /--out/],
  ] as const) {
    const { code, stderr } = await run("cli.ts", ["train", ...args]);
    assert.equal(code, 1);
    assert.match(stderr, missing);
  }
});

test("train --help lists every option of the API", async () => {
  const { code, stdout } = await run("cli.ts", ["train", "--help"]);
  assert.equal(code, 0);
  for (const flag of [
    "--model",
    "--rank",
    "--target-modules",
    "--memory-budget",
    "--save-points",
    "--out",
    "--sample",
  ]) {
    assert.ok(stdout.includes(flag), flag);
  }
});
