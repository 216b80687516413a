import assert from "node:assert/strict";
import { test } from "node:test";
import * as kernels from "../../src/api/kernels/mod.ts";
import { type Matrix, matrix } from "../reference/matrix.ts";
import * as reference from "../reference/rows.ts";
import {
  assertClose,
  assertGradient,
  dot,
  FLOATS,
  KINDS,
  Random,
  Rig,
  SIZES,
  TOLERANCE,
} from "./rig.ts";

const EPS = 1e-5;

for (const kind of KINDS) {
  test(`embeddingForward() looks rows up in a table of any float type on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const ids = [3, 0, 16, 3, 1, 99, -1];
    for (const dtype of FLOATS) {
      for (const stored of FLOATS) {
        for (const width of [1, 64, 129]) {
          const table = new Random(width).matrix(stored, 17, width);
          const y = rig.tensor(dtype, [ids.length, width], undefined, { gap: 3 });
          const options = { stream: rig.stream, live: rig.ints([6]).view };
          kernels.embeddingForward(
            y.view,
            rig.matrix(stored, table).view,
            rig.ints(ids).view,
            options,
          );
          const want = reference.gatherRows(table, ids.slice(0, 6));
          assertClose(
            await rig.read(y, 6),
            want,
            TOLERANCE[dtype],
            `${stored} to ${dtype} [7, ${width}]`,
          );
        }
      }
    }
  });

  test(`gatherRows() copies rows bit for bit on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const index = [4, 4, 0, 2, 1];
    for (const dtype of FLOATS) {
      for (const width of SIZES) {
        const x = new Random(width).matrix(dtype, 5, width);
        const input = rig.matrix(dtype, x, { gap: 5 });
        const y = rig.tensor(dtype, [5, width], undefined, { gap: 2 });
        const options = { stream: rig.stream, live: rig.ints([3]).view };
        kernels.gatherRows(y.view, input.view, rig.ints(index).view, options);
        const want = reference.gatherRows(x, index.slice(0, 3));
        assert.deepEqual(await rig.read(y, 3), want, `${dtype} [5, ${width}]`);
      }
    }
  });

  test(`argmax() finds the first of the largest on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    for (const dtype of FLOATS) {
      for (const width of [...SIZES, 1000]) {
        const random = new Random(width);
        const x = matrix(9, width, () => random.below(20) - 30); // many ties, all negative
        const out = rig.tensor("i32", [9, 1]);
        const column = out.buffer.as("i32", [9]);
        kernels.argmax(column, rig.matrix(dtype, x, { gap: 1 }).view, {
          stream: rig.stream,
          live: rig.ints([8]).view,
        });
        assert.deepEqual([...(await rig.read(out, 8)).data], reference.argmax(x).slice(0, 8));
      }
    }
  });

  test(`rmsNormForward() agrees with the formula on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    for (const dtype of FLOATS) {
      for (const width of SIZES) {
        const random = new Random(width);
        const x = random.matrix(dtype, 5, width, 3);
        const weight = random.matrix("bf16", 1, width);
        const input = rig.matrix(dtype, x, { gap: 7 });
        const output = rig.tensor(dtype, [5, width], undefined, { gap: 1 });
        const w = rig.tensor("bf16", [width], weight.data).view;
        const live = rig.ints([4]).view;
        kernels.rmsNormForward(output.view, input.view, w, EPS, { stream: rig.stream, live });
        kernels.rmsNormForward(input.view, input.view, w, EPS, { stream: rig.stream });
        const want = reference.rmsNorm(x, weight, EPS);
        const first = matrix(4, width, (row, col) => want.data[row * width + col] as number);
        assertClose(await rig.read(output, 4), first, TOLERANCE[dtype], `${dtype} [5, ${width}]`);
        assertClose(
          await rig.read(input),
          want,
          TOLERANCE[dtype],
          `${dtype} [5, ${width}] in place`,
        );
      }
    }
  });

  test(`rmsNormBackward() is the gradient of the formula, plus what is added, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    for (const dtype of FLOATS) {
      for (const width of SIZES) {
        const random = new Random(width);
        const x = random.matrix(dtype, 4, width);
        const dy = random.matrix(dtype, 4, width);
        const add = random.matrix(dtype, 4, width);
        const weight = random.matrix("f32", 1, width);
        const dx = rig.matrix(dtype, dy, { gap: 2 });
        const options = { stream: rig.stream, add: rig.matrix(dtype, add, { gap: 1 }).view };
        const w = rig.tensor("f32", [width], weight.data).view;
        kernels.rmsNormBackward(
          dx.view,
          dx.view,
          rig.matrix(dtype, x, { gap: 3 }).view,
          w,
          EPS,
          options,
        );
        const loss = () => dot(reference.rmsNorm(x, weight, EPS), dy) + dot(x, add);
        assertGradient(await rig.read(dx), x, loss, 4 * TOLERANCE[dtype], `${dtype} [4, ${width}]`);
        // y again, over dy: the bits of the forward pass, and dx as without it.
        for (const gap of [0, 3]) {
          const like = (values: Matrix) => rig.matrix(dtype, values, { gap });
          const [y, again, other, alone] = [like(dy), like(dy), like(dy), like(dy)];
          const input = like(x).view;
          const added = { stream: rig.stream, add: like(add).view };
          kernels.rmsNormForward(y.view, input, w, EPS, { stream: rig.stream });
          kernels.rmsNormBackward(alone.view, alone.view, input, w, EPS, added);
          kernels.rmsNormBackward(other.view, again.view, input, w, EPS, {
            ...added,
            y: again.view,
          });
          assert.deepEqual((await rig.read(again)).data, (await rig.read(y)).data);
          assert.deepEqual((await rig.read(other)).data, (await rig.read(alone)).data);
        }
      }
    }
  });

  test(`gluForward() and gluBackward() agree with the formula on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const { stream } = rig;
    for (const dtype of FLOATS) {
      for (const width of SIZES) {
        const random = new Random(width);
        const gu = random.matrix(dtype, 3, 2 * width, 2);
        const dh = random.matrix(dtype, 3, width);
        const input = rig.matrix(dtype, gu, { gap: 3 });
        const h = rig.tensor(dtype, [3, width], undefined, { gap: 1 });
        const dgu = rig.tensor(dtype, [3, 2 * width], undefined, { gap: 5 });
        const gradient = rig.matrix(dtype, dh, { gap: 2 }).view;
        const live = rig.ints([2]).view;
        kernels.gluForward(h.view, input.view, { stream });
        kernels.gluBackward(dgu.view, gradient, input.view, { stream, live });
        kernels.gluBackward(input.view, gradient, input.view, { stream });
        const what = `${dtype} [3, ${width}]`;
        const again = rig.matrix(dtype, dh);
        const free = rig.tensor(dtype, [3, 2 * width]);
        const fresh = rig.matrix(dtype, gu).view;
        kernels.gluBackward(free.view, again.view, fresh, { stream, h: again.view });
        assert.deepEqual((await rig.read(again)).data, (await rig.read(h)).data, `${what} h`);
        assertClose(await rig.read(h), reference.glu(gu), TOLERANCE[dtype], what);
        const whole = await rig.read(input);
        assertGradient(whole, gu, () => dot(reference.glu(gu), dh), 2 * TOLERANCE[dtype], what);
        const part = await rig.read(dgu, 2);
        assert.deepEqual(part.data, whole.data.slice(0, part.data.length), `${what} live rows`);
      }
    }
  });

  test(`gluForward() stays finite far from zero on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const gu = matrix(1, 8, (_, col) => [-1e4, 1e4, -100, 100, 1, 1, 1, 1][col] as number);
    const h = rig.tensor("f32", [1, 4]);
    kernels.gluForward(h.view, rig.matrix("f32", gu).view, { stream: rig.stream });
    const [far = 1, large, small = 1, positive] = (await rig.read(h)).data;
    assert.ok(Math.abs(far) < 1e-30 && Math.abs(small) < 1e-30);
    assert.deepEqual([large, positive], [1e4, 100]);
  });
}

test("row kernels reject tensors that do not fit, naming both", async () => {
  await using rig = await Rig.open("cpu", 1);
  const options = { stream: rig.stream };
  const x = rig.tensor("f32", [4, 8]).view;
  const short = rig.tensor("f32", [4, 7]).view;
  const weight = rig.tensor("f32", [8]).view;
  const ids = rig.ints([0, 0, 0, 0]).view;
  const cases: [() => void, RegExp][] = [
    [
      () => kernels.rmsNormForward(short, x, weight, EPS, options),
      /^rmsNormForward: C does not fit: x is \[4, 8\], y is \[4, 7\]: pass \[T, C\] as y/,
    ],
    [
      () => kernels.rmsNormForward(x, x, ids, EPS, options),
      /^rmsNormForward: weight must be f32, bf16, f16/,
    ],
    [
      () => kernels.rmsNormForward(x, x, weight, Number.NaN, options),
      /^rmsNormForward: eps must be/,
    ],
    [
      () => kernels.rmsNormBackward(x, x, x, weight, EPS, { ...options, add: short }),
      /add is \[4, 7\]/,
    ],
    [
      () => kernels.gluForward(x, x, options),
      /^gluForward: I does not fit: h is \[4, 8\], gu is \[4, 8\]/,
    ],
    [() => kernels.embeddingForward(x, short, ids, options), /^embeddingForward: C does not fit/],
    [() => kernels.gatherRows(x, x, weight, options), /^gatherRows: index must be i32/],
    [() => kernels.argmax(rig.ints([0]).view, x, options), /^argmax: T does not fit/],
    [() => kernels.gluForward(x, x, { ...options, live: ids }), /^gluForward: /],
  ];
  for (const [use, message] of cases) assert.throws(use, { code: "BAD_ARGUMENT", message });
});
