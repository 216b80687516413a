/** Packs whole documents into micro-batches, and writes a micro-batch into the arrays a step reads. */
import { LoramemError } from "../../ffi/error.ts";
import { countLabels, type Document } from "./conversation.ts";

/** Documents that are computed as one packed sequence, without attention between them. */
export interface PackedMicroBatch {
  /** In the order they lie in the sequence. */
  readonly documents: readonly Document[];
  /** Their tokens together, at most tokensPerMicroBatch. */
  readonly tokens: number;
  /** Their training targets together. */
  readonly labelled: number;
}

/** The arrays of one micro-batch, planned for T tokens, D documents and M labels. */
export interface MicroBatchBlock {
  /** Token ids, [T]; 0 in the unused tail. */
  readonly ids: Int32Array;
  /** Position in the own document, counted from 0, [T]; 0 in the unused tail. */
  readonly positions: Int32Array;
  /**
   * [D + 1] offsets of the documents, then the number of tokens in use, repeated: places without a
   * document are empty documents.
   */
  readonly cuSeqlens: Int32Array;
  /** [M] rows whose next token is a training target, ascending; 0 behind the last label. */
  readonly labelRows: Int32Array;
  /** [M] that next token; 0 behind the last label. */
  readonly labelIds: Int32Array;
}

/**
 * Packs documents by first-fit decreasing: longest first (ties in the given order), each into the
 * first micro-batch with room. Deterministic. Where `maxDocuments` does not bind, the number of
 * micro-batches is at most 11/9 of the smallest possible plus 6/9 (Dósa, ESCAPE 2007). Costs documents x micro-batches.
 *
 * @example Usage
 * ```ts
 * import { packDocuments } from "./src/api/data/packing.ts";
 * const document = { ids: Int32Array.of(5, 6, 7), labelled: Uint8Array.of(0, 0, 1), where: "here" };
 * console.log(packDocuments([document, document, document], 8).map((batch) => batch.tokens)); // 6, 3
 * ```
 *
 * @param documents The documents of one optimizer step, or of an evaluation.
 * @param tokensPerMicroBatch Most tokens of a micro-batch.
 * @param maxDocuments Most documents of a micro-batch; no limit if left out.
 * @returns The micro-batches; every document is in exactly one.
 * @throws {LoramemError} `BAD_ARGUMENT`; `BAD_DATA` for a document that fits no micro-batch.
 */
export function packDocuments(
  documents: readonly Document[],
  tokensPerMicroBatch: number,
  maxDocuments: number = Number.MAX_SAFE_INTEGER,
): PackedMicroBatch[] {
  checkCount("tokensPerMicroBatch", tokensPerMicroBatch);
  checkCount("maxDocuments", maxDocuments);
  const batches: { documents: Document[]; tokens: number; labelled: number }[] = [];
  // toSorted is stable, so ties keep the given order.
  for (const document of documents.toSorted((a, b) => b.ids.length - a.ids.length)) {
    const { length } = document.ids;
    if (length > tokensPerMicroBatch) {
      const message =
        `packDocuments: a document is longer than a micro-batch: ${document.where} has ${length} tokens, ` +
        `the limit is ${tokensPerMicroBatch}: set tokensPerMicroBatch to ${length} or more`;
      throw new LoramemError("BAD_DATA", message);
    }
    let batch = batches.find(
      ({ documents: { length: count }, tokens }) =>
        tokens + length <= tokensPerMicroBatch && count < maxDocuments,
    );
    if (batch === undefined) {
      batch = { documents: [], tokens: 0, labelled: 0 };
      batches.push(batch);
    }
    batch.documents.push(document);
    batch.tokens += length;
    batch.labelled += countLabels(document);
  }
  return batches;
}

/**
 * Writes a micro-batch into `block`, every element of it. Allocates nothing, so it may run in a step.
 *
 * @param batch What to write.
 * @param block Where to; typically views of a pinned buffer.
 * @throws {LoramemError} `OVER_PLAN` if the micro-batch is larger than the block; nothing is written.
 */
export function fillMicroBatch(batch: PackedMicroBatch, block: MicroBatchBlock): void {
  const { ids, positions, cuSeqlens, labelRows, labelIds } = block;
  checkFits("tokens", Math.min(ids.length, positions.length), batch.tokens);
  checkFits("documents", cuSeqlens.length - 1, batch.documents.length);
  checkFits("labels", Math.min(labelRows.length, labelIds.length), batch.labelled);
  let row = 0;
  let label = 0;
  let index = 0;
  for (const document of batch.documents) {
    cuSeqlens[index++] = row;
    ids.set(document.ids, row);
    for (let position = 0; position < document.ids.length; position++, row++) {
      positions[row] = position;
      if (position > 0 && document.labelled[position] === 1) {
        labelRows[label] = row - 1;
        labelIds[label++] = document.ids[position] as number;
      }
    }
  }
  cuSeqlens.fill(row, index);
  ids.fill(0, row);
  positions.fill(0, row);
  labelRows.fill(0, label);
  labelIds.fill(0, label);
}

function checkFits(what: string, planned: number, requested: number): void {
  if (requested <= planned) return;
  const message = `fillMicroBatch: more ${what} than planned: ${requested} of ${planned}`;
  throw new LoramemError("OVER_PLAN", message, { planned, requested });
}

function checkCount(name: string, value: number): void {
  if (Number.isSafeInteger(value) && value >= 1) return;
  const message = `packDocuments: ${name} is not a positive integer: ${value}`;
  throw new LoramemError("BAD_ARGUMENT", message, { name, value });
}
