/** Random numbers of benchmarks and tests: the same on every machine. */
import { philox4x32 } from "../../src/api/data/order.ts";

/** A source of random 32-bit words; sources of different streams are independent. */
export function randomWords(seed: number, stream: number): () => number {
  const [out, counter] = [new Uint32Array(4), Uint32Array.of(0, 0, stream, 0)];
  const key = Uint32Array.of(seed, 0x5ba9e5);
  let lane = 4;
  return () => {
    if (lane === 4) {
      philox4x32(out, counter, key);
      counter[0] = (counter[0] as number) + 1;
      lane = 0;
    }
    return out[lane++] as number;
  };
}

/** The bits of the bf16 number nearest to an f32 number, ties to even. */
export function bf16Bits(value: number): number {
  ROUND.setFloat32(0, value);
  const bits = ROUND.getUint32(0);
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

/** The bf16 number nearest to `value`. */
export function bf16Round(value: number): number {
  ROUND.setUint32(0, bf16Bits(value) << 16);
  return ROUND.getFloat32(0);
}

const ROUND = new DataView(new ArrayBuffer(4));
