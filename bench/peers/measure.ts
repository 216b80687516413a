/** Starts the two sides of a comparison, each in processes of its own, and keeps what they print. */
import { spawn } from "node:child_process";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";
import { writeResult } from "../results.ts";

/** What one run measured, or why it could not; of the fields only those are named that are compared. */
export interface Row {
  readonly system: "loramem" | "peft";
  readonly setting: string;
  /** Set by {@linkcode mergeRows}. */
  readonly shape?: string;
  readonly error?: string;
  readonly losses?: readonly number[];
  readonly tokensPerSecond?: number;
  readonly stepMs?: number;
  readonly planGiB?: number;
  readonly driverGiB?: number;
  /** Most that PyTorch's allocator had given out: less than the driver lost, which suits PEFT best. */
  readonly allocatorPeakGiB?: number;
  readonly processGiB?: number;
  readonly processPeakGiB?: number;
  readonly skipped?: readonly number[];
}

/** Runs loramem on a case; `flags` are those of loramem.ts. */
export async function runLoramem(
  folder: string,
  setting: string,
  flags: Readonly<Record<string, string | number>>,
  limit: number,
): Promise<Row> {
  const script = fileURLToPath(new URL("loramem.ts", import.meta.url));
  const prefix = process.versions.deno === undefined ? [] : ["run", "-A"];
  const args = [...prefix, script, folder, ...asArguments(flags)];
  const { rows, failure } = await runLines(process.execPath, args, limit);
  return rows[0] ?? { system: "loramem", setting, error: failure };
}

/** Runs PEFT on a case under every setting; `flags` are those of peft.py. */
export async function runPeft(
  folder: string,
  settings: readonly string[],
  flags: Readonly<Record<string, string | number>>,
  limit: number,
): Promise<Row[]> {
  if (settings.length === 0) return [];
  const script = fileURLToPath(new URL("peft.py", import.meta.url));
  const all = { ...flags, settings: settings.join(","), limit };
  const python = process.env.PYTHON ?? "python3";
  const args = [script, folder, ...asArguments(all)];
  const { rows, failure } = await runLines(python, args, limit * settings.length + 60);
  const missing = settings.filter((setting) => !rows.some((row) => row.setting === setting));
  return [...rows, ...missing.map((setting): Row => ({ system: "peft", setting, error: failure }))];
}

function asArguments(flags: Readonly<Record<string, string | number>>): string[] {
  return Object.entries(flags).flatMap(([name, value]) => [`--${name}`, String(value)]);
}

/** Runs a program that prints JSON objects, one a line; it is ended after `limit` seconds. */
async function runLines(
  program: string,
  args: readonly string[],
  limit: number,
): Promise<{ rows: Row[]; failure: string }> {
  const env = { ...process.env, NO_COLOR: "1" };
  const child = spawn(program, args, { env, stdio: ["ignore", "pipe", "pipe"] });
  const timer = setTimeout(() => child.kill("SIGKILL"), 1000 * limit);
  let [output, errors] = ["", ""];
  child.stdout.setEncoding("utf8").on("data", (text: string) => {
    output += text;
  });
  child.stderr.setEncoding("utf8").on("data", (text: string) => {
    errors = (errors + text).slice(-4000);
  });
  const ending = await new Promise<string>((resolve) => {
    child.on("error", (error) => resolve(error.message));
    child.on("close", (code, signal) => resolve(`ended with ${signal ?? code}`));
  });
  clearTimeout(timer);
  const rows = output.split("\n").flatMap((line): Row[] => {
    return line.startsWith("{") ? [JSON.parse(line)] : [];
  });
  const lines = errors.split("\n").map((line) => line.trim());
  const said = lines.findLast((line) => /^(error|\w*Error|E[A-Z]+)\b.*:/.test(line)) ?? "";
  return { rows, failure: `${ending}: ${said.slice(0, 300)}` };
}

/** A run of ours beside the best of the peer's. */
export interface Comparison {
  readonly shape: string;
  readonly setting: string;
  /** The peer's setting, and what it is best at. */
  readonly peer: string;
  readonly best: "fastest" | "leanest";
  /** Ours over theirs. */
  readonly tokensPerSecond: number;
  /** Ours over theirs; null where there is no device to ask. */
  readonly memory: number | null;
}

/** Every run of ours beside the peer's fastest and leanest run of its shape. */
export function compare(rows: readonly Row[]): Comparison[] {
  const ran = rows.filter((row) => row.tokensPerSecond !== undefined && !/fp32/.test(row.setting));
  return ran.flatMap(({ system, setting, shape = "", ...ours }) => {
    if (system !== "loramem") return [];
    const peers = ran.filter((row) => row.system === "peft" && row.shape === shape);
    const fastest = bestOf(peers, (row) => row.tokensPerSecond ?? 0);
    const leanest = bestOf(peers, (row) => -(memoryOf(row) ?? Number.POSITIVE_INFINITY));
    const memory = memoryOf({ system, setting, ...ours });
    return [["fastest", fastest] as const, ["leanest", leanest] as const].flatMap(
      ([best, peer]): Comparison[] => {
        if (peer === undefined) return [];
        const theirs = memoryOf(peer);
        return [
          {
            shape,
            setting,
            peer: peer.setting,
            best,
            tokensPerSecond: (ours.tokensPerSecond ?? 0) / (peer.tokensPerSecond ?? 0),
            memory: memory === undefined || theirs === undefined ? null : memory / theirs,
          },
        ];
      },
    );
  });
}

/** GiB: the driver's figure of ours, the allocator's peak of theirs. That is the reading that suits PEFT best. */
export function memoryOf(row: Row): number | undefined {
  return row.system === "peft" ? row.allocatorPeakGiB : (row.driverGiB ?? row.planGiB);
}

function bestOf(rows: readonly Row[], score: (row: Row) => number): Row | undefined {
  return rows.toSorted((a, b) => score(b) - score(a))[0];
}

/**
 * Adds rows of a shape to a results file. A row replaces the earlier one of its shape, system and setting, except that a
 * failure never replaces a measurement.
 */
export async function mergeRows(
  file: string,
  about: Readonly<Record<string, unknown>>,
  shape: string,
  rows: readonly Row[],
): Promise<Row[]> {
  const kept = new Map((await readRows(file)).map((row) => [keyOf(row), row]));
  for (const row of rows) {
    const placed = { ...row, shape };
    const earlier = kept.get(keyOf(placed));
    const worse = row.error !== undefined && earlier !== undefined && earlier.error === undefined;
    if (!worse) kept.set(keyOf(placed), placed);
  }
  const all = [...kept.values()];
  const ratios = compare(all);
  await writeResult(file, { ...about, ...(ratios.length === 0 ? {} : { ratios }), rows: all });
  return all;
}

function keyOf({ shape, system, setting }: Row): string {
  return JSON.stringify([shape, system, setting]);
}

async function readRows(file: string): Promise<Row[]> {
  try {
    return JSON.parse(await readFile(file, "utf8")).rows;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return [];
    throw error;
  }
}

/** Words of a comma-separated flag; "none" is none. */
export function listOf(text: string): string[] {
  return text === "none" ? [] : text.split(",");
}

/** A table of text columns, the first one left-aligned. */
export function table(lines: readonly (readonly string[])[]): string {
  const widths = (lines[0] ?? []).map((_, column) =>
    Math.max(...lines.map((line) => (line[column] ?? "").length)),
  );
  const pad = (text: string, column: number) => {
    const width = widths[column] ?? 0;
    return column === 0 ? text.padEnd(width) : text.padStart(width);
  };
  return lines.map((line) => line.map(pad).join("  ").trimEnd()).join("\n");
}

/** A figure in a table; "-" where there is none. */
export function figure(value: number | undefined, digits = 2): string {
  return value === undefined ? "-" : value.toFixed(digits);
}

/** A file in the folder of results. */
export const resultsFile = (file: string) =>
  join(fileURLToPath(new URL("../results/", import.meta.url)), file);
