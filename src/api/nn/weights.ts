/** The frozen weights of a decoder: which tensors of the checkpoint lie where in the weights reservation. */
import {
  aligned,
  bytesOf,
  DTYPES,
  type DType,
  type MemoryClass,
  makeValue,
  type Value,
  viewOf,
} from "../graph/value.ts";
import type { WeightStream } from "../graph/weave.ts";
import type { ModelConfig } from "./config.ts";

/** A run of rows of one weight value, filled from one tensor of the checkpoint. */
export interface WeightSource {
  readonly tensor: string;
  readonly value: Value;
  /** First element of the value that the tensor fills. */
  readonly element: number;
  readonly elements: number;
}

/** The weights of one decoder layer. Matrices that are multiplied by the same input lie next to each other. */
export interface LayerWeights {
  /** [C] */
  readonly inputNorm: Value;
  /** [(Hq + 2 Hk) D, C] */
  readonly qkv: Value;
  readonly qkvBias: Value | null;
  /** [C, Hq D] */
  readonly o: Value;
  readonly oBias: Value | null;
  /** [C] */
  readonly postNorm: Value;
  /** [2 I, C] */
  readonly gateUp: Value;
  readonly gateUpBias: Value | null;
  /** [C, I] */
  readonly down: Value;
  readonly downBias: Value | null;
}

/** All weights of a decoder. */
export interface DecoderWeights {
  /** [V, C] */
  readonly embedding: Value;
  readonly layers: readonly LayerWeights[];
  /** [C] */
  readonly finalNorm: Value;
  /** [V, C]; the embedding itself if they are tied. */
  readonly head: Value;
  /** [P, D / 2] f32 tables of the rotary embedding. */
  readonly cos: Value;
  readonly sin: Value;
  /** Every value, in placement order. */
  readonly values: readonly Value[];
  /** Where every tensor of the checkpoint goes. */
  readonly sources: readonly WeightSource[];
  /** Null if all of them stay on the device. */
  readonly stream: WeightStream | null;
}

/** Layers whose weights are on the device at a time where they are streamed: one computes, the next one comes. */
const WINDOWS = 2;

/**
 * Lays out the weights of `config`.
 *
 * @param dtypeOf Element type in which a tensor of the checkpoint is stored. Tensors that are merged into one matrix
 * take the type of the first one, or f32 if they differ.
 * @param positions P, rows of the rotary tables.
 */
export function layoutWeights(
  config: ModelConfig,
  dtypeOf: (tensor: string) => DType,
  positions: number,
): DecoderWeights {
  const values: Value[] = [];
  const sources: WeightSource[] = [];
  const keep = (value: Value): Value => {
    values.push(value);
    return value;
  };
  const merged = (
    name: string,
    layer: number | null,
    parts: readonly { readonly tensor: string; readonly rows: number }[],
    width: number | null,
  ): Value => {
    const types = new Set(parts.map((part) => dtypeOf(part.tensor)));
    const dtype =
      types.size === 1 ? (dtypeOf((parts[0] as { tensor: string }).tensor) as DType) : "f32";
    const rows = parts.reduce((sum, part) => sum + part.rows, 0);
    const shape = width === null ? [rows] : [rows, width];
    const value = keep(makeValue(name, dtype, shape, { memory: "weights", layer }));
    let element = 0;
    for (const part of parts) {
      const elements = part.rows * (width ?? 1);
      sources.push({ tensor: part.tensor, value, element, elements });
      element += elements;
    }
    return value;
  };

  const { hiddenSize: C, intermediateSize: I, headDim: D } = config;
  const q = config.heads * D;
  const kv = config.kvHeads * D;
  const single = (
    name: string,
    layer: number | null,
    tensor: string,
    rows: number,
    width: number | null,
  ) => merged(name, layer, [{ tensor, rows }], width);
  const embedding = single("embedding", null, "model.embed_tokens.weight", config.vocabSize, C);
  const layers = Array.from({ length: config.layers }, (_, layer): LayerWeights => {
    const at = (name: string) => `model.layers.${layer}.${name}`;
    const group = (
      name: string,
      parts: readonly (readonly [module: string, rows: number])[],
      width: number,
      bias: boolean,
    ): [Value, Value | null] => {
      const named = (suffix: string) =>
        parts.map(([module, rows]) => ({ tensor: at(`${module}.${suffix}`), rows }));
      const weight = merged(name, layer, named("weight"), width);
      return [weight, bias ? merged(`${name}.bias`, layer, named("bias"), null) : null];
    };
    const inputNorm = single("inputNorm", layer, at("input_layernorm.weight"), C, null);
    const qkvParts = [
      ["self_attn.q_proj", q],
      ["self_attn.k_proj", kv],
      ["self_attn.v_proj", kv],
    ] as const;
    const [qkv, qkvBias] = group("qkv", qkvParts, C, config.qkvBias);
    const [o, oBias] = group("o", [["self_attn.o_proj", C]], q, config.oBias);
    const postNorm = single("postNorm", layer, at("post_attention_layernorm.weight"), C, null);
    const mlpParts = [
      ["mlp.gate_proj", I],
      ["mlp.up_proj", I],
    ] as const;
    const [gateUp, gateUpBias] = group("gateUp", mlpParts, C, config.mlpBias);
    const [down, downBias] = group("down", [["mlp.down_proj", C]], I, config.mlpBias);
    return { inputNorm, qkv, qkvBias, o, oBias, postNorm, gateUp, gateUpBias, down, downBias };
  });
  const finalNorm = single("finalNorm", null, "model.norm.weight", C, null);
  const head = config.tieWordEmbeddings
    ? embedding
    : single("head", null, "lm_head.weight", config.vocabSize, C);
  const table = (name: string) =>
    keep(makeValue(name, "f32", [positions, D / 2], { memory: "weights" }));
  const cos = table("rope.cos");
  const sin = table("rope.sin");
  return { embedding, layers, finalNorm, head, cos, sin, values, sources, stream: null };
}

/** Layers start at multiples of this many bytes of a file, so that no read of one touches another's blocks. */
const FILE_BLOCK = 4096;

/**
 * The same weights with those of the layers on the host or in a file: the layers read windows on the device, to which they are
 * copied one after the other. Everything outside the layers stays on the device. Those of a file are filled in their windows,
 * layer by layer, and written from there.
 */
export function streamLayers(resident: DecoderWeights, place: "host" | "file"): DecoderWeights {
  const places = new Map<Value, number>();
  const sizes = resident.layers.map((layer) => {
    let bytes = 0;
    for (const value of Object.values(layer) as (Value | null)[]) {
      if (value === null) continue;
      places.set(value, bytes);
      bytes += aligned(bytesOf(value));
    }
    return place === "file" ? Math.ceil(bytes / FILE_BLOCK) * FILE_BLOCK : bytes;
  });
  const block = (name: string, bytes: number, memory: MemoryClass, layer: number | null) =>
    makeValue(name, "f32", [bytes / DTYPES.f32.bytes], { memory, layer });
  const largest = Math.max(...sizes);
  const windows = sizes
    .slice(0, WINDOWS)
    .map((_, index) => block(`window${index}`, largest, "weights", null));
  const stored = sizes.map((bytes, layer) => block("layer", bytes, place, layer));
  const within = (base: Value, value: Value): Value => {
    const elements = (places.get(value) as number) / DTYPES[base.dtype].bytes;
    const view = viewOf(base, value.name, value.shape, elements, value.pitch, value.dtype);
    return { ...view, layer: value.layer };
  };
  const layers = resident.layers.map((layer, index) => {
    const window = windows[index % WINDOWS] as Value;
    const entries = Object.entries(layer) as [keyof LayerWeights, Value | null][];
    return Object.fromEntries(
      entries.map(([name, value]) => [name, value && within(window, value)]),
    ) as unknown as LayerWeights;
  });
  const sources = resident.sources.map((source) => {
    const { layer } = source.value;
    if (layer === null) return source;
    const from = place === "file" ? windows[layer % WINDOWS] : stored[layer];
    return { ...source, value: within(from as Value, source.value) };
  });
  const outside = resident.values.filter(({ layer }) => layer === null);
  const values = [...outside, ...windows, ...stored];
  return { ...resident, layers, sources, values, stream: { windows, layers: stored } };
}
