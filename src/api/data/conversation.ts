/** Turns chat records into documents: token ids, and which of them are training targets. */
import { type ErrorDetails, LoramemError } from "../../ffi/error.ts";
import type { ChatMessage, ChatTemplate, RenderOptions } from "./chat_template.ts";
import { findAnswer, type Span, type TryRender, tokenBorders } from "./label_spans.ts";
import type { SourceRecord } from "./records.ts";
import type { Tokenizer } from "./tokenizer.ts";
import { isObject } from "./tokenizer_config.ts";

/** One training document, seen as one sequence of its own. */
export interface Document {
  /** Token ids, i32 [n]. */
  readonly ids: Int32Array;
  /** u8 [n]: 1 where this token is a training target. Never the first: nothing predicts it. */
  readonly labelled: Uint8Array;
  /** Where it came from, for messages. */
  readonly where: string;
}

/** What text becomes tokens with. */
export interface ConversationCodec {
  readonly tokenizer: Tokenizer;
  readonly template: ChatTemplate;
}

const ROLES: readonly unknown[] = ["system", "developer", "user", "assistant", "tool"];

/**
 * Encodes a record `{messages: [{role, content}, ...], tools?}`.
 *
 * The ids are those of the whole rendered conversation. All assistant turns are targets, and only
 * they (see `label_spans.ts`). Special-token text inside messages stays ordinary text, and lone
 * surrogates become U+FFFD.
 *
 * @param record A record as `readRecords` gives it.
 * @param codec The model's tokenizer and chat template.
 * @returns The document.
 * @throws {LoramemError} `BAD_DATA` naming the record if it is malformed, if the template refuses it,
 * or if no token of it is a target.
 */
export function encodeConversation(record: SourceRecord, codec: ConversationCodec): Document {
  const { tokenizer, template } = codec;
  const { messages, tools } = readConversation(record, tokenizer);
  const render = (part: readonly ChatMessage[], addGenerationPrompt: boolean) =>
    template.render(part, { addGenerationPrompt, ...tools });
  let text: string;
  try {
    text = render(messages, false);
  } catch (cause) {
    if (!(cause instanceof LoramemError)) throw cause;
    const message = `${cause.message}: ${record.where}`;
    throw new LoramemError("BAD_DATA", message, record.details, { cause });
  }
  const answers = findAnswers(text, messages, record, (part, addGenerationPrompt) => {
    try {
      return render(part, addGenerationPrompt);
    } catch {
      return null; // templates may refuse a conversation that is cut off
    }
  });
  const ids = tokenizer.encode(text);
  const borders = tokenBorders(
    ids,
    text,
    answers.flatMap(({ start, end }) => [start, end]),
    (piece) => tokenizer.encode(piece),
  );
  const labelled = new Uint8Array(ids.length);
  for (let index = 0; index < borders.length; index += 2) {
    labelled.fill(1, borders[index], borders[index + 1]);
  }
  labelled[0] = 0;
  if (!labelled.includes(1)) {
    throw badRecord(record, "no token to learn", "assistant turns are empty", "give them text");
  }
  return { ids: Int32Array.from(ids), labelled, where: record.where };
}

/**
 * Encodes messages as a prompt: the conversation so far, then what opens the assistant's turn.
 *
 * @param messages The conversation so far.
 * @param codec The model's tokenizer and chat template.
 * @returns Token ids, i32 [n].
 * @throws {LoramemError} `BAD_DATA` if the messages are malformed or the template refuses them.
 */
export function encodePrompt(
  messages: readonly ChatMessage[],
  codec: ConversationCodec,
): Int32Array {
  const record = { value: { messages }, where: "prompt", details: {} };
  const conversation = readConversation(record, codec.tokenizer);
  const text = codec.template.render(conversation.messages, { addGenerationPrompt: true });
  return Int32Array.from(codec.tokenizer.encode(text));
}

/** Number of training targets in a document; the first token never counts. */
export function countLabels({ labelled }: Document): number {
  let count = 0;
  for (let index = 1; index < labelled.length; index++) count += labelled[index] as number;
  return count;
}

function findAnswers(
  text: string,
  messages: readonly ChatMessage[],
  record: SourceRecord,
  render: TryRender,
): Span[] {
  const answers: Span[] = [];
  for (const [turn, message] of messages.entries()) {
    if (message.role !== "assistant") continue;
    const answer = findAnswer(text, messages, turn, render);
    if (answer === null || answer.start < (answers.at(-1)?.end ?? 0)) {
      throw badRecord(
        record,
        `cannot find the answer of messages[${turn}] in the rendered text`,
        "the chat template rewrites it once the conversation goes on",
        "split the record so that this answer comes last",
      );
    }
    answers.push(answer);
  }
  if (answers.length === 0) {
    throw badRecord(record, "no assistant turn", "nothing to learn", "add an assistant message");
  }
  return answers;
}

/** Checks a record and protects every text in it. */
function readConversation(
  record: SourceRecord,
  tokenizer: Tokenizer,
): { messages: ChatMessage[]; tools: RenderOptions } {
  const want = 'give {"messages": [{"role": ..., "content": ...}, ...]}';
  const { value } = record;
  if (!isObject(value)) throw badRecord(record, "not an object", kindOf(value), want);
  const { messages, tools } = value;
  if (!Array.isArray(messages)) {
    const keys = Object.keys(value).slice(0, 8).join(", ");
    throw badRecord(record, "no messages list", `keys are: ${keys || "none"}`, want);
  }
  if (messages.length === 0) throw badRecord(record, "no messages", "the list is empty", want);
  for (const [index, message] of messages.entries()) {
    const name = `messages[${index}]`;
    if (!isObject(message)) throw badRecord(record, `${name} is no object`, kindOf(message), want);
    const { role, content } = message;
    if (!ROLES.includes(role)) {
      const shown = JSON.stringify(role) ?? "undefined";
      throw badRecord(record, `${name}.role is unknown`, shown, `use one of ${ROLES.join(", ")}`);
    }
    if (typeof content !== "string") {
      throw badRecord(record, `${name}.content is not text`, kindOf(content), "give a string");
    }
  }
  if (tools != null && !Array.isArray(tools)) {
    throw badRecord(record, "tools is not a list", kindOf(tools), "give a list or leave it out");
  }
  return {
    messages: protectAll(messages, tokenizer) as ChatMessage[],
    tools: tools == null ? {} : { tools: protectAll(tools, tokenizer) as unknown[] },
  };
}

/** Copies a JSON value with every text in it protected, keys included: templates print those too. */
function protectAll(value: unknown, tokenizer: Tokenizer): unknown {
  if (typeof value === "string") return tokenizer.protect(value);
  if (Array.isArray(value)) return value.map((item) => protectAll(item, tokenizer));
  if (!isObject(value)) return value;
  return Object.fromEntries(
    Object.entries(value).map(([key, item]) => [
      tokenizer.protect(key),
      protectAll(item, tokenizer),
    ]),
  );
}

function badRecord(record: SourceRecord, wrong: string, values: string, mend: string) {
  const details: ErrorDetails["BAD_DATA"] = record.details;
  return new LoramemError(
    "BAD_DATA",
    `data: ${wrong}: ${record.where}: ${values}: ${mend}`,
    details,
  );
}

function kindOf(value: unknown): string {
  return value === null
    ? "it is null"
    : Array.isArray(value)
      ? "it is a list"
      : `it is ${typeof value}`;
}
