import assert from "node:assert/strict";
import { test } from "node:test";
import { type ModelConfig, parseModelConfig } from "../../src/api/nn/config.ts";
import {
  expectedTensors,
  linearModules,
  type TensorInfo,
  validateCheckpoint,
} from "../../src/api/nn/config_tensors.ts";
import { goldenConfig, goldenTensors, LLAMA_31_8B, QWEN25_05B, refuses } from "./helpers.ts";

const parameters = (config: ModelConfig) =>
  [...expectedTensors(config).values()].reduce(
    (sum, shape) => sum + shape.reduce((a, b) => a * b),
    0,
  );

for (const name of ["llama", "llama3-rope-tied", "qwen2"]) {
  test(`expectedTensors() lists the tensors of the golden model ${name}`, () => {
    const files = goldenTensors(`${name}/model/model.safetensors`);
    const expected = expectedTensors(goldenConfig(name));
    assert.deepEqual(
      Object.fromEntries([...files].map(([name, { shape }]) => [name, shape])),
      Object.fromEntries(expected),
    );
    validateCheckpoint(goldenConfig(name), files);
  });
}

test("expectedTensors() counts the parameters of known models", () => {
  assert.equal(parameters(parseModelConfig(LLAMA_31_8B, "f")), 8_030_261_248);
  assert.equal(parameters(parseModelConfig(QWEN25_05B, "f")), 494_032_768);
});

test("linearModules() lists the linear layers with their sizes", () => {
  const modules = linearModules(goldenConfig("llama3-rope-tied"));
  assert.equal(modules.length, 2 * 7 + 1);
  const sizes = Object.fromEntries(
    modules
      .slice(0, 7)
      .map(({ path, inFeatures, outFeatures }) => [path, [inFeatures, outFeatures]]),
  );
  assert.deepEqual(sizes, {
    "model.layers.0.self_attn.q_proj": [64, 128],
    "model.layers.0.self_attn.k_proj": [64, 64],
    "model.layers.0.self_attn.v_proj": [64, 64],
    "model.layers.0.self_attn.o_proj": [128, 64],
    "model.layers.0.mlp.gate_proj": [64, 96],
    "model.layers.0.mlp.up_proj": [64, 96],
    "model.layers.0.mlp.down_proj": [96, 64],
  });
  assert.deepEqual(modules.at(-1), { path: "lm_head", inFeatures: 64, outFeatures: 256 });
});

/** The tensors of the golden llama, edited. */
function edited(
  edit: (tensors: Map<string, TensorInfo>) => void,
  name = "llama",
): ReadonlyMap<string, TensorInfo> {
  const tensors: Map<string, TensorInfo> = goldenTensors(`${name}/model/model.safetensors`);
  edit(tensors);
  return tensors;
}

const NORM = "model.layers.1.input_layernorm.weight";
const GATE = "model.layers.0.mlp.gate_proj.weight";

test("validateCheckpoint() names a missing tensor and counts the others", () => {
  const one = edited((tensors) => tensors.delete(NORM));
  refuses(
    () => validateCheckpoint(goldenConfig("llama"), one),
    "BAD_FILE",
    /missing.*1\.input_.*\[64\]/,
  );
  const none = new Map<string, TensorInfo>();
  const error = refuses(
    () => validateCheckpoint(goldenConfig("llama"), none),
    "BAD_FILE",
    /and 20 more/,
  );
  assert.ok(error.is("BAD_FILE") && error.details.tensor === "model.embed_tokens.weight");
  const headless = edited((tensors) => tensors.delete("lm_head.weight"));
  refuses(() => validateCheckpoint(goldenConfig("llama"), headless), "BAD_FILE", /lm_head/);
});

test("validateCheckpoint() names a surplus tensor", () => {
  for (const name of [
    "model.layers.2.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_proj.bias",
  ]) {
    const tensors = edited((tensors) =>
      tensors.set(name, { dtype: "F32", shape: [64], file: "a.st" }),
    );
    const error = refuses(
      () => validateCheckpoint(goldenConfig("llama"), tensors),
      "BAD_FILE",
      /not part of the llama model/,
      /a\.st/,
    );
    assert.ok(error.is("BAD_FILE") && error.details.tensor === name);
  }
});

test("validateCheckpoint() ignores rotary tables and the copy of a tied head", () => {
  const table: TensorInfo = { dtype: "F32", shape: [8] };
  const tied = edited((tensors) => {
    tensors.set("model.layers.0.self_attn.rotary_emb.inv_freq", table);
    tensors.set("model.rotary_emb.inv_freq", table);
    tensors.set("lm_head.weight", { dtype: "BF16", shape: [256, 64] });
  }, "qwen2");
  validateCheckpoint(goldenConfig("qwen2"), tied);
});

test("validateCheckpoint() names a shape that contradicts the config, with both shapes", () => {
  for (const shape of [[64, 96], [96], [96, 64, 1], []]) {
    const tensors = edited((tensors) => tensors.set(GATE, { dtype: "F32", shape, file: "b.st" }));
    refuses(
      () => validateCheckpoint(goldenConfig("llama"), tensors),
      "BAD_FILE",
      /gate_proj.* is \[.*\], expected \[96,64\] in b\.st/,
    );
  }
});

test("validateCheckpoint() refuses dtypes that cannot be trained", () => {
  for (const dtype of ["U8", "I8", "F8_E4M3", "F64"]) {
    const tensors = edited((tensors) => tensors.set(GATE, { dtype, shape: [3072, 1] }));
    refuses(
      () => validateCheckpoint(goldenConfig("llama"), tensors),
      "UNSUPPORTED",
      new RegExp(dtype),
    );
  }
});
