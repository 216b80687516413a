/**
 * A small coverage-guided fuzzer in the manner of AFL (Zalewski 2014): an input that takes a branch, or takes it another
 * power-of-two number of times, is kept and mutated further.
 */
import { Buffer } from "node:buffer";

/** Settings of a run. */
export interface FuzzOptions {
  /** Inputs that are tried. */
  readonly runs: number;
  /** Valid inputs to start from. */
  readonly corpus: readonly Uint8Array[];
  /** Pieces of the format, put in at random places. */
  readonly dictionary?: readonly string[];
  /** Branch counters of the code under test; without them mutation is blind. */
  readonly counts?: Uint32Array;
  /** A change that knows the format; tried for one input in four. */
  readonly reshape?: (input: Uint8Array, random: Random) => Uint8Array;
  /** Mends an input, e.g. a length field; called for most inputs, not for all. */
  readonly mend?: (input: Uint8Array) => void;
  readonly seed: number;
  /** Longest input, bytes. Default 4096. */
  readonly maxBytes?: number;
}

/** What a run saw. */
export interface FuzzReport {
  /** Inputs that were kept because they took a new branch. */
  readonly kept: number;
  /** Outcomes of branches that were seen, of all that there are. */
  readonly outcomes: number;
}

/**
 * Calls `target` with mutated inputs; what it throws is a finding.
 *
 * @throws what `target` throws, with the input in hexadecimal and base64.
 */
export function fuzz(target: (input: Uint8Array) => void, options: FuzzOptions): FuzzReport {
  const { runs, corpus, dictionary = [], counts, mend, reshape, seed, maxBytes = 4096 } = options;
  const random = generator(seed);
  const words = dictionary.map((word) => new TextEncoder().encode(word));
  const kept: Uint8Array[] = corpus.map((input) => input.slice());
  const seen = new Uint8Array(counts?.length ?? 0);
  const attempt = (input: Uint8Array) => {
    counts?.fill(0);
    try {
      target(input);
    } catch (cause) {
      const text = Buffer.from(input).toString("base64");
      throw new Error(`fuzz: seed ${seed}: ${cause}: input (base64) ${text}`, { cause });
    }
    if (counts !== undefined && isNew(counts, seen)) kept.push(input);
  };
  for (const input of corpus) attempt(input);
  for (let run = corpus.length; run < runs; run++) {
    const parent = kept[random(kept.length)] as Uint8Array;
    const shaped = reshape !== undefined && random(4) === 0;
    let input = shaped ? reshape(parent, random) : parent;
    for (let change = shaped ? random(2) : 1 + random(4); change > 0; change--) {
      input = mutate(input, kept[random(kept.length)] as Uint8Array, words, random);
    }
    if (input.byteLength > maxBytes) input = input.subarray(0, maxBytes);
    if (input === parent) input = parent.slice();
    if (mend !== undefined && random(8) > 0) mend(input);
    attempt(input);
  }
  return { kept: kept.length - corpus.length, outcomes: seen.filter((bits) => bits > 0).length };
}

/** Marks what is new: one bit for each power of two of a counter. */
function isNew(counts: Uint32Array, seen: Uint8Array): boolean {
  let found = false;
  for (let at = 0; at < counts.length; at++) {
    const count = counts[at] as number;
    if (count === 0) continue;
    const bit = 1 << Math.min(7, 31 - Math.clz32(count));
    if (((seen[at] as number) & bit) !== 0) continue;
    seen[at] = (seen[at] as number) | bit;
    found = true;
  }
  return found;
}

/** Numbers at which arithmetic goes wrong, and what is no number. */
const NUMBERS = (
  "0 -0 -1 1.5 1e3 1e308 1e999 127 128 255 256 65535 65536 100000000 2147483647 2147483648 4294967295 " +
  "4294967296 9007199254740991 9007199254740992 9223372036854775808 18446744073709551615 [] {} null true"
)
  .split(" ")
  .map((text) => new TextEncoder().encode(text));

/** A whole number from 0 to below `below`. */
export type Random = (below: number) => number;

/** One change: a byte, a piece taken out, doubled, or put in, a number, or a piece of another input. */
function mutate(
  input: Uint8Array,
  other: Uint8Array,
  words: readonly Uint8Array[],
  random: Random,
): Uint8Array {
  const at = random(input.byteLength + 1);
  const upTo = at + random(Math.min(64, input.byteLength - at) + 1);
  const kind = random(8);
  if (kind <= 2 && at < input.byteLength) {
    const changed = input.slice();
    changed[at] = kind === 0 ? (changed[at] as number) ^ (1 << random(8)) : random(256);
    return changed;
  }
  if (kind === 3) return splice(input, at, upTo, new Uint8Array(0));
  if (kind === 4) return splice(input, at, at, input.subarray(at, upTo));
  if (kind === 5 && words.length > 0) {
    return splice(input, at, random(2) ? at : upTo, words[random(words.length)] as Uint8Array);
  }
  if (kind === 6) {
    const isDigit = (byte: number | undefined) => byte !== undefined && byte >= 48 && byte < 58;
    let from = at;
    while (from < input.byteLength && !isDigit(input[from])) from++;
    let to = from;
    while (isDigit(input[to])) to++;
    return splice(input, from, to, NUMBERS[random(NUMBERS.length)] as Uint8Array);
  }
  const from = random(other.byteLength + 1);
  return splice(input, at, upTo, other.subarray(from, from + random(64)));
}

function splice(input: Uint8Array, from: number, to: number, insert: Uint8Array): Uint8Array {
  const result = new Uint8Array(input.byteLength - (to - from) + insert.byteLength);
  result.set(input.subarray(0, from));
  result.set(insert, from);
  result.set(input.subarray(to), from + insert.byteLength);
  return result;
}

/** xorshift32 (Marsaglia 2003): the same seed tries the same inputs. */
function generator(seed: number): Random {
  let state = seed | 1;
  return (below) => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) % below;
  };
}
