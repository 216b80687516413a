/** The whole decoder as its formulas: Llama, and Qwen2 with biases and sliding windows. One document, no adapter. */
import type { ModelConfig } from "../../src/api/nn/config.ts";
import { attention } from "./attention.ts";
import { at, type Matrix, matrix, sum, timesTransposed } from "./matrix.ts";
import { gatherRows, glu, rmsNorm, rope } from "./rows.ts";

/** Logits [T, V]. `weight` gives a tensor of the checkpoint as a matrix, a vector as one row. */
export function decoder(
  config: ModelConfig,
  weight: (name: string) => Matrix,
  ids: readonly number[],
): Matrix {
  const { heads, kvHeads, headDim, rmsNormEps: eps } = config;
  const half = headDim / 2;
  const angle = (position: number, pair: number) => position / config.rope.theta ** (pair / half);
  const cos = matrix(ids.length, half, (row, col) => Math.cos(angle(row, col)));
  const sin = matrix(ids.length, half, (row, col) => Math.sin(angle(row, col)));
  const positions = ids.map((_, position) => position);
  const turn = (x: Matrix, count: number) => rope(x, cos, sin, positions, count, headDim, 1);
  const linear = (x: Matrix, module: string, biased = false) => {
    const y = timesTransposed(x, weight(`${module}.weight`));
    const bias = biased ? weight(`${module}.bias`) : null;
    return bias === null
      ? y
      : matrix(y.rows, y.cols, (row, col) => at(y, row, col) + at(bias, 0, col));
  };
  const add = (a: Matrix, b: Matrix) =>
    matrix(a.rows, a.cols, (row, col) => at(a, row, col) + at(b, row, col));

  let x = gatherRows(weight("model.embed_tokens.weight"), ids);
  config.windows.forEach((window, index) => {
    const layer = `model.layers.${index}`;
    const n = rmsNorm(x, weight(`${layer}.input_layernorm.weight`), eps);
    const project = (name: string) => linear(n, `${layer}.self_attn.${name}_proj`, config.qkvBias);
    const [q, k, v] = [turn(project("q"), heads), turn(project("k"), kvHeads), project("v")];
    const shape = { heads, kvHeads, headDim, scale: 1 / Math.sqrt(headDim), window };
    const { o } = attention(q, k, v, [0, ids.length], shape);
    x = add(x, linear(o, `${layer}.self_attn.o_proj`, config.oBias));
    const m = rmsNorm(x, weight(`${layer}.post_attention_layernorm.weight`), eps);
    const [gate, up] = [linear(m, `${layer}.mlp.gate_proj`), linear(m, `${layer}.mlp.up_proj`)];
    const gu = matrix(m.rows, 2 * gate.cols, (row, col) =>
      col < gate.cols ? at(gate, row, col) : at(up, row, col - gate.cols),
    );
    x = add(x, linear(glu(gu), `${layer}.mlp.down_proj`));
  });
  const head = config.tieWordEmbeddings ? "model.embed_tokens" : "lm_head";
  return linear(rmsNorm(x, weight("model.norm.weight"), eps), head);
}

/** Mean over the labelled tokens of -log p(token | tokens before it). */
export function meanLoss(
  logits: readonly Matrix[],
  documents: readonly { readonly ids: Int32Array; readonly labelled: Uint8Array }[],
): number {
  let [total, count] = [0, 0];
  documents.forEach(({ ids, labelled }, index) => {
    const all = logits[index] as Matrix;
    for (let row = 1; row < ids.length; row++) {
      if (labelled[row] !== 1) continue;
      const most = Math.max(...all.data.subarray((row - 1) * all.cols, row * all.cols));
      const mass = sum(all.cols, (col) => Math.exp(at(all, row - 1, col) - most));
      total += most + Math.log(mass) - at(all, row - 1, ids[row] as number);
      count++;
    }
  });
  return total / count;
}
