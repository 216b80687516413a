/**
 * Checks that PEFT reads the adapter that loramem writes: both must see the same evaluation loss within 1e-3.
 * Needs Python with torch, transformers and peft.
 *
 *     bun tests/peers/adapter_loss.ts
 */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { LoraTrainer } from "../../mod.ts";

const DEMO = "examples/demo";
const TOLERANCE = 1e-3;

const folder = await mkdtemp(join(tmpdir(), "loramem-"));
try {
  await using trainer = await LoraTrainer.open({
    model: `${DEMO}/model`,
    data: `${DEMO}/train.jsonl`,
    evalData: `${DEMO}/valid.jsonl`,
    learningRate: 2e-3,
    warmupSteps: 10,
    device: "cpu",
  });
  for await (const step of trainer.steps()) void step;
  const ours = await trainer.evaluate();
  const adapter = join(folder, "adapter");
  await trainer.save(adapter);
  const script = ["tests/peers/adapter_loss.py", `${DEMO}/model`, adapter, `${DEMO}/valid.jsonl`];
  const output = execFileSync("python3", script, {
    encoding: "utf8",
    stdio: ["ignore", "pipe", "inherit"],
  });
  const { loss: peft, labelledTokens } = JSON.parse(output.trim().split("\n").at(-1) ?? "");
  console.log(
    JSON.stringify({ loramem: ours, peft, difference: Math.abs(ours - peft), labelledTokens }),
  );
  assert.ok(Math.abs(ours - peft) < TOLERANCE);
} finally {
  await rm(folder, { recursive: true, force: true });
}
