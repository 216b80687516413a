/** Sets a value to zero bytes. */
import { memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { bytesOf, type Value } from "../value.ts";

export const fillZero: OpKind<{ readonly y: Value }> = {
  name: "fill",
  uses: ({ y }) => ({ reads: [], writes: [y] }),
  cost: ({ y }) => [memoryWork(y.dtype, bytesOf(y))],
  bind: ({ y }) => ({ fill: y }),
};
