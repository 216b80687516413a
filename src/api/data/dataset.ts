/** A data set in memory: every record encoded, over-long ones dealt with, and totals. */
import { type ErrorDetails, LoramemError } from "../../ffi/error.ts";
import {
  type ConversationCodec,
  countLabels,
  type Document,
  encodeConversation,
} from "./conversation.ts";
import { type RecordSource, readRecords } from "./records.ts";

/** What to do with a document of more than `maxTokens` tokens. */
export type Overlong = "error" | "truncate" | "split";

const OVERLONG: readonly unknown[] = ["error", "truncate", "split"] satisfies Overlong[];

/** How to load a data set. */
export interface DatasetOptions extends ConversationCodec {
  /** Tokens that a document may have, at least 2; without it there is no limit. */
  readonly maxTokens?: number;
  /**
   * `error` refuses the data set. `truncate` keeps the first `maxTokens` tokens. `split` cuts into
   * pieces of `maxTokens` that share one token, so that every label keeps a predecessor and is
   * learnt once; pieces without a label are left out, as they would teach nothing.
   */
  readonly overlong: Overlong;
  /** What the data is for, in messages: "training data", "evaluation data". */
  readonly what: string;
}

/** A loaded data set. */
export interface Dataset {
  /** The documents, in the order of the records. */
  readonly documents: readonly Document[];
  /** Tokens of the longest document. */
  readonly longest: number;
  /** Tokens of all documents. */
  readonly tokens: number;
  /** Training targets in all documents. */
  readonly labelledTokens: number;
}

/**
 * Reads and encodes all records. Takes 5 bytes of memory per token besides the objects.
 *
 * @example Usage
 * ```ts
 * import { loadChatTemplate } from "./src/api/data/chat_template.ts";
 * import { loadDataset } from "./src/api/data/dataset.ts";
 * import { loadTokenizer } from "./src/api/data/tokenizer.ts";
 * const model = "examples/demo/model";
 * const data = await loadDataset("examples/demo/valid.jsonl", {
 *   tokenizer: await loadTokenizer(model),
 *   template: await loadChatTemplate(model),
 *   overlong: "error",
 *   what: "evaluation data",
 * });
 * console.log(data.documents.length, data.tokens, data.longest);
 * ```
 *
 * @param source A path, a glob, or any iterable of records.
 * @param options Tokenizer, template, and the policy for long documents.
 * @returns The documents and their totals.
 * @throws {LoramemError} `BAD_DATA` for anything wrong with the data, naming the place; `BAD_ARGUMENT`.
 */
export async function loadDataset(source: RecordSource, options: DatasetOptions): Promise<Dataset> {
  const { maxTokens = Number.POSITIVE_INFINITY, overlong, what } = options;
  if (options.maxTokens !== undefined && !(Number.isSafeInteger(maxTokens) && maxTokens >= 2)) {
    const message = `loadDataset: maxTokens is not an integer of at least 2: ${maxTokens}`;
    throw new LoramemError("BAD_ARGUMENT", message, { name: "maxTokens", value: maxTokens });
  }
  if (!OVERLONG.includes(overlong)) {
    const message = `loadDataset: overlong is unknown: ${overlong}: use one of ${OVERLONG.join(", ")}`;
    throw new LoramemError("BAD_ARGUMENT", message, { name: "overlong", value: overlong });
  }
  const documents: Document[] = [];
  let refused: { where: string; length: number; details: ErrorDetails["BAD_DATA"] } | undefined;
  let refusedCount = 0;
  let fits = 0;
  for await (const record of readRecords(source)) {
    const document = encodeConversation(record, options);
    const { length } = document.ids;
    if (length <= maxTokens) {
      documents.push(document);
    } else if (overlong === "error") {
      // Read on, so that the message can name the size that fits them all.
      refused ??= { where: record.where, length, details: record.details };
      refusedCount++;
      fits = Math.max(fits, length);
    } else {
      const kept =
        overlong === "truncate" ? truncate(document, maxTokens) : split(document, maxTokens);
      if (kept.length === 0) {
        const message =
          `loadDataset: no token to learn is left after cutting to ${maxTokens} tokens: ${record.where} ` +
          `(${length} tokens): raise tokensPerMicroBatch or set overlong to "split"`;
        throw new LoramemError("BAD_DATA", message, record.details);
      }
      documents.push(...kept);
    }
  }
  if (refused !== undefined) {
    const message =
      `loadDataset: longer than tokensPerMicroBatch: ${refused.where} has ${refused.length} tokens, ` +
      `the limit is ${maxTokens} (${refusedCount} such in the ${what}): ` +
      `set tokensPerMicroBatch to ${fits} or more, or overlong to "truncate" or "split"`;
    throw new LoramemError("BAD_DATA", message, refused.details);
  }
  let longest = 0;
  let tokens = 0;
  let labelledTokens = 0;
  for (const document of documents) {
    longest = Math.max(longest, document.ids.length);
    tokens += document.ids.length;
    labelledTokens += countLabels(document);
  }
  return { documents, longest, tokens, labelledTokens };
}

function truncate(document: Document, maxTokens: number): Document[] {
  const { where } = document;
  return [cut(document, 0, maxTokens, where)].filter((piece) => countLabels(piece) > 0);
}

function split(document: Document, maxTokens: number): Document[] {
  const stride = maxTokens - 1;
  const count = Math.ceil((document.ids.length - 1) / stride);
  const pieces = Array.from({ length: count }, (_, index) => {
    const start = index * stride;
    const where = `${document.where} (piece ${index + 1} of ${count})`;
    return cut(document, start, start + maxTokens, where);
  });
  return pieces.filter((piece) => countLabels(piece) > 0);
}

function cut(document: Document, start: number, end: number, where: string): Document {
  const labelled = document.labelled.slice(start, end);
  labelled[0] = 0; // nothing in this piece predicts its first token
  return { ids: document.ids.slice(start, end), labelled, where };
}
