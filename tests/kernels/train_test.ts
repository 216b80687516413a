import assert from "node:assert/strict";
import { test } from "node:test";
import * as kernels from "../../src/api/kernels/mod.ts";
import { SLOW } from "../ffi/support.ts";
import { crossEntropy } from "../reference/loss.ts";
import { type Matrix, matrix } from "../reference/matrix.ts";
import { adamw, norm } from "../reference/optimizer.ts";
import {
  assertClose,
  assertGradient,
  FLOATS,
  type Float,
  KINDS,
  Random,
  Rig,
  rounded,
  SIZES,
  TOLERANCE,
} from "./rig.ts";

/** A vector of f64 zeroes. */
function zeros(rig: Rig, length: number) {
  return rig.tensor("f64", [length], new Float64Array(length));
}

/** The bytes of a tensor as metrics. */
async function metricsOf(
  rig: Rig,
  { buffer }: ReturnType<Rig["tensor"]>,
): Promise<kernels.StepMetrics> {
  using host = rig.device.createPinnedBuffer(buffer.bytes);
  rig.stream.copy(host, buffer);
  await rig.stream.done();
  return kernels.readStepMetrics(host.view(Uint8Array));
}

for (const kind of KINDS) {
  for (const dtype of FLOATS) {
    test(
      `linearCrossEntropy() gives losses and gradients of labelled rows in ${dtype} on ${kind}`,
      SLOW,
      async () => {
        const cases = [
          { T: 1, C: 1, V: 2, labelled: 1, capacity: 1, chunkRows: 1 },
          { T: 65, C: 63, V: 129, labelled: 40, capacity: 64, chunkRows: 16 },
          { T: 64, C: 64, V: 1000, labelled: 63, capacity: 63, chunkRows: 64 },
          { T: 129, C: 127, V: 65, labelled: 127, capacity: 128, chunkRows: 63 },
        ];
        for (const { T, C, V, labelled, capacity, chunkRows } of cases) {
          await using rig = await Rig.open(kind);
          const { stream } = rig;
          const what = `T ${T}, C ${C}, V ${V}, labelled ${labelled}, chunkRows ${chunkRows}`;
          const random = new Random(V);
          const stored = FLOATS[V % 3] as Float;
          const x = random.matrix(dtype, T, C);
          const w = random.matrix(stored, V, C, 1 / Math.sqrt(C));
          const rows = Array.from({ length: T }, (_, row) => row)
            .sort(() => random.uniform() - 0.5)
            .slice(0, labelled)
            .sort((a, b) => a - b);
          const ids = rows.map(() => random.below(V));
          const lossWeight = 1 / 50;
          const padded = (values: readonly number[]) =>
            rig.ints([...values, ...Array<number>(capacity - labelled).fill(0)]).view;
          const header = kernels.packBatchHeader({ tokens: T, documents: 1, labelled, lossWeight });
          const batch = rig.struct("i32", header).view;
          const dx = rig.tensor(dtype, [T, C], new Float32Array(T * C), { gap: 2 });
          const metrics = rig.tensor("f64", [9], [0.5, 0, 0, 0, 0, 0, 0, 0, 0]);
          const losses: Matrix[] = [];
          for (const gradient of [dx.view, null]) {
            const loss = rig.tensor("f32", [capacity, 1]);
            const vector = loss.buffer.as("f32", [capacity]);
            const logits = rig.tensor(dtype, [chunkRows, V]).view;
            const gathered = rig.tensor(dtype, [chunkRows, C]).view;
            for (let chunk = 0; chunk < Math.ceil(capacity / chunkRows); chunk++) {
              kernels.linearCrossEntropy(
                vector,
                gradient,
                logits,
                gathered,
                rig.matrix(dtype, x, { gap: 3 }).view,
                rig.matrix(stored, w, { gap: 1 }).view,
                padded(rows),
                padded(ids),
                batch,
                { stream, chunk },
              );
            }
            if (gradient) kernels.lossSum(metrics.view, vector, batch, { stream });
            losses.push(await rig.read(loss, labelled));
          }
          const want = crossEntropy(x, w, rows, ids);
          const column = matrix(labelled, 1, (row) => want[row] as number);
          // Logits of 16 bits are rounded before the exponential.
          const tolerance = dtype === "f32" ? TOLERANCE.f32 : 4 * TOLERANCE[dtype];
          for (const got of losses) assertClose(got, column, tolerance, `loss: ${what}`);
          assert.deepEqual(losses[0], losses[1], `evaluation: ${what}`);
          const total = (losses[0] as Matrix).data.reduce((sum, value) => sum + value, 0.5);
          const { lossSum } = await metricsOf(rig, metrics);
          assert.ok(Math.abs(lossSum - total) < 1e-9 * total, `lossSum: ${what}`);

          const got = await rig.read(dx);
          const scalar = () =>
            lossWeight * crossEntropy(x, w, rows, ids).reduce((sum, value) => sum + value, 0);
          assertGradient(got, x, scalar, 4 * tolerance, `dx: ${what}`, 10);
          for (let row = 0; row < T; row++) {
            const own = got.data.subarray(row * C, (row + 1) * C);
            if (!rows.includes(row))
              assert.ok(
                own.every((value) => value === 0),
                `row ${row} has no label: ${what}`,
              );
          }
        }
      },
    );
  }

  test(
    `linearCrossEntropy() multiplies its gradient, not its loss, by a scale on ${kind}`,
    SLOW,
    async () => {
      const results: number[][] = [];
      for (const scale of [null, 1, 2 ** 20]) {
        await using rig = await Rig.open(kind);
        const { stream } = rig;
        const random = new Random(3);
        const [x, w] = [random.matrix("f32", 3, 8), random.matrix("f32", 7, 8)];
        const [loss, dx] = [rig.tensor("f32", [3]), rig.tensor("f32", [3, 8])];
        const [logits, gathered] = [rig.tensor("f32", [3, 7]).view, rig.tensor("f32", [3, 8]).view];
        const [rows, ids] = [rig.ints([0, 1, 2]).view, rig.ints([4, 0, 6]).view];
        const counts = { tokens: 3, documents: 1, labelled: 3, lossWeight: 0.25 };
        const batch = rig.struct("i32", kernels.packBatchHeader(counts)).view;
        const scaler = scale === null ? null : rig.tensor("f32", [8]).view;
        if (scaler !== null && scale !== null) {
          kernels.scalerSet(scaler, kernels.scalerValues({ initScale: scale }), { stream });
        }
        const tensors = [rig.matrix("f32", x).view, rig.matrix("f32", w).view] as const;
        const options = { stream, scaler };
        kernels.linearCrossEntropy(
          loss.view,
          dx.view,
          logits,
          gathered,
          ...tensors,
          rows,
          ids,
          batch,
          options,
        );
        const gradient = [...(await rig.read(dx)).data].map((value) => value / (scale ?? 1));
        results.push([...(await rig.read(loss)).data, ...gradient]);
      }
      assert.deepEqual(results[1], results[0]);
      assert.deepEqual(results[2], results[0]);
    },
  );

  test(`linearCrossEntropy() stays finite where logits are large on ${kind}`, SLOW, async () => {
    await using rig = await Rig.open(kind);
    const x = rig.tensor("f32", [1, 1], [1]).view;
    const w = rig.tensor("f32", [3, 1], [1000, -1000, 999]).view;
    const loss = rig.tensor("f32", [1]);
    const dx = rig.tensor("f32", [1, 1]);
    const header = kernels.packBatchHeader({ tokens: 1, documents: 1, labelled: 1, lossWeight: 1 });
    const [logits, gathered] = [rig.tensor("f32", [1, 3]).view, rig.tensor("f32", [1, 1]).view];
    const [row, id, batch] = [
      rig.ints([0]).view,
      rig.ints([0]).view,
      rig.struct("i32", header).view,
    ];
    kernels.linearCrossEntropy(loss.view, dx.view, logits, gathered, x, w, row, id, batch, {
      stream: rig.stream,
    });
    const [value = 0] = (await rig.read(loss)).data;
    assert.ok(Math.abs(value - Math.log1p(Math.exp(-1))) < 1e-4);
    assert.ok(Number.isFinite((await rig.read(dx)).data[0]));
  });

  test(`gradNorm() and adamw() follow the paper for several steps on ${kind}`, SLOW, async () => {
    for (const n of [...SIZES, 65_536, 70_001]) {
      for (const maxNorm of [0, 0.5]) {
        await using rig = await Rig.open(kind);
        const { stream } = rig;
        const random = new Random(n);
        const numbers = (deviation: number) =>
          Float64Array.from({ length: n }, () => Math.fround(random.normal(deviation)));
        const state = { p: numbers(1), m: new Float64Array(n), v: new Float64Array(n) };
        const [p, m, v] = [state.p, state.m, state.v].map((values) =>
          rig.tensor("f32", [n], values),
        ) as [ReturnType<Rig["tensor"]>, ReturnType<Rig["tensor"]>, ReturnType<Rig["tensor"]>];
        const copy = rig.tensor("bf16", [n]);
        const metrics = zeros(rig, 9);
        const optimizer = zeros(rig, 2);
        const partial = rig.tensor("f64", [Math.ceil(n / 65536)]).view;
        const settings = {
          learningRate: 1e-2,
          beta1: 0.9,
          beta2: 0.99,
          eps: 1e-8,
          weightDecay: 0.1,
        };
        const control = rig.struct(
          "f64",
          kernels.packOptimizerControl({ ...settings, maxNorm }),
        ).view;
        for (let step = 1; step <= 3; step++) {
          const gradient = numbers(2);
          const g = rig.tensor("f32", [n], gradient);
          kernels.gradNorm(metrics.view, partial, optimizer.view, g.view, control, { stream });
          kernels.adamw(p.view, m.view, v.view, g.view, copy.view, control, metrics.view, {
            stream,
          });
          const { gradNorm, clip, ...other } = await metricsOf(rig, metrics);
          const want = norm(gradient);
          assert.ok(Math.abs(gradNorm - want) < 1e-6 * want, `norm of ${n}`);
          const factor = maxNorm === 0 ? 1 : Math.min(1, maxNorm / (want + 1e-6));
          assert.ok(Math.abs(clip - factor) < 1e-6, `clip of ${n}`);
          const report = { step, learningRate: 1e-2, lossScale: 1, skipped: false, badElement: -1 };
          assert.deepEqual(other, { lossSum: 0, ...report });
          adamw(state, gradient, factor, { ...settings, step });
          assert.ok(
            (await rig.read(g)).data.every((value) => value === 0),
            "the gradient is zeroed",
          );
        }
        const row = (values: Float64Array) => matrix(1, n, (_, col) => values[col] as number);
        for (const [name, tensor] of Object.entries({ p, m, v })) {
          const want = row(state[name as "p"]);
          assertClose(await rig.read(tensor), want, 1e-5, `${name} of ${n}, maxNorm ${maxNorm}`);
        }
        const masters = await rig.read(p);
        const want = Array.from(masters.data, (value) => rounded("bf16", value));
        assert.deepEqual([...(await rig.read(copy)).data], want, "the copy is the rounded master");
      }
    }
  });

  test(`gradNorm() has the same bits with any number of threads on ${kind}`, SLOW, async () => {
    const norms: number[] = [];
    for (const threads of [1, 2, 3]) {
      await using rig = await Rig.open(kind, threads);
      const random = new Random(1);
      const n = 300_000;
      const g = rig.tensor(
        "f32",
        [n],
        Float32Array.from({ length: n }, () => random.normal()),
      );
      const metrics = zeros(rig, 9);
      const control = rig.struct("f64", kernels.packOptimizerControl({ learningRate: 1 })).view;
      const partial = rig.tensor("f64", [5]).view;
      kernels.gradNorm(metrics.view, partial, zeros(rig, 2).view, g.view, control, {
        stream: rig.stream,
      });
      norms.push((await metricsOf(rig, metrics)).gradNorm);
    }
    assert.deepEqual(norms, [norms[0], norms[0], norms[0]]);
  });
}

test("packBatchHeader() and packOptimizerControl() check their fields", SLOW, () => {
  const header = { tokens: 4, documents: 1, labelled: 2, lossWeight: 0.5 };
  const bytes = kernels.packBatchHeader(header);
  assert.deepEqual([...new Int32Array(bytes.buffer, 0, 3)], [4, 1, 2]);
  assert.equal(new Float32Array(bytes.buffer)[3], 0.5);
  for (const bad of [
    { tokens: -1 },
    { documents: 0.5 },
    { labelled: 2 ** 31 },
    { lossWeight: Number.NaN },
  ]) {
    const use = () => kernels.packBatchHeader({ ...header, ...bad });
    assert.throws(use, { code: "BAD_ARGUMENT", message: /^packBatchHeader: / });
  }
  const control = { learningRate: 0.5, schedule: "linear", warmupSteps: 3 } as const;
  const packed = kernels.packOptimizerControl({ ...control, totalSteps: 9, beta1: 0.5 });
  assert.deepEqual([...new Float64Array(packed.buffer, 0, 2)], [0.5, 0.5]);
  assert.deepEqual([...new BigInt64Array(packed.buffer, 48, 3)], [3n, 9n, 2n]);
  for (const bad of [
    { warmupSteps: -1 },
    { totalSteps: 0 },
    { learningRate: Number.NaN },
    { eps: Number.POSITIVE_INFINITY },
    { schedule: "toString" as "linear" },
  ]) {
    const use = () => kernels.packOptimizerControl({ learningRate: 1, ...bad });
    assert.throws(use, { code: "BAD_ARGUMENT", message: /^packOptimizerControl: / });
  }
  assert.throws(() => kernels.readStepMetrics(new Uint8Array(71)), { code: "BAD_ARGUMENT" });
});

test("loss and optimizer kernels reject tensors that do not fit", SLOW, async () => {
  await using rig = await Rig.open("cpu", 1);
  const options = { stream: rig.stream };
  const metrics = rig.tensor("f64", [9]).view;
  const state = rig.tensor("f64", [2]).view;
  const vector = rig.tensor("f32", [8]).view;
  const short = rig.tensor("f32", [7]).view;
  const batch = rig.ints([0, 0, 0, 0]).view;
  const partial = rig.tensor("f64", [1]).view;
  const large = rig.tensor("f32", [65_537]).view;
  const x = rig.tensor("f32", [2, 3]).view;
  const w = rig.tensor("f32", [5, 3]).view;
  const logits = rig.tensor("f32", [4, 5]).view;
  const gathered = rig.tensor("f32", [4, 3]).view;
  const labels = rig.ints([0, 0, 0, 0, 0, 0, 0, 0]).view;
  const head = (chunk: number, rows = labels) =>
    kernels.linearCrossEntropy(vector, null, logits, gathered, x, w, rows, labels, batch, {
      ...options,
      chunk,
    });
  const cases: [() => void, RegExp][] = [
    [() => kernels.lossSum(vector, vector, batch, options), /^lossSum: metrics must be f64/],
    [
      () => kernels.gradNorm(metrics, partial, state, large, metrics, options),
      /^gradNorm: partial is too small: .* pass f64 \[2\]/,
    ],
    [
      () => kernels.gradNorm(metrics, partial, state, vector, state, options),
      /^gradNorm: control has the wrong size/,
    ],
    [
      () => kernels.adamw(vector, vector, short, vector, null, metrics, metrics, options),
      /^adamw: n does not fit: p is \[8\], v is \[7\]/,
    ],
    [
      () => kernels.adamw(vector, vector, vector, vector, batch, metrics, metrics, options),
      /^adamw: copy must be f32, bf16, f16/,
    ],
    [() => head(2), /^linearCrossEntropy: chunk must be an integer from 0 to 1: it is 2/],
    [() => head(0, batch), /^linearCrossEntropy: M does not fit/],
  ];
  for (const [use, message] of cases) assert.throws(use, { code: "BAD_ARGUMENT", message });
});
