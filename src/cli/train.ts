/** `loramem train`: fine-tune, with a live line, evaluation and samples before and after, and a PEFT adapter at the end. */
import { mkdir, mkdtemp, rmdir, writeFile } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import process from "node:process";
import type { Command } from "commander";
import type { LoadProgress } from "../api/io/load_tensors.ts";
import { formatBytes } from "../api/plan/report.ts";
import type { Notice } from "../api/train/notice.ts";
import type { WeightPlace } from "../api/train/run_plan.ts";
import { LoraTrainer } from "../api/train/trainer.ts";
import { LoramemError } from "../ffi/error.ts";
import { formatDuration, StatusLine } from "./status_line.ts";
import { listenForStop } from "./stop_signal.ts";
import { addTrainFlags, type RunSettings, readTrainFlags } from "./train_flags.ts";

/** What is said of streamed weights. */
const WEIGHTS: Readonly<Record<WeightPlace, string>> = {
  resident: "",
  stream: ", weights streamed from host memory",
  file: ", weights streamed from a file",
};

/** Adds the subcommand to the program. */
export function addTrainCommand(program: Command): void {
  const command = program
    .command("train")
    .description("fine-tune a model with LoRA and write a PEFT adapter");
  addTrainFlags(command).action(async (values: Record<string, unknown>) => {
    process.exitCode = await train(await readTrainFlags(values));
  });
}

/** Runs a training; gives the exit status. */
async function train(settings: RunSettings): Promise<number> {
  const { options, out } = settings;
  await checkWritable(out);
  const print = (text: string) => process.stdout.write(`${text}\n`);
  const line = new StatusLine(process.stdout);
  const onNotice = ({ message }: Notice) => {
    line.end();
    print(message);
  };
  const onProgress = (progress: LoadProgress) =>
    line.show(describeLoad(progress), isLoaded(progress));
  await using trainer = await LoraTrainer.open(options, { onProgress, onNotice });
  const { noCuda } = trainer.device.info();
  print(
    `Device ${trainer.device.kind}${noCuda === undefined ? "" : ` (${noCuda})`}, ${trainer.options.precision}`,
  );
  print(
    `${trainer.parameters} trained parameters, ${trainer.totalSteps} steps of ${options.batchSize} documents, ` +
      `${trainer.tokensPerMicroBatch} tokens at once, save points ${trainer.savePoints}` +
      WEIGHTS[trainer.weights],
  );
  print(
    `${formatBytes(trainer.plan.deviceBytes)} on the device, known before the first step:\n${trainer.plan}`,
  );

  using stop = listenForStop(() => {
    line.end();
    print("Stopping after this step; once more to stop at once");
  });
  if (trainer.stepsDone === 0) {
    if (options.evalData !== undefined)
      print(`Evaluation loss before: ${(await trainer.evaluate()).toFixed(4)}`);
    await printSamples(trainer, settings, "before", print, stop.signal);
  }
  await runSteps(trainer, line, print, stop.signal);
  await printSamples(trainer, settings, "after", print, stop.signal);

  const folder = join(out, "adapter");
  await trainer.save(folder);
  await writeFile(join(out, "run.json"), `${JSON.stringify(describeRun(trainer), null, 2)}\n`);
  if (stop.signal.aborted)
    print(
      `Stopped after step ${trainer.stepsDone} of ${trainer.totalSteps}` +
        `${options.saveEvery === undefined ? "" : "; --resume auto goes on from there"}`,
    );
  print(`Adapter written to ${folder}`);
  return stop.exitCode;
}

function isLoaded({ bytes, totalBytes }: LoadProgress): boolean {
  return bytes === totalBytes;
}

function describeLoad(progress: LoadProgress): string {
  const { bytes, totalBytes, seconds, bytesPerSecond } = progress;
  const rate = `${(bytesPerSecond / 1e9).toFixed(2)} GB/s`;
  if (isLoaded(progress)) {
    return `Loaded ${formatBytes(bytes)} of weights in ${seconds.toFixed(1)} s, ${rate}`;
  }
  return `loading ${formatBytes(bytes)} of ${formatBytes(totalBytes)}  ${rate}`;
}

async function runSteps(
  trainer: LoraTrainer,
  line: StatusLine,
  print: (text: string) => void,
  signal: AbortSignal,
): Promise<void> {
  const { totalSteps, stepsPerEpoch, options, stepsDone: first } = trainer;
  let [tokens, seconds, waited] = [0, 0, 0];
  for await (const step of trainer.steps({ signal })) {
    tokens += step.tokens;
    seconds += step.seconds;
    waited += step.inputWaitSeconds;
    const left = (seconds / (step.step - first)) * (totalSteps - step.step);
    const skipped = step.skipped ? `skipped at loss scale ${step.lossScale}  ` : "";
    const { modelFlopUtilization: share } = step;
    const utilization = share === null ? "" : `  ${(100 * share).toFixed(1)} % MFU`;
    const text =
      `step ${step.step}/${totalSteps}  loss ${step.loss.toFixed(4)}  ${skipped}` +
      `${Math.round(tokens / seconds)} tokens/s${utilization}  ${formatDuration(left)} left`;
    const last = step.step === totalSteps;
    line.show(text, last);
    if (options.evalData === undefined || (!last && step.step % stepsPerEpoch !== 0)) continue;
    line.end();
    print(`Evaluation loss after epoch ${step.epoch}: ${(await trainer.evaluate()).toFixed(4)}`);
  }
  line.end();
  if (seconds > 0) print(describePerformance(trainer, waited));
}

/** What the steps amounted to, and the memory in use beside the plan. */
function describePerformance(trainer: LoraTrainer, waited: number): string {
  const { seconds, tokensPerSecond, modelFlopUtilization, memory } = trainer.performance();
  const share =
    modelFlopUtilization === null ? "" : `, ${(100 * modelFlopUtilization).toFixed(1)} % MFU`;
  const driver = memory.driver === null ? "" : `, ${formatBytes(memory.driver)} by the driver`;
  return (
    `On the device: ${Math.round(tokensPerSecond)} tokens/s${share}, ` +
    `${((100 * waited) / seconds).toFixed(2)} % of the time waiting for input; memory in use ` +
    `${formatBytes(memory.reserved)}, ${formatBytes(trainer.plan.deviceBytes)} planned${driver}`
  );
}

async function printSamples(
  trainer: LoraTrainer,
  { samples, sampleTokens }: RunSettings,
  when: string,
  print: (text: string) => void,
  signal: AbortSignal,
): Promise<void> {
  for (const sample of samples) {
    if (signal.aborted) return;
    const answer = await trainer.generate(sample, { maxTokens: sampleTokens });
    print(`Sample ${when}: ${sample} -> ${answer}`);
  }
}

/** What was asked for and what was chosen, to be read by people and by `--config`. */
function describeRun(trainer: LoraTrainer): unknown {
  return {
    options: { ...trainer.options, algorithms: trainer.algorithms },
    chosen: {
      device: trainer.device.info(),
      weights: trainer.weights,
      savePoints: trainer.savePoints,
      tokensPerMicroBatch: trainer.tokensPerMicroBatch,
      planBytes: trainer.plan.classes,
      steps: trainer.stepsDone,
    },
  };
}

/** Fails now, and not after the training, if the folder cannot be written. Leaves nothing behind. */
async function checkWritable(out: string): Promise<void> {
  let created: string | undefined;
  try {
    created = await mkdir(out, { recursive: true });
    await rmdir(await mkdtemp(join(out, ".write-test-")));
  } catch (cause) {
    const errno = String((cause as { code?: unknown }).code);
    const message = `--out: the folder cannot be written: ${out} (${errno}): choose another, or change its mode`;
    throw new LoramemError("IO", message, { file: out, errno }, { cause });
  } finally {
    // Only folders that were made here, from the innermost: rmdir refuses one that is not empty.
    for (
      let dir = resolve(out);
      created !== undefined && dir.startsWith(created);
      dir = dirname(dir)
    ) {
      await rmdir(dir).catch(() => undefined);
    }
  }
}
