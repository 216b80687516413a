/** Picking rows and the most likely token, for generation. */
import { liveBytes, memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { DTYPES, rowsOf, type Value } from "../value.ts";

/** y[i] = x[index[i]] */
export const gatherRows: OpKind<{
  readonly y: Value;
  readonly x: Value;
  readonly index: Value;
}> = {
  name: "gatherRows",
  uses: ({ y, x, index }) => ({ reads: [x, index], writes: [y] }),
  cost: ({ y }, load) => [memoryWork(y.dtype, 2 * liveBytes(load, y))],
  bind: ({ y, x, index }) => ({
    kernel: "lm_gather_rows",
    fields: {
      type: DTYPES[y.dtype].code,
      y,
      x,
      index,
      live: null,
      rows: rowsOf(y),
      width: y.shape[1] as number,
      source_rows: rowsOf(x),
      y_pitch: y.pitch,
      x_pitch: x.pitch,
    },
  }),
};

/** out[t] = index of the largest x[t, :] */
export const argmax: OpKind<{ readonly out: Value; readonly x: Value }> = {
  name: "argmax",
  uses: ({ out, x }) => ({ reads: [x], writes: [out] }),
  cost: ({ x }, load) => [memoryWork(x.dtype, liveBytes(load, x))],
  bind: ({ out, x }) => ({
    kernel: "lm_argmax",
    fields: {
      type: DTYPES[x.dtype].code,
      out,
      x,
      live: null,
      rows: rowsOf(x),
      width: x.shape[1] as number,
      x_pitch: x.pitch,
    },
  }),
};
