import assert from "node:assert/strict";
import { test } from "node:test";
import * as kernels from "../../src/api/kernels/mod.ts";
import { SLOW } from "../ffi/support.ts";
import * as reference from "../reference/linear.ts";
import { type Matrix, matrix } from "../reference/matrix.ts";
import {
  assertClose,
  assertGradient,
  dot,
  FLOATS,
  type Float,
  KINDS,
  Random,
  Rig,
  rounded,
  SIZES,
  type Tensor,
  TOLERANCE,
} from "./rig.ts";

/** A group with its data, for the reference and on the device. */
interface Group {
  readonly parts: readonly reference.Part[];
  readonly onDevice: kernels.LoraPart[];
  readonly gradients: readonly (Tensor | null)[];
  readonly a: Matrix;
  readonly N: number;
  readonly R: number;
}

const SCALES = [2, 0.5, 1.25] as const;

function makeGroup(
  rig: Rig,
  random: Random,
  stored: Float,
  K: number,
  sizes: readonly [number, number][],
): Group {
  const R = sizes.reduce((total, [, rank]) => total + rank, 0);
  const parts = sizes.map(([out, rank], index) => ({
    out,
    rank,
    scale: SCALES[index] as number,
    b: random.matrix(stored, out, rank, 0.3),
  }));
  const gradients = parts.map(({ out, rank, b }) =>
    rank === 0
      ? null
      : rig.tensor(
          "f32",
          [out, rank],
          b.data.map((_, index) => index % 7),
        ),
  );
  const onDevice = parts.map(({ out, rank, scale, b }, index) => ({
    out,
    rank,
    scale,
    b: rank === 0 ? null : rig.matrix(stored, b).view,
    gradB: gradients[index]?.view ?? null,
  }));
  const N = parts.reduce((total, { out }) => total + out, 0);
  return { parts, onDevice, gradients, a: random.matrix(stored, R, K, 0.3), N, R };
}

/** Sizes [T, K, parts] around tiles and vectors, with one to three parts and with none to three adapters. */
const CASES: readonly [number, number, readonly [number, number][]][] = [
  ...SIZES.map((n): [number, number, [number, number][]] => [n, 65, [[63, 4]]]),
  ...SIZES.map((n): [number, number, [number, number][]] => [5, n, [[64, 8]]]),
  ...SIZES.map((n): [number, number, [number, number][]] => [
    7,
    33,
    [
      [n, 3],
      [16, 0],
      [17, 16],
    ],
  ]),
  [
    3,
    64,
    [
      [32, 0],
      [16, 0],
      [16, 0],
    ],
  ],
  [
    130,
    127,
    [
      [129, 16],
      [33, 1],
    ],
  ],
];

for (const kind of KINDS) {
  for (const dtype of FLOATS) {
    test(
      `loraDown() and loraLinearForward() agree with the formulas in ${dtype} on ${kind}`,
      SLOW,
      async () => {
        for (const [T, K, sizes] of CASES) {
          await using rig = await Rig.open(kind);
          const { stream } = rig;
          const what = `T ${T}, K ${K}, parts ${JSON.stringify(sizes)}`;
          const random = new Random(T * 1000 + K);
          const stored = FLOATS[(T + K) % 3] as Float;
          const { parts, onDevice, a, N, R } = makeGroup(rig, random, stored, K, sizes);
          const x = random.matrix(dtype, T, K);
          const w = random.matrix(stored, N, K, 0.2);
          const bias = random.matrix("bf16", 1, N);
          const residual = random.matrix(dtype, T, N);
          const input = rig.matrix(dtype, x, { gap: 3 }).view;
          const s = rig.tensor(dtype, [T, Math.max(1, R)], undefined, { gap: 1 });
          if (R > 0) {
            kernels.loraDown(s.view, input, rig.matrix(stored, a).view, onDevice, { stream });
            assertClose(
              await rig.read(s),
              reference.loraDown(x, a, parts),
              2 * TOLERANCE[dtype],
              `s: ${what}`,
            );
          }
          const y = rig.matrix(dtype, residual, { gap: 5 }); // the residual, overwritten in place
          kernels.loraLinearForward(
            y.view,
            input,
            rig.matrix(stored, w, { gap: 2 }).view,
            onDevice,
            {
              stream,
              bias: rig.tensor("bf16", [N], bias.data).view,
              residual: y.view,
              s: R > 0 ? s.view : null,
            },
          );
          const down = R > 0 ? await rig.read(s) : matrix(T, 0, () => 0);
          const want = reference.loraLinear(x, w, down, parts, bias, residual);
          assertClose(await rig.read(y), want, 2 * TOLERANCE[dtype], `y: ${what}`);
        }
      },
    );

    test(
      `loraLinearBackward() gives the gradients of the formula in ${dtype} on ${kind}`,
      SLOW,
      async () => {
        for (const [T, K, sizes] of CASES) {
          await using rig = await Rig.open(kind);
          const { stream } = rig;
          const what = `T ${T}, K ${K}, parts ${JSON.stringify(sizes)}`;
          const random = new Random(T * 1000 + K);
          const stored = FLOATS[(T + K) % 3] as Float;
          const { parts, onDevice, gradients, a, N, R } = makeGroup(rig, random, stored, K, sizes);
          const x = random.matrix(dtype, T, K);
          const w = random.matrix(stored, N, K, 0.2);
          const dy = random.matrix(dtype, T, N);
          const input = rig.matrix(dtype, x, { gap: 3 }).view;
          const dx = rig.tensor(dtype, [T, K], undefined, { gap: 2 });
          const gradA = rig.tensor(
            "f32",
            [Math.max(1, R), K],
            new Float32Array(Math.max(1, R) * K).fill(1),
          );
          const s = rig.tensor(dtype, [T, Math.max(1, R)], undefined, { gap: 1 }).view;
          const aView = R > 0 ? rig.matrix(stored, a).view : null;
          if (aView) kernels.loraDown(s, input, aView, onDevice, { stream });
          const adapters = {
            x: input,
            s,
            a: aView,
            gradA: gradA.view,
            ds: rig.tensor("f32", [T, Math.max(1, R)]).view,
          };
          kernels.loraLinearBackward(
            dx.view,
            rig.matrix(dtype, dy, { gap: 1 }).view,
            rig.matrix(stored, w, { gap: 2 }).view,
            onDevice,
            { stream, ...(R > 0 ? adapters : {}) },
          );
          if (aView) {
            // The part that reads x in a call of its own: the same bits.
            const later = rig.tensor("f32", [R, K], new Float32Array(R * K).fill(1));
            const { x: _, gradA: __, ...rest } = adapters;
            const own = onDevice.map((part, index) => {
              const { out = 0, rank = 0 } = parts[index] ?? {};
              return rank === 0 ? part : { ...part, gradB: rig.tensor("f32", [out, rank]).view };
            });
            const [gradient, weight] = [rig.matrix(dtype, dy).view, rig.matrix(stored, w).view];
            kernels.loraLinearBackward(null, gradient, weight, own, { stream, ...rest });
            kernels.loraDownBackward(later.view, rest.ds, input, aView, own, { stream });
            assert.deepEqual((await rig.read(later)).data, (await rig.read(gradA)).data, what);
          }
          const loss = () => dot(reference.loraGroup(x, w, a, parts), dy);
          const tolerance = 4 * TOLERANCE[dtype] + 1e-5;
          assertGradient(await rig.read(dx), x, loss, tolerance, `dx: ${what}`, 6);
          if (R === 0) continue;
          const da = await rig.read(gradA); // accumulated on 1
          assertGradient(
            matrix(R, K, (i, k) => (da.data[i * K + k] as number) - 1),
            a,
            loss,
            tolerance,
            `dA: ${what}`,
            6,
          );
          for (const [index, part] of parts.entries()) {
            const gradient = gradients[index];
            if (!gradient) continue;
            const db = await rig.read(gradient); // accumulated on index % 7
            const own = matrix(part.out, part.rank, (i, j) => {
              const at = i * part.rank + j;
              return (db.data[at] as number) - (at % 7);
            });
            assertGradient(own, part.b, loss, tolerance, `dB${index}: ${what}`, 6);
          }
        }
      },
    );
  }

  // Mutant: csrc/cuda/linear.cu adds the residual to s B^T first and rounds, as it could where cuBLASLt serves; the sizes are such
  // that it does. What the adapters add is then 0.
  for (const stored of ["bf16", "f16"] as const) {
    test(
      `loraLinearForward keeps adapters that are small beside the residual, ${stored} on ${kind}`,
      SLOW,
      async () => {
        await using rig = await Rig.open(kind);
        const random = new Random(7);
        const [T, N, K, rank] = [256, 512, 4096, 8];
        const small = stored === "bf16" ? 2 ** -10 : 2 ** -13; // an eighth of the residual's grid
        const x = rig.matrix(stored, random.matrix(stored, T, K)).view;
        const w = rig.matrix(stored, random.matrix(stored, N, K, 0.05 / Math.sqrt(K))).view;
        // All in [1, 2), with the same grid.
        const uniform = matrix(T, N, () => rounded(stored, 1 + random.uniform()));
        const residual = rig.matrix(stored, uniform).view;
        const ones = matrix(N, rank, () => 1);
        const group = [{ out: N, rank, b: rig.matrix(stored, ones).view }];
        const meanWith = async (term: number) => {
          const y = rig.tensor(stored, [T, N]);
          const s = rig.matrix(
            stored,
            matrix(T, rank, () => term / rank),
          ).view;
          const options = { stream: rig.stream, s, residual };
          kernels.loraLinearForward(y.view, x, w, group, options);
          const { data } = await rig.read(y);
          return data.reduce((sum, value) => sum + value, 0) / data.length;
        };
        // Rounding errs by 2 to 3 times `small` in a single element, but in no direction.
        const added = (await meanWith(small)) - (await meanWith(0));
        assert.ok(Math.abs(added / small - 1) < 0.05, `${added / small}`);
      },
    );
  }

  test(`linear kernels leave rows that are not live alone on ${kind}`, SLOW, async () => {
    await using rig = await Rig.open(kind);
    const { stream } = rig;
    const random = new Random(1);
    const [T, K, live] = [9, 24, 5];
    const { parts, onDevice, gradients, a, N, R } = makeGroup(rig, random, "f32", K, [[12, 3]]);
    // Rows that are not live hold NaN: whatever reads them shows.
    const fill = (m: Matrix) =>
      matrix(m.rows, m.cols, (row, col) =>
        row < live ? (m.data[row * m.cols + col] as number) : Number.NaN,
      );
    const x = fill(random.matrix("f32", T, K));
    const dy = fill(random.matrix("f32", T, N));
    const w = random.matrix("f32", N, K);
    const options = { stream, live: rig.ints([live]).view };
    const [input, grad, weight, aView] = [x, dy, w, a].map((m) => rig.matrix("f32", m).view) as [
      ReturnType<Rig["matrix"]>["view"],
      ReturnType<Rig["matrix"]>["view"],
      ReturnType<Rig["matrix"]>["view"],
      ReturnType<Rig["matrix"]>["view"],
    ];
    const s = rig.tensor("f32", [T, R]);
    const y = rig.tensor("f32", [T, N]);
    const dx = rig.tensor("f32", [T, K]);
    const gradA = rig.tensor("f32", [R, K], new Float32Array(R * K));
    const ds = rig.tensor("f32", [T, R]).view;
    kernels.loraDown(s.view, input, aView, onDevice, options);
    kernels.loraLinearForward(y.view, input, weight, onDevice, { ...options, s: s.view });
    const adapters = { x: input, s: s.view, a: aView, gradA: gradA.view, ds };
    kernels.loraLinearBackward(dx.view, grad, weight, onDevice, { ...options, ...adapters });
    const top = (m: Matrix) =>
      matrix(live, m.cols, (row, col) => m.data[row * m.cols + col] as number);
    const want = reference.loraGroup(top(x), w, a, parts);
    assertClose(await rig.read(y, live), want, 2 * TOLERANCE.f32, "y");
    for (const tensor of [
      await rig.read(dx, live),
      await rig.read(s, live),
      await rig.read(gradA),
    ]) {
      assert.ok(tensor.data.every(Number.isFinite));
    }
    const db = await rig.read(gradients[0] as Tensor);
    assert.ok(db.data.every(Number.isFinite));
  });

  test(
    `linear kernels give the same bits with any number of threads on ${kind}`,
    SLOW,
    async () => {
      const results: string[] = [];
      for (const threads of [1, 2, 3]) {
        await using rig = await Rig.open(kind, threads);
        const { stream } = rig;
        const random = new Random(3);
        const { onDevice, gradients, a, N, R } = makeGroup(rig, random, "f32", 96, [
          [64, 8],
          [40, 4],
        ]);
        const T = 131;
        const input = rig.matrix("f32", random.matrix("f32", T, 96)).view;
        const dy = rig.matrix("f32", random.matrix("f32", T, N)).view;
        const weight = rig.matrix("f32", random.matrix("f32", N, 96)).view;
        const aView = rig.matrix("f32", a).view;
        const s = rig.tensor("f32", [T, R]);
        const dx = rig.tensor("f32", [T, 96]);
        const gradA = rig.tensor("f32", [R, 96], new Float32Array(R * 96));
        kernels.loraDown(s.view, input, aView, onDevice, { stream });
        const adapters = {
          x: input,
          s: s.view,
          a: aView,
          gradA: gradA.view,
          ds: rig.tensor("f32", [T, R]).view,
        };
        kernels.loraLinearBackward(dx.view, dy, weight, onDevice, { stream, ...adapters });
        const all = [dx, s, gradA, ...gradients].map((tensor) => rig.read(tensor as Tensor));
        results.push((await Promise.all(all)).map(({ data }) => data.join()).join(";"));
      }
      assert.equal(results[1], results[0]);
      assert.equal(results[2], results[0]);
    },
  );
}

test("linear kernels reject groups and tensors that do not fit", SLOW, async () => {
  await using rig = await Rig.open("cpu", 1);
  const options = { stream: rig.stream };
  const x = rig.tensor("f32", [4, 8]).view;
  const y = rig.tensor("f32", [4, 6]).view;
  const w = rig.tensor("f32", [6, 8]).view;
  const s = rig.tensor("f32", [4, 2]).view;
  const a = rig.tensor("f32", [2, 8]).view;
  const b = rig.tensor("f32", [6, 2]).view;
  const forward = kernels.loraLinearForward;
  const cases: [() => void, RegExp][] = [
    [
      () => forward(y, x, w, [], options),
      /^loraLinearForward: group must have 1 to 3 parts: it has 0/,
    ],
    [() => forward(y, x, w, [{ out: 1 }, { out: 1 }, { out: 2 }, { out: 2 }], options), /it has 4/],
    [
      () => forward(y, x, w, [{ out: 5 }], options),
      /^loraLinearForward: N does not fit: N is 5, y is \[4, 6\]/,
    ],
    [
      () => forward(y, x, w, [{ out: 6, rank: 2, b }], options),
      /^loraLinearForward: s is missing: /,
    ],
    [
      () => forward(y, x, w, [{ out: 6, rank: 2 }], { ...options, s }),
      /group\[0\]\.b is missing: its rank is 2/,
    ],
    [
      () => forward(y, x, w, [{ out: 6, rank: 3, b }], { ...options, s }),
      /R does not fit: R is 3, s is \[4, 2\]/,
    ],
    [
      () => forward(y, x, w, [{ out: 6, rank: -1 }], options),
      /group\[0\]\.rank must be an integer from 0/,
    ],
    [
      () => forward(y, x, w, [{ out: 6, scale: Number.NaN }], options),
      /group\[0\]\.scale must be a finite number/,
    ],
    [() => forward(y, x, a, [{ out: 6 }], options), /^loraLinearForward: N does not fit/],
    [() => kernels.loraDown(s, x, a, [{ out: 6 }], options), /^loraDown: the group has no adapter/],
    [
      () =>
        kernels.loraLinearBackward(x, y, w, [{ out: 6, rank: 2, b }], {
          ...options,
          x,
          s,
          a,
          ds: s,
          gradA: a,
        }),
      /^loraLinearBackward: group\[0\]\.gradB is missing/,
    ],
    [
      () =>
        kernels.loraLinearBackward(x, y, w, [{ out: 6, rank: 2, b, gradB: b }], {
          ...options,
          x,
          s,
          a,
          ds: s,
        }),
      /^loraLinearBackward: gradA is missing: x is given/,
    ],
    [
      () =>
        kernels.loraLinearBackward(x, y, w, [{ out: 6, rank: 2, b, gradB: b }], {
          ...options,
          s,
          a,
          ds: s,
          gradA: a,
        }),
      /^loraLinearBackward: x is missing: gradA is given/,
    ],
    [
      () => kernels.loraDownBackward(a, s, x, a, [{ out: 6 }], options),
      /^loraDownBackward: the group has no adapter/,
    ],
    [
      () => kernels.loraDownBackward(a, s, x, a, [{ out: 6, rank: 3 }], options),
      /^loraDownBackward: R does not fit/,
    ],
  ];
  for (const [use, message] of cases) assert.throws(use, { code: "BAD_ARGUMENT", message });
});
