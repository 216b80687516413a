/** RMSNorm over rows (Zhang & Sennrich 2019). The weight is frozen; backward folds in the residual's gradient. */
import { liveBytes, memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { DTYPES, rowsOf, type Value } from "../value.ts";

export interface NormAttributes {
  /** [T, C] */
  readonly y: Value;
  /** [T, C] */
  readonly x: Value;
  /** [C] */
  readonly weight: Value;
  readonly live: Value;
  /** Added to the mean square. */
  readonly eps: number;
}

export const norm: OpKind<NormAttributes> = {
  name: "norm",
  restores: true,
  uses: ({ y, x, weight, live }) => ({ reads: [x, weight, live], writes: [y], inPlace: [[y, x]] }),
  cost: ({ y, x }, load) => [memoryWork(y.dtype, liveBytes(load, y, x))],
  bind: ({ y, x, weight, live, eps }) => ({
    kernel: "lm_rms_norm_forward",
    fields: {
      type: DTYPES[y.dtype].code,
      y,
      x,
      weight,
      live,
      rows: rowsOf(y),
      width: y.shape[1] as number,
      y_pitch: y.pitch,
      x_pitch: x.pitch,
      weight_type: DTYPES[weight.dtype].code,
      eps,
    },
  }),
  backward({ y, x, weight, live, eps }, walk) {
    if (!walk.wants(x)) return;
    const dy = walk.gradient(y) as Value;
    const dx = walk.gradientLike(x);
    const earlier = walk.gradient(x);
    const restored = walk.restored(y);
    walk.emit(normBackward, {
      dx,
      y: restored,
      dy,
      x: walk.need(x),
      weight,
      add: earlier,
      live,
      eps,
    });
    walk.replace(x, dx);
  },
};

interface NormBackwardAttributes {
  readonly dx: Value;
  /** Written with the output of the forward op, if anyone needs it again. */
  readonly y: Value | null;
  readonly dy: Value;
  readonly x: Value;
  readonly weight: Value;
  /** Gradient that x has already from its other consumer, the residual; null = none. */
  readonly add: Value | null;
  readonly live: Value;
  readonly eps: number;
}

const normBackward: OpKind<NormBackwardAttributes> = {
  name: "normBackward",
  uses({ dx, y, dy, x, weight, add, live }) {
    const inPlace: [Value, Value][] = [[dx, dy]];
    if (add !== null) inPlace.unshift([dx, add]);
    if (y !== null) inPlace.push([y, dy]);
    return {
      reads: add === null ? [dy, x, weight, live] : [dy, x, weight, add, live],
      writes: y === null ? [dx] : [dx, y],
      inPlace,
    };
  },
  cost: ({ dx, y, dy, x, add }, load) => [memoryWork(dx.dtype, liveBytes(load, dx, y, dy, x, add))],
  bind: ({ dx, y, dy, x, weight, add, live, eps }) => ({
    kernel: "lm_rms_norm_backward",
    fields: {
      type: DTYPES[dx.dtype].code,
      dx,
      y,
      dy,
      x,
      weight,
      add,
      live,
      rows: rowsOf(dx),
      width: dx.shape[1] as number,
      dx_pitch: dx.pitch,
      y_pitch: y?.pitch ?? 0,
      dy_pitch: dy.pitch,
      x_pitch: x.pitch,
      add_pitch: add?.pitch ?? 0,
      weight_type: DTYPES[weight.dtype].code,
      eps,
    },
  }),
};
