/** Rotary position embedding on the q and k heads of a packed q|k|v row, in place (Su et al. 2021); v passes through. */
import { liveRows, memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { DTYPES, rowsOf, type Value } from "../value.ts";

export interface RopeAttributes {
  /** [T, (Hq + 2 Hk) D] */
  readonly y: Value;
  readonly x: Value;
  /** [P, D / 2] f32 */
  readonly cos: Value;
  readonly sin: Value;
  /** [T] i32 */
  readonly positions: Value;
  readonly live: Value;
  /** Hq + Hk */
  readonly heads: number;
  readonly headDim: number;
  /** 1 forward, -1 its transpose. */
  readonly direction: 1 | -1;
}

export const rope: OpKind<RopeAttributes> = {
  name: "rope",
  uses: ({ y, x, cos, sin, positions, live }) => ({
    reads: [x, cos, sin, positions, live],
    writes: [y],
    inPlace: [[y, x]],
  }),
  // In place, as planned wherever possible: v is not touched.
  cost: ({ y, heads, headDim }, load) => {
    const elements = liveRows(y, load) * heads * headDim;
    return [memoryWork(y.dtype, 2 * elements * DTYPES[y.dtype].bytes)];
  },
  bind: ({ y, x, cos, sin, positions, live, heads, headDim, direction }) => ({
    kernel: "lm_rope",
    fields: {
      type: DTYPES[y.dtype].code,
      y,
      x,
      cos,
      sin,
      positions,
      live,
      rows: rowsOf(y),
      width: y.shape[1] as number,
      heads,
      head_dim: headDim,
      position_count: cos.shape[0] as number,
      y_pitch: y.pitch,
      x_pitch: x.pitch,
      direction,
    },
  }),
  backward(attributes, walk) {
    if (!walk.wants(attributes.x)) return;
    const dy = walk.gradient(attributes.y) as Value;
    const dx = walk.gradientLike(attributes.x);
    walk.emit(rope, { ...attributes, y: dx, x: dy, direction: -1 });
    walk.contribute(attributes.x, dx);
  },
};
