import assert from "node:assert/strict";
import { test } from "node:test";
import { generateTokens } from "../../src/api/generate/generate.ts";
import type { Session } from "../../src/api/train/session.ts";
import { LoramemError } from "../../src/ffi/error.ts";
import { withScratch } from "../io/scratch.ts";
import { type Golden, openGolden, readGolden, slidingGolden } from "./support.ts";

function argmax(row: Float32Array): number {
  return row.reduce((best, value, index) => (value > (row[best] as number) ? index : best), 0);
}

async function generate(
  session: Session,
  prompt: readonly number[],
  maxTokens: number,
  stopIds = new Set<number>(),
) {
  const { set, staging, spec } = session.run;
  assert.ok(set.generation !== null && staging.generation !== null);
  const io = {
    executor: session.executor,
    block: set.generation,
    hostBlock: staging.generation,
    hostToken: staging.token,
    contextTokens: spec.dims.contextTokens,
  };
  return await generateTokens(io, prompt, { maxTokens, stopIds });
}

/** Checks what a session generates against the logits of full forwards. */
async function checkGeneration(golden: Golden, document: number): Promise<void> {
  await using session = await openGolden(golden);
  // Longer than a prefill of 8 rows, so that the prompt goes through in two pieces.
  const prompt = Array.from(golden.batches.flat()[document]?.ids.subarray(0, 13) ?? []);
  const answer = await generate(session, prompt, 6);
  const ids = [...prompt];
  for (const token of answer) {
    const labelled = new Uint8Array(ids.length).fill(1).fill(0, 0, 1);
    const logits = await session.logits([{ ids: Int32Array.from(ids), labelled, where: "test" }]);
    const vocab = logits.length / ids.length;
    assert.equal(token, argmax(logits.subarray((ids.length - 1) * vocab)));
    ids.push(token);
  }
  assert.equal(answer.length, 6);
  const stopped = await generate(session, prompt, 6, new Set([answer[2] as number]));
  assert.deepEqual(stopped, answer.slice(0, answer.indexOf(answer[2] as number)));
}

test("generateTokens() with its KV cache says what full forwards say", async () => {
  for (const name of ["llama", "qwen2", "llama3-rope-tied"]) {
    await checkGeneration(await readGolden(name), 0);
  }
});

test("generateTokens() keeps to the window of a layer", async () => {
  await withScratch(async (dir) => {
    const golden = await slidingGolden(dir, { window: 3, fullLayers: 0 });
    for (let document = 0; document < 6; document++) await checkGeneration(golden, document);
  });
});

test("generateTokens() refuses more than was planned, with the numbers", async () => {
  const golden = await readGolden("llama");
  await using session = await openGolden(golden);
  await assert.rejects(generate(session, [3, 4, 5], 22), (error: unknown) => {
    return (
      error instanceof LoramemError &&
      error.code === "OVER_PLAN" &&
      /3 \+ 22 tokens, 24 planned/.test(error.message)
    );
  });
});

test("Session.evaluate() equals the loss that training reports, and ignores the adapters on request", async () => {
  const golden = await readGolden("llama");
  await using session = await openGolden(golden);
  const documents = golden.batches[0] ?? [];
  const evaluated = await session.evaluate(documents);
  const base = await session.evaluate(documents, true);
  const { loss } = await session.trainStep(documents, golden.settings);
  assert.equal(evaluated, loss);
  assert.notEqual(base, loss);
});

test("Session packs many documents and still gives the loss of the whole step", async () => {
  const golden = await readGolden("llama");
  await using session = await openGolden(golden);
  const all = golden.batches.flat();
  const whole = await session.evaluate(all);
  let [sum, labelled] = [0, 0];
  for (const document of all) {
    const count = document.labelled.reduce((total, flag) => total + flag, 0);
    sum += (await session.evaluate([document])) * count;
    labelled += count;
  }
  assert.ok(Math.abs(whole - sum / labelled) < 1e-6);
});

test("Session trains in bf16 close to fp32", async () => {
  const golden = await readGolden("qwen2");
  await using session = await openGolden(golden, { precision: "bf16" });
  for (let step = 0; step < golden.losses.length; step++) {
    const { loss } = await session.trainStep(golden.batches[step % 3] ?? [], golden.settings);
    assert.ok(Math.abs(loss - (golden.losses[step] ?? 0)) < 0.03, `step ${step}: ${loss}`);
  }
});
