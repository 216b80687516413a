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
  restores: true,
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
    const dh = walk.gradient(h) as Value;
    walk.emit(gluBackward, { dgu, h: walk.restored(h), dh, gu: walk.need(gu), live });
    walk.contribute(gu, dgu);
  },
};

interface GluBackwardAttributes {
  readonly dgu: Value;
  /** Written with the output of the forward op, if anyone needs it again. */
  readonly h: Value | null;
  readonly dh: Value;
  readonly gu: Value;
  readonly live: Value;
}

export const gluBackward: OpKind<GluBackwardAttributes> = {
  name: "gluBackward",
  uses: ({ dgu, h, dh, gu, live }) => ({
    reads: [dh, gu, live],
    writes: h === null ? [dgu] : [dgu, h],
    inPlace:
      h === null
        ? [[dgu, gu]]
        : [
            [dgu, gu],
            [h, dh],
          ],
  }),
  cost: ({ dgu, h, dh, gu }, load) => [memoryWork(dh.dtype, liveBytes(load, dgu, h, dh, gu))],
  bind: ({ dgu, h, dh, gu, live }) => ({
    kernel: "lm_glu_backward",
    fields: {
      type: DTYPES[dh.dtype].code,
      dgu,
      h,
      dh,
      gu,
      live,
      rows: rowsOf(dh),
      width: dh.shape[1] as number,
      dgu_pitch: dgu.pitch,
      h_pitch: h?.pitch ?? 0,
      dh_pitch: dh.pitch,
      gu_pitch: gu.pitch,
    },
  }),
};
