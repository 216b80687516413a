/** The chat template of a checkpoint folder: messages to text. */
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { LoramemError } from "../../ffi/error.ts";
import { isObject, readTokenizerConfig, type TokenizerConfig } from "./tokenizer_config.ts";

/** One message. Keys besides these two (`name`, `tool_calls`, ...) are handed to the template. */
export interface ChatMessage {
  readonly role: string;
  readonly content: string;
  readonly [key: string]: unknown;
}

/** How to render. */
export interface RenderOptions {
  /** End with what opens an assistant turn, as a prompt does. Default false. */
  readonly addGenerationPrompt?: boolean;
  /** Tool descriptions for templates that list them. */
  readonly tools?: readonly unknown[];
}

/** Renders conversations as the checkpoint was trained to read them. */
export interface ChatTemplate {
  /**
   * Text of `messages`, control tokens spelled out.
   *
   * @throws {LoramemError} `BAD_DATA` if the template refuses the messages.
   */
  render(messages: readonly ChatMessage[], options?: RenderOptions): string;
}

/**
 * Llama 3 templates print today's date unless they are given one. A fixed date keeps the same data
 * the same tokens on every day; this one is the default that those templates name themselves.
 */
const DATE_STRING = "26 Jul 2024";

/**
 * Loads the chat template: `chat_template.jinja`, else `chat_template` of tokenizer_config.json,
 * which is a text or a list of named texts ("default" is taken, "tool_use" where tools are given).
 *
 * @example Usage
 * ```ts
 * import { loadChatTemplate } from "./src/api/data/chat_template.ts";
 * const template = await loadChatTemplate("examples/demo/model");
 * console.log(template.render([{ role: "user", content: "Define: love" }]));
 * ```
 *
 * @param modelDir A checkpoint folder in the Hugging Face layout.
 * @returns The template.
 * @throws {LoramemError} `BAD_CONFIG` if there is none or it cannot be parsed.
 */
export async function loadChatTemplate(modelDir: string): Promise<ChatTemplate> {
  const config = await readTokenizerConfig(modelDir);
  const { Template } = await import("@huggingface/jinja");
  const { file, texts } = await readTemplates(modelDir, config);
  const parse = (text: string) => {
    try {
      return new Template(text);
    } catch (cause) {
      const message = `loadChatTemplate: not a template that can be parsed: ${file}: ${cause}`;
      throw new LoramemError("BAD_CONFIG", message, { file, key: "chat_template" }, { cause });
    }
  };
  const usual = parse(texts.usual);
  const withTools = texts.withTools === undefined ? usual : parse(texts.withTools);
  return {
    render(messages, options = {}) {
      const template = options.tools === undefined ? usual : withTools;
      try {
        return template.render({
          ...config.specialTokens,
          date_string: DATE_STRING,
          messages,
          // Templates test these against none, which differs from "not defined".
          tools: options.tools ?? null,
          documents: null,
          add_generation_prompt: options.addGenerationPrompt ?? false,
        });
      } catch (cause) {
        const reason = cause instanceof Error ? cause.message : String(cause);
        const message = `chat template: refuses the messages: ${reason}`;
        throw new LoramemError("BAD_DATA", message, {}, { cause });
      }
    },
  };
}

interface Templates {
  readonly file: string;
  readonly texts: { readonly usual: string; readonly withTools?: string | undefined };
}

async function readTemplates(modelDir: string, config: TokenizerConfig): Promise<Templates> {
  const file = join(modelDir, "chat_template.jinja");
  try {
    return { file, texts: { usual: await readFile(file, "utf8") } };
  } catch (cause) {
    if ((cause as NodeJS.ErrnoException).code !== "ENOENT") {
      const message = `loadChatTemplate: cannot read ${file}: ${cause}`;
      throw new LoramemError("BAD_CONFIG", message, { file }, { cause });
    }
  }
  const value = config.fields.chat_template;
  if (typeof value === "string") return { file: config.file, texts: { usual: value } };
  if (Array.isArray(value)) {
    const named = new Map<unknown, unknown>(
      value.filter(isObject).map(({ name, template }) => [name, template]),
    );
    const usual = named.get("default");
    const withTools = named.get("tool_use");
    if (typeof usual === "string") {
      const tools = typeof withTools === "string" ? withTools : undefined;
      return { file: config.file, texts: { usual, withTools: tools } };
    }
  }
  throw new LoramemError(
    "BAD_CONFIG",
    `loadChatTemplate: no chat template: ${modelDir}: copy chat_template.jinja from the chat version ` +
      "of this model into the folder, or write one",
    { file: config.file, key: "chat_template" },
  );
}
