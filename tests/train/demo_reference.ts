/** PEFT's run on the demo data, to be compared with: batch 8, 99 steps an epoch, AdamW 2e-3, warm-up times cosine. */
import { readFile } from "node:fs/promises";
import { LoraTrainer } from "../../mod.ts";

interface PeftReference {
  readonly base_eval_loss: number;
  readonly base_samples: Readonly<Record<string, string>>;
  readonly eval_loss_after_each_epoch: readonly number[];
}

export async function readReference(): Promise<PeftReference> {
  const file = new URL("../golden/demo_peft_reference.json", import.meta.url);
  return JSON.parse(await readFile(file, "utf8"));
}

/** The demo with PEFT's settings, three epochs. */
export async function openDemo(): Promise<LoraTrainer> {
  const demo = new URL("../../examples/demo/", import.meta.url).pathname;
  return await LoraTrainer.open({
    model: `${demo}model`,
    data: `${demo}train.jsonl`,
    evalData: `${demo}valid.jsonl`,
    device: "cpu",
    batchSize: 8,
    epochs: 3,
    dropLast: true,
    learningRate: 2e-3,
    warmupSteps: 10,
  });
}
