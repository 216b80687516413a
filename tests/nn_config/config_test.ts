import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import fc from "fast-check";
import { type ModelConfig, parseModelConfig, readModelConfig } from "../../src/api/nn/config.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { GOLDEN, goldenConfig, goldenJson, LLAMA_31_8B, QWEN25_05B, refuses } from "./helpers.ts";

const SMALL = {
  vocabSize: 256,
  hiddenSize: 64,
  intermediateSize: 96,
  layers: 2,
  maxPositions: 256,
  windows: [0, 0],
  qkvBias: false,
  oBias: false,
  mlpBias: false,
};

/** Parses Llama-3.1-8B with some keys replaced; undefined removes a key. */
function llama(edit: Record<string, unknown>): ModelConfig {
  const json = Object.entries({ ...LLAMA_31_8B, ...edit }).filter(
    ([, value]) => value !== undefined,
  );
  return parseModelConfig(Object.fromEntries(json), "config.json");
}

const qwen = (edit: Record<string, unknown>) =>
  parseModelConfig({ ...QWEN25_05B, ...edit }, "config.json");

test("parseModelConfig() reads the golden configs", () => {
  assert.deepEqual(goldenConfig("llama"), {
    ...SMALL,
    family: "llama",
    heads: 4,
    kvHeads: 2,
    headDim: 16,
    rmsNormEps: 1e-5,
    tieWordEmbeddings: false,
    rope: { type: "default", theta: 10000 },
    torchDtype: "float32",
  });
  const llama3 = {
    type: "llama3",
    theta: 500000,
    factor: 8,
    lowFreqFactor: 1,
    highFreqFactor: 4,
    originalMaxPositions: 32,
  };
  assert.deepEqual(goldenConfig("llama3-rope-tied"), {
    ...SMALL,
    family: "llama",
    heads: 4,
    kvHeads: 2,
    headDim: 32,
    rmsNormEps: 1e-6,
    tieWordEmbeddings: true,
    rope: llama3,
    torchDtype: "bfloat16",
  });
  assert.deepEqual(goldenConfig("qwen2"), {
    ...SMALL,
    family: "qwen2",
    heads: 2,
    kvHeads: 1,
    headDim: 32,
    rmsNormEps: 1e-6,
    tieWordEmbeddings: true,
    qkvBias: true,
    rope: { type: "default", theta: 1000000 },
    torchDtype: "bfloat16",
  });
});

for (const [name, architecture] of Object.entries({
  gemma2: "Gemma2ForCausalLM",
  gpt2: "GPT2LMHeadModel",
  phi3: "Phi3ForCausalLM",
  "mistral-swa": "MistralForCausalLM",
  qwen3: "Qwen3ForCausalLM",
})) {
  test(`parseModelConfig() refuses ${name} by the name of its architecture`, () => {
    const json = goldenJson(`${name}/model/config.json`);
    refuses(
      () => parseModelConfig(json, "x/config.json"),
      "UNSUPPORTED",
      /unknown architecture/,
      new RegExp(architecture),
      /x\/config\.json/,
      /LlamaForCausalLM and Qwen2ForCausalLM/,
    );
  });
}

test("parseModelConfig() reads Llama-3.1-8B", () => {
  const config = llama({});
  assert.deepEqual(
    [config.layers, config.hiddenSize, config.heads, config.kvHeads, config.headDim],
    [32, 4096, 32, 8, 128],
  );
  assert.equal(config.rope.type, "llama3");
  assert.equal(config.rope.theta, 500000);
  assert.equal(config.tieWordEmbeddings, false);
});

test("parseModelConfig() reads Qwen2.5-0.5B", () => {
  const config = qwen({});
  assert.deepEqual(
    [config.layers, config.hiddenSize, config.heads, config.kvHeads, config.headDim],
    [24, 896, 14, 2, 64],
  );
  assert.deepEqual([config.qkvBias, config.oBias, config.mlpBias], [true, false, false]);
  assert.deepEqual(config.rope, { type: "default", theta: 1000000 });
});

test("parseModelConfig() reads what else stands in configs on the Hub", () => {
  // Llama 2: no rope_theta, rope_scaling null, num_key_value_heads as many as heads.
  const llama2 = llama({
    _name_or_path: "meta-llama/Llama-2-7b-hf",
    attention_bias: undefined,
    attention_dropout: undefined,
    mlp_bias: undefined,
    num_key_value_heads: undefined,
    rope_scaling: null,
    rope_theta: undefined,
    tie_word_embeddings: undefined,
    max_sequence_length: 2048,
    pad_token_id: 0,
  });
  assert.deepEqual(
    [llama2.kvHeads, llama2.rope, llama2.tieWordEmbeddings],
    [32, { type: "default", theta: 10000 }, false],
  );
  // SmolLM2.
  const extras = {
    is_llama_config: true,
    rope_interleaved: false,
    "transformers.js_config": { a: 1 },
  };
  llama({ ...extras, rope_scaling: null, rope_theta: 100000 });
  // Unsloth's copies, transformers 5.
  llama({ unsloth_fixed: true, torch_dtype: undefined, dtype: "bfloat16" });
  qwen({ layer_types: Array(24).fill("full_attention"), sliding_window: null, rope_scaling: null });
  // Without architectures the type decides.
  assert.equal(llama({ architectures: undefined }).family, "llama");
  const biased = llama({ attention_bias: true, mlp_bias: true });
  assert.deepEqual([biased.qkvBias, biased.oBias, biased.mlpBias], [true, true, true]);
});

test("parseModelConfig() refuses an unknown key by name", () => {
  for (const [key, value] of [
    ["attention_multiplier", 0.1],
    ["hidden_sise", 4096],
    ["new_thing", null],
  ]) {
    const error = refuses(
      () => llama({ [key as string]: value }),
      "BAD_CONFIG",
      new RegExp(`unknown key ${key}`),
    );
    assert.ok(error.is("BAD_CONFIG") && error.details.key === key);
  }
  refuses(() => qwen({ mlp_bias: false }), "BAD_CONFIG", /mlp_bias/);
});

test("parseModelConfig() refuses known keys that change the model", () => {
  const changes: readonly [string, unknown][] = [
    ["hidden_act", "gelu"],
    ["attention_dropout", 0.1],
    ["pretraining_tp", 2],
    ["rope_interleaved", true],
    ["partial_rotary_factor", 0.5],
    ["quantization_config", { quant_method: "bitsandbytes" }],
    ["quantization", { bits: 4 }],
    ["auto_map", { AutoModel: "modeling.X" }],
    ["layer_types", ["full_attention", "sliding_attention"]],
    ["sliding_window", 4096],
    ["use_sliding_window", true],
  ];
  for (const [key, value] of changes) {
    refuses(() => llama({ [key]: value }), "UNSUPPORTED", new RegExp(`${key} = `), /config\.json/);
  }
  refuses(
    () => llama({ layer_types: ["full_attention"] }),
    "BAD_CONFIG",
    /1 entries for 32 layers/,
  );
});

test("parseModelConfig() reads Qwen2's sliding windows as transformers does", () => {
  const windows = (edit: Record<string, unknown>) =>
    qwen({ num_hidden_layers: 4, max_window_layers: 1, sliding_window: 512, ...edit }).windows;
  assert.deepEqual(windows({}), [0, 0, 0, 0]); // the switch is off, as in every published checkpoint
  const use_sliding_window = true;
  assert.deepEqual(windows({ use_sliding_window }), [0, 512, 512, 512]);
  assert.deepEqual(windows({ use_sliding_window, max_window_layers: 0 }), [512, 512, 512, 512]);
  assert.deepEqual(windows({ use_sliding_window, max_window_layers: 4 }), [0, 0, 0, 0]);
  assert.deepEqual(windows({ use_sliding_window, sliding_window: null }), [0, 0, 0, 0]);
  const { sliding_window: _, ...unsaid } = QWEN25_05B;
  const defaults = { ...unsaid, use_sliding_window, max_window_layers: 23 };
  assert.deepEqual(parseModelConfig(defaults, "c").windows, [...Array(23).fill(0), 4096]);
  const { use_sliding_window: __, ...unswitched } = QWEN25_05B;
  assert.equal(Math.max(...parseModelConfig(unswitched, "c").windows), 0);
  const [full, sliding] = ["full_attention", "sliding_attention"];
  const layer_types = [sliding, full, sliding, full]; // goes before max_window_layers
  assert.deepEqual(windows({ use_sliding_window, layer_types }), [512, 0, 512, 0]);

  const contradicting = [
    { layer_types },
    { layer_types, use_sliding_window, sliding_window: null },
  ];
  for (const edit of contradicting) {
    refuses(() => windows(edit), "BAD_CONFIG", /layer_types has sliding_attention, but no window/);
  }
  refuses(() => windows({ layer_types: [full, "chunked", full, full] }), "UNSUPPORTED", /chunked/);
  refuses(() => windows({ layer_types: [full] }), "BAD_CONFIG", /1 entries for 4 layers/);
  refuses(() => windows({ use_sliding_window: 1 }), "BAD_CONFIG", /use_sliding_window is 1/);
  for (const sliding_window of [0, -1, 1.5, "all"]) {
    refuses(
      () => windows({ use_sliding_window, sliding_window }),
      "BAD_CONFIG",
      /sliding_window is/,
    );
  }
  refuses(() => windows({ max_window_layers: -1 }), "BAD_CONFIG", /max_window_layers is -1/);
});

test("parseModelConfig() reads every spelling of RoPE", () => {
  const { rope_type: _, ...numbers } = LLAMA_31_8B.rope_scaling;
  const expected = llama({}).rope;
  assert.deepEqual(llama({ rope_scaling: { ...numbers, type: "llama3" } }).rope, expected);
  const parameters = { ...LLAMA_31_8B.rope_scaling, rope_theta: 500000 };
  const v5 = { rope_scaling: undefined, rope_theta: undefined, rope_parameters: parameters };
  assert.deepEqual(llama(v5).rope, expected);
  assert.deepEqual(llama({ ...v5, rope_theta: 500000 }).rope, expected);
  for (const type of ["type", "rope_type"]) {
    assert.deepEqual(llama({ rope_scaling: { [type]: "default" } }).rope, {
      type: "default",
      theta: 500000,
    });
  }
});

test("parseModelConfig() refuses RoPE that it does not know or that contradicts itself", () => {
  const rope = (object: unknown) => () => llama({ rope_scaling: object });
  for (const type of ["linear", "dynamic", "yarn", "longrope", "su"]) {
    refuses(rope({ type, factor: 2 }), "UNSUPPORTED", new RegExp(type), /default and llama3/);
    refuses(rope({ rope_type: type, factor: 2 }), "UNSUPPORTED", new RegExp(type));
  }
  refuses(rope({ rope_type: "spiral" }), "BAD_CONFIG", /rope_type is "spiral"/);
  refuses(rope({ rope_type: "llama3", type: "default" }), "BAD_CONFIG", /given twice/);
  refuses(rope({ factor: 2 }), "BAD_CONFIG", /unknown key rope_scaling\.factor/);
  refuses(rope("linear"), "BAD_CONFIG", /rope_scaling/);
  const good = LLAMA_31_8B.rope_scaling;
  refuses(rope({ ...good, factor: 0.5 }), "BAD_CONFIG", /rope_scaling\.factor/);
  refuses(rope({ ...good, factor: undefined }), "BAD_CONFIG", /rope_scaling\.factor is missing/);
  refuses(rope({ ...good, low_freq_factor: 0 }), "BAD_CONFIG", /low_freq_factor/);
  refuses(rope({ ...good, high_freq_factor: 1 }), "BAD_CONFIG", /high_freq_factor/);
  refuses(rope({ ...good, original_max_position_embeddings: 1.5 }), "BAD_CONFIG", /original_max/);
  refuses(rope({ ...good, attention_factor: 2 }), "BAD_CONFIG", /attention_factor/);
  refuses(() => llama({ rope_parameters: { rope_type: "default" } }), "BAD_CONFIG", /both given/);
  refuses(
    () => llama({ rope_scaling: { ...good, rope_theta: 1 } }),
    "BAD_CONFIG",
    /rope_theta.*twice/,
  );
  for (const theta of [0, -1, "1e4", Number.NaN]) {
    refuses(() => llama({ rope_theta: theta }), "BAD_CONFIG", /rope_theta/);
  }
});

test("parseModelConfig() refuses sizes out of range or in contradiction, naming the key", () => {
  const bad: readonly [string, unknown][] = [
    ["hidden_size", 0],
    ["hidden_size", -4096],
    ["hidden_size", 4096.5],
    ["hidden_size", "4096"],
    ["hidden_size", 2 ** 31],
    ["hidden_size", 4095],
    ["hidden_size", undefined],
    ["hidden_size", null],
    ["vocab_size", 0],
    ["vocab_size", 2 ** 40],
    ["intermediate_size", undefined],
    ["num_hidden_layers", 0],
    ["num_hidden_layers", 1e9],
    ["num_attention_heads", 0],
    ["num_key_value_heads", 3],
    ["num_key_value_heads", 64],
    ["head_dim", 0],
    ["head_dim", 127],
    ["head_dim", 2 ** 22],
    ["max_position_embeddings", undefined],
    ["rms_norm_eps", 0],
    ["rms_norm_eps", -1],
    ["rms_norm_eps", undefined],
    ["tie_word_embeddings", "false"],
    ["attention_bias", 1],
    ["torch_dtype", 16],
  ];
  for (const [key, value] of bad) {
    const name = key === "torch_dtype" ? "dtype" : key;
    refuses(() => llama({ [key]: value }), "BAD_CONFIG", new RegExp(name), /config\.json/);
  }
  const { num_key_value_heads: _, ...rest } = QWEN25_05B;
  refuses(() => parseModelConfig(rest, "f"), "BAD_CONFIG", /num_key_value_heads is missing/);
});

test("parseModelConfig() refuses an unclear architecture", () => {
  refuses(() => parseModelConfig({}, "f"), "BAD_CONFIG", /no architectures/);
  refuses(() => parseModelConfig([], "f"), "BAD_CONFIG", /not a JSON object/);
  refuses(() => llama({ model_type: "mistral" }), "BAD_CONFIG", /model_type is "mistral"/);
  refuses(() => llama({ architectures: ["LlamaModel"] }), "UNSUPPORTED", /LlamaModel/);
  refuses(() => llama({ architectures: [] }), "UNSUPPORTED", /unknown architecture/);
  refuses(() => llama({ architectures: undefined, model_type: "rwkv" }), "UNSUPPORTED", /rwkv/);
});

test("parseModelConfig() answers any value of any key with a config or LoramemError", () => {
  const deep = "[".repeat(50_000) + "]".repeat(50_000);
  refuses(() => llama({ auto_map: JSON.parse(deep) }), "UNSUPPORTED", /auto_map/);
  const key = fc.oneof(
    fc.constantFrom(...Object.keys(LLAMA_31_8B), "rope_parameters"),
    fc.string(),
  );
  const value = fc.oneof(fc.jsonValue(), fc.constantFrom(0, -0, 2 ** 53, 1e308, null, true));
  fc.assert(
    fc.property(fc.dictionary(key, value, { minKeys: 1, maxKeys: 3 }), (edit) => {
      try {
        const config = llama(edit);
        assert.equal(config.heads % config.kvHeads, 0);
      } catch (error) {
        assert.ok(error instanceof LoramemError, String(error));
      }
    }),
    { numRuns: 1000 },
  );
});

test("readModelConfig() reads a folder or a file and explains what is wrong with it", async () => {
  const dir = mkdtempSync(join(tmpdir(), "loramem-config-"));
  try {
    const model = join(GOLDEN, "llama/model");
    assert.deepEqual(
      await readModelConfig(model),
      await readModelConfig(join(model, "config.json")),
    );
    assert.equal((await readModelConfig(model)).hiddenSize, 64);
    const cases: readonly [string | null, RegExp][] = [
      [null, /no such file.*config\.json/],
      ["", /not valid JSON/],
      ['{"architectures": ["LlamaForCausalLM"], "hid', /not valid JSON.*truncated/],
      ["null", /not a JSON object/],
      [" ".repeat(10_000_001), /10000001 bytes/],
    ];
    for (const [text, message] of cases) {
      if (text !== null) writeFileSync(join(dir, "config.json"), text);
      const error = await readModelConfig(dir).catch((error) => error);
      refuses(
        () => {
          throw error;
        },
        "BAD_CONFIG",
        message,
      );
    }
    const error = await readModelConfig(join(dir, "config.json/x")).catch((error) => error);
    refuses(
      () => {
        throw error;
      },
      "IO",
      /ENOTDIR/,
    );
  } finally {
    rmSync(dir, { recursive: true });
  }
});
