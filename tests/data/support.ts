/** What the tests of the data layer share. */
import assert from "node:assert/strict";
import { cpSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after } from "node:test";
import { fileURLToPath } from "node:url";
import { loadChatTemplate } from "../../src/api/data/chat_template.ts";
import type { ConversationCodec, Document } from "../../src/api/data/conversation.ts";
import type { SourceRecord } from "../../src/api/data/records.ts";
import { loadTokenizer, type Tokenizer } from "../../src/api/data/tokenizer.ts";
import { type ErrorCode, LoramemError } from "../../src/ffi/error.ts";

export const demo = fileURLToPath(new URL("../../examples/demo/", import.meta.url));

/** An empty folder that is removed when the file's tests are over. */
export function temporaryFolder(): string {
  const folder = mkdtempSync(join(tmpdir(), "loramem-data-"));
  after(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

/** A new folder with these files. */
export function folderWith(files: Record<string, string | Uint8Array>): string {
  const folder = temporaryFolder();
  for (const [name, content] of Object.entries(files)) writeFileSync(join(folder, name), content);
  return folder;
}

/** The demo model's folder without its weights, with some files changed. */
export function modelWith(files: Record<string, string>): string {
  const folder = temporaryFolder();
  cpSync(join(demo, "model"), folder, {
    recursive: true,
    filter: (source) => !source.endsWith(".safetensors"),
  });
  for (const [name, content] of Object.entries(files)) {
    rmSync(join(folder, name), { force: true }); // the copy keeps read-only modes
    writeFileSync(join(folder, name), content);
  }
  return folder;
}

/** The demo model's tokenizer with its own chat template, or with another one. */
export async function demoCodec(template?: string): Promise<ConversationCodec> {
  const folder =
    template === undefined ? join(demo, "model") : modelWith({ "chat_template.jinja": template });
  return {
    tokenizer: await loadTokenizer(join(demo, "model")),
    template: await loadChatTemplate(folder),
  };
}

/** Messages from `role: content` pairs, as a record. */
export function conversation(...turns: (readonly [role: string, content: string])[]): SourceRecord {
  const messages = turns.map(([role, content]) => ({ role, content }));
  return { value: { messages }, where: "chat.jsonl:7", details: { file: "chat.jsonl", line: 7 } };
}

/** The texts of the runs of labelled tokens. */
export function answersOf({ ids, labelled }: Document, tokenizer: Tokenizer): string[] {
  const runs: number[][] = [];
  for (const [index, id] of ids.entries()) {
    if (labelled[index] === 0) continue;
    if (index === 0 || labelled[index - 1] === 0) runs.push([]);
    runs.at(-1)?.push(id);
  }
  return runs.map((run) => tokenizer.decode(run));
}

/** For assert.throws and assert.rejects: a LoramemError with this code and a message like this. */
export function error(code: ErrorCode, message: RegExp, details?: object) {
  return (thrown: unknown): boolean => {
    assert(thrown instanceof LoramemError, `not a LoramemError: ${thrown}`);
    assert.equal(thrown.code, code, thrown.message);
    assert.match(thrown.message, message);
    if (details !== undefined) assert.deepEqual(thrown.details, details);
    return true;
  };
}
