/** Random programs from fixed seeds: chains of ops with residuals, scratch and a backward pass, of uneven sizes. */
import {
  type OpKind,
  type OpUses,
  type Program,
  ProgramBuilder,
} from "../../src/api/graph/program.ts";
import { makeValue, type Value } from "../../src/api/graph/value.ts";

/** Uniform numbers in [0, 1) (mulberry32, public domain). */
export function randomNumbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const touch: OpKind<OpUses> = {
  name: "touch",
  uses: (uses) => uses,
  cost: () => [],
  bind: () => ({ fill: makeValue("none", "f32", [1]) }),
};

/** A program of 12 to 90 ops; the same seed gives the same program. */
export function randomProgram(seed: number): Program {
  const random = randomNumbers(seed);
  const below = (count: number) => Math.floor(random() * count);
  // Sizes between 256 bytes and 4 MiB, uniform in their logarithm, or one of a few common ones.
  const common = Array.from({ length: 3 }, () => 64 * (1 + below(2000)));
  const elements = () =>
    random() < 0.5 ? (common[below(3)] as number) : Math.round(64 * 2 ** (random() * 14));
  const builder = new ProgramBuilder();
  const value = (name: string) => makeValue(name, "f32", [elements()]);
  const scratch = () => (random() < 0.3 ? [value("scratch")] : []);
  const input = value("input");
  const forward: Value[] = [input];
  const length = 4 + below(28);
  for (let index = 0; index < length; index++) {
    const reads = [forward.at(-1) as Value];
    if (random() < 0.3) reads.push(forward[below(forward.length)] as Value);
    const writes = [value("activation")];
    if (random() < 0.15) writes.push(value("statistics"));
    builder.emit(touch, { reads, writes, scratch: scratch() });
    forward.push(...writes);
  }
  let gradient = value("gradient");
  builder.emit(touch, { reads: [forward.at(-1) as Value], writes: [gradient] });
  for (let index = forward.length - 1; index >= 0; index--) {
    const reads = [gradient];
    if (random() < 0.6) reads.push(forward[index] as Value);
    const next = value("gradient");
    const inPlace = random() < 0.3 ? [[next, gradient] as const] : [];
    builder.emit(touch, { reads, writes: [next], scratch: scratch(), inPlace }, "backward");
    gradient = next;
  }
  return builder.finish("train", [input]);
}
