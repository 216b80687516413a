/** Weights from a checkpoint in their planned slots: the bytes of the files, aligned, and with bounded host memory. */
import assert from "node:assert/strict";
import { cp, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { DTYPES } from "../../src/api/graph/value.ts";
import { toFloat32 } from "../../src/api/io/dtype.ts";
import {
  openSafetensors,
  type TensorData,
  type TensorFile,
  writeSafetensors,
} from "../../src/api/io/safetensors.ts";
import { Device } from "../../src/api/memory/mod.ts";
import type { WeightSource } from "../../src/api/nn/weights.ts";
import { loadWeights, storedType } from "../../src/api/train/load_weights.ts";
import { Session } from "../../src/api/train/session.ts";
import { LoraTrainer } from "../../src/api/train/trainer.ts";
import { DEMO } from "../cli/support.ts";
import { rejects, withScratch } from "../io/scratch.ts";
import { CASES, KINDS, openGolden, planGolden, readGolden, SMALL_RING } from "./support.ts";

/** What the slot of a tensor holds. */
async function slotOf(
  { executor }: Session,
  { value, element, elements }: WeightSource,
): Promise<Uint8Array<ArrayBuffer>> {
  const { bytes: size } = DTYPES[value.dtype];
  const { buffer, offset } = executor.locate(value);
  using host = executor.device.createPinnedBuffer(elements * size);
  executor.stream.copy(host, buffer, {
    bytes: elements * size,
    srcOffset: offset + element * size,
  });
  await executor.stream.done();
  return host.view(Uint8Array).slice();
}

async function readTensor(file: TensorFile, name: string): Promise<Uint8Array<ArrayBuffer>> {
  const entry = file.tensors.get(name);
  assert.ok(entry);
  const bytes = new Uint8Array(entry.bytes);
  await file.read(entry, bytes);
  return bytes;
}

for (const device of KINDS) {
  for (const name of CASES) {
    test(`loadWeights() brings the bytes of the file to aligned slots: ${name} on ${device}`, async () => {
      const golden = await readGolden(name);
      await using session = await openGolden(golden, { device });
      await using file = await openSafetensors(`${golden.folder}/model`);
      const { weights, plan } = session.run;
      for (const value of weights.values) assert.equal(plan.offset(value) % 256, 0, value.name);
      for (const source of weights.sources) {
        const expected = await readTensor(file, source.tensor);
        assert.deepEqual(await slotOf(session, source), expected, source.tensor); // mutant: element left out
      }
    });
  }

  test(`loadWeights() turns parts of different types into f32, exactly, on ${device}`, () =>
    withScratch(async (dir) => {
      const golden = await readGolden("llama3-rope-tied");
      await mixTypes(`${golden.folder}/model`, dir);
      const mixed = { ...golden, folder: dir };
      await cp(`${golden.folder}/adapter0`, join(dir, "adapter0"), { recursive: true });
      // Few tokens: the workspace is smaller than the tensors, which are converted piece by piece.
      const dims = { tokensPerMicroBatch: 4, documentsPerMicroBatch: 1, lossChunkTokens: 1 };
      const programs = ["evaluate"] as const;
      await using session = await openGolden(mixed, { device, dims, programs });
      await using file = await openSafetensors(`${dir}/model`);
      const types = new Set<string>();
      for (const source of session.run.weights.sources) {
        const stored = storedType(file, source.tensor);
        const bytes = await readTensor(file, source.tensor);
        const slot = await slotOf(session, source);
        types.add(`${stored} ${source.value.dtype}`);
        if (stored === source.value.dtype) assert.deepEqual(slot, bytes, source.tensor);
        else {
          assert.equal(source.value.dtype, "f32");
          const expected = toFloat32(file.tensors.get(source.tensor)?.dtype ?? "F32", bytes);
          assert.deepEqual(new Float32Array(slot.buffer), expected, source.tensor); // mutant: raw at the start of its part
        }
      }
      assert.ok(types.has("bf16 f32") && types.has("f16 f32") && types.has("f32 f32"));
      const { workspace } = session.executor;
      const largest = Math.max(...session.run.weights.sources.map(({ elements }) => elements));
      assert.ok(workspace.bytes < 4 * largest, `${workspace.bytes} bytes for ${largest} elements`);
    }));
}

/** A copy of a model in which k and up are stored as f32, v as f16. */
async function mixTypes(model: string, dir: string): Promise<void> {
  await cp(model, join(dir, "model"), { recursive: true });
  await using file = await openSafetensors(model);
  const tensors: TensorData[] = [];
  for (const { name, dtype, shape } of file.tensors.values()) {
    const data = await readTensor(file, name);
    const floats = toFloat32(dtype, data);
    const to = /k_proj|up_proj/.test(name) ? "F32" : /v_proj/.test(name) ? "F16" : dtype;
    const stored = to === "F16" ? new Float16Array(floats) : floats;
    const bytes = to === dtype ? data : new Uint8Array(stored.buffer);
    tensors.push({ name, dtype: to, shape, data: bytes });
  }
  await writeSafetensors(join(dir, "model/model.safetensors"), tensors);
}

test("loadWeights() loads shards, whatever the order of tensors in them", () =>
  withScratch(async (dir) => {
    const golden = await readGolden("qwen2");
    await cp(`${golden.folder}/model`, dir, { recursive: true });
    await using whole = await openSafetensors(dir);
    const map: Record<string, string> = {};
    // By name from the last to the first, every third tensor in one shard: no order that a model computes in.
    const names = [...whole.tensors.keys()].sort().reverse();
    for (let shard = 0; shard < 3; shard++) {
      const tensors: TensorData[] = [];
      for (const name of names.filter((_, index) => index % 3 === shard)) {
        const { dtype, shape } = whole.tensors.get(name) ?? { dtype: "F32", shape: [] };
        map[name] = `model-${shard}.safetensors`;
        tensors.push({ name, dtype, shape, data: await readTensor(whole, name) });
      }
      await writeSafetensors(join(dir, `model-${shard}.safetensors`), tensors);
    }
    await writeFile(join(dir, "model.safetensors.index.json"), JSON.stringify({ weight_map: map }));
    const run = await planGolden(golden);
    await using device = await Device.open("cpu", { threads: 1 });
    const session = Session.commit(device, run, "eager");
    await using shards = await openSafetensors(dir);
    await using ring = device.createFileRing(SMALL_RING);
    await loadWeights(session.executor, run, shards, ring);
    for (const source of run.weights.sources) {
      const expected = await readTensor(whole, source.tensor);
      assert.deepEqual(await slotOf(session, source), expected, source.tensor);
    }
    await session.dispose();
  }));

test("loadWeights() leaves a session that can be closed where the disk fails half-way", async () => {
  const golden = await readGolden("qwen2");
  const run = await planGolden(golden);
  await using file = await openSafetensors(`${golden.folder}/model`);
  const files = { failAt: 6, fails: 1000 };
  await using device = await Device.open("sim", { threads: 1, files });
  const before = device.stats();
  const session = Session.commit(device, run, "graph");
  const ring = device.createFileRing(SMALL_RING);
  await rejects(() => loadWeights(session.executor, run, file, ring), "IO", /model\.safetensors/);
  await ring.dispose();
  await session.dispose();
  assert.equal(device.stats().reserved, before.reserved);
});

test("LoraTrainer.open() reports the load, and gives everything back where it is stopped", async () => {
  const options = {
    model: join(DEMO, "model"),
    data: join(DEMO, "valid.jsonl"),
    device: "cpu",
    promptTokens: 0,
  } as const;
  const seen: number[] = [];
  await using trainer = await LoraTrainer.open(options, {
    onProgress: ({ bytes, totalBytes }) => seen.push(bytes / totalBytes),
  });
  assert.equal(seen.at(-1), 1);
  assert.ok(trainer.plan.deviceBytes > 0);
  const signal = AbortSignal.abort();
  await rejects(() => LoraTrainer.open(options, { signal }), "CANCELLED");
});
