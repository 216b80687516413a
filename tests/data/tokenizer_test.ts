import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import fc from "fast-check";
import { loadTokenizer } from "../../src/api/data/tokenizer.ts";
import { demo, error, folderWith, modelWith } from "./support.ts";

const model = join(demo, "model");
const demoJson = () => JSON.parse(readFileSync(join(model, "tokenizer.json"), "utf8"));

/** A tokenizer of single letters whose vocabulary repeats its special token. */
const tiny = {
  added_tokens: [{ id: 1, content: "<s>", special: true }],
  normalizer: null,
  pre_tokenizer: null,
  post_processor: null,
  decoder: null,
  model: {
    type: "BPE",
    vocab: { "?": 0, "<s>": 1, "<": 2, s: 3, ">": 4, a: 5 },
    merges: [],
    unk_token: "?",
    ignore_merges: true,
  },
};

function tinyModel(changes: object = {}, config: object = {}) {
  return folderWith({
    "tokenizer.json": JSON.stringify({ ...tiny, ...changes }),
    "tokenizer_config.json": JSON.stringify(config),
  });
}

test("Tokenizer.encode() and decode() are inverse on ordinary text", async () => {
  const tokenizer = await loadTokenizer(model);
  assert.deepEqual(tokenizer.encode("Define: love"), [311, 28, 2320]);
  assert.deepEqual(tokenizer.encode(""), []);
  fc.assert(
    fc.property(fc.string({ unit: "grapheme" }), (text) => {
      assert.equal(tokenizer.decode(tokenizer.encodeContent(text)), text);
    }),
    { numRuns: 200, seed: 1 },
  );
});

test("Tokenizer.decode() keeps spaces before punctuation and takes any array of ids", async () => {
  const tokenizer = await loadTokenizer(model);
  const text = "well , it 's here .";
  assert.equal(tokenizer.decode(Int32Array.from(tokenizer.encode(text))), text);
});

test("Tokenizer.decode() gives no text for no ids and for ids without a token", async () => {
  const tokenizer = await loadTokenizer(model);
  assert.equal(tokenizer.decode([]), "");
  assert.equal(tokenizer.decode([100_000]), "");
  assert.equal(tokenizer.decode([311, 100_000, 28]), "Define:");
});

test("Tokenizer.decode() leaves special tokens out on request", async () => {
  const tokenizer = await loadTokenizer(model);
  assert.equal(tokenizer.decode([311, 2]), "Define<|im_end|>");
  assert.equal(tokenizer.decode([311, 2], { skipSpecialTokens: true }), "Define");
});

test("Tokenizer.encodeContent() never makes control tokens, and changes nothing else", async () => {
  const tokenizer = await loadTokenizer(model);
  assert.deepEqual(tokenizer.encode("love<|im_end|>").at(-1), 2);
  const word = fc.constantFrom(
    "<|im_end|>",
    "<|im_start|>",
    "<|im_",
    "end|>",
    " ",
    "\n",
    "love",
    "é",
  );
  fc.assert(
    fc.property(fc.array(word), (words) => {
      const text = words.join("");
      const ids = tokenizer.encodeContent(text);
      assert.equal(tokenizer.decode(ids), text);
      assert(ids.every((id) => id > 2));
      if (!/<\|im_(start|end)\|>/.test(text)) assert.deepEqual(ids, tokenizer.encode(text));
    }),
    { numRuns: 200, seed: 1 },
  );
});

test("Tokenizer.encode() makes control tokens of a template around protected text", async () => {
  const tokenizer = await loadTokenizer(model);
  const content = "x <|im_end|> y";
  assert.deepEqual(tokenizer.encode(`<|im_start|>${tokenizer.protect(content)}<|im_end|>`), [
    1,
    ...tokenizer.encodeContent(content),
    2,
  ]);
});

test("Tokenizer.encodeContent() splits a special token that the vocabulary repeats", async () => {
  const tokenizer = await loadTokenizer(tinyModel());
  assert.deepEqual(tokenizer.encode("<s>"), [1]);
  assert.deepEqual(tokenizer.encodeContent("<s>"), [2, 3, 4]);
  assert.deepEqual(tokenizer.encodeContent("a<s>z"), [5, 2, 3, 4, 0]);
});

test("Tokenizer.encodeContent() keeps added tokens that are not special", async () => {
  const think = { id: 6, content: "<a>", special: false };
  const addedTokens = [...tiny.added_tokens, think];
  const tokenizer = await loadTokenizer(tinyModel({ added_tokens: addedTokens }));
  assert.deepEqual(tokenizer.encodeContent("<a><s>"), [6, 2, 3, 4]);
});

test("Tokenizer.encode() finds the longest control token beside protected text", async () => {
  const nested = ["<a", "<a>"].map((content, index) => ({ id: 6 + index, content, special: true }));
  const addedTokens = [...tiny.added_tokens, ...nested];
  const tokenizer = await loadTokenizer(tinyModel({ added_tokens: addedTokens }));
  assert.deepEqual(tokenizer.encode(`<a>${tokenizer.protect("<s>")}<a`), [7, 2, 3, 4, 6]);
});

test("Tokenizer.protect() replaces lone surrogates and the markers' code points", async () => {
  const tokenizer = await loadTokenizer(model);
  assert.equal(tokenizer.protect("a\ud83d😀\udc00"), "a\uFFFD😀\uFFFD");
  assert.equal(tokenizer.protect("\uFDD00\uFDD1"), "\uFFFD0\uFFFD");
});

test("Tokenizer describes the vocabulary", async () => {
  const tokenizer = await loadTokenizer(model);
  assert.equal(tokenizer.vocabSize, 4096);
  assert.equal(tokenizer.bosToken, null);
  assert.deepEqual(tokenizer.eosTokenIds, [2]);
  assert.equal(tokenizer.tokenId("<|im_start|>"), 1);
  assert.equal(tokenizer.tokenId("no such token"), undefined);
  const addedTokens = [{ id: 9, content: "<s>", special: true }];
  const bos = { __type: "AddedToken", content: "<s>" };
  const other = await loadTokenizer(tinyModel({ added_tokens: addedTokens }, { bos_token: bos }));
  assert.equal(other.vocabSize, 10);
  assert.equal(other.bosToken, "<s>");
  assert.deepEqual(other.eosTokenIds, []);
});

test("Tokenizer.eosTokenIds joins generation_config.json with eos_token", async () => {
  const generation = JSON.stringify({ eos_token_id: [0, 7] });
  const files = { "generation_config.json": generation, "config.json": '{"eos_token_id": 5}' };
  assert.deepEqual((await loadTokenizer(modelWith(files))).eosTokenIds, [0, 7, 2]);
});

test("Tokenizer.eosTokenIds falls back to config.json", async () => {
  const folder = modelWith({
    "generation_config.json": "{}",
    "config.json": '{"eos_token_id": 5}',
    "tokenizer_config.json": "{}",
  });
  assert.deepEqual((await loadTokenizer(folder)).eosTokenIds, [5]);
});

test("loadTokenizer() refuses end tokens that do not exist", async () => {
  await assert.rejects(
    loadTokenizer(modelWith({ "generation_config.json": '{"eos_token_id": [2, "x"]}' })),
    error("BAD_CONFIG", /eos_token_id is not a token id: "x": .*generation_config\.json/),
  );
  await assert.rejects(
    loadTokenizer(modelWith({ "tokenizer_config.json": '{"eos_token": "<nope>"}' })),
    error("BAD_CONFIG", /eos_token is not in the vocabulary: "<nope>"/),
  );
});

test("loadTokenizer() refuses missing files and names them", async () => {
  await assert.rejects(
    loadTokenizer(folderWith({})),
    error("BAD_CONFIG", /no such file: .*tokenizer\.json/),
  );
  await assert.rejects(
    loadTokenizer(folderWith({ "tokenizer.json": JSON.stringify(tiny) })),
    error("BAD_CONFIG", /no such file: .*tokenizer_config\.json/),
  );
});

test("loadTokenizer() refuses damaged files and names them", async () => {
  const text = JSON.stringify(demoJson());
  const damaged: [Record<string, string>, RegExp][] = [
    [{ "tokenizer.json": text.slice(0, 5000) }, /not JSON: .*tokenizer\.json: .*damaged/],
    [{ "tokenizer.json": "[]" }, /not a JSON object: .*tokenizer\.json/],
    [{ "tokenizer_config.json": "{" }, /not JSON: .*tokenizer_config\.json/],
    [{ "generation_config.json": "{" }, /not JSON: .*generation_config\.json/],
  ];
  for (const [files, message] of damaged) {
    await assert.rejects(loadTokenizer(modelWith(files)), error("BAD_CONFIG", message));
  }
});

test("loadTokenizer() refuses content that it cannot use", async () => {
  const withModel = (changes: object) => ({ model: { ...tiny.model, ...changes } });
  const refused: [object, RegExp][] = [
    [{ model: undefined }, /no "model" object/],
    [withModel({ type: "Unigram" }), /model type "Unigram", only "BPE"/],
    [withModel({ vocab: { a: -1 } }), /model\.vocab does not map tokens to ids/],
    [withModel({ vocab: [["a", 0]] }), /model\.vocab does not map tokens to ids/],
    [withModel({ merges: undefined }), /model\.merges is not a list/],
    [withModel({ unk_token: "<unk>" }), /unk_token "<unk>" is not in the vocabulary/],
    [{ added_tokens: [{ id: 1.5, content: "x" }] }, /added_tokens is not a list of tokens/],
    [{ added_tokens: [{ id: 1 }] }, /added_tokens is not a list of tokens/],
    [{ decoder: { type: "Magic" } }, /damaged or unknown content: .*Magic/],
  ];
  for (const [changes, message] of refused) {
    await assert.rejects(loadTokenizer(tinyModel(changes)), error("BAD_CONFIG", message));
  }
});
