/** The closed set of programs of a run, written over one decoder, and the blocks through which data goes in and out. */
import { emitBackward } from "../graph/backward.ts";
import { adamw, gradNorm, NORM_BLOCK } from "../graph/ops/adamw.ts";
import { attention } from "../graph/ops/attention.ts";
import { cachedAttention } from "../graph/ops/cached_attention.ts";
import { fillZero } from "../graph/ops/fill.ts";
import { linearCrossEntropy, lossSum } from "../graph/ops/linear_cross_entropy.ts";
import { loraLinearGroup } from "../graph/ops/lora_linear_group.ts";
import { argmax, gatherRows } from "../graph/ops/sample.ts";
import type { MlpTiles } from "../graph/ops/tiled_mlp.ts";
import { type Op, type Program, ProgramBuilder, type ProgramName } from "../graph/program.ts";
import {
  DTYPES,
  type DType,
  makeValue,
  type SaveRole,
  type Value,
  type ValueOptions,
  viewOf,
} from "../graph/value.ts";
import { type OffloadedInput, weaveTransfers } from "../graph/weave.ts";
import { isKept, isOffloaded, keepsRole, type SavePoints } from "../plan/save_points.ts";
import type { Adapters } from "./adapters.ts";
import type { ModelConfig } from "./config.ts";
import { type EmitAttention, emitDecoder } from "./llama.ts";
import type { DecoderWeights } from "./weights.ts";

/** Sizes that a plan is made for; data may be smaller, never larger. */
export interface StepDims {
  /** T */
  readonly tokensPerMicroBatch: number;
  readonly documentsPerMicroBatch: number;
  /** Rows of logits that exist at a time. */
  readonly lossChunkTokens: number;
  /** Rows of the MLP that are computed at a time; by default as many as {@linkcode mlpTileTokens}. */
  readonly mlpTileTokens?: number;
  /** Rows of a prefill; longer prompts go through in several. 0 = the plan has no generation. */
  readonly prefillTokens: number;
  /** Rows of the KV cache: prompt and answer together. */
  readonly contextTokens: number;
}

/** The input block in device memory, one i32 array, and its windows. */
export interface BatchBlock {
  /** What the programs read. */
  readonly block: Value;
  /** Its twin, into which the next micro-batch is copied meanwhile; every program carries it. */
  readonly incoming: Value;
  /** [4] `lm_batch_header` */
  readonly header: Value;
  readonly live: Value;
  /** [T] */
  readonly ids: Value;
  readonly positions: Value;
  /** [documents + 1] */
  readonly cuSeqlens: Value;
  /** [T] each; the first `labelled` entries count */
  readonly labelRows: Value;
  readonly labelIds: Value;
  /** Rows that hold tokens, of every tile of the MLP; null where T is one tile. */
  readonly mlpTiles: MlpTiles | null;
}

/** Input and output of generation. */
export interface GenerationBlock {
  readonly block: Value;
  readonly live: Value;
  readonly ids: Value;
  readonly positions: Value;
  /** [1] rows in the KV cache */
  readonly past: Value;
  /** [1] row whose next token is wanted */
  readonly last: Value;
  /** [1] the most likely next token */
  readonly token: Value;
}

/** Backends differ in the scratch that their kernels need. */
export type Backend = "cpu" | "cuda";

/** Everything that programs are built from. */
export interface ModelParts {
  readonly config: ModelConfig;
  readonly weights: DecoderWeights;
  readonly adapters: Adapters;
  readonly type: DType;
  readonly dims: StepDims;
  readonly savePoints: SavePoints;
  readonly backend: Backend;
}

/** Programs and the blocks that they share. */
export interface ProgramSet {
  readonly programs: readonly Program[];
  readonly batch: BatchBlock;
  readonly generation: GenerationBlock | null;
  /** [T, V] logits of the "logits" programs; null without them. */
  readonly logits: Value | null;
  /** Layer inputs that wait on the host. */
  readonly offloaded: readonly Value[];
}

/** i32 elements at whose multiples the windows of a block start: 256 bytes. */
const BLOCK_ALIGNMENT = 64;

/** Splits one i32 block into named windows. */
function makeBlock<N extends string>(name: string, sizes: Readonly<Record<N, number>>) {
  const starts = new Map<N, number>();
  let elements = 0;
  for (const [window, size] of Object.entries(sizes) as [N, number][]) {
    starts.set(window, elements);
    elements += Math.ceil(size / BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT;
  }
  const block = makeValue(name, "i32", [elements]);
  const window = (of: N, size = sizes[of]) =>
    viewOf(block, `${name}.${of}`, [size], starts.get(of) as number, size);
  const element = (of: N, index: number) =>
    viewOf(block, `${name}.${of}.${index}`, [1], (starts.get(of) as number) + index, 1);
  return { block, window, element };
}

/** Bytes of gate, up and h of one tile: enough rows to fill a large GPU, little against what else a layer needs. */
const MLP_TILE_BYTES = 128 << 20;

/** Most tiles of the MLP: a graph of more would take more memory than smaller tiles save. */
const MOST_MLP_TILES = 32;

/** Rows of a tile of the MLP: what `dims` says, or a power of two; more where there would be too many tiles. */
function mlpTileTokens({ config, dims, type }: ModelParts): number {
  const row = 3 * config.intermediateSize * DTYPES[type].bytes;
  const rows = 2 ** Math.max(7, Math.floor(Math.log2(MLP_TILE_BYTES / row)));
  const least = Math.ceil(dims.tokensPerMicroBatch / MOST_MLP_TILES / 128) * 128;
  return dims.mlpTileTokens ?? Math.max(rows, least);
}

/** Builds the programs named in `names`. */
export function buildPrograms(parts: ModelParts, names: readonly ProgramName[]): ProgramSet {
  const { dims } = parts;
  const T = dims.tokensPerMicroBatch;
  const tileRows = mlpTileTokens(parts);
  const tiles = Math.ceil(T / tileRows);
  const batchSizes = {
    header: 4,
    ids: T,
    positions: T,
    cuSeqlens: dims.documentsPerMicroBatch + 1,
    labelRows: T,
    labelIds: T,
    tileLive: tiles > 1 ? tiles : 0,
  };
  const { block, window, element } = makeBlock("batch", batchSizes);
  const incoming = makeValue("batch.incoming", block.dtype, block.shape);
  const batch: BatchBlock = {
    block,
    incoming,
    header: window("header"),
    live: window("header", 1),
    ids: window("ids"),
    positions: window("positions"),
    cuSeqlens: window("cuSeqlens"),
    labelRows: window("labelRows"),
    labelIds: window("labelIds"),
    mlpTiles:
      tiles > 1
        ? {
            rows: tileRows,
            live: Array.from({ length: tiles }, (_, index) => element("tileLive", index)),
          }
        : null,
  };
  const logits = makeValue("logits", parts.type, [T, parts.config.vocabSize]);
  const offloaded: OffloadedInput[] = [];
  const generation = dims.prefillTokens > 0 ? makeGeneration(parts, incoming) : null;
  const build: Readonly<Record<ProgramName, () => Program>> = {
    train: () => trainProgram(parts, batch, offloaded),
    optimizer: () => optimizerProgram(parts, batch),
    evaluate: () => evaluateProgram(parts, batch, "evaluate"),
    evaluateBase: () => evaluateProgram(parts, batch, "evaluateBase"),
    logits: () => logitsProgram(parts, batch, logits, "logits"),
    logitsBase: () => logitsProgram(parts, batch, logits, "logitsBase"),
    prefill: () => (generation as Generation).program("prefill", dims.prefillTokens),
    decode: () => (generation as Generation).program("decode", 1),
  };
  const { stream } = parts.weights;
  return {
    programs: names.map((name) =>
      weaveTransfers(build[name](), stream, name === "train" ? offloaded : []),
    ),
    offloaded: offloaded.map(({ host }) => host),
    batch,
    generation: generation?.block ?? null,
    logits: names.some((name) => name.startsWith("logits")) ? logits : null,
  };
}

/** Head sizes at which a GPU adds dq up in order, unless a window or a cap is in the way; see lm_attention_backward. */
const ORDERED_HEAD_DIMS: readonly number[] = [32, 64, 128];

/** Attention over packed documents. */
function packedAttention(
  builder: ProgramBuilder,
  batch: BatchBlock,
  { type, backend }: Pick<ModelParts, "type" | "backend">,
): EmitAttention {
  return (qkv, _layer, shape) => {
    const ordered =
      backend === "cuda" &&
      type !== "f32" &&
      ORDERED_HEAD_DIMS.includes(shape.headDim) &&
      !shape.window &&
      !shape.softcap;
    const rows = qkv.shape[0] as number;
    const o = builder.value("attention", type, [rows, shape.heads * shape.headDim], "attention");
    const lse = builder.value("logSumExp", "f32", [shape.heads, rows], "logSumExp");
    builder.emit(attention, { o, lse, qkv, cuSeqlens: batch.cuSeqlens, shape, ordered });
    return o;
  };
}

/** Emits the chunks of head and loss; gives the row losses. */
function emitLoss(
  builder: ProgramBuilder,
  { config, weights, adapters, type, dims, backend }: ModelParts,
  batch: BatchBlock,
  x: Value,
  dx: Value | null,
): Value {
  const T = dims.tokensPerMicroBatch;
  const rows = Math.min(dims.lossChunkTokens, T);
  const loss = makeValue("loss", "f32", [T]);
  const { labelRows, labelIds, header } = batch;
  builder.endSegment("forward");
  for (let chunk = 0; chunk * rows < T; chunk++) {
    const logits = makeValue("logits", type, [rows, config.vocabSize]);
    const gathered =
      backend === "cpu" ? null : makeValue("gathered", type, [rows, config.hiddenSize]);
    const scratch = { loss, dx, logits, gathered };
    builder.emit(linearCrossEntropy, {
      ...scratch,
      x,
      head: weights.head,
      labelRows,
      labelIds,
      header,
      scaler: dx === null ? null : adapters.scaler,
      chunk,
    });
    builder.endSegment(`head.${chunk}`, chunk);
  }
  return loss;
}

/** Forward, loss and backward of one micro-batch; gradients are added to the arena. Notes the inputs that are offloaded. */
function trainProgram(parts: ModelParts, batch: BatchBlock, offloaded: OffloadedInput[]): Program {
  const { adapters, type, savePoints } = parts;
  const builder = new ProgramBuilder();
  const decoder = { ...parts, adapters: adapters.layers };
  const keeps = (layer: number, role: SaveRole) => keepsRole(savePoints, layer, role);
  const input = { ...batch, keeps };
  const x = emitDecoder(builder, decoder, input, packedAttention(builder, batch, parts));
  const forward = [...builder.ops];
  const dx = makeValue("d(finalNorm)", type, x.shape);
  builder.emit(fillZero, { y: dx });
  const loss = emitLoss(builder, parts, batch, x, dx);
  builder.emit(lossSum, { metrics: adapters.metrics, loss, header: batch.header });
  offloaded.push(...offloadedInputs(forward, savePoints));
  const restored = new Map(offloaded.map((value) => [value.input, value.restored]));
  const kept = (value: Value) => isKept(savePoints, value);
  emitBackward(builder, forward, new Map([[x, dx]]), kept, restored);
  return builder.finish("train", [batch.incoming, batch.block]);
}

/** The layer inputs that wait on the host, each with its places there and in the backward pass. */
function offloadedInputs(forward: readonly Op[], savePoints: SavePoints): OffloadedInput[] {
  const inputs = forward
    .flatMap(({ uses }) => uses.writes)
    .filter(({ role }) => role === "layerInput");
  return inputs.flatMap((input): OffloadedInput[] => {
    const layer = input.layer as number;
    if (!isOffloaded(savePoints, layer)) return [];
    const like = (name: string, options: ValueOptions) =>
      makeValue(name, input.dtype, input.shape, { layer, ...options });
    const host = like("hidden.host", { memory: "host" });
    return [{ layer, input, host, restored: like("hidden'", { role: "restored" }) }];
  });
}

/** Clipping, the loss scale and AdamW over the flat arena. */
function optimizerProgram({ adapters }: ModelParts, { incoming }: BatchBlock): Program {
  const { master, m, v, gradient, copy, control, state, scaler, metrics } = adapters;
  const builder = new ProgramBuilder();
  const blocks = Math.ceil((gradient.shape[0] as number) / NORM_BLOCK);
  const partial = makeValue("gradNorm.partial", "f64", [blocks]);
  builder.emit(gradNorm, { metrics, partial, state, scaler, gradient, control }, "optimizer");
  builder.emit(adamw, { master, m, v, gradient, copy, control, metrics }, "optimizer");
  return builder.finish("optimizer", [incoming]);
}

/** Loss without gradients. */
function evaluateProgram(parts: ModelParts, batch: BatchBlock, name: ProgramName): Program {
  const builder = new ProgramBuilder();
  const adapters = name === "evaluate" ? parts.adapters.layers : null;
  const attend = packedAttention(builder, batch, parts);
  const x = emitDecoder(builder, { ...parts, adapters }, batch, attend);
  const loss = emitLoss(builder, parts, batch, x, null);
  builder.emit(lossSum, { metrics: parts.adapters.metrics, loss, header: batch.header });
  return builder.finish(name, [batch.incoming, batch.block]);
}

/** Logits of every row, for checking a model against another implementation. */
function logitsProgram(
  parts: ModelParts,
  batch: BatchBlock,
  logits: Value,
  name: ProgramName,
): Program {
  const builder = new ProgramBuilder();
  const adapters = name === "logits" ? parts.adapters.layers : null;
  const attend = packedAttention(builder, batch, parts);
  const x = emitDecoder(builder, { ...parts, adapters }, batch, attend);
  emitHead(builder, logits, x, parts.weights.head, batch.live);
  return builder.finish(name, [batch.incoming, batch.block, logits]);
}

/** logits = x W^T */
function emitHead(builder: ProgramBuilder, y: Value, x: Value, w: Value, live: Value | null): void {
  builder.emit(loraLinearGroup, { y, x, w, bias: null, residual: null, s: null, lora: null, live });
}

interface Generation {
  readonly block: GenerationBlock;
  program(name: "prefill" | "decode", rows: number): Program;
}

/** Prefill and decode are the same ops over different numbers of rows; they carry input block and KV cache. */
function makeGeneration(parts: ModelParts, incoming: Value): Generation {
  const { config, weights, adapters, type, dims } = parts;
  const sizes = {
    live: 1,
    past: 1,
    last: 1,
    ids: dims.prefillTokens,
    positions: dims.prefillTokens,
  };
  const { block, window } = makeBlock("generation", sizes);
  const token = makeValue("token", "i32", [1]);
  const cache = (name: string) =>
    Array.from({ length: config.layers }, (_, layer) =>
      makeValue(name, type, [dims.contextTokens, config.kvHeads * config.headDim], { layer }),
    );
  const kCaches = cache("kCache");
  const vCaches = cache("vCache");
  const [live, past, last] = [window("live"), window("past"), window("last")];
  return {
    block: { block, live, past, last, token, ids: window("ids"), positions: window("positions") },
    program(name, rows) {
      const builder = new ProgramBuilder();
      const input = {
        ids: window("ids", rows),
        positions: window("positions", rows),
        live,
        mlpTiles: null,
      };
      const x = emitDecoder(
        builder,
        { ...parts, adapters: adapters.layers },
        input,
        (qkv, layer, shape) => {
          const o = builder.value("attention", type, [rows, shape.heads * shape.headDim]);
          const caches = { kCache: kCaches[layer] as Value, vCache: vCaches[layer] as Value };
          builder.emit(cachedAttention, { o, qkv, ...caches, past, live, shape });
          return o;
        },
      );
      const hidden = makeValue("lastHidden", type, [1, config.hiddenSize]);
      builder.emit(gatherRows, { y: hidden, x, index: last });
      const logits = makeValue("nextLogits", type, [1, config.vocabSize]);
      emitHead(builder, logits, hidden, weights.head, null);
      builder.emit(argmax, { out: token, x: logits });
      return builder.finish(name, [incoming, block, token, ...kCaches, ...vCaches]);
    },
  };
}
