/**
 * Fine-tunes a model, in the order in which it happens; copy and change it.
 *
 *     bun run train.ts --model examples/demo/model --data examples/demo/train.jsonl \
 *       --eval-data examples/demo/valid.jsonl --learning-rate 2e-3 --out out/mine
 *     deno run -A train.ts ...
 *
 * Every flag of `bun cli.ts train --help` is understood.
 */
import process from "node:process";
import { Command } from "commander";
import { LoraTrainer, type Notice } from "./mod.ts";
import { addTrainFlags, readTrainFlags } from "./src/cli/train_flags.ts";

// Flags, then options with every default filled in.
const command = addTrainFlags(new Command("train.ts").showSuggestionAfterError());
const { options, out, samples, sampleTokens } = await readTrainFlags(command.parse().opts());

// Ctrl-C stops after the current step, and the adapter is saved.
const stop = new AbortController();
process.once("SIGINT", () => stop.abort());
process.once("SIGTERM", () => stop.abort());

// Reads and checks everything, reserves every byte, loads the weights.
const onNotice = ({ message }: Notice) => console.log(message);
await using trainer = await LoraTrainer.open(options, { onNotice });
console.log(String(trainer.plan));

const report = async (when: string) => {
  if (options.evalData !== undefined)
    console.log(`evaluation loss ${when}:`, await trainer.evaluate());
  for (const sample of samples) {
    console.log(`${sample} ->`, await trainer.generate(sample, { maxTokens: sampleTokens }));
  }
};

await report("before");
for await (const step of trainer.steps({ signal: stop.signal })) {
  // One wait for the device per step: the loss is read back here.
  const speed = `${Math.round(step.tokensPerSecond)} tokens/s`;
  console.log(`step ${step.step}/${trainer.totalSteps}  loss ${step.loss.toFixed(4)}  ${speed}`);
}
await report("after");

// A folder that PEFT, vLLM and llama.cpp read.
await trainer.save(`${out}/adapter`);
console.log(`adapter written to ${out}/adapter`);
