/** What both sides of a comparison load: a checkpoint, an adapter, and the tokens of every step. */
import { existsSync } from "node:fs";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import type { Document } from "../../src/api/data/conversation.ts";
import { parseModelConfig } from "../../src/api/nn/config.ts";
import { MODELS } from "../../tests/plan/models.ts";
import {
  randomCheckpoint,
  writeCheckpoint,
  writeRandomAdapter,
} from "../../tests/shapes/checkpoint.ts";
import { allLabelled, markovBatch } from "../../tests/shapes/markov.ts";
import { SETTINGS, SHAPES, type ShapeName } from "../../tests/shapes/session.ts";

/** `case.json`. */
export interface Case {
  readonly shape: ShapeName;
  readonly seed: number;
  readonly steps: number;
  readonly documents: number;
  readonly tokens: number;
  readonly settings: typeof SETTINGS;
}

/** Steps after which the data comes again. */
const STEPS = 64;

/** Makes the case of a shape in `parent`, unless it is there already, and gives its folder. */
export async function makeCase(parent: string, shape: ShapeName, seed: number): Promise<string> {
  const folder = join(parent, `${shape}-seed${seed}`);
  if (existsSync(join(folder, "case.json"))) return folder;
  const { model, documents, tokens } = SHAPES[shape];
  const config = parseModelConfig(MODELS[model], "config.json");
  await mkdir(folder, { recursive: true });
  const json = { ...MODELS[model], model_type: config.family, bos_token_id: 0, eos_token_id: 0 };
  await writeCheckpoint(join(folder, "model"), json, randomCheckpoint(config, seed));
  await writeRandomAdapter(join(folder, "adapter"), config, seed);
  const ids = Array.from({ length: STEPS }, (_, step) =>
    markovBatch({ vocabSize: config.vocabSize, documents, tokens, seed, step }),
  ).flatMap((batch) => batch.map((document) => Buffer.from(document.ids.buffer)));
  await writeFile(join(folder, "tokens.i32"), Buffer.concat(ids));
  // Last: without it the case is not complete.
  const record: Case = { shape, seed, steps: STEPS, documents, tokens, settings: SETTINGS };
  await writeFile(join(folder, "case.json"), `${JSON.stringify(record, null, 2)}\n`);
  return folder;
}

/** The description of a case. */
export async function readCase(folder: string): Promise<Case> {
  return JSON.parse(await readFile(join(folder, "case.json"), "utf8"));
}

/** The documents of every step of a case. */
export async function readBatches(folder: string, of: Case): Promise<Document[][]> {
  const bytes = await readFile(join(folder, "tokens.i32"));
  const ids = new Int32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4);
  return Array.from({ length: of.steps }, (_, step) =>
    Array.from({ length: of.documents }, (_, index): Document => {
      const at = (step * of.documents + index) * of.tokens;
      const where = `step ${step}, document ${index}`;
      return { ids: ids.slice(at, at + of.tokens), labelled: allLabelled(of.tokens), where };
    }),
  );
}
