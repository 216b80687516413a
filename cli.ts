#!/usr/bin/env bun
/**
 * The command line.
 *
 *     bun cli.ts train --help
 *     deno run -A cli.ts train --help
 *     bun cli.ts plan --help
 *     bun cli.ts inspect --help
 *     bun cli.ts doctor
 */
import process from "node:process";
import { Command } from "commander";
import { LoramemError } from "./mod.ts";
import { addDoctorCommand } from "./src/cli/doctor.ts";
import { addInspectCommand } from "./src/cli/inspect.ts";
import { addPlanCommand } from "./src/cli/plan.ts";
import { addTrainCommand } from "./src/cli/train.ts";

const program = new Command("loramem")
  .description("LoRA fine-tuning with every byte planned before the first step")
  .version("0.1.0")
  .showSuggestionAfterError()
  .showHelpAfterError("(--help lists all flags)");
addTrainCommand(program);
addPlanCommand(program);
addInspectCommand(program);
addDoctorCommand(program);

// `... | head` closes the pipe early. The reader has what it wanted, but a run is not lost for that: it goes on and is saved.
process.stdout.on("error", (error: NodeJS.ErrnoException) => {
  if (error.code !== "EPIPE") throw error;
});

try {
  await program.parseAsync(process.argv);
} catch (error) {
  // A failure that loramem names needs no stack; anything else is a bug and keeps it.
  process.stderr.write(
    `${error instanceof LoramemError ? `error: ${error.message}` : (error as Error).stack}\n`,
  );
  process.exitCode = 1;
}
