import assert from "node:assert/strict";
import { Buffer } from "node:buffer";
import { copyFile, link, mkdir, open, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { type Adapter, readAdapter, writeAdapter } from "../../src/api/io/adapter.ts";
import { type TensorData, writeSafetensors } from "../../src/api/io/safetensors.ts";
import { GOLDEN, rejects, withScratch } from "./scratch.ts";

const CASES = [
  "llama",
  "llama+rslora",
  "llama+rank-pattern",
  "llama+qv-only",
  "llama+all-linear",
  "llama3-rope-tied",
  "qwen2",
];

const PATH = "model.layers.0.self_attn.q_proj";
const A = `base_model.model.${PATH}.lora_A.weight`;
const B = `base_model.model.${PATH}.lora_B.weight`;

/** A small valid adapter: rank 2, in 3, out 5. */
function sample(): Adapter {
  const a = Float32Array.from({ length: 6 }, (_, i) => i + 0.5);
  const b = Float32Array.from({ length: 10 }, (_, i) => -i);
  return {
    config: { rank: 2, alpha: 4, targetModules: ["q_proj"] },
    tensors: [{ path: PATH, rank: 2, inFeatures: 3, outFeatures: 5, a, b }],
  };
}

const readJson = async (file: string) => JSON.parse(await readFile(file, "utf8"));

/** Writes the sample with an edited config or other tensors. */
async function writeRaw(
  dir: string,
  config: Record<string, unknown>,
  tensors?: readonly TensorData[],
): Promise<void> {
  await writeAdapter(dir, sample());
  const file = join(dir, "adapter_config.json");
  await writeFile(file, JSON.stringify({ ...(await readJson(file)), ...config }));
  if (tensors) await writeSafetensors(join(dir, "adapter_model.safetensors"), tensors);
}

const tensor = (name: string, shape: number[], dtype: TensorData["dtype"] = "F32"): TensorData => {
  const bytes = shape.reduce((x, y) => x * y, dtype === "F32" ? 4 : 2);
  return { name, dtype, shape, data: new Uint8Array(bytes) };
};

for (const name of CASES) {
  for (const step of ["adapter0", "adapterN"]) {
    test(`writeAdapter() gives back what readAdapter() read from ${name}/${step}`, () =>
      withScratch(async (dir) => {
        const golden = join(GOLDEN, name, step);
        const adapter = await readAdapter(golden);
        await writeAdapter(join(dir, "out"), adapter);
        assert.deepEqual(await readAdapter(join(dir, "out")), adapter);
        // The same tensors, byte for byte: PEFT's writer and ours lay them out alike.
        const weights = "adapter_model.safetensors";
        const [ours, theirs] = [
          await readFile(join(dir, "out", weights)),
          await readFile(join(golden, weights)),
        ];
        assert.deepEqual(new Uint8Array(ours), new Uint8Array(theirs));
        // Every key that is written says what PEFT's says.
        const config = await readJson(join(golden, "adapter_config.json"));
        const written = await readJson(join(dir, "out/adapter_config.json"));
        for (const [key, value] of Object.entries(written))
          assert.deepEqual(value, config[key], key);
        assert.equal("use_rslora" in written, name === "llama+rslora");
        assert.equal("rank_pattern" in written, name === "llama+rank-pattern");
      }));
  }
}

test("writeAdapter() writes the files that PEFT writes, config keys sorted", () =>
  withScratch(async (dir) => {
    const { tensors, config } = sample();
    const full = {
      ...config,
      baseModel: "org/model",
      dropout: 0.1,
      rankPattern: { q_proj: 2 },
      alphaPattern: { q_proj: 1.5 },
      excludeModules: ["lm_head"],
      useRslora: true,
    };
    await writeAdapter(dir, { tensors, config: full });
    assert.deepEqual((await readdir(dir)).sort(), [
      "adapter_config.json",
      "adapter_model.safetensors",
    ]);
    const text = await readFile(join(dir, "adapter_config.json"), "utf8");
    assert.equal(
      text,
      `{
  "alpha_pattern": {
    "q_proj": 1.5
  },
  "base_model_name_or_path": "org/model",
  "bias": "none",
  "exclude_modules": [
    "lm_head"
  ],
  "inference_mode": true,
  "lora_alpha": 4,
  "lora_dropout": 0.1,
  "peft_type": "LORA",
  "r": 2,
  "rank_pattern": {
    "q_proj": 2
  },
  "target_modules": [
    "q_proj"
  ],
  "task_type": "CAUSAL_LM",
  "use_rslora": true
}
`,
    );
    assert.deepEqual((await readAdapter(dir)).config, full);
  }));

test("writeAdapter() refuses bad adapters and writes nothing", () =>
  withScratch(async (dir) => {
    const { config, tensors } = sample();
    const first = tensors[0]!;
    const nan = first.b.with(3, Number.NaN);
    const infinite = first.a.with(0, Infinity);
    const bad: readonly [Adapter, RegExp][] = [
      [{ config, tensors: [] }, /no tensors/],
      [{ config, tensors: [{ ...first, b: nan }] }, /q_proj holds a NaN/],
      [{ config, tensors: [{ ...first, a: infinite }] }, /NaN or an infinity/],
      [{ config, tensors: [{ ...first, inFeatures: 4 }] }, /are not \[2, 4\]/],
      [{ config, tensors: [{ ...first, rank: 3 }] }, /rank 3/],
      [{ config, tensors: [{ ...first, inFeatures: 0, a: new Float32Array() }] }, /is empty/],
      [{ config, tensors: [first, first] }, /name is taken/],
      [{ config: { ...config, rank: 0 }, tensors }, /r is 0/],
      [{ config: { ...config, alpha: Number.NaN }, tensors }, /lora_alpha/],
      [{ config: { ...config, targetModules: [] }, tensors }, /target_modules is empty/],
      [{ config: { ...config, targetModules: "All-Linear" }, tensors }, /all-linear/],
      [{ config: { ...config, rankPattern: { q_proj: 1.5 } }, tensors }, /rank_pattern/],
    ];
    for (const [adapter, message] of bad) {
      await rejects(() => writeAdapter(join(dir, "out"), adapter), "BAD_ARGUMENT", message);
      assert.deepEqual(await readdir(dir), []);
    }
  }));

test("writeAdapter() replaces an adapter and keeps other files", () =>
  withScratch(async (dir) => {
    await writeAdapter(dir, sample());
    await writeFile(join(dir, "README.md"), "mine");
    const { config, tensors } = sample();
    await writeAdapter(dir, { config: { ...config, alpha: 8 }, tensors });
    assert.equal((await readAdapter(dir)).config.alpha, 8);
    assert.equal((await readdir(dir)).length, 3);
  }));

test("writeAdapter() over the adapter that was read leaves whoever has the old file open with it", () =>
  withScratch(async (dir) => {
    // Mutant: the file is overwritten in place, and a process that maps it finds other weights, or zeros.
    await writeAdapter(dir, sample());
    const weights = join(dir, "adapter_model.safetensors");
    const before = await readFile(weights);
    await link(weights, join(dir, "linked"));
    await using held = await open(weights, "r");
    const adapter = await readAdapter(dir);
    await writeAdapter(dir, adapter);
    assert.deepEqual(await readFile(weights), before);
    const [first] = adapter.tensors;
    assert.ok(first);
    first.a.fill(7);
    await writeAdapter(dir, adapter);
    assert.deepEqual(await readAdapter(dir), adapter);
    assert.notDeepEqual(await readFile(weights), before);
    assert.deepEqual(await held.readFile(), before);
    assert.deepEqual(await readFile(join(dir, "linked")), before);
  }));

test("writeAdapter() writes nothing when the file reads back differently", () =>
  withScratch(async (dir) => {
    const { compare } = Buffer;
    Buffer.compare = () => 1; // a disk that returns other bytes
    try {
      await rejects(() => writeAdapter(dir, sample()), "BAD_FILE", /bytes read back differently/);
    } finally {
      Buffer.compare = compare;
    }
    assert.deepEqual(await readdir(dir), []);
  }));

test("readAdapter() accepts float16 and bfloat16, also mixed", () =>
  withScratch(async (dir) => {
    const half = (...values: number[]) => new Uint8Array(new Uint16Array(values).buffer);
    await writeRaw(dir, { r: 1 }, [
      { name: A, dtype: "BF16", shape: [1, 2], data: half(0x3f80, 0xc000) },
      { name: B, dtype: "F16", shape: [1, 1], data: half(0x3800) },
    ]);
    const [only] = (await readAdapter(dir)).tensors;
    assert.deepEqual([...only!.a], [1, -2]);
    assert.deepEqual([...only!.b], [0.5]);
  }));

test("readAdapter() refuses features of PEFT that are not plain LoRA, naming the key", async () => {
  const features: readonly [string, unknown][] = [
    ["use_dora", true],
    ["bias", "all"],
    ["bias", "lora_only"],
    ["modules_to_save", ["lm_head"]],
    ["trainable_token_indices", [1, 2]],
    ["layer_replication", [[0, 2]]],
    ["lora_bias", true],
    ["peft_type", "LOHA"],
    ["task_type", "SEQ_CLS"],
    ["target_parameters", ["experts"]],
    ["layers_to_transform", [0]],
    ["layers_to_transform", 3],
    ["init_lora_weights", "pissa"],
    ["loftq_config", { loftq_bits: 4 }],
    ["fan_in_fan_out", true],
  ];
  for (const [key, value] of features) {
    await withScratch(async (dir) => {
      await writeRaw(dir, { [key]: value });
      await rejects(
        () => readAdapter(dir),
        "UNSUPPORTED",
        new RegExp(`${key} = `),
        /merge this adapter/,
      );
    });
  }
  const golden = join(GOLDEN, "llama+modules-to-save/adapter0");
  await rejects(() => readAdapter(golden), "UNSUPPORTED", /modules_to_save/);
});

test("readAdapter() passes an unknown key that is off and refuses one that is on", async () => {
  for (const value of [null, false, 0, "", [], {}, { ephemeral: false }]) {
    await withScratch(async (dir) => {
      await writeRaw(dir, {
        use_new_thing: value,
        peft_version: "9.9",
        init_lora_weights: "gaussian",
      });
      await readAdapter(dir);
    });
  }
  for (const value of [true, 1, "x", [0], { on: true }]) {
    await withScratch(async (dir) => {
      await writeRaw(dir, { use_new_thing: value });
      const error = await rejects(
        () => readAdapter(dir),
        "BAD_CONFIG",
        /unknown key use_new_thing/,
      );
      assert.ok(error.is("BAD_CONFIG") && error.details.key === "use_new_thing");
    });
  }
});

test("readAdapter() refuses config values out of range, naming the key", async () => {
  const bad: readonly [string, unknown][] = [
    ["r", 0],
    ["r", 1.5],
    ["r", "2"],
    ["r", 2 ** 31],
    ["lora_alpha", 0],
    ["lora_alpha", "4"],
    ["lora_dropout", 1],
    ["target_modules", null],
    ["target_modules", [1]],
    ["target_modules", {}],
    ["rank_pattern", { q_proj: 0 }],
    ["rank_pattern", [2]],
    ["alpha_pattern", { q_proj: null }],
    ["use_rslora", "yes"],
  ];
  for (const [key, value] of bad) {
    await withScratch(async (dir) => {
      await writeRaw(dir, { [key]: value });
      await rejects(() => readAdapter(dir), "BAD_CONFIG", new RegExp(key), /adapter_config\.json/);
    });
  }
});

test("readAdapter() refuses tensors that are not pairs of lora_A and lora_B", async () => {
  const [a, b] = [tensor(A, [2, 3]), tensor(B, [5, 2])];
  const named = (name: string) => tensor(name, [2, 2]);
  const cases: readonly [TensorData[], "BAD_FILE" | "UNSUPPORTED", RegExp][] = [
    [[], "BAD_FILE", /adapter is empty/],
    [[a], "BAD_FILE", /lora_B is missing.*q_proj/],
    [[b], "BAD_FILE", /lora_A is missing.*q_proj/],
    [[a, tensor(B, [5, 3])], "BAD_FILE", /are not \[r, in\] and \[out, r\].*q_proj/],
    [[tensor(A, [3, 3]), tensor(B, [5, 3])], "BAD_FILE", /rank 3 is not in adapter_config/],
    [[tensor(A, [2, 0]), b], "BAD_FILE", /are not/],
    [[tensor(A, [6]), b], "BAD_FILE", /not a matrix.*lora_A/],
    [[tensor(A, [2, 3], "I16"), b], "UNSUPPORTED", /I16.*lora_A/],
    [
      [a, b, named("base_model.model.model.embed_tokens.lora_embedding_A")],
      "UNSUPPORTED",
      /embedding_A/,
    ],
    [[a, b, named("base_model.model.lm_head.weight")], "UNSUPPORTED", /lm_head/],
    [[a, b, named(`${PATH}.lora_A.weight`)], "UNSUPPORTED", /q_proj/],
    [[a, b, named(`base_model.model.${PATH}.lora_magnitude_vector`)], "UNSUPPORTED", /magnitude/],
  ];
  for (const [tensors, code, message] of cases) {
    await withScratch(async (dir) => {
      await writeRaw(dir, {}, tensors);
      await rejects(() => readAdapter(dir), code, message);
    });
  }
});

test("readAdapter() refuses a tensor with a NaN, naming it", () =>
  withScratch(async (dir) => {
    const data = new Uint8Array(new Float32Array([0, Number.NaN]).buffer);
    await writeRaw(dir, { r: 1 }, [
      tensor(B, [5, 1]),
      { name: A, dtype: "F32", shape: [1, 2], data },
    ]);
    await rejects(() => readAdapter(dir), "BAD_FILE", /NaN/, /lora_A/);
  }));

test("readAdapter() explains missing files and a pickle", () =>
  withScratch(async (dir) => {
    await rejects(
      () => readAdapter(join(dir, "gone")),
      "BAD_CONFIG",
      /no such file.*adapter_config/,
    );
    await writeAdapter(dir, sample());
    await rm(join(dir, "adapter_model.safetensors"));
    await rejects(() => readAdapter(dir), "BAD_FILE", /no such file.*adapter_model\.safetensors/);
    await writeFile(join(dir, "adapter_model.bin"), "pickle");
    await rejects(() => readAdapter(dir), "BAD_FILE", /pickle/, /save it again/);
    for (const text of ["", "{", "[]", '{"r":1,"r":2}', "\ufffe"]) {
      await writeFile(join(dir, "adapter_config.json"), text);
      await rejects(() => readAdapter(dir), "BAD_CONFIG", /adapter_config\.json/);
    }
  }));

test("readAdapter() ignores the folders of other checkpoints beside it", () =>
  withScratch(async (dir) => {
    await writeAdapter(dir, sample());
    await mkdir(join(dir, "checkpoint-10"));
    await copyFile(join(dir, "adapter_config.json"), join(dir, "model.safetensors"));
    assert.deepEqual(await readAdapter(dir), sample());
  }));
