/** The flags of a training run, made from the one options schema. */
import { readFile } from "node:fs/promises";
import type { Command } from "commander";
import { z } from "zod";
import { type ResolvedOptions, resolveOptions, trainSchema } from "../api/train/options.ts";
import { LoramemError } from "../ffi/error.ts";

/** What the command line adds to the options of the API. */
export interface RunSettings {
  readonly options: ResolvedOptions;
  /** Folder for the adapter, run.json and checkpoints. */
  readonly out: string;
  /** Prompts that are answered before and after the run. */
  readonly samples: readonly string[];
  /** Longest sample answer, tokens. */
  readonly sampleTokens: number;
}

interface JsonType {
  readonly type?: string;
  readonly anyOf?: readonly JsonType[];
  readonly enum?: readonly unknown[];
  readonly default?: unknown;
  readonly description?: string;
  readonly properties?: Readonly<Record<string, JsonType>>;
}

/** One flag and the option that it sets. */
interface Flag {
  /** Path in the options, such as `["lora", "rank"]`. */
  readonly path: readonly string[];
  readonly name: string;
  readonly type: JsonType;
}

const SCHEMA = z.toJSONSchema(trainSchema, { io: "input", unrepresentable: "any" }) as JsonType;

/** The folder of the run is --out. */
const NO_FLAG = "runDir";

/** Every flag; the options of `lora` stand beside the others. */
const FLAGS: readonly Flag[] = flagsOf(SCHEMA, []);

function flagsOf(type: JsonType, path: readonly string[]): Flag[] {
  return Object.entries(type.properties ?? {}).flatMap(([key, property]): Flag[] => {
    const at = [...path, key];
    if (key === "lora") return flagsOf(property, at);
    if (key === NO_FLAG) return [];
    return [{ path: at, name: kebab(key), type: property }];
  });
}

function kebab(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
}

/** Adds the flags of the options, and `--config`, to a command. */
export function addOptionFlags(command: Command): Command {
  for (const { name, type } of FLAGS) {
    const choices = type.enum === undefined ? "" : ` (${type.enum.join(", ")})`;
    const fallback = type.default === undefined ? "" : ` [${String(type.default)}]`;
    const value = type.type === "boolean" ? "" : " <value>";
    command.option(`--${name}${value}`, `${type.description ?? ""}${choices}${fallback}`);
  }
  return command.option(
    "--config <file>",
    "JSON file with options in the names of the API, such as run.json of an earlier run; flags win",
  );
}

/** Adds the flags of a training to a command. */
export function addTrainFlags(command: Command): Command {
  return addOptionFlags(command)
    .option("--out <dir>", "folder for the adapter, run.json and checkpoints")
    .option(
      "--sample <text>",
      "prompt to answer before and after; may be repeated",
      (text: string, all: string[]) => [...all, text],
      [],
    )
    .option("--sample-tokens <count>", "longest sample answer [48]");
}

/**
 * Reads parsed flags of the options, merged over `--config`, and checks them.
 *
 * @param defaults Options that are set where neither a flag nor the file does.
 * @throws {LoramemError} BAD_ARGUMENT naming the flag.
 */
export async function readOptionFlags(
  { config, ...given }: Readonly<Record<string, unknown>>,
  defaults: Readonly<Record<string, unknown>> = {},
): Promise<ResolvedOptions> {
  const options: Record<string, unknown> = {
    ...defaults,
    ...(config === undefined ? {} : await readConfig(String(config))),
  };
  for (const { path, name, type } of FLAGS) {
    const value = given[camel(name)];
    if (value === undefined) continue;
    const parsed = typeof value === "string" ? parseValue(name, value, type) : value;
    setAt(options, path, parsed);
  }
  return resolveOptions(options, (path) => {
    const flag = FLAGS.find((candidate) => candidate.path.join(".") === path);
    return flag === undefined ? path : `--${flag.name}`;
  });
}

/**
 * Reads parsed flags of a training.
 *
 * @throws {LoramemError} BAD_ARGUMENT naming the flag.
 */
export async function readTrainFlags(
  values: Readonly<Record<string, unknown>>,
): Promise<RunSettings> {
  const { out, sample, sampleTokens, ...given } = values;
  if (out === undefined) {
    throw new LoramemError("BAD_ARGUMENT", "--out: missing: give the folder for the adapter", {
      name: "out",
    });
  }
  const options = await readOptionFlags(given);
  const limit = Number(sampleTokens ?? 48);
  if (!Number.isSafeInteger(limit) || limit < 1) {
    const message = `--sample-tokens: not a positive integer: ${sampleTokens}: give one`;
    throw new LoramemError("BAD_ARGUMENT", message, { name: "sampleTokens", value: sampleTokens });
  }
  const runDir = String(out);
  return {
    options: { ...options, runDir },
    out: runDir,
    samples: sample as string[],
    sampleTokens: limit,
  };
}

async function readConfig(file: string): Promise<Record<string, unknown>> {
  try {
    const json: unknown = JSON.parse(await readFile(file, "utf8"));
    const options = (json as { options?: unknown }).options ?? json;
    if (typeof options !== "object" || options === null) throw new Error("not an object");
    return options as Record<string, unknown>;
  } catch (cause) {
    const message = `--config: cannot be read as JSON options: ${file}: ${(cause as Error).message}: check the file`;
    throw new LoramemError("BAD_ARGUMENT", message, { name: "config", value: file }, { cause });
  }
}

function camel(name: string): string {
  return name.replace(/-([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
}

function setAt(options: Record<string, unknown>, path: readonly string[], value: unknown): void {
  const [first, ...rest] = path as [string, ...string[]];
  if (rest.length === 0) {
    options[first] = value;
  } else {
    const inner = { ...(options[first] as Record<string, unknown> | undefined) };
    options[first] = inner;
    setAt(inner, rest, value);
  }
}

/** The text of a flag as the schema's type; what does not parse stays text for the schema to refuse. */
function parseValue(name: string, text: string, type: JsonType): unknown {
  const types = (type.anyOf ?? [type]).map((option) => option.type);
  if (
    types.some((kind) => kind === "integer" || kind === "number") &&
    /^[+-]?[\d.]+(e[+-]?\d+)?$/i.test(text)
  ) {
    return Number(text);
  }
  if (types.includes("array") && text.includes(",") && /^[\w.,]+$/.test(text))
    return text.split(",");
  if (types.includes("array") && /^\w+$/.test(text) && text !== "all-linear") return [text];
  if (types.includes("object")) {
    try {
      return JSON.parse(text);
    } catch (cause) {
      const message = `--${name}: not JSON: ${text}: write it as {"q_proj": 8}`;
      throw new LoramemError("BAD_ARGUMENT", message, { name, value: text }, { cause });
    }
  }
  return text;
}
