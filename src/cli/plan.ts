/** `loramem plan`: what a training would take, without a GPU, weights or the native library. */
import { writeFile } from "node:fs/promises";
import process from "node:process";
import type { Command } from "commander";
import { renderPage } from "../api/plan/page.ts";
import { pageData } from "../api/plan/page_data.ts";
import { planTraining, type TrainingPlan } from "../api/train/plan_training.ts";
import { LoramemError } from "../ffi/error.ts";
import { addOptionFlags, readOptionFlags } from "./train_flags.ts";

/** Adds the subcommand to the program. */
export function addPlanCommand(program: Command): void {
  const command = program
    .command("plan")
    .description("work out every byte and the speed of a training, on any machine")
    .option("--budget <bytes>", "the same as --memory-budget")
    .option("--html <file>", "write a page that shows every value over the step");
  addOptionFlags(command).action(async (values: Record<string, unknown>) => {
    const { html, budget, ...flags } = values;
    const given = budget === undefined ? flags : { memoryBudget: budget, ...flags };
    const { data, ...options } = await readOptionFlags(given, { data: [] });
    const noData = Array.isArray(data) && data.length === 0;
    const planned = await planTraining(noData ? options : { ...options, data });
    process.stdout.write(`${planned}\n`);
    if (html !== undefined) await writePage(planned, String(html), options.model);
  });
}

async function writePage(planned: TrainingPlan, file: string, model: string): Promise<void> {
  const page = renderPage(pageData(`Memory plan of ${model}`, planned.compared()));
  try {
    await writeFile(file, page);
  } catch (cause) {
    const errno = String((cause as { code?: unknown }).code);
    const message = `--html: cannot be written: ${file} (${errno}): choose another file`;
    throw new LoramemError("IO", message, { file, errno }, { cause });
  }
  process.stdout.write(`Page written to ${file}\n`);
}
