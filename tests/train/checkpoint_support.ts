/** A small run that is stopped and resumed. */
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { LoraTrainer, type Notice, type StepInfo, type TrainOptions } from "../../mod.ts";
import { DEMO, temporary } from "../cli/support.ts";

const record = (word: string, answer: string) => ({
  messages: [
    { role: "user", content: `Define: ${word}` },
    { role: "assistant", content: answer },
  ],
});

/** Five documents: three steps of two in an epoch, the last one with one document. */
export const RECORDS = [
  record("rack", "An argumentative implement."),
  record("aim", "The task we set our wishes to."),
  record("selfish", "Devoid of consideration for the selfishness of others."),
  record("love", "A temporary insanity."),
  record("year", "A period of three hundred and sixty-five disappointments."),
];

/** Six steps in two epochs. */
export function smallRun(more: Partial<TrainOptions> = {}): TrainOptions {
  return {
    model: join(DEMO, "model"),
    data: RECORDS,
    evalData: RECORDS.slice(3),
    device: "cpu",
    threads: 1,
    batchSize: 2,
    epochs: 2,
    lora: { rank: 4, alpha: 8 },
    learningRate: 1e-3,
    warmupSteps: 2,
    promptTokens: 32,
    answerTokens: 4,
    algorithms: "estimated", // timing may choose otherwise in the next run
    ...more,
  };
}

/** What a step did that is the same in every run; times are not. */
type SameInfo = Pick<StepInfo, (typeof SAME)[number]>;
const SAME = [
  ...(["step", "epoch", "loss", "learningRate", "gradNorm"] as const),
  ...(["skipped", "lossScale", "tokens"] as const),
] as const;

/** What a run did: every step without its times, the adapter as a hash, and notices. */
export interface Trace {
  readonly steps: SameInfo[];
  adapter: string;
  readonly notices: Notice[];
}

export interface TraceOptions {
  /** Called after every step; true leaves the loop. */
  readonly after?: (trainer: LoraTrainer, step: number) => Promise<boolean | undefined>;
  readonly signal?: AbortSignal;
}

/** Runs to the end, or until `after` says so. */
export async function traceRun(options: TrainOptions, how: TraceOptions = {}): Promise<Trace> {
  const trace: Trace = { steps: [], adapter: "", notices: [] };
  const onNotice = (notice: Notice) => void trace.notices.push(notice);
  await using trainer = await LoraTrainer.open(options, { onNotice });
  for await (const step of trainer.steps(how.signal === undefined ? {} : { signal: how.signal })) {
    trace.steps.push(Object.fromEntries(SAME.map((name) => [name, step[name]])) as SameInfo);
    if (await how.after?.(trainer, step.step)) return trace;
  }
  trace.adapter = await adapterHash(trainer);
  return trace;
}

/** SHA-256 of the adapter that a trainer would save. */
export async function adapterHash(trainer: LoraTrainer): Promise<string> {
  await using folder = await temporary();
  await trainer.save(folder.path);
  const bytes = await readFile(join(folder.path, "adapter_model.safetensors"));
  return createHash("sha256").update(bytes).digest("hex");
}
