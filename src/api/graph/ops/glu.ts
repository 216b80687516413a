/** SwiGLU: h = silu(g) * u over a packed gate|up row (Shazeer 2020). */
import { liveBytes, memoryWork } from "../cost.ts";
import type { OpKind } from "../program.ts";
import { DTYPES, rowsOf, type Value } from "../value.ts";

export interface GluAttributes {
  /** [T, I] */
  readonly h: Value;
  /** [T, 2 I] */
  readonly gu: Value;
  readonly live: Value;
}

export const glu: OpKind<GluAttributes> = {
  name: "glu",
  uses: ({ h, gu, live }) => ({ reads: [gu, live], writes: [h] }),
  cost: ({ h, gu }, load) => [memoryWork(h.dtype, liveBytes(load, h, gu))],
  bind: ({ h, gu, live }) => ({
    kernel: "lm_glu_forward",
    fields: {
      type: DTYPES[h.dtype].code,
      h,
      gu,
      live,
      rows: rowsOf(h),
      width: h.shape[1] as number,
      h_pitch: h.pitch,
      gu_pitch: gu.pitch,
    },
  }),
  backward({ h, gu, live }, walk) {
    if (!walk.wants(gu)) return;
    const dgu = walk.gradientLike(gu);
    walk.emit(gluBackward, { dgu, dh: walk.gradient(h) as Value, gu: walk.need(gu), live });
    walk.contribute(gu, dgu);
  },
};

interface GluBackwardAttributes {
  readonly dgu: Value;
  readonly dh: Value;
  readonly gu: Value;
  readonly live: Value;
}

const gluBackward: OpKind<GluBackwardAttributes> = {
  name: "gluBackward",
  uses: ({ dgu, dh, gu, live }) => ({ reads: [dh, gu, live], writes: [dgu], inPlace: [[dgu, gu]] }),
  cost: ({ dgu, dh, gu }, load) => [memoryWork(dh.dtype, liveBytes(load, dgu, dh, gu))],
  bind: ({ dgu, dh, gu, live }) => ({
    kernel: "lm_glu_backward",
    fields: {
      type: DTYPES[dh.dtype].code,
      dgu,
      dh,
      gu,
      live,
      rows: rowsOf(dh),
      width: dh.shape[1] as number,
      dgu_pitch: dgu.pitch,
      dh_pitch: dh.pitch,
      gu_pitch: gu.pitch,
    },
  }),
};
