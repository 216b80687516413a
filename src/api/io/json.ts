/**
 * Reading JSON that nobody vouches for: bounded size and depth, valid UTF-8, no key twice.
 *
 * `JSON.parse` alone keeps the last of two equal keys, so two readers can see two different files,
 * and spends memory in proportion to the nesting. One linear scan before it settles both.
 */
import { readFile, stat } from "node:fs/promises";
import { ioError } from "./io_error.ts";

/**
 * No JSON file of a model is larger; the safetensors specification sets the same limit for its
 * header.
 */
export const MAX_JSON_BYTES = 100_000_000;

/** Turns a description of what is wrong into the error of the caller's file format. */
export type Fail = (what: string) => never;

/**
 * Parses JSON strictly.
 *
 * @param bytes UTF-8 text; a leading byte order mark is dropped.
 * @param maxDepth How many objects and arrays may be open at once.
 * @param fail Called with what is wrong.
 * @returns What `JSON.parse` returns.
 */
export function parseStrictJson(bytes: Uint8Array, maxDepth: number, fail: Fail): unknown {
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return fail("it is not valid UTF-8");
  }
  scan(text, maxDepth, fail);
  try {
    return JSON.parse(text);
  } catch (error) {
    return fail(`it is not valid JSON (${error instanceof Error ? error.message : error})`);
  }
}

/** Reads and strictly parses a JSON file. Returns `undefined` where there is no such file. */
export async function readJsonFile(op: string, path: string, fail: Fail): Promise<unknown> {
  let bytes: Uint8Array;
  try {
    const info = await stat(path);
    if (!info.isFile()) return fail("it is not a regular file");
    if (info.size > MAX_JSON_BYTES)
      return fail(`it has ${info.size} bytes, over ${MAX_JSON_BYTES}`);
    bytes = await readFile(path);
  } catch (error) {
    const wrapped = ioError(op, path, error);
    if (wrapped.is("IO") && wrapped.details.errno === "ENOENT") return undefined;
    throw wrapped;
  }
  return parseStrictJson(bytes, 32, fail);
}

/** A plain JSON object, the only thing whose keys may be read. */
export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Checks depth and duplicate keys. Malformed text passes: `JSON.parse` finds it afterwards. */
function scan(text: string, maxDepth: number, fail: Fail): void {
  const open: (Set<string> | null)[] = []; // keys seen in each open object, null for an array
  for (let at = 0; at < text.length; at++) {
    const char = text[at];
    if (char === "{" || char === "[") {
      open.push(char === "{" ? new Set() : null);
      if (open.length > maxDepth) fail(`it is nested deeper than ${maxDepth} levels`);
    } else if (char === "}" || char === "]") {
      open.pop();
    } else if (char === '"') {
      const start = at;
      for (at++; at < text.length && text[at] !== '"'; at++) if (text[at] === "\\") at++;
      const end = at + 1;
      while (" \t\n\r".includes(text[at + 1] ?? "x")) at++;
      const keys = open.at(-1);
      if (keys && text[at + 1] === ":") {
        const key = unquote(text.slice(start, end));
        if (keys.has(key)) fail(`the key ${JSON.stringify(key)} stands there twice`);
        keys.add(key);
      }
    }
  }
}

/** `"a"` and `"\u0061"` are one key. */
function unquote(quoted: string): string {
  if (!quoted.includes("\\")) return quoted.slice(1, -1);
  try {
    return JSON.parse(quoted);
  } catch {
    return quoted;
  }
}
