import assert from "node:assert/strict";
import { test } from "node:test";
import { parseModelConfig } from "../../src/api/nn/config.ts";
import { linearModules } from "../../src/api/nn/config_tensors.ts";
import {
  compressTargets,
  type LoraConfig,
  resolveLoraTargets,
} from "../../src/api/nn/lora_config.ts";
import { goldenConfig, goldenJson, goldenTensors, LLAMA_31_8B, refuses } from "./helpers.ts";

const MODULES = linearModules(goldenConfig("llama"));
const ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];

/** Paths that a config adapts in the golden llama. */
const paths = (lora: Partial<LoraConfig>) =>
  resolveLoraTargets(MODULES, { rank: 4, alpha: 8, targetModules: "all-linear", ...lora }).map(
    ({ path }) => path,
  );

const refused = (lora: Partial<LoraConfig>, ...patterns: RegExp[]) =>
  refuses(() => paths(lora), "BAD_ARGUMENT", ...patterns);

for (const name of [
  "llama",
  "llama+rslora",
  "llama+rank-pattern",
  "llama+qv-only",
  "llama+all-linear",
  "llama3-rope-tied",
  "qwen2",
]) {
  test(`resolveLoraTargets() finds the modules and ranks of PEFT's adapter ${name}`, () => {
    const json = goldenJson(`${name}/adapter0/adapter_config.json`);
    const targets = resolveLoraTargets(linearModules(goldenConfig(name)), {
      rank: json.r as number,
      alpha: json.lora_alpha as number,
      targetModules: json.target_modules as string[],
      rankPattern: json.rank_pattern as Record<string, number>,
      alphaPattern: json.alpha_pattern as Record<string, number>,
      useRslora: json.use_rslora as boolean,
    });
    const expected = targets.flatMap(({ path, rank, inFeatures, outFeatures }) => [
      [`base_model.model.${path}.lora_A.weight`, [rank, inFeatures]],
      [`base_model.model.${path}.lora_B.weight`, [outFeatures, rank]],
    ]);
    const files = goldenTensors(`${name}/adapter0/adapter_model.safetensors`);
    assert.deepEqual(
      Object.fromEntries(expected),
      Object.fromEntries([...files].map(([name, { shape }]) => [name, shape])),
    );
  });
}

test("resolveLoraTargets() takes all-linear in any case, without the output head", () => {
  assert.equal(paths({}).length, 14);
  assert.deepEqual(paths({ targetModules: "All-Linear" }), paths({ targetModules: ALL }));
});

test("resolveLoraTargets() reads list items as path endings at a dot", () => {
  assert.deepEqual(paths({ targetModules: ["q_proj"] }), [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
  ]);
  const one = ["model.layers.1.mlp.up_proj"];
  for (const item of ["1.mlp.up_proj", "layers.1.mlp.up_proj", ...one]) {
    assert.deepEqual(paths({ targetModules: [item] }), one);
  }
});

test("resolveLoraTargets() reads a string as a regular expression over the whole path", () => {
  assert.equal(paths({ targetModules: ".*\\.(q|v)_proj" }).length, 4);
  assert.deepEqual(paths({ targetModules: "model\\.layers\\.1\\..*o_proj" }), [
    "model.layers.1.self_attn.o_proj",
  ]);
  assert.equal(paths({ targetModules: "model.*up_proj|model.*gate_proj" }).length, 4);
});

test("resolveLoraTargets() leaves out excluded modules", () => {
  assert.equal(paths({ excludeModules: ["down_proj", "lm_head"] }).length, 12);
  assert.equal(paths({ excludeModules: ".*layers\\.0.*" }).length, 7);
  assert.equal(paths({ targetModules: ".*", excludeModules: ["lm_head"] }).length, 14);
  refused({ excludeModules: ALL }, /no module is left/);
  refused({ excludeModules: ["vision_tower"] }, /excludeModules "vision_tower"/);
});

test("resolveLoraTargets() looks rank and alpha up by the first pattern that matches", () => {
  const targets = resolveLoraTargets(MODULES, {
    rank: 4,
    alpha: 8,
    targetModules: "all-linear",
    rankPattern: {
      "layers.1.self_attn.q_proj": 3,
      q_proj: 2,
      "(up|gate)_proj": 16,
      "layers.0.*": 5,
    },
    alphaPattern: { q_proj: 32, "model\\.layers\\.1\\.mlp\\.down_proj": 1 },
  });
  const found = new Map(targets.map((target) => [target.path, target]));
  const check = (path: string, rank: number, alpha: number) => {
    const target = found.get(`model.layers.${path}`)!;
    assert.deepEqual([target.rank, target.alpha, target.scale], [rank, alpha, alpha / rank], path);
  };
  check("1.self_attn.q_proj", 3, 32);
  check("0.self_attn.q_proj", 2, 32);
  check("0.mlp.up_proj", 16, 8);
  check("0.mlp.down_proj", 5, 8); // layers.0.* follows a dot
  check("1.mlp.down_proj", 4, 1);
  check("1.self_attn.v_proj", 4, 8);
});

test("resolveLoraTargets() scales by the root of the rank under rsLoRA", () => {
  const [target] = resolveLoraTargets(MODULES, {
    rank: 16,
    alpha: 8,
    targetModules: ["k_proj"],
    useRslora: true,
  });
  assert.deepEqual(target, {
    path: "model.layers.0.self_attn.k_proj",
    inFeatures: 64,
    outFeatures: 32,
    rank: 16,
    alpha: 8,
    scale: 2,
  });
});

test("resolveLoraTargets() names near misses of a target that matches nothing", () => {
  refused({ targetModules: ["q_prj"] }, /"q_prj".*did you mean q_proj/);
  refused({ targetModules: ["q_proj", "gate"] }, /"gate".*did you mean gate_proj/);
  refused({ targetModules: ["attn.q_proj"] }, /did you mean self_attn\.q_proj/);
  refused({ targetModules: ["query_key_value"] }, /the model has q_proj, k_proj/);
  refused({ targetModules: ["proj"] }, /did you mean .*q_proj/); // an ending, but not at a dot
  refused({ targetModules: ["(q|v)_proj"] }, /give the regular expression as one string/);
  refused({ targetModules: "q_proj" }, /regular expression.*write \["q_proj"\]/);
  refused({ targetModules: ".*q_prj" }, /matches no module/);
  refused({ rankPattern: { q_prj: 2 } }, /rankPattern "q_prj".*did you mean q_proj/);
  refused({ rankPattern: { proj: 2 } }, /no adapted module/); // not after a dot
  refused({ targetModules: ["q_proj"], alphaPattern: { up_proj: 2 } }, /no adapted module/);
});

test("resolveLoraTargets() refuses regular expressions of another dialect", () => {
  for (const source of ["(", "(?P<x>q_proj)", ".*\\Aq", "a)|(b", "(?i)q_proj"]) {
    refused({ targetModules: source }, /not a regular expression/);
    refused({ rankPattern: { [source]: 2 } }, /not a regular expression/);
  }
});

test("resolveLoraTargets() refuses values out of range", () => {
  for (const rank of [0, -1, 1.5, Number.NaN, 65_537, "4"])
    refused({ rank: rank as number }, /rank/);
  for (const alpha of [0, -1, Number.NaN, Infinity, "8"])
    refused({ alpha: alpha as number }, /alpha/);
  refused({ rankPattern: { q_proj: 0 } }, /rankPattern\.q_proj/);
  refused({ alphaPattern: { q_proj: 0 } }, /alphaPattern\.q_proj/);
  refused({ targetModules: [] }, /targetModules/);
  refused({ targetModules: [7] as unknown as string[] }, /targetModules/);
  refused({ targetModules: [""] }, /targetModules/);
});

test("resolveLoraTargets() refuses an adapter on the output head", () => {
  for (const targetModules of [["q_proj", "lm_head"], ".*"]) {
    refuses(() => paths({ targetModules }), "UNSUPPORTED", /lm_head/, /excludeModules/);
  }
});

test("compressTargets() finds the shortest list that means the same modules", () => {
  const compress = (lora: Partial<LoraConfig>) => {
    const chosen = paths(lora);
    const list = compressTargets(
      chosen.map((path) => ({ path })),
      MODULES,
    );
    assert.deepEqual(paths({ targetModules: list }), chosen);
    return list;
  };
  assert.deepEqual(compress({}), ALL);
  assert.deepEqual(compress({ targetModules: ["v_proj", "q_proj"] }), ["q_proj", "v_proj"]);
  assert.deepEqual(compress({ targetModules: ".*layers\\.1.*q_proj" }), ["1.self_attn.q_proj"]);
  assert.deepEqual(compress({ targetModules: ["0.self_attn.q_proj", "up_proj"] }), [
    "0.self_attn.q_proj",
    "up_proj",
  ]);
});

test("compressTargets() keeps apart layers whose numbers end alike", () => {
  const modules = linearModules(parseModelConfig(LLAMA_31_8B, "f"));
  const chosen = modules.filter(
    ({ path }) => path.startsWith("model.layers.1.") && path.endsWith("q_proj"),
  );
  assert.deepEqual(compressTargets(chosen, modules), ["1.self_attn.q_proj"]);
});
