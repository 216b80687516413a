/** What ends other runs half-way: one long sample, evaluation, generation, a save. Here none of them takes a byte more. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { LoraTrainer } from "../../mod.ts";
import { DEMO, temporary } from "../cli/support.ts";
import { KINDS } from "./support.ts";

const record = (question: string, answer: string) => ({
  messages: [
    { role: "user", content: question },
    { role: "assistant", content: answer },
  ],
});

const SHORT = Array.from({ length: 9 }, (_, index) => record(`Define: ${index}`, "A number."));
const LONG = record(
  "Define: patience",
  "A minor form of despair, disguised as a virtue. ".repeat(28),
);

for (const device of KINDS) {
  test(`LoraTrainer takes no memory after its first step on ${device}: a document of 20 times the median, evaluation, samples, saves`, async () => {
    await using folder = await temporary();
    await using trainer = await LoraTrainer.open({
      model: `${DEMO}/model`,
      data: [...SHORT.slice(0, 5), LONG, ...SHORT.slice(5)],
      evalData: [SHORT[0], LONG],
      device,
      batchSize: 2,
      epochs: 2,
      lora: { rank: 4 },
      promptTokens: 32,
      answerTokens: 16,
      memoryBudget: "28MB", // less than it would like
    });
    const memory = () => {
      const { kernelLaunches: _, ...counters } = trainer.device.stats();
      // On the CPU the system's free memory is that of all programs.
      return device === "cpu" ? counters : { ...counters, free: trainer.device.info().memoryFree };
    };
    const tokens: number[] = [];
    let first: ReturnType<typeof memory> | null = null;
    for await (const step of trainer.steps()) {
      tokens.push(step.tokens);
      await trainer.evaluate();
      await trainer.generate("Define: love", { maxTokens: 4 });
      await trainer.save(`${folder.path}/adapter`);
      first ??= memory();
      assert.deepEqual(memory(), first, `step ${step.step}`);
    }
    assert.equal(tokens.length, 10);
    const sorted = tokens.toSorted((a, b) => a - b);
    // Two documents a step: the median step is two short ones.
    const median = (sorted[Math.floor(sorted.length / 2)] ?? 0) / 2;
    const longest = (sorted.at(-1) ?? 0) - median;
    assert.ok(longest >= 20 * median, `${longest} and ${median} tokens`);
    assert.ok(trainer.tokensPerMicroBatch >= longest);
    assert.notEqual(trainer.savePoints, "keep");
    assert.ok((first?.reserved ?? 0) < 28e6 + 3 * 4096);
  });
}
