/**
 * Keeps text that a user wrote apart from the control tokens that a chat template writes.
 *
 * The text of a special token, such as `<|im_end|>`, inside a message must not become that token: it
 * would let data end a turn or open a new one. Before rendering, `protect` replaces such text by a
 * private marker that templates carry along unchanged. After rendering, every special token still
 * spelled out is the template's own. A second tokenizer, in which the control tokens have private
 * names, then encodes the whole text at once; the user's spelling is put back and means nothing to it.
 * So the words around it are cut exactly as in ordinary text, at every join.
 *
 * The markers are Unicode non-characters (U+FDD0 to U+FDEF), which are reserved for use inside a
 * program; `cleanText` takes them out of all incoming text, so data cannot forge one.
 */

const QUOTED = /\uFDD0(\d+)\uFDD1/g;

/** Stands in front of and behind an answer in a trial rendering (see `label_spans.ts`). */
export const START_MARK = "\uFDD4";
export const END_MARK = "\uFDD5";

/** Replaces lone surrogates (they have no UTF-8 form) and U+FDD0..U+FDEF by U+FFFD. */
export function cleanText(text: string): string {
  return text.replace(/[\p{Surrogate}\uFDD0-\uFDEF]/gu, "\uFFFD");
}

/** One entry of `added_tokens` in tokenizer.json; other keys are carried along. */
export interface AddedToken {
  readonly id: number;
  readonly content: string;
  readonly special?: boolean;
}

/** The parts of tokenizer.json that loramem reads itself. */
export interface TokenizerJson {
  readonly added_tokens: readonly AddedToken[];
  readonly model: {
    readonly vocab: Readonly<Record<string, number>>;
    readonly unk_token?: string | null;
  };
}

/** The special tokens of one tokenizer as text. */
export class SpecialText {
  readonly #contents: readonly string[];
  readonly #indices: ReadonlyMap<string, number>;
  readonly #pattern: RegExp | null;

  constructor(addedTokens: readonly AddedToken[]) {
    // Added tokens that are not special (`<think>`, `<tool_call>`) are part of what models write.
    this.#contents = addedTokens.filter((token) => token.special).map((token) => token.content);
    this.#indices = new Map(this.#contents.map((content, index) => [content, index]));
    // Longest first, so that the leftmost-longest match is found, as tokenizers do.
    const longestFirst = this.#contents.toSorted((a, b) => b.length - a.length);
    const alternatives = longestFirst.map((text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
    this.#pattern = alternatives.length > 0 ? new RegExp(alternatives.join("|"), "g") : null;
  }

  /** Replaces special-token text by markers; text without any is returned as it is. */
  protect(text: string): string {
    return this.#replace(text, (index) => `\uFDD0${index}\uFDD1`);
  }

  /** Whether `text` holds markers made by `protect`. */
  isProtected(text: string): boolean {
    return text.includes("\uFDD0");
  }

  /** Names the control tokens as in `renamed` and puts the protected spellings back. */
  reveal(text: string): string {
    return this.#replace(text, controlName).replace(
      QUOTED,
      (_, index: string) => this.#contents[Number(index)] ?? "",
    );
  }

  /**
   * The same tokenizer.json with private names for the special tokens, also where the vocabulary
   * repeats them: with `ignore_merges` a whole word is looked up there.
   */
  renamed(json: TokenizerJson): TokenizerJson {
    const rename = (token: string): string => {
      const index = this.#indices.get(token);
      return index === undefined ? token : controlName(index);
    };
    const { vocab, unk_token: unknown } = json.model;
    return {
      ...json,
      added_tokens: json.added_tokens.map((token) => ({
        ...token,
        content: rename(token.content),
      })),
      model: {
        ...json.model,
        vocab: Object.fromEntries(Object.entries(vocab).map(([token, id]) => [rename(token), id])),
        ...(typeof unknown === "string" && { unk_token: rename(unknown) }),
      },
    };
  }

  #replace(text: string, marker: (index: number) => string): string {
    if (this.#pattern === null) return text;
    return text.replace(this.#pattern, (token) => marker(this.#indices.get(token) as number));
  }
}

function controlName(index: number): string {
  return `\uFDD2${index}\uFDD3`;
}
