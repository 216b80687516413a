/**
 * Finds the tokens of the answers in a rendered conversation, for any chat template.
 *
 * An answer is what the model has to write: everything after the generation prompt up to the end of
 * the turn, so the content, the token that ends it and what the template puts behind that (ChatML: a
 * line feed), in every assistant turn alike. The borders come from rendering the conversation cut
 * off before and after the turn; no `{% generation %}` block is needed.
 */
import type { ChatMessage } from "./chat_template.ts";
import { END_MARK, START_MARK } from "./special_text.ts";

/** A half-open range, of UTF-16 units or of tokens. */
export interface Span {
  readonly start: number;
  readonly end: number;
}

/** Renders messages with or without the generation prompt; null where the template refuses them. */
export type TryRender = (
  messages: readonly ChatMessage[],
  addGenerationPrompt: boolean,
) => string | null;

/**
 * Finds the answer of the assistant message `turn` in `text`, the whole rendered conversation.
 *
 * Some templates write earlier turns differently once the conversation goes on (they drop thoughts,
 * or move the system message). Where a cut conversation is thus not how `text` begins, the border is
 * found by marking the content in the whole conversation; the answer then starts at the content.
 *
 * @returns The range in `text`, or null if neither way finds it.
 */
export function findAnswer(
  text: string,
  messages: readonly ChatMessage[],
  turn: number,
  render: TryRender,
): Span | null {
  const prompt = render(messages.slice(0, turn), true);
  const closed = render(messages.slice(0, turn + 1), false);
  let start = prompt !== null && text.startsWith(prompt) ? prompt.length : -1;
  let end = closed !== null && text.startsWith(closed) ? closed.length : -1;
  if (start < 0) start = contentBorders(text, messages, turn, render).start;
  if (end < 0 && closed !== null) {
    const contentEnd = contentBorders(text, messages, turn, render).end;
    const closedEnd = contentBorders(closed, messages.slice(0, turn + 1), turn, render).end;
    if (contentEnd >= 0 && closedEnd >= 0) {
      end = contentEnd + commonPrefix(text.slice(contentEnd), closed.slice(closedEnd));
    }
  }
  return start >= 0 && end >= start ? { start, end } : null;
}

/**
 * Where the content of one message begins and ends in `text`; -1 for a border that is not found.
 * The marks go inside surrounding white space, because templates trim.
 */
function contentBorders(
  text: string,
  messages: readonly ChatMessage[],
  turn: number,
  render: TryRender,
): Span {
  const message = messages[turn] as ChatMessage;
  const content = message.content.trim();
  const from = message.content.indexOf(content);
  const marked =
    message.content.slice(0, from) +
    START_MARK +
    content +
    END_MARK +
    message.content.slice(from + content.length);
  const rendered = render(messages.with(turn, { ...message, content: marked }), false) ?? "";
  const start = rendered.indexOf(START_MARK);
  const end = rendered.replace(START_MARK, "").indexOf(END_MARK);
  // The marks must not have changed anything else, nor have been written twice.
  const same = rendered.replace(START_MARK, "").replace(END_MARK, "") === text;
  return same ? { start, end } : { start: -1, end: -1 };
}

/**
 * Converts borders in `text` to borders in its tokens: for each position, how many tokens end at or
 * before it. A token across the start of an answer therefore counts as part of the answer (no word
 * of it is lost), one across its end does not (no text of the next turn is learnt).
 *
 * @param ids The tokens of `text`.
 * @param positions Positions in `text`, ascending.
 */
export function tokenBorders(
  ids: readonly number[],
  text: string,
  positions: readonly number[],
  encode: (text: string) => number[],
): number[] {
  // Usual case: the pieces' tokens are the tokens of the whole. Costs one more encoding of the text.
  const pieces = [...positions, text.length].map((position, index) =>
    encode(text.slice(positions[index - 1] ?? 0, position)),
  );
  const joined = pieces.flat();
  if (joined.length === ids.length && commonPrefix(joined, ids) === ids.length) {
    let count = 0;
    return pieces.slice(0, -1).map((piece) => (count += piece.length));
  }
  // Otherwise (a token across a border, or a tokenizer that treats the start of a text differently)
  // encode up to each border: quadratic in the number of turns, and rare.
  return positions.map((position) => commonPrefix(encode(text.slice(0, position)), ids));
}

function commonPrefix<T extends string | readonly number[]>(a: T, b: T): number {
  const length = Math.min(a.length, b.length);
  let count = 0;
  while (count < length && a[count] === b[count]) count++;
  return count;
}
