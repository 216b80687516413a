/** What model and data of a run are, as short hashes: a resumed run must have the same. */
import { createHash } from "node:crypto";
import type { Document } from "../data/conversation.ts";
import type { TensorFile } from "../io/safetensors.ts";
import type { ModelConfig } from "../nn/config.ts";

/** Bytes that are read at the beginning, in the middle and at the end of every tensor. */
const SAMPLE_BYTES = 256;

/** Hex digits of a fingerprint. */
const DIGITS = 16;

/**
 * SHA-256 over the config and, of every tensor, name, dtype, shape and three samples of its bytes. A fine-tuned copy of a
 * model differs in every tensor, so it is told apart; the cost is three small reads a tensor, not the whole checkpoint.
 */
export async function modelFingerprint(config: ModelConfig, files: TensorFile): Promise<string> {
  const hash = createHash("sha256").update(JSON.stringify(config));
  const sample = new Uint8Array(SAMPLE_BYTES);
  for (const name of [...files.tensors.keys()].sort()) {
    const entry = files.tensors.get(name);
    if (entry === undefined) continue;
    hash.update(`\n${name} ${entry.dtype} ${entry.shape}\n`);
    const part = sample.subarray(0, Math.min(SAMPLE_BYTES, entry.bytes));
    for (const share of [0, 0.5, 1]) {
      await files.read(entry, part, Math.floor((entry.bytes - part.byteLength) * share));
      hash.update(part);
    }
  }
  return hash.digest("hex").slice(0, DIGITS);
}

/** SHA-256 over the tokens and labels of every document, in order. */
export function dataFingerprint(documents: readonly Document[]): string {
  const hash = createHash("sha256");
  for (const { ids, labelled } of documents) {
    hash.update(`${ids.length}\n`);
    hash.update(new Uint8Array(ids.buffer, ids.byteOffset, ids.byteLength));
    hash.update(labelled);
  }
  return hash.digest("hex").slice(0, DIGITS);
}
