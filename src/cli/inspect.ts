/** `loramem inspect`: what a safetensors file, a model, an adapter or a run's checkpoints hold, and whether it is sound. */
import process from "node:process";
import type { Command } from "commander";
import type { InspectedFile } from "../api/io/inspect_file.ts";
import { formatBytes } from "../api/plan/report.ts";
import { type Inspection, inspectFiles } from "../api/train/inspect.ts";

/** Adds the subcommand to the program. */
export function addInspectCommand(program: Command): void {
  program
    .command("inspect")
    .description(
      "say what a safetensors file, model, adapter or run folder holds; exit status 1 if not sound",
    )
    .argument("<path>", "the file or folder")
    .option("--values", "read every element and count NaN and infinity")
    .option("--json", "print one JSON object")
    .action(async (path: string, { values, json }: { values?: true; json?: true }) => {
      const found = await inspectFiles(path, { values: values ?? false });
      process.stdout.write(`${json ? JSON.stringify(toJson(found), null, 2) : describe(found)}\n`);
      if (!found.sound) process.exitCode = 1;
    });
}

/** Errors as their messages. */
function toJson(found: Inspection): unknown {
  const faults = found.faults.map(({ code, message, details }) => ({ code, message, ...details }));
  const files = found.files.map(({ faults: _, ...file }) => file);
  return { ...found, files, faults };
}

function describe({ path, kind, files, faults, remarks }: Inspection): string {
  const count = files.reduce((sum, file) => sum + file.tensors.length, 0);
  return [
    `${path}: ${kind}, ${files.length} file${files.length === 1 ? "" : "s"}, ${count} tensors`,
    ...files.flatMap(describeFile),
    ...remarks.map((remark) => `Remark: ${remark}`),
    ...faults.map(({ message }) => `Fault: ${message}`),
    faults.length === 0 ? "Sound" : `Not sound: ${faults.length} found`,
  ].join("\n");
}

function describeFile({ path, bytes, metadata, tensors }: InspectedFile): string[] {
  const width = Math.max(0, ...tensors.map(({ name }) => name.length));
  return [
    `${path}: ${bytes === null ? "cannot be reached" : formatBytes(bytes)}`,
    ...Object.entries(metadata).map(([key, text]) => `  ${key} = ${shorten(text)}`),
    ...tensors.map(({ name, dtype, shape, bytes, nan, infinite, intact }) => {
      const odd = nan === null ? "" : `  ${nan} NaN, ${infinite} infinite`;
      const sum = intact === null ? "" : `  checksum ${intact ? "right" : "WRONG"}`;
      const size = `${dtype.padEnd(4)} [${shape}]  ${formatBytes(bytes)}`;
      return `  ${name.padEnd(width)}  ${size}${odd}${sum}`;
    }),
  ];
}

/** Metadata of a hostile file may be long and may hold control characters. */
function shorten(text: string): string {
  const quoted = JSON.stringify(text);
  return quoted.length > 120 ? `${quoted.slice(0, 120)}...` : quoted;
}
