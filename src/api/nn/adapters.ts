/**
 * The trainable state: every LoRA matrix in one flat f32 arena, so that zeroing, norm, unscaling and AdamW are one kernel
 * each, and the compute copies and gradients that the linear groups read and add to.
 */
import { LoramemError } from "../../ffi/error.ts";
import { type StructName, structLayout } from "../../ffi/structs.ts";
import type { LoraGroup, LoraPart } from "../graph/ops/lora_linear_group.ts";
import { DTYPES, type DType, makeValue, type Value, viewOf } from "../graph/value.ts";
import type { ModelConfig } from "./config.ts";
import type { LoraTarget } from "./lora_config.ts";

/** One LoRA matrix in the flat arena. */
export interface AdapterTensor {
  /** Module path with `.lora_A.weight` or `.lora_B.weight`. */
  readonly name: string;
  readonly matrix: "A" | "B";
  /** A: [rank, in]; B: [out, rank]. */
  readonly shape: readonly [number, number];
  /** First element in the arena. */
  readonly element: number;
}

/** The adapters of one decoder layer, by linear group; null = the group has none. */
export interface LayerAdapters {
  readonly qkv: LoraGroup | null;
  readonly o: LoraGroup | null;
  readonly gateUp: LoraGroup | null;
  readonly down: LoraGroup | null;
}

/** The trainable state of a run. */
export interface Adapters {
  readonly layers: readonly LayerAdapters[];
  readonly tensors: readonly AdapterTensor[];
  /** [P] f32 each, P = elements of the arena including padding, which stays zero. */
  readonly master: Value;
  readonly gradient: Value;
  readonly m: Value;
  readonly v: Value;
  /** [P] in the activations' type; null if that is f32 and the masters are used themselves. */
  readonly copy: Value | null;
  /** [9] f64, `lm_optimizer_control`: settings. */
  readonly control: Value;
  /** [2] f64, `lm_optimizer_state`. With masters, moments and the scaler it is all that a run remembers. */
  readonly state: Value;
  /** [8] f32, `lm_scaler`; null unless activations are f16, whose gradients are too small to be stored unscaled. */
  readonly scaler: Value | null;
  /** [9] f64, `lm_step_metrics`. */
  readonly metrics: Value;
  /** Number of parameters, padding left out. */
  readonly parameters: number;
  /** Every value, in placement order. */
  readonly values: readonly Value[];
}

/** Elements of the arena at whose multiples every matrix starts: 256 bytes of f32. */
const ELEMENT_ALIGNMENT = 64;

const GROUPS = {
  qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
  o: ["self_attn.o_proj"],
  gateUp: ["mlp.gate_proj", "mlp.up_proj"],
  down: ["mlp.down_proj"],
} as const;

interface GroupLayout {
  readonly parts: readonly {
    readonly out: number;
    readonly target: LoraTarget | null;
    readonly b: number;
  }[];
  readonly rank: number;
  readonly in: number;
  /** First element of A. */
  readonly a: number;
}

/**
 * Lays out the adapters of `targets`.
 *
 * @param type Element type of the activations; adapters get a compute copy in it unless it is f32.
 * @throws {LoramemError} UNSUPPORTED for a target outside the decoder layers.
 */
export function layoutAdapters(
  config: ModelConfig,
  targets: readonly LoraTarget[],
  type: DType,
): Adapters {
  const byPath = new Map(targets.map((target) => [target.path, target]));
  const tensors: AdapterTensor[] = [];
  let elements = 0;
  const take = (count: number): number => {
    const start = elements;
    elements = Math.ceil((start + count) / ELEMENT_ALIGNMENT) * ELEMENT_ALIGNMENT;
    return start;
  };
  const layoutGroup = (
    layer: number,
    modules: readonly string[],
    outs: readonly number[],
  ): GroupLayout | null => {
    const found = modules.map((module) => {
      const path = `model.layers.${layer}.${module}`;
      const target = byPath.get(path) ?? null;
      byPath.delete(path);
      return target;
    });
    const first = found.find((target) => target !== null);
    if (first === undefined || first === null) return null;
    const width = first.inFeatures;
    const rank = found.reduce((sum, target) => sum + (target?.rank ?? 0), 0);
    const a = take(rank * width);
    let rows = 0;
    for (const target of found) {
      if (target === null) continue;
      const shape = [target.rank, width] as const;
      tensors.push({
        name: `${target.path}.lora_A.weight`,
        matrix: "A",
        shape,
        element: a + rows * width,
      });
      rows += target.rank;
    }
    const parts = found.map((target, index) => {
      const out = outs[index] as number;
      if (target === null) return { out, target, b: 0 };
      const b = take(out * target.rank);
      const shape = [out, target.rank] as const;
      tensors.push({ name: `${target.path}.lora_B.weight`, matrix: "B", shape, element: b });
      return { out, target, b };
    });
    return { parts, rank, in: width, a };
  };

  const q = config.heads * config.headDim;
  const kv = config.kvHeads * config.headDim;
  const layouts = Array.from({ length: config.layers }, (_, layer) => ({
    qkv: layoutGroup(layer, GROUPS.qkv, [q, kv, kv]),
    o: layoutGroup(layer, GROUPS.o, [config.hiddenSize]),
    gateUp: layoutGroup(layer, GROUPS.gateUp, [config.intermediateSize, config.intermediateSize]),
    down: layoutGroup(layer, GROUPS.down, [config.hiddenSize]),
  }));
  for (const path of byPath.keys()) {
    throw new LoramemError(
      "UNSUPPORTED",
      `lora: no adapter is possible on this module: ${path}: choose linears of the decoder layers`,
      { what: path },
    );
  }

  const flat = (name: string, dtype: DType, count = elements) =>
    makeValue(name, dtype, [count], { memory: "trainable" });
  const master = flat("adapters.master", "f32");
  const copy = type === "f32" ? null : flat("adapters.copy", type);
  const gradient = flat("adapters.gradient", "f32");
  const m = flat("adapters.m", "f32");
  const v = flat("adapters.v", "f32");
  const struct = (name: string, dtype: DType, of: StructName) =>
    flat(name, dtype, structLayout(of).size / DTYPES[dtype].bytes);
  const control = struct("optimizer.control", "f64", "lm_optimizer_control");
  const state = struct("optimizer.state", "f64", "lm_optimizer_state");
  const scaler = type === "f16" ? struct("optimizer.scaler", "f32", "lm_scaler") : null;
  const metrics = struct("step.metrics", "f64", "lm_step_metrics");
  const toGroup = (layout: GroupLayout | null): LoraGroup | null => {
    if (layout === null) return null;
    const window = (base: Value, shape: readonly [number, number], element: number) =>
      viewOf(base, base.name, shape, element, shape[1]);
    const aShape = [layout.rank, layout.in] as const;
    return {
      a: window(copy ?? master, aShape, layout.a),
      gradA: window(gradient, aShape, layout.a),
      parts: layout.parts.map(({ out, target, b }): LoraPart => {
        if (target === null) return { out, rank: 0, scale: 0, b: null, gradB: null };
        const { rank, scale } = target;
        const bShape = [out, rank] as const;
        return {
          out,
          rank,
          scale,
          b: window(copy ?? master, bShape, b),
          gradB: window(gradient, bShape, b),
        };
      }),
    };
  };
  return {
    layers: layouts.map((layer) => ({
      qkv: toGroup(layer.qkv),
      o: toGroup(layer.o),
      gateUp: toGroup(layer.gateUp),
      down: toGroup(layer.down),
    })),
    tensors,
    master,
    gradient,
    m,
    v,
    copy,
    control,
    state,
    scaler,
    metrics,
    parameters: tensors.reduce((sum, { shape: [rows, width] }) => sum + rows * width, 0),
    values: [master, copy, gradient, m, v, control, state, scaler, metrics].filter(
      (value) => value !== null,
    ),
  };
}
