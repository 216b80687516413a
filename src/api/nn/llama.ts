/**
 * The Llama decoder (Touvron et al. 2023, arXiv:2302.13971) as ops. Qwen2 is the same graph with biases on q, k and v, and
 * may have a sliding window in some layers.
 *
 *     n = norm(x);  qkv = n Wqkv^T;  rotate q, k;  o = attention(qkv);  mid = x + o Wo^T
 *     n = norm(mid);  gu = n Wgu^T;  h = silu(g) * u;  x' = mid + h Wd^T
 */
import type { AttentionShape } from "../graph/ops/attention.ts";
import { embedding } from "../graph/ops/embedding.ts";
import { glu } from "../graph/ops/glu.ts";
import {
  type LoraGroup,
  loraDown,
  loraLinearGroup,
  totalRank,
} from "../graph/ops/lora_linear_group.ts";
import { norm } from "../graph/ops/norm.ts";
import { rope } from "../graph/ops/rope.ts";
import {
  type MlpTiles,
  type TiledMlpAttributes,
  tiledMlp,
  tileScratch,
} from "../graph/ops/tiled_mlp.ts";
import type { ProgramBuilder } from "../graph/program.ts";
import { type DType, makeValue, type SaveRole, type Value } from "../graph/value.ts";
import type { LayerAdapters } from "./adapters.ts";
import type { ModelConfig } from "./config.ts";
import type { DecoderWeights, LayerWeights } from "./weights.ts";

/** What the decoder is run on. */
export interface DecoderInput {
  /** [T] i32 */
  readonly ids: Value;
  /** [T] i32, restarting at 0 in every document */
  readonly positions: Value;
  /** [1] i32: rows that hold tokens */
  readonly live: Value;
  /** Tiles of the MLP; null = all rows at once. */
  readonly mlpTiles: MlpTiles | null;
  /** Whether a layer keeps values of a role for backward; only asked where its MLP runs in tiles. */
  readonly keeps?: (layer: number, role: SaveRole) => boolean;
}

/** The parts of a decoder. */
export interface Decoder {
  readonly config: ModelConfig;
  readonly weights: DecoderWeights;
  /** Per layer; null = run the base model. */
  readonly adapters: readonly LayerAdapters[] | null;
  /** Element type of the activations. */
  readonly type: DType;
}

/** Emits attention over the rotated q|k|v rows [T, (Hq + 2 Hk) D] of a layer; gives o [T, Hq D]. */
export type EmitAttention = (qkv: Value, layer: number, shape: AttentionShape) => Value;

/** Emits the decoder; gives the normed hidden state [T, C]. */
export function emitDecoder(
  builder: ProgramBuilder,
  { config, weights, adapters, type }: Decoder,
  { ids, positions, live, mlpTiles, keeps }: DecoderInput,
  emitAttention: EmitAttention,
): Value {
  const rows = ids.shape[0] as number;
  const { hiddenSize, rmsNormEps: eps, heads, kvHeads, headDim } = config;
  const shapeOf = (layer: number): AttentionShape => {
    const window = config.windows[layer] as number;
    return { heads, kvHeads, headDim, scale: 1 / Math.sqrt(headDim), window };
  };

  const normed = (name: string, x: Value, weight: Value): Value => {
    const y = builder.value(name, type, [rows, hiddenSize]);
    builder.emit(norm, { y, x, weight, live, eps });
    return y;
  };
  const linear = (
    name: string,
    x: Value,
    w: Value,
    bias: Value | null,
    lora: LoraGroup | null,
    residual: Value | null,
    role: SaveRole | null,
    y = builder.value(name, type, [rows, w.shape[0] as number], role),
    downRole: SaveRole = "loraDown",
  ): Value => {
    let s: Value | null = null;
    if (lora !== null) {
      s = builder.value(`${name}.s`, type, [rows, totalRank(lora)], downRole);
      builder.emit(loraDown, { s, x, lora, live });
    }
    builder.emit(loraLinearGroup, { y, x, w, bias, residual, s, lora, live });
    return y;
  };

  // The input of a layer belongs to the layer that reads it; the last layer's output goes to the final norm.
  const inputOf = (index: number): Value => {
    const layer = Math.min(index, config.layers - 1);
    return makeValue("hidden", type, [rows, hiddenSize], { layer, role: "layerInput" });
  };
  let x = inputOf(0);
  builder.emit(embedding, { y: x, table: weights.embedding, ids, live });
  weights.layers.forEach((layer, index) => {
    builder.layer = index;
    const lora = adapters?.[index] ?? null;
    const n = normed("inputNorm", x, layer.inputNorm);
    const projected = linear(
      "qkv.linear",
      n,
      layer.qkv,
      layer.qkvBias,
      lora?.qkv ?? null,
      null,
      null,
    );
    const qkv = builder.value("qkv", type, projected.shape, "qkv");
    const { cos, sin } = weights;
    const rotated = { heads: heads + kvHeads, headDim, direction: 1 } as const;
    builder.emit(rope, { y: qkv, x: projected, cos, sin, positions, live, ...rotated });
    const o = emitAttention(qkv, index, shapeOf(index));
    const mid = linear("midResidual", o, layer.o, layer.oBias, lora?.o ?? null, x, "midResidual");
    const n2 = normed("postNorm", mid, layer.postNorm);
    const next = inputOf(index + 1);
    if (mlpTiles !== null) {
      const kept = (role: SaveRole) => keeps?.(index, role) ?? false;
      emitTiledMlp(builder, { y: next, x: n2, residual: mid, layer, lora, tiles: mlpTiles }, kept);
      x = next;
      return;
    }
    const gu = linear(
      "gateUp",
      n2,
      layer.gateUp,
      layer.gateUpBias,
      lora?.gateUp ?? null,
      null,
      "gateUp",
    );
    const h = builder.value("mlp", type, [rows, config.intermediateSize]);
    builder.emit(glu, { h, gu, live });
    const down = lora?.down ?? null;
    const { down: w, downBias } = layer;
    x = linear("hidden", h, w, downBias, down, mid, next.role, next, "mlpLoraDown");
  });
  builder.layer = null;
  return normed("finalNorm", x, weights.finalNorm);
}

/** The MLP of a layer in tiles. */
function emitTiledMlp(
  builder: ProgramBuilder,
  {
    layer,
    lora,
    ...rows
  }: Pick<TiledMlpAttributes, "y" | "x" | "residual" | "tiles"> & {
    readonly layer: LayerWeights;
    readonly lora: LayerAdapters | null;
  },
  keeps: (role: SaveRole) => boolean,
): void {
  const gateUp = { w: layer.gateUp, bias: layer.gateUpBias, lora: lora?.gateUp ?? null };
  const down = { w: layer.down, bias: layer.downBias, lora: lora?.down ?? null };
  const whole = (name: string, columns: number, role: SaveRole) => {
    const { dtype, shape } = rows.x;
    return builder.value(name, dtype, [shape[0] as number, columns], role);
  };
  const ofLora = (name: string, group: LoraGroup | null, role: SaveRole) =>
    group === null ? null : whole(name, totalRank(group), role);
  const s = ofLora("hidden.s", down.lora, "mlpLoraDown");
  const kept = {
    gu: keeps("gateUp") ? whole("gateUp", layer.gateUp.shape[0] as number, "gateUp") : null,
    sGateUp: keeps("loraDown") ? ofLora("gateUp.s", gateUp.lora, "loraDown") : null,
  };
  const scratch = tileScratch({ ...rows, gateUp }, kept);
  builder.emit(tiledMlp, { ...rows, ...kept, s, gateUp, down, scratch });
}
