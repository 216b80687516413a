/**
 * Reads training records: JSON Lines files (one JSON value per line, UTF-8), or values from memory.
 * This file knows files, lines and JSON; what a record means is decided in `conversation.ts`.
 */
import { Buffer } from "node:buffer";
import { createReadStream } from "node:fs";
import { glob, stat } from "node:fs/promises";
import { type ErrorDetails, LoramemError } from "../../ffi/error.ts";

/** A path or glob of `.jsonl` files, or the records themselves. */
export type RecordSource = string | Iterable<unknown> | AsyncIterable<unknown>;

/** One record and the place it came from. */
export interface SourceRecord {
  /** The parsed JSON value, or the value that the iterable gave. Not checked yet. */
  readonly value: unknown;
  /** `file:line`, or `record N` counted from 1. Every later error names it. */
  readonly where: string;
  /** The same place for `LoramemError.details`; empty for values from memory. */
  readonly details: ErrorDetails["BAD_DATA"];
}

/**
 * Reads records one at a time.
 *
 * A byte-order mark at the start of a file, CRLF line ends and blank lines are accepted. Files of a
 * glob are read in code-unit order of their paths, so the order does not depend on the file system.
 * Memory is bounded by one read chunk (64 KiB) plus the longest line.
 *
 * @example Usage
 * ```ts
 * import { readRecords } from "./src/api/data/records.ts";
 * for await (const record of readRecords([{ messages: [] }])) console.log(record.where); // record 1
 * ```
 *
 * @param source A path, a glob, or any iterable of records.
 * @returns The records in order.
 * @throws {LoramemError} `BAD_ARGUMENT` if `source` is none of these; `BAD_DATA` if a file is missing,
 * unreadable, not UTF-8, not JSON Lines, or if there are no records at all.
 */
export async function* readRecords(source: RecordSource): AsyncGenerator<SourceRecord> {
  if (typeof source === "string") {
    for (const file of await matchFiles(source)) yield* readFileRecords(file);
    return;
  }
  if (!isIterable(source)) {
    throw new LoramemError(
      "BAD_ARGUMENT",
      `readRecords: the source is not a path and not iterable: ${typeof source}: ` +
        "give a path, a glob, or an array or (async) iterable of records",
      { name: "source", value: source },
    );
  }
  let count = 0;
  for await (const value of source) {
    count++;
    yield { value, where: `record ${count}`, details: {} };
  }
  if (count === 0) {
    throw new LoramemError("BAD_DATA", "readRecords: no records: the iterable is empty");
  }
}

function isIterable(source: unknown): source is Iterable<unknown> | AsyncIterable<unknown> {
  return (
    typeof source === "object" &&
    source !== null &&
    (Symbol.iterator in source || Symbol.asyncIterator in source)
  );
}

/** A path that exists is taken literally, even when it contains glob characters. */
async function matchFiles(pattern: string): Promise<string[]> {
  const exists = await stat(pattern).then(
    () => true,
    () => false,
  );
  if (exists || !/[*?[{]/.test(pattern)) return [pattern];
  const files: string[] = [];
  for await (const file of glob(pattern)) files.push(file);
  if (files.length === 0) {
    throw new LoramemError("BAD_DATA", `readRecords: no file matches: ${pattern}: check the path`, {
      file: pattern,
    });
  }
  return files.sort();
}

async function* readFileRecords(file: string): AsyncGenerator<SourceRecord> {
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  let line = 0;
  let count = 0;
  for await (const bytes of readLines(file)) {
    line++;
    const where = `${file}:${line}`;
    const details = { file, line };
    let text: string;
    try {
      text = decoder.decode(bytes);
    } catch (cause) {
      const message = `readRecords: not UTF-8 text: ${where}: save the file as UTF-8`;
      throw new LoramemError("BAD_DATA", message, details, { cause });
    }
    if (line === 1 && text.startsWith("\uFEFF")) text = text.slice(1);
    if (text.trim() === "") continue;
    let value: unknown;
    try {
      value = JSON.parse(text);
    } catch (cause) {
      const reason = cause instanceof Error ? cause.message.slice(0, 120) : String(cause);
      const message = `readRecords: not JSON: ${where}: ${reason}: each line must hold one JSON value`;
      throw new LoramemError("BAD_DATA", message, details, { cause });
    }
    count++;
    yield { value, where, details };
  }
  if (count === 0) {
    const what = line === 0 ? "the file is empty" : "every line is blank";
    throw new LoramemError("BAD_DATA", `readRecords: no records: ${file}: ${what}`, { file });
  }
}

/** Lines as bytes, without the line feed. Splitting before decoding never cuts a UTF-8 sequence. */
async function* readLines(file: string): AsyncGenerator<Uint8Array> {
  let pieces: Uint8Array[] = [];
  try {
    for await (const chunk of createReadStream(file) as AsyncIterable<Uint8Array>) {
      let start = 0;
      for (let end = chunk.indexOf(10); end >= 0; end = chunk.indexOf(10, start)) {
        pieces.push(chunk.subarray(start, end));
        yield pieces.length === 1 ? (pieces[0] as Uint8Array) : Buffer.concat(pieces);
        pieces = [];
        start = end + 1;
      }
      if (start < chunk.length) pieces.push(chunk.subarray(start));
    }
  } catch (cause) {
    const { code } = cause as NodeJS.ErrnoException;
    const reason =
      code === "ENOENT" ? "no such file" : code === "EISDIR" ? "a folder, not a file" : `${cause}`;
    const message = `readRecords: cannot read the data: ${file}: ${reason}`;
    throw new LoramemError("BAD_DATA", message, { file }, { cause });
  }
  if (pieces.length > 0) yield Buffer.concat(pieces);
}
