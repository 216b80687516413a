/** Reads tokenizer_config.json, which the tokenizer and the chat template share. */
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { LoramemError } from "../../ffi/error.ts";

/** What tokenizer_config.json says. */
export interface TokenizerConfig {
  readonly file: string;
  /** The file as it is. */
  readonly fields: Readonly<Record<string, unknown>>;
  /** Text of `bos_token`, `eos_token`, `pad_token`, ...: every `*_token` that is set, by that name. */
  readonly specialTokens: Readonly<Record<string, string>>;
}

/**
 * Reads `tokenizer_config.json` of a checkpoint folder.
 *
 * @throws {LoramemError} `BAD_CONFIG` if it is missing or not a JSON object.
 */
export async function readTokenizerConfig(modelDir: string): Promise<TokenizerConfig> {
  const file = join(modelDir, "tokenizer_config.json");
  const fields = await readJsonObject(file);
  if (fields === null) throw missingFile(file);
  const specialTokens: Record<string, string> = {};
  for (const [name, value] of Object.entries(fields)) {
    if (!name.endsWith("_token")) continue;
    // Either the text itself or a saved token object; null means "none".
    const text = isObject(value) ? value.content : value;
    if (typeof text === "string") specialTokens[name] = text;
  }
  return { file, fields, specialTokens };
}

/**
 * Reads a file that must hold one JSON object.
 *
 * @returns The object, or null if there is no such file.
 * @throws {LoramemError} `BAD_CONFIG` if the file cannot be read or holds anything else.
 */
export async function readJsonObject(file: string): Promise<Record<string, unknown> | null> {
  let text: string;
  try {
    text = await readFile(file, "utf8");
  } catch (cause) {
    if ((cause as NodeJS.ErrnoException).code === "ENOENT") return null;
    throw new LoramemError(
      "BAD_CONFIG",
      `model: cannot read ${file}: ${cause}`,
      { file },
      { cause },
    );
  }
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (cause) {
    const message = `model: not JSON: ${file}: the file is damaged or incomplete: copy it again`;
    throw new LoramemError("BAD_CONFIG", message, { file }, { cause });
  }
  if (!isObject(value)) {
    throw new LoramemError("BAD_CONFIG", `model: not a JSON object: ${file}`, { file });
  }
  return value;
}

/** The error for a file that a checkpoint folder must have. */
export function missingFile(file: string): LoramemError {
  return new LoramemError(
    "BAD_CONFIG",
    `model: no such file: ${file}: give a folder in the Hugging Face layout, with its tokenizer files`,
    { file },
  );
}

/** Narrows to a JSON object (not null, not an array). */
export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
