import assert from "node:assert/strict";
import { test } from "node:test";
import { attentionWorkspace } from "../../src/api/graph/ops/attention.ts";
import * as kernels from "../../src/api/kernels/mod.ts";
import { SLOW } from "../ffi/support.ts";
import * as reference from "../reference/attention.ts";
import { columns, type Matrix, matrix } from "../reference/matrix.ts";
import { rope } from "../reference/rows.ts";
import {
  assertClose,
  assertGradient,
  dot,
  FLOATS,
  KINDS,
  Random,
  Rig,
  type Tensor,
  TOLERANCE,
} from "./rig.ts";

/** Rows, heads, key-value heads, head size, and where documents start. */
interface Case {
  readonly T: number;
  readonly heads: number;
  readonly kvHeads: number;
  readonly D: number;
  readonly cuSeqlens: readonly number[];
  readonly window?: number;
  readonly softcap?: number;
}

const CASES: readonly Case[] = [
  { T: 1, heads: 1, kvHeads: 1, D: 1, cuSeqlens: [0, 1] },
  { T: 63, heads: 2, kvHeads: 2, D: 16, cuSeqlens: [0, 63] },
  { T: 65, heads: 4, kvHeads: 2, D: 32, cuSeqlens: [0, 1, 1, 2, 65] },
  { T: 127, heads: 3, kvHeads: 1, D: 63, cuSeqlens: [0, 64, 100, 127, 127] },
  { T: 129, heads: 2, kvHeads: 1, D: 64, cuSeqlens: [0, 129] },
  { T: 64, heads: 2, kvHeads: 2, D: 65, cuSeqlens: [0, 30, 50, 50] }, // rows 50 .. 63 hold nothing
  { T: 40, heads: 1, kvHeads: 1, D: 129, cuSeqlens: [0, 40] },
  // One key more or less in a window, or a gradient without the slope 1 - tanh^2 of the cap, fails here.
  { T: 70, heads: 2, kvHeads: 1, D: 16, cuSeqlens: [0, 66, 70], window: 1 },
  { T: 140, heads: 2, kvHeads: 2, D: 32, cuSeqlens: [0, 129, 140], window: 7 },
  { T: 150, heads: 4, kvHeads: 2, D: 8, cuSeqlens: [0, 20, 150], window: 65, softcap: 1.5 },
  { T: 65, heads: 2, kvHeads: 1, D: 64, cuSeqlens: [0, 1, 65], softcap: 0.5 },
];

/** Views of q, k and v inside one matrix [T, (Hq + 2 Hk) D + gap]. */
function split(tensor: Tensor, { T, heads, kvHeads, D }: Case): [q: Tensor, k: Tensor, v: Tensor] {
  const { pitch, dtype } = tensor.view;
  const size = dtype === "f32" ? 4 : 2;
  const view = (count: number, before: number): Tensor => ({
    buffer: tensor.buffer,
    view: tensor.buffer.as(dtype, [T, count * D], { pitch, offset: before * D * size }),
  });
  return [view(heads, 0), view(kvHeads, heads), view(kvHeads, heads + kvHeads)];
}

function parts(m: Matrix, { heads, kvHeads, D }: Case): [q: Matrix, k: Matrix, v: Matrix] {
  const [a, b, c] = [heads * D, (heads + kvHeads) * D, (heads + 2 * kvHeads) * D] as const;
  return [columns(m, 0, a), columns(m, a, b), columns(m, b, c)];
}

function first(m: Matrix, count: number): Matrix {
  return matrix(count, m.cols, (row, col) => m.data[row * m.cols + col] as number);
}

for (const kind of KINDS) {
  for (const dtype of FLOATS) {
    test(
      `attentionForward() and attentionBackward() agree with the formula in ${dtype} on ${kind}`,
      SLOW,
      async () => {
        for (const sizes of CASES) {
          await using rig = await Rig.open(kind);
          const { T, heads, kvHeads, D, cuSeqlens, window = 0, softcap = 0 } = sizes;
          const what = JSON.stringify(sizes);
          const live = cuSeqlens.at(-1) as number;
          const random = new Random(T);
          const qkv = random.matrix(dtype, T, (heads + 2 * kvHeads) * D);
          const packed = rig.matrix(dtype, qkv, { gap: 3 });
          const [q, k, v] = split(packed, sizes);
          const o = rig.tensor(dtype, [T, heads * D], undefined, { gap: 1 });
          const lse = rig.tensor("f32", [heads, T]);
          const documents = rig.ints(cuSeqlens).view;
          const options = { stream: rig.stream, heads, kvHeads, window, softcap };
          kernels.attentionForward(o.view, lse.view, q.view, k.view, v.view, documents, options);

          const layout = { heads, kvHeads, headDim: D, scale: 1 / Math.sqrt(D), window, softcap };
          const [a, b, c] = parts(qkv, sizes);
          const want = reference.attention(a, b, c, cuSeqlens, layout);
          assertClose(
            await rig.read(o, live),
            first(want.o, live),
            2 * TOLERANCE[dtype],
            `o: ${what}`,
          );
          const stats = rig.device.createPinnedBuffer(heads * T * 4);
          rig.stream.copy(stats, lse.buffer);
          await rig.stream.done();
          const got = stats.view(Float32Array);
          for (let i = 0; i < heads * T; i++) {
            if (i % T >= live) continue;
            const difference = Math.abs((got[i] as number) - (want.lse.data[i] as number));
            assert.ok(difference < 1e-4, `lse ${i}: ${what}`);
          }

          const gradO = random.matrix(dtype, T, heads * D);
          const gradient = rig.tensor(dtype, [T, (heads + 2 * kvHeads) * D], undefined, { gap: 5 });
          const [dq, dk, dv] = split(gradient, sizes);
          const delta = rig.tensor("f32", [heads, T]).view;
          const words = attentionWorkspace(T, cuSeqlens.length - 1, layout);
          kernels.attentionBackward(
            dq.view,
            dk.view,
            dv.view,
            delta,
            rig.matrix(dtype, gradO, { gap: 1 }).view,
            o.view,
            lse.view,
            q.view,
            k.view,
            v.view,
            documents,
            { ...options, workspace: rig.tensor("f32", [words]).view },
          );
          const dqkv = await rig.read(gradient, live);
          const loss = () => {
            const [x, y, z] = parts(qkv, sizes);
            return dot(
              first(reference.attention(x, y, z, cuSeqlens, layout).o, live),
              first(gradO, live),
            );
          };
          const views = {
            ...qkv,
            rows: live,
            data: qkv.data.subarray(0, live * qkv.cols),
          } as Matrix;
          assertGradient(dqkv, views, loss, 8 * TOLERANCE[dtype] + 1e-5, `dqkv: ${what}`, 5);
        }
      },
    );

    test(
      `attentionCachedForward() appends to the cache and sees all of it in ${dtype} on ${kind}`,
      SLOW,
      async () => {
        for (const mask of [{}, { window: 7 }, { window: 21, softcap: 0.7 }]) {
          await using rig = await Rig.open(kind);
          const sizes = { T: 24, heads: 4, kvHeads: 2, D: 20, cuSeqlens: [] };
          const { heads, kvHeads, D } = sizes;
          const layout = { heads, kvHeads, headDim: D, scale: 0.3, ...mask };
          const options = { stream: rig.stream, heads, kvHeads, scale: 0.3, ...mask };
          const capacity = 40;
          const qkv = new Random(5).matrix(dtype, 35, (heads + 2 * kvHeads) * D);
          const kCache = rig.tensor(dtype, [capacity, kvHeads * D]);
          const vCache = rig.tensor(dtype, [capacity, kvHeads * D]);
          // 20 live rows of 24, then 12 of 12 and 3 single rows.
          let past = 0;
          for (const [T, live] of [
            [24, 20],
            [12, 12],
            [1, 1],
            [1, 1],
            [1, 1],
          ] as const) {
            const own = matrix(T, qkv.cols, (row, col) =>
              row < live ? (qkv.data[(past + row) * qkv.cols + col] as number) : Number.NaN,
            );
            const [q, k, v] = split(rig.matrix(dtype, own, { gap: 2 }), { ...sizes, T });
            const o = rig.tensor(dtype, [T, heads * D], undefined, { gap: 3 });
            const at = rig.ints([past]).view;
            const rows = { ...options, live: rig.ints([live]).view };
            kernels.attentionCachedForward(
              o.view,
              kCache.view,
              vCache.view,
              q.view,
              k.view,
              v.view,
              at,
              rows,
            );
            const [, keys, values] = parts(first(qkv, past + live), sizes);
            const [queries] = parts(first(own, live), sizes);
            const want = reference.cachedAttention(queries, keys, values, past, layout);
            assertClose(
              await rig.read(o, live),
              want,
              2 * TOLERANCE[dtype],
              `past ${past} ${JSON.stringify(mask)}`,
            );
            past += live;
          }
          const [, keys] = parts(qkv, sizes);
          assert.deepEqual((await rig.read(kCache, past)).data, keys.data);
        }
      },
    );
  }

  test(
    `attention kernels give the same bits with any number of threads on ${kind}`,
    SLOW,
    async () => {
      const results: string[] = [];
      const sizes = { T: 131, heads: 4, kvHeads: 2, D: 32, cuSeqlens: [0, 90, 131] };
      const { T, heads, kvHeads, D } = sizes;
      for (const threads of [1, 2, 3]) {
        await using rig = await Rig.open(kind, threads);
        const random = new Random(9);
        const [q, k, v] = split(rig.matrix("f32", random.matrix("f32", T, 8 * D)), sizes);
        const o = rig.tensor("f32", [T, heads * D]);
        const lse = rig.tensor("f32", [heads, T]);
        const documents = rig.ints(sizes.cuSeqlens).view;
        const options = { stream: rig.stream, heads, kvHeads };
        kernels.attentionForward(o.view, lse.view, q.view, k.view, v.view, documents, options);
        const gradient = rig.tensor("f32", [T, 8 * D]);
        const [dq, dk, dv] = split(gradient, sizes);
        const delta = rig.tensor("f32", [heads, T]).view;
        const gradO = rig.matrix("f32", random.matrix("f32", T, heads * D)).view;
        kernels.attentionBackward(
          dq.view,
          dk.view,
          dv.view,
          delta,
          gradO,
          o.view,
          lse.view,
          q.view,
          k.view,
          v.view,
          documents,
          options,
        );
        const all = [await rig.read(o), await rig.read(lse), await rig.read(gradient)];
        results.push(all.map(({ data }) => data.join()).join(";"));
      }
      assert.equal(results[1], results[0]);
      assert.equal(results[2], results[0]);
    },
  );

  test(
    `rope() rotates pairs by position and is undone by its transpose on ${kind}`,
    SLOW,
    async () => {
      await using rig = await Rig.open(kind);
      const { stream } = rig;
      for (const dtype of FLOATS) {
        for (const [T, heads, D, rest] of [
          [1, 1, 2, 0],
          [63, 2, 16, 16],
          [65, 3, 64, 64],
          [7, 1, 130, 1],
        ] as const) {
          const random = new Random(T);
          const width = heads * D + rest;
          const x = random.matrix(dtype, T, width);
          const angles = matrix(50, D / 2, (position, pair) => position / 100 ** (pair / D));
          const cos = matrix(50, D / 2, (row, col) =>
            Math.fround(Math.cos(angles.data[row * (D / 2) + col] as number)),
          );
          const sin = matrix(50, D / 2, (row, col) =>
            Math.fround(Math.sin(angles.data[row * (D / 2) + col] as number)),
          );
          const positions = Array.from({ length: T }, () => random.below(50));
          const what = `${dtype} T ${T}, heads ${heads}, D ${D}, rest ${rest}`;
          const [c, s] = [rig.matrix("f32", cos).view, rig.matrix("f32", sin).view];
          const at = rig.ints(positions).view;
          const input = rig.matrix(dtype, x, { gap: 2 });
          const y = rig.tensor(dtype, [T, width], undefined, { gap: 1 });
          kernels.rope(y.view, input.view, c, s, at, { stream, heads, headDim: D });
          const forward = rope(x, cos, sin, positions, heads, D, 1);
          assertClose(await rig.read(y), forward, TOLERANCE[dtype], what);
          kernels.rope(input.view, input.view, c, s, at, {
            stream,
            heads,
            headDim: D,
            backward: true,
          });
          const dx = await rig.read(input);
          const own = { ...x, data: x.data.slice() };
          // Linear: the gradient of dot(rope(x), g) is the transpose applied to g; g is the old content of input.
          assertGradient(
            dx,
            own,
            () => dot(rope(own, cos, sin, positions, heads, D, 1), x),
            2 * TOLERANCE[dtype],
            what,
          );
        }
      }
    },
  );
}

test("attention kernels and rope() reject what does not fit", SLOW, async () => {
  await using rig = await Rig.open("cpu", 1);
  const { stream } = rig;
  const q = rig.tensor("f32", [8, 64]).view;
  const k = rig.tensor("f32", [8, 32]).view;
  const wide = rig.tensor("f32", [8, 32], undefined, { gap: 32 }).view;
  const lse = rig.tensor("f32", [4, 8]).view;
  const ids = rig.ints([0, 8]).view;
  const one = rig.ints([0]).view;
  const positions = rig.ints([0, 0, 0, 0, 0, 0, 0, 0]).view;
  const table = rig.tensor("f32", [10, 8]).view;
  const heads = { stream, heads: 4, kvHeads: 2 };
  const forward = kernels.attentionForward;
  const cases: [() => void, RegExp][] = [
    [
      () => forward(q, lse, q, k, k, ids, heads),
      /^attentionForward: rows must be equally far apart: q has pitch 64, k has pitch 32/,
    ],
    [
      () => forward(q, lse, q, wide, wide, ids, { ...heads, heads: 3 }),
      /^attentionForward: Hq does not fit: Hq is 3/,
    ],
    [
      () => forward(q, lse, q, wide, wide, ids, { ...heads, kvHeads: 1 }),
      /^attentionForward: the heads do not fit: heads is 4, kvHeads is 1/,
    ],
    [
      () => forward(q, lse, q, wide, wide, one, heads),
      /^attentionForward: cuSeqlens has no document/,
    ],
    [() => forward(k, lse, q, wide, wide, ids, heads), /^attentionForward: HqD does not fit/],
    [
      () => forward(q, lse, q, wide, wide, ids, { ...heads, scale: Number.NaN }),
      /scale must be a finite number/,
    ],
    [
      () => forward(q, lse, q, wide, wide, ids, { ...heads, window: -1 }),
      /^attentionForward: window must be an integer from 0/,
    ],
    [
      () => forward(q, lse, q, wide, wide, ids, { ...heads, softcap: -1 }),
      /^attentionForward: softcap is negative: -1: 0 = no cap/,
    ],
    [
      () => kernels.attentionCachedForward(q, k, lse, q, wide, wide, one, heads),
      /^attentionCachedForward: vCache|^attentionCachedForward: capacity/,
    ],
    [
      () => kernels.rope(q, q, table, table, positions, { stream, heads: 5, headDim: 16 }),
      /^rope: the rotated heads do not fit/,
    ],
    [
      () => kernels.rope(q, q, table, table, positions, { stream, heads: 1, headDim: 15 }),
      /^rope: D\/2 does not fit/,
    ],
    [
      () => kernels.rope(q, q, table, table, ids, { stream, heads: 1, headDim: 16 }),
      /^rope: T does not fit/,
    ],
  ];
  for (const [use, message] of cases) assert.throws(use, { code: "BAD_ARGUMENT", message });
});
