import assert from "node:assert/strict";
import { test } from "node:test";
import * as kernels from "../../src/api/kernels/mod.ts";
import { matrix } from "../reference/matrix.ts";
import { assertClose, FLOATS, KINDS, Random, Rig, rounded, SIZES, TOLERANCE } from "./rig.ts";

for (const kind of KINDS) {
  test(`scale() multiplies every element, in place too, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const options = { stream: rig.stream };
    for (const dtype of FLOATS) {
      for (const n of SIZES) {
        const x = new Random(n).matrix(dtype, 1, n);
        const want = matrix(1, n, (_, col) => rounded(dtype, (x.data[col] as number) * -1.75));
        const input = rig.tensor(dtype, [n], x.data);
        const output = rig.tensor(dtype, [n]);
        kernels.scale(output.view, input.view, -1.75, options);
        kernels.scale(input.view, input.view, -1.75, options);
        assert.deepEqual((await rig.read(output)).data, want.data, `${dtype} [${n}]`);
        assert.deepEqual((await rig.read(input)).data, want.data, `${dtype} [${n}] in place`);
      }
    }
  });

  test(`add() adds every element, in place too, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    for (const dtype of FLOATS) {
      for (const n of SIZES) {
        const random = new Random(n);
        const a = random.matrix(dtype, 3, n);
        const b = random.matrix(dtype, 3, n);
        const want = matrix(3, n, (row, col) => {
          const index = row * n + col;
          return rounded(dtype, Math.fround((a.data[index] as number) + (b.data[index] as number)));
        });
        const [left, right] = [rig.matrix(dtype, a), rig.matrix(dtype, b)];
        kernels.add(right.view, left.view, right.view, { stream: rig.stream });
        assert.deepEqual((await rig.read(right)).data, want.data, `${dtype} [3, ${n}]`);
      }
    }
  });

  test(`cast() rounds to nearest even between every pair of types on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const special = [
      0,
      -0,
      1,
      1 + 2 ** -8,
      1 + 3 * 2 ** -9,
      65504,
      65520,
      -1e30,
      1e-7,
      2 ** -24,
      Number.POSITIVE_INFINITY,
    ];
    for (const from of FLOATS) {
      for (const to of FLOATS) {
        const random = new Random(7);
        const values = [...special, ...Array.from({ length: 118 }, () => random.normal(100))].map(
          (value) => rounded(from, value),
        );
        const x = rig.tensor(from, [values.length], values);
        const y = rig.tensor(to, [values.length]);
        kernels.cast(y.view, x.view, { stream: rig.stream });
        const got = [...(await rig.read(y)).data];
        assert.deepEqual(
          got,
          values.map((value) => rounded(to, value)),
          `${from} to ${to}`,
        );
      }
    }
  });
}

test("elementwise kernels reject tensors that do not fit", async () => {
  await using rig = await Rig.open("cpu", 1);
  const options = { stream: rig.stream };
  const x = rig.tensor("f32", [4, 8]).view;
  const short = rig.tensor("f32", [4, 7]).view;
  const flat = rig.tensor("f32", [32]).view;
  const half = rig.tensor("f16", [4, 8]).view;
  const ints = rig.tensor("i32", [4, 8]).view;
  const gaps = rig.tensor("f32", [4, 8], undefined, { gap: 1 }).view;
  const cases: [() => void, RegExp][] = [
    [
      () => kernels.scale(short, x, 1, options),
      /^scale: shapes differ: y is \[4, 7\], x is \[4, 8\]: pass/,
    ],
    [
      () => kernels.scale(flat, x, 1, options),
      /^scale: shapes differ: y is \[32\], x is \[4, 8\]: pass/,
    ],
    [
      () => kernels.add(x, half, x, options),
      /^add: activations must share one dtype: y is f32 \[4, 8\], a is f16 \[4, 8\]: /,
    ],
    [() => kernels.cast(ints, x, options), /^cast: y must be f32, bf16, f16: it is i32 \[4, 8\]: /],
    [
      () => kernels.scale(gaps, x, 1, options),
      /^scale: y must have no gaps between rows: f32 \[4, 8\] has pitch 9: /,
    ],
    [
      () => kernels.scale(x, x, Number.NaN, options),
      /^scale: factor must be a finite number: it is NaN/,
    ],
    [() => kernels.scale(x, x, "2" as never, options), /^scale: factor must be a finite number/],
    [
      () => kernels.scale(undefined as never, x, 1, options),
      /^scale: y must be a TensorView: it is undefined/,
    ],
    [
      () => kernels.scale(x, {} as never, 1, options),
      /^scale: x must be a TensorView: it is object/,
    ],
    [() => kernels.scale(x, x, 1, {} as never), /^scale: stream is missing: pass \{ stream \}/],
    [() => kernels.scale(x, x, 1, undefined as never), /^scale: stream is missing/],
  ];
  for (const [use, message] of cases) assert.throws(use, { code: "BAD_ARGUMENT", message });
});

test("kernels refuse disposed memory and memory of another device", async () => {
  await using rig = await Rig.open("cpu", 1);
  await using other = await Rig.open("cpu", 1);
  const mine = rig.tensor("f32", [8]);
  const theirs = other.tensor("f32", [8]);
  const options = { stream: rig.stream };
  assert.throws(() => kernels.scale(mine.view, theirs.view, 1, options), {
    code: "BAD_ARGUMENT",
    message: /^scale: x is on another device/,
  });
  mine.buffer.dispose();
  assert.throws(() => kernels.scale(mine.view, mine.view, 1, options), { code: "DISPOSED" });
});

test("kernels that are recorded refer to the memory that they use", async () => {
  await using rig = await Rig.open("cpu", 1);
  const x = rig.tensor("f32", [4], [1, 2, 3, 4]);
  using graph = rig.stream.capture(() => kernels.scale(x.view, x.view, 2, { stream: rig.stream }));
  assert.equal(graph.nodes, 1);
  for (let round = 0; round < 3; round++) graph.launch(rig.stream);
  assert.deepEqual([...(await rig.read(x)).data], [8, 16, 24, 32]);
  x.buffer.dispose();
  assert.throws(() => graph.launch(rig.stream), { code: "DISPOSED" });
});

test("assertClose() and TOLERANCE tell wrong results from rounding", () => {
  const want = matrix(1, 4, (_, col) => col + 1);
  const off = matrix(1, 4, (_, col) => (col + 1) * (1 + 3 * TOLERANCE.f32));
  assertClose(want, want, 0, "equal");
  assert.throws(() => assertClose(off, want, TOLERANCE.f32 / 4, "off"));
});
