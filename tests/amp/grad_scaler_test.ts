import assert from "node:assert/strict";
import { test } from "node:test";
import { GradScaler, type GradScalerState, kernels, type LoramemError } from "../../mod.ts";
import { KINDS, Rig, type Tensor } from "../kernels/rig.ts";

const refuses = (use: () => unknown, message: RegExp) =>
  assert.throws(use, (error: LoramemError) => {
    assert.match(error.message, message);
    return error.code === "BAD_ARGUMENT";
  });

const vector = (rig: Rig, ...values: number[]) => rig.tensor("f32", [values.length], values);

/** A weight that plain gradient descent moves where `found` is 0; stands for an optimizer. */
class Descent {
  readonly p: Tensor;
  readonly g: Tensor;
  readonly rig: Rig;
  readonly #adam: readonly [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor];

  constructor(rig: Rig, value: number) {
    this.rig = rig;
    this.p = vector(rig, value);
    this.g = vector(rig, 0);
    const zeros = (length: number) => rig.tensor("f64", [length], new Float64Array(length));
    const control = rig.struct("f64", kernels.packOptimizerControl({ learningRate: 0.5 }));
    const moments = [vector(rig, 0), vector(rig, 0)] as const;
    this.#adam = [...moments, zeros(9), zeros(1), zeros(2), control];
  }

  /** Puts a gradient on the device. */
  set(value: number): void {
    const from = vector(this.rig, value);
    this.rig.stream.copy(this.g.buffer, from.buffer);
  }

  readonly run = (found: Parameters<Parameters<GradScaler["step"]>[2]>[0]): void => {
    const [m, v, metrics, partial, state, control] = this.#adam;
    const { stream } = this.rig;
    kernels.gradNorm(metrics.view, partial.view, state.view, this.g.view, control.view, {
      stream,
      found,
    });
    kernels.adamw(this.p.view, m.view, v.view, this.g.view, null, control.view, metrics.view, {
      stream,
    });
  };

  get gradients() {
    return { weight: this.g.view };
  }

  /** Every bit that an update may change, but for the counters. */
  async state(): Promise<number[]> {
    const [m, v, , , state] = this.#adam;
    const all = [];
    for (const tensor of [this.p, m, v]) all.push(...(await this.rig.read(tensor)).data);
    const counters = await bits(this.rig, state);
    return [...all, Number(counters[0])];
  }
}

async function bits(rig: Rig, tensor: Tensor): Promise<BigInt64Array> {
  using host = rig.device.createPinnedBuffer(tensor.buffer.bytes);
  rig.stream.copy(host, tensor.buffer);
  await rig.stream.done();
  return host.view(BigInt64Array).slice();
}

async function scaleOf(scaler: GradScaler, rig: Rig): Promise<number> {
  const state = await scaler.stateDict(rig);
  return "scale" in state ? state.scale : 1;
}

for (const kind of KINDS) {
  test(`GradScaler follows its state machine: three stages, four calls, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const options = { stream: rig.stream };
    const loss = vector(rig, 1).view;
    const bring = {
      READY: () => {},
      UNSCALED: (scaler: GradScaler, o: Descent) => scaler.unscale("o", o.gradients, options),
      STEPPED: (scaler: GradScaler, o: Descent) => scaler.step("o", o.gradients, o.run, options),
    };
    const calls = {
      scale: (scaler: GradScaler, _: Descent) => scaler.scale(loss, loss, options),
      unscale: (scaler: GradScaler, o: Descent) => scaler.unscale("o", o.gradients, options),
      step: (scaler: GradScaler, o: Descent) => scaler.step("o", o.gradients, o.run, options),
      update: (scaler: GradScaler, _: Descent) => scaler.update(options),
    };
    /** The stage that follows, or why there is none. */
    const outcomes = {
      READY: { scale: "READY", unscale: "UNSCALED", step: "STEPPED", update: /no gradient was/ },
      UNSCALED: { scale: "UNSCALED", unscale: /called already/, step: "STEPPED", update: "READY" },
      STEPPED: { scale: "STEPPED", unscale: /too late/, step: /called already/, update: "READY" },
    } as const;
    /** What a stage is known by: whether unscale and step are refused. */
    const stageOf = (scaler: GradScaler, o: Descent) => {
      try {
        scaler.unscale("o", o.gradients, options);
        return "READY";
      } catch (error) {
        return /too late/.test(String(error)) ? "STEPPED" : "UNSCALED";
      }
    };
    let seen = 0;
    for (const stage of ["READY", "UNSCALED", "STEPPED"] as const) {
      for (const call of ["scale", "unscale", "step", "update"] as const) {
        using scaler = GradScaler.open(rig.device);
        const optimizer = new Descent(rig, 1);
        scaler.scale(loss, loss, options);
        bring[stage](scaler, optimizer);
        const outcome = outcomes[stage][call];
        const use = () => calls[call](scaler, optimizer);
        if (typeof outcome === "string") {
          use();
          assert.equal(stageOf(scaler, optimizer), outcome, `${call} in ${stage}`);
        } else {
          refuses(use, outcome);
          assert.equal(stageOf(scaler, optimizer), stage, `${call} in ${stage}`);
        }
        seen++;
      }
    }
    assert.equal(seen, 12);
  });

  test(`GradScaler refuses unscale, step and update before anything was scaled, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    using scaler = GradScaler.open(rig.device);
    const optimizer = new Descent(rig, 1);
    refuses(() => scaler.unscale("o", optimizer.gradients, rig), /nothing was scaled yet/);
    refuses(() => scaler.step("o", optimizer.gradients, optimizer.run, rig), /nothing was scaled/);
    refuses(() => scaler.update(rig), /nothing was scaled yet/);
  });

  test(`GradScaler scales a loss and takes the scale out of gradients, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    using scaler = GradScaler.open(rig.device, { initScale: 1024 });
    const [loss, y] = [vector(rig, 1.5, -2), vector(rig, 0, 0)];
    scaler.scale(y.view, loss.view, rig);
    assert.deepEqual([...(await rig.read(y)).data], [1536, -2048]);
    assert.deepEqual([...(await rig.read(loss)).data], [1.5, -2]);
    const [a, b] = [vector(rig, 1024, 3), vector(rig, -512)];
    const found = scaler.unscale({}, { a: a.view, b: b.view }, rig);
    assert.deepEqual([...(await rig.read(a)).data], [1, 3 / 1024]);
    assert.deepEqual([...(await rig.read(b)).data], [-0.5]);
    assert.equal(String(found), "f32 [1]");
  });

  test(`GradScaler skips an overflowed step bit for bit and recovers after ten, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    using scaler = GradScaler.open(rig.device);
    const optimizer = new Descent(rig, 1);
    const loss = vector(rig, 1).view;
    const step = (gradient: number) => {
      scaler.scale(loss, loss, rig);
      optimizer.set(gradient);
      scaler.step(optimizer, optimizer.gradients, optimizer.run, rig);
      scaler.update(rig);
    };
    step(65536);
    const before = await optimizer.state();
    const values = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, Number.NaN];
    for (let turn = 0; turn < 10; turn++) step(values[turn % 3] as number);
    assert.deepEqual(await optimizer.state(), before);
    assert.equal((await rig.read(optimizer.g)).data[0], 0, "a skipped gradient is zeroed");
    assert.equal(await scaleOf(scaler, rig), 64);
    step(64);
    const after = await optimizer.state();
    assert.equal(after[3], 2, "two updates were applied");
    assert.ok((after[0] as number) < (before[0] as number));
    assert.equal(await scaleOf(scaler, rig), 64);
  });

  test(`GradScaler skips by the gradients of one optimizer and backs off for all, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    using scaler = GradScaler.open(rig.device, { initScale: 8 });
    const [bad, good] = [new Descent(rig, 1), new Descent(rig, 1)];
    const loss = vector(rig, 1).view;
    scaler.scale(loss, loss, rig);
    bad.set(8);
    good.set(8);
    const poisoned = { ...bad.gradients, other: vector(rig, 1, Number.NaN, 3).view };
    scaler.step(bad, poisoned, bad.run, rig);
    scaler.step(good, good.gradients, good.run, rig);
    scaler.update(rig);
    assert.equal((await rig.read(bad.p)).data[0], 1);
    assert.ok(((await rig.read(good.p)).data[0] as number) < 1);
    assert.equal(await scaleOf(scaler, rig), 4);
    // The flag was cleared: the next step is clean.
    scaler.scale(loss, loss, rig);
    bad.set(4);
    scaler.step(bad, bad.gradients, bad.run, rig);
    scaler.update(rig);
    assert.ok(((await rig.read(bad.p)).data[0] as number) < 1);
    assert.equal(await scaleOf(scaler, rig), 4);
  });

  test(`GradScaler fixes what it found before clipping, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    using scaler = GradScaler.open(rig.device, { initScale: 4 });
    const optimizer = new Descent(rig, 1);
    const loss = vector(rig, 1).view;
    scaler.scale(loss, loss, rig);
    optimizer.set(Number.POSITIVE_INFINITY);
    scaler.unscale("o", optimizer.gradients, rig);
    optimizer.set(1); // what a clip by a NaN norm, or a hook, may leave behind
    scaler.step("o", optimizer.gradients, optimizer.run, rig);
    scaler.update(rig);
    assert.equal((await rig.read(optimizer.p)).data[0], 1);
    assert.equal(await scaleOf(scaler, rig), 2);
  });

  test(`GradScaler grows after its interval, never to infinity, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const loss = vector(rig, 1).view;
    const grow = async (options: Parameters<typeof GradScaler.open>[1], steps: number) => {
      using scaler = GradScaler.open(rig.device, options);
      const scales: number[] = [];
      for (let step = 0; step < steps; step++) {
        scaler.scale(loss, loss, rig);
        scaler.unscale("o", { g: vector(rig, 1).view }, rig);
        scaler.update(rig);
        scales.push(await scaleOf(scaler, rig));
      }
      return scales;
    };
    assert.deepEqual(await grow({ initScale: 1, growthInterval: 2 }, 5), [1, 2, 2, 4, 4]);
    assert.deepEqual(await grow({ initScale: 2 ** 127, growthInterval: 1 }, 2), [
      2 ** 127,
      2 ** 127,
    ]);
    const limited = { initScale: 4, growthInterval: 1, maxScale: 10 };
    assert.deepEqual(await grow(limited, 3), [8, 10, 10]);
  });

  test(`GradScaler without a floor falls below 1, with one it does not, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const loss = vector(rig, 1).view;
    for (const [minScale, wanted] of [
      [0, 2 ** -2],
      [0.75, 0.75],
    ] as const) {
      using scaler = GradScaler.open(rig.device, { initScale: 2, minScale });
      for (let step = 0; step < 3; step++) {
        scaler.scale(loss, loss, rig);
        scaler.unscale("o", { g: vector(rig, Number.NaN).view }, rig);
        scaler.update(rig);
      }
      assert.equal(await scaleOf(scaler, rig), wanted);
    }
  });

  test(`GradScaler never divides by a scale of 0 into the parameters, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    using scaler = GradScaler.open(rig.device, { initScale: 2 ** -140 });
    const optimizer = new Descent(rig, 1);
    scaler.scale(vector(rig, 1).view, vector(rig, 1).view, rig);
    optimizer.set(2 ** -140); // its unscaled value is 1, but 1 / scale is infinite in f32
    scaler.step("o", optimizer.gradients, optimizer.run, rig);
    scaler.update(rig);
    assert.equal((await rig.read(optimizer.p)).data[0], 1);
  });

  test(`GradScaler keeps an overflow of the first micro-batch to the end of the step, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    using scaler = GradScaler.open(rig.device);
    const optimizer = new Descent(rig, 1);
    const [loss, part] = [vector(rig, 1).view, vector(rig, 1).view];
    scaler.scale(loss, loss, rig);
    optimizer.set(Number.POSITIVE_INFINITY);
    scaler.scale(loss, loss, rig);
    kernels.add(optimizer.g.view, optimizer.g.view, part, rig);
    scaler.step("o", optimizer.gradients, optimizer.run, rig);
    assert.equal((await rig.read(optimizer.p)).data[0], 1);
  });

  test(`GradScaler goes on from a saved state with the same bits, on ${kind}`, async () => {
    await using rig = await Rig.open(kind);
    const loss = vector(rig, 1).view;
    const settings = { initScale: 96, growthFactor: 1.5, backoffFactor: 0.3, growthInterval: 3 };
    const gradients = [1, 2, Number.NaN, 3, 4, 5, 6, 7, Number.NaN, 8, 9, 10, 11];
    const play = async (scaler: GradScaler, from: number, to: number) => {
      const states: GradScalerState[] = [];
      for (const gradient of gradients.slice(from, to)) {
        scaler.scale(loss, loss, rig);
        scaler.unscale("o", { g: vector(rig, gradient).view }, rig);
        scaler.update(rig);
        states.push(await scaler.stateDict(rig));
      }
      return states;
    };
    using whole = GradScaler.open(rig.device, settings);
    const expected = await play(whole, 0, gradients.length);
    using first = GradScaler.open(rig.device, settings);
    await play(first, 0, 5);
    const saved = JSON.parse(JSON.stringify(await first.stateDict(rig)));
    assert.equal(saved.growthTracker, 2);
    using before = GradScaler.open(rig.device);
    before.loadStateDict(saved); // before first use
    assert.deepEqual(await before.stateDict(rig), saved);
    assert.deepEqual(await play(before, 5, gradients.length), expected.slice(5));
    using after = GradScaler.open(rig.device);
    await play(after, 0, 4);
    after.loadStateDict(saved); // after use
    assert.deepEqual(await play(after, 5, gradients.length), expected.slice(5));
  });
}

test("GradScaler.stateDict() is scale, tracker and settings; the state of a disabled one is empty", async () => {
  await using rig = await Rig.open("cpu");
  using scaler = GradScaler.open(rig.device);
  assert.deepEqual(await scaler.stateDict(rig), {
    scale: 65536,
    growthTracker: 0,
    growthFactor: 2,
    backoffFactor: 0.5,
    growthInterval: 2000,
    minScale: 0,
    maxScale: 0,
  });
  using off = GradScaler.open(rig.device, { enabled: false });
  const empty = await off.stateDict(rig);
  assert.deepEqual(empty, {});
  refuses(() => scaler.loadStateDict(empty), /state is empty/);
  off.loadStateDict(await scaler.stateDict(rig));
  refuses(
    () => scaler.loadStateDict({ ...empty, scale: Number.NaN } as GradScalerState),
    /GradScaler.loadStateDict: scale must be a finite/,
  );
});

test("GradScaler.stateDict() and loadStateDict() wait for the end of a step", async () => {
  await using rig = await Rig.open("cpu");
  using scaler = GradScaler.open(rig.device);
  const state = await scaler.stateDict(rig);
  scaler.scale(vector(rig, 1).view, vector(rig, 1).view, rig);
  scaler.unscale("o", { g: vector(rig, 1).view }, rig);
  await assert.rejects(scaler.stateDict(rig), { code: "BAD_ARGUMENT", message: /under way/ });
  refuses(() => scaler.loadStateDict(state), /under way/);
});

test("GradScaler that is not enabled passes everything through and takes no memory", async () => {
  await using rig = await Rig.open("cpu");
  const { reserved } = rig.device.stats();
  using scaler = GradScaler.open(rig.device, { enabled: false });
  assert.equal(rig.device.stats().reserved, reserved);
  assert.equal(scaler.enabled, false);
  assert.equal(scaler.factor(rig), null);
  const [y, loss] = [vector(rig, 0, 0), vector(rig, 1, 2)];
  scaler.scale(y.view, loss.view, rig);
  assert.deepEqual([...(await rig.read(y)).data], [1, 2]);
  const optimizer = new Descent(rig, 1);
  optimizer.set(3);
  assert.equal(scaler.unscale("o", optimizer.gradients, rig), null);
  assert.equal((await rig.read(optimizer.g)).data[0], 3);
  const seen: unknown[] = [];
  scaler.step("o", {}, (found) => seen.push(found), rig);
  assert.deepEqual(seen, [null]);
  scaler.update(rig);
});

test("GradScaler refuses gradients that are not f32, by name, and touches none", async () => {
  await using rig = await Rig.open("cpu");
  using scaler = GradScaler.open(rig.device);
  scaler.scale(vector(rig, 1).view, vector(rig, 1).view, rig);
  const good = vector(rig, 1);
  for (const dtype of ["f16", "bf16"] as const) {
    const half = rig.tensor(dtype, [1], [1]).view;
    const gradients = { good: good.view, "layers.0.lora_A": half };
    refuses(
      () => scaler.unscale("o", gradients, rig),
      /layers\.0\.lora_A must be f32: it is b?f16/,
    );
  }
  assert.equal((await rig.read(good)).data[0], 1);
});

test("GradScaler refuses a step for which no gradient was checked", async () => {
  await using rig = await Rig.open("cpu");
  using scaler = GradScaler.open(rig.device);
  scaler.scale(vector(rig, 1).view, vector(rig, 1).view, rig);
  const ran: unknown[] = [];
  refuses(
    () => scaler.step("o", {}, (found) => ran.push(found), rig),
    /no gradient was checked for "o": pass those that the loss depends on/,
  );
  assert.deepEqual(ran, []);
  refuses(() => scaler.update(rig), /no gradient was checked/);
});

test("GradScaler.update() takes a new scale and leaves the growth tracker alone", async () => {
  await using rig = await Rig.open("cpu");
  using scaler = GradScaler.open(rig.device, { growthInterval: 2 });
  scaler.scale(vector(rig, 1).view, vector(rig, 1).view, rig);
  scaler.unscale("o", { g: vector(rig, 1).view }, rig);
  scaler.update(rig);
  scaler.update({ stream: rig.stream, newScale: 24 });
  const state = await scaler.stateDict(rig);
  assert.deepEqual({ ...state, scale: 24, growthTracker: 1 }, state);
  for (const newScale of [0, -1, Number.NaN, 1e39]) {
    refuses(() => scaler.update({ stream: rig.stream, newScale }), /newScale/);
  }
});

test("GradScaler.open() checks its settings", async () => {
  await using rig = await Rig.open("cpu");
  for (const [settings, message] of [
    [{ growthFactor: 1 }, /GradScaler.open: growthFactor must be above 1: it is 1/],
    [{ backoffFactor: 1 }, /backoffFactor must be between 0 and 1/],
    [{ backoffFactor: 0 }, /backoffFactor/],
    [{ growthInterval: 0 }, /growthInterval/],
    [{ initScale: 0 }, /scale must be above 0/],
    [{ initScale: 1e39 }, /scale must be a finite number/],
    [{ minScale: 2, maxScale: 1 }, /maxScale is below minScale/],
  ] as const) {
    refuses(() => GradScaler.open(rig.device, settings), message);
  }
});
