import assert from "node:assert/strict";
import { join } from "node:path";
import { test } from "node:test";
import { type ChatMessage, loadChatTemplate } from "../../src/api/data/chat_template.ts";
import { demo, error, folderWith } from "./support.ts";

const hello: ChatMessage[] = [{ role: "user", content: "Hello" }];

function modelFolder(config: object, template?: string): string {
  return folderWith({
    "tokenizer_config.json": JSON.stringify(config),
    ...(template !== undefined && { "chat_template.jinja": template }),
  });
}

test("ChatTemplate.render() renders the demo template with and without generation prompt", async () => {
  const template = await loadChatTemplate(join(demo, "model"));
  const text = "<|im_start|>user\nHello<|im_end|>\n";
  assert.equal(template.render(hello), text);
  assert.equal(
    template.render(hello, { addGenerationPrompt: true }),
    `${text}<|im_start|>assistant\n`,
  );
});

test("loadChatTemplate() prefers chat_template.jinja to tokenizer_config.json", async () => {
  const template = await loadChatTemplate(modelFolder({ chat_template: "config" }, "file"));
  assert.equal(template.render(hello), "file");
});

test("loadChatTemplate() reads a template text from tokenizer_config.json", async () => {
  const text = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token is defined }}";
  const config = { bos_token: "<s>", eos_token: { content: "</s>" }, pad_token: null };
  const template = await loadChatTemplate(modelFolder({ ...config, chat_template: text }));
  assert.equal(template.render(hello), "<s>Hello</s>false");
});

test("loadChatTemplate() picks from a list of named templates", async () => {
  const named = (name: string) => ({ name, template: `${name} {{ tools is none }}` });
  const list = [named("rag"), named("tool_use"), named("default")];
  const template = await loadChatTemplate(modelFolder({ chat_template: list }));
  assert.equal(template.render(hello), "default true");
  assert.equal(template.render(hello, { tools: [{}] }), "tool_use false");
  const single = await loadChatTemplate(modelFolder({ chat_template: [named("default")] }));
  assert.equal(single.render(hello, { tools: [{}] }), "default false");
});

test("ChatTemplate.render() gives none for what a conversation lacks", async () => {
  const text = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}";
  const template = await loadChatTemplate(modelFolder({}, text));
  assert.equal(template.render(hello), "true true false");
});

test("ChatTemplate.render() gives templates a fixed date", async () => {
  const text = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}";
  const template = await loadChatTemplate(modelFolder({}, text));
  assert.equal(template.render(hello), "26 Jul 2024");
});

test("loadChatTemplate() says what to do where there is no template", async () => {
  const unnamed = { chat_template: [{ name: "rag", template: "x" }] };
  for (const config of [{}, unnamed, { chat_template: null }]) {
    await assert.rejects(
      loadChatTemplate(modelFolder(config)),
      error("BAD_CONFIG", /no chat template: .*copy chat_template\.jinja/),
    );
  }
});

test("loadChatTemplate() refuses a template that cannot be parsed", async () => {
  await assert.rejects(
    loadChatTemplate(modelFolder({}, "{% for %}")),
    error("BAD_CONFIG", /not a template that can be parsed: .*chat_template\.jinja/),
  );
});

test("loadChatTemplate() refuses a folder without tokenizer_config.json", async () => {
  await assert.rejects(
    loadChatTemplate(folderWith({ "chat_template.jinja": "x" })),
    error("BAD_CONFIG", /no such file: .*tokenizer_config\.json/),
  );
});

test("ChatTemplate.render() reports messages that the template refuses", async () => {
  const template = await loadChatTemplate(
    modelFolder({}, "{{ raise_exception('roles must alternate') }}"),
  );
  assert.throws(
    () => template.render(hello),
    error("BAD_DATA", /refuses the messages: roles must/),
  );
});
