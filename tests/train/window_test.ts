/** Qwen2 with a sliding window in some layers, against the decoder written as formulas. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { toFloat32 } from "../../src/api/io/dtype.ts";
import { openSafetensors } from "../../src/api/io/safetensors.ts";
import { type ModelConfig, readModelConfig } from "../../src/api/nn/config.ts";
import { exportAdapters } from "../../src/api/train/adapter_state.ts";
import { withScratch } from "../io/scratch.ts";
import { Random } from "../kernels/rig.ts";
import { decoder, meanLoss } from "../reference/decoder.ts";
import { at, type Matrix, matrix } from "../reference/matrix.ts";
import {
  type Golden,
  KINDS,
  openGolden,
  readGolden,
  relativeError,
  slidingGolden,
} from "./support.ts";

/** The tensors of a checkpoint as matrices. */
async function readWeights(golden: Golden): Promise<ReadonlyMap<string, Matrix>> {
  await using file = await openSafetensors(`${golden.folder}/model`);
  const weights = new Map<string, Matrix>();
  for (const entry of file.tensors.values()) {
    const bytes = new Uint8Array(entry.bytes);
    await file.read(entry, bytes);
    const data = Float64Array.from(toFloat32(entry.dtype, bytes));
    const cols = entry.shape.at(-1) as number;
    weights.set(entry.name, { rows: data.length / cols, cols, data });
  }
  return weights;
}

/** Logits of the first batch by the formulas, document by document. */
function reference(golden: Golden, config: ModelConfig, weights: ReadonlyMap<string, Matrix>) {
  const weight = (name: string) => weights.get(name) as Matrix;
  return (golden.batches[0] ?? []).map(({ ids }) => decoder(config, weight, Array.from(ids)));
}

const flat = (logits: readonly Matrix[]) => logits.flatMap(({ data }) => Array.from(data));

/** W + alpha / r (B + step dB) (A + step dA) for every adapted module, dA and dB drawn at random. */
function stepped(golden: Golden, weights: ReadonlyMap<string, Matrix>, seed: number, step: number) {
  const random = new Random(seed);
  const { alpha } = golden.adapter0.config;
  const result = new Map(weights);
  const directions = new Map<string, { readonly a: Matrix; readonly b: Matrix }>();
  for (const { path, rank, inFeatures, outFeatures, a, b } of golden.adapter0.tensors) {
    const [da, db] = [
      random.matrix("f32", rank, inFeatures),
      random.matrix("f32", outFeatures, rank),
    ];
    directions.set(path, { a: da, b: db });
    const base = weights.get(`${path}.weight`) as Matrix;
    const merged = matrix(outFeatures, inFeatures, (row, col) => {
      let lora = 0;
      for (let r = 0; r < rank; r++) {
        const left = (b[row * rank + r] as number) + step * at(db, row, r);
        lora += left * ((a[r * inFeatures + col] as number) + step * at(da, r, col));
      }
      return at(base, row, col) + (alpha / rank) * lora;
    });
    result.set(`${path}.weight`, merged);
  }
  return { weights: result, directions };
}

test("the decoder of formulas gives the reference logits of the golden qwen2", async () => {
  const golden = await readGolden("qwen2");
  const config = await readModelConfig(`${golden.folder}/model`);
  const logits = reference(golden, config, await readWeights(golden));
  assert.ok(relativeError(flat(logits), golden.tensors.get("base_logits") ?? []) < 1e-5);
});

for (const device of KINDS) {
  test(`Session runs Qwen2 with a window in some layers as the formulas do on ${device}`, async () => {
    await withScratch(async (dir) => {
      const golden = await slidingGolden(dir, { window: 16, fullLayers: 1 });
      const config = await readModelConfig(`${golden.folder}/model`);
      assert.deepEqual(config.windows, [0, 16]);
      const weights = await readWeights(golden);
      await using session = await openGolden(golden, { device });
      const documents = golden.batches[0] ?? [];
      const logits = await session.logits(documents, true);
      assert.ok(relativeError(logits, flat(reference(golden, config, weights))) < 1e-5);
      // A window that is one key longer, or in another layer, is told apart.
      for (const windows of [
        [0, 17],
        [0, 15],
        [16, 0],
        [16, 16],
        [0, 0],
      ]) {
        const other = flat(reference(golden, { ...config, windows }, weights));
        assert.ok(relativeError(logits, other) > 1e-3, `${windows}`);
      }

      await session.accumulate(documents);
      const gradients = await exportAdapters(session.executor, session.run, "gradient");
      for (const seed of [1, 2]) {
        const [step, { directions }] = [1e-4, stepped(golden, weights, seed, 0)];
        const loss = (side: number) => {
          const moved = stepped(golden, weights, seed, side * step).weights;
          return meanLoss(reference(golden, config, moved), documents);
        };
        const slope = (loss(1) - loss(-1)) / (2 * step);
        let [projected, size] = [0, 0];
        for (const { path, a, b } of gradients) {
          const { a: da, b: db } = directions.get(path) as { a: Matrix; b: Matrix };
          for (const [gradient, direction] of [
            [a, da],
            [b, db],
          ] as const) {
            gradient.forEach((value, index) => {
              projected += value * (direction.data[index] as number);
              size += value ** 2;
            });
          }
        }
        assert.ok(Math.abs(slope - projected) < 1e-4 * Math.sqrt(size), `${slope}, ${projected}`);
      }
    });
  });
}
