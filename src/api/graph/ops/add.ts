/** y = a + b: the general fan-in of gradients. Norms fold it into their own backward, so it is rarely needed. */
import { liveBytes, memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { DTYPES, rowsOf, type Value } from "../value.ts";

export const add: OpKind<{ readonly y: Value; readonly a: Value; readonly b: Value }> = {
  name: "add",
  uses: ({ y, a, b }) => ({
    reads: [a, b],
    writes: [y],
    inPlace: [
      [y, a],
      [y, b],
    ],
  }),
  cost: ({ y, a, b }, load) => [memoryWork(y.dtype, liveBytes(load, y, a, b))],
  bind: ({ y, a, b }) => ({
    kernel: "lm_add",
    fields: { type: DTYPES[y.dtype].code, y, a, b, n: rowsOf(y) * y.pitch },
  }),
};
