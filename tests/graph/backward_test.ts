import assert from "node:assert/strict";
import { test } from "node:test";
import { emitBackward } from "../../src/api/graph/backward.ts";
import { type OpKind, ProgramBuilder } from "../../src/api/graph/program.ts";
import { makeValue, type SaveRole, type Value, viewOf } from "../../src/api/graph/value.ts";

/** y = f(inputs); its backward contributes one gradient to every input and needs the first. */
const f: OpKind<{ readonly y: Value; readonly inputs: readonly Value[] }> = {
  name: "f",
  uses: ({ y, inputs }) => ({ reads: inputs, writes: [y] }),
  cost: () => [],
  bind: ({ y }) => ({ fill: y }),
  backward({ y, inputs }, walk) {
    const dy = walk.gradient(y) as Value;
    const needed = walk.need(inputs[0] as Value);
    for (const input of inputs) {
      if (!walk.wants(input)) continue;
      const dx = walk.gradientLike(input);
      walk.emit(df, { dx, dy, x: needed });
      walk.contribute(input, dx);
    }
  },
};

const df: OpKind<{ readonly dx: Value; readonly dy: Value; readonly x: Value }> = {
  name: "df",
  uses: ({ dx, dy, x }) => ({ reads: [dy, x], writes: [dx] }),
  cost: () => [],
  bind: ({ dx }) => ({ fill: dx }),
};

const parameter = () => makeValue("p", "f32", [4, 4], { memory: "trainable" });

function chain(roles: readonly (SaveRole | null)[]) {
  const builder = new ProgramBuilder();
  const input = makeValue("input", "f32", [4, 4]);
  const p = parameter();
  let x = input;
  const values = roles.map((role, index) => {
    const y = makeValue(`v${index}`, "f32", [4, 4], { role });
    builder.emit(f, { y, inputs: [x, p] });
    x = y;
    return y;
  });
  return { builder, input, values };
}

const names = (builder: ProgramBuilder, from: number) =>
  builder.ops.slice(from).map(({ kind, phase }) => `${phase}:${kind.name}`);

function backward(builder: ProgramBuilder, last: Value, isKept: (value: Value) => boolean): void {
  emitBackward(
    builder,
    [...builder.ops],
    new Map([[last, makeValue("seed", "f32", last.shape)]]),
    isKept,
  );
}

test("emitBackward() recomputes nothing that is kept", () => {
  const { builder, values } = chain(["qkv", "qkv", "qkv"]);
  backward(builder, values[2] as Value, () => true);
  assert.ok(!names(builder, 3).some((name) => name.startsWith("recompute")));
});

test("emitBackward() recomputes a dropped value once, from kept ancestors, with the same op", () => {
  const { builder, values } = chain(["layerInput", null, null]);
  backward(builder, values[2] as Value, (value) => value.role !== null);
  const recomputed = builder.ops.filter(({ phase }) => phase === "recompute");
  assert.deepEqual(
    recomputed.map(({ kind }) => kind.name),
    ["f"],
  );
  assert.equal(recomputed[0]?.uses.reads[0]?.name, "v0");
  assert.equal(recomputed[0]?.uses.writes[0]?.name, "v1'");
});

test("emitBackward() walks no further than the lowest op with parameters", () => {
  const builder = new ProgramBuilder();
  const input = makeValue("input", "f32", [4, 4]);
  const frozen = makeValue("frozen", "f32", [4, 4]);
  const y = makeValue("y", "f32", [4, 4]);
  builder.emit(f, { y: frozen, inputs: [input] });
  builder.emit(f, { y, inputs: [frozen, parameter()] });
  backward(builder, y, () => true);
  // Nobody wants the gradient of `frozen`; that of the parameter is the rule's own business.
  assert.deepEqual(names(builder, 2), []);
});

test("emitBackward() adds up the gradients of a value with two consumers", () => {
  const builder = new ProgramBuilder();
  const x = makeValue("x", "f32", [4, 4]);
  const [a, b] = [makeValue("a", "f32", [4, 4]), makeValue("b", "f32", [4, 4])];
  builder.emit(f, { y: x, inputs: [parameter()] });
  builder.emit(f, { y: a, inputs: [x] });
  builder.emit(f, { y: b, inputs: [a, x] });
  backward(builder, b, () => true);
  const sums = builder.ops.filter(({ kind }) => kind.name === "add");
  assert.equal(sums.length, 1);
});

test("emitBackward() recomputes the owner of a window, not the window", () => {
  const builder = new ProgramBuilder();
  const whole = makeValue("whole", "f32", [4, 8]);
  const p = parameter();
  builder.emit(f, { y: whole, inputs: [p] });
  const window = viewOf(whole, "window", [4, 4], 4);
  const y = makeValue("y", "f32", [4, 4]);
  builder.emit(f, { y, inputs: [window, p] });
  backward(builder, y, () => false);
  const recomputed = builder.ops.filter(({ phase }) => phase === "recompute");
  assert.deepEqual(
    recomputed.map(({ uses }) => uses.writes[0]?.name),
    ["whole'"],
  );
});

/** y = g(x): its backward rule can write y again. */
const g: OpKind<{ readonly y: Value; readonly x: Value }> = {
  name: "g",
  restores: true,
  uses: ({ y, x }) => ({ reads: [x], writes: [y] }),
  cost: () => [],
  bind: ({ y }) => ({ fill: y }),
  backward({ y, x }, walk) {
    const dx = walk.gradientLike(x);
    const restored = walk.restored(y);
    walk.emit(dg, { dx, y: restored, dy: walk.gradient(y) as Value });
    walk.contribute(x, dx);
  },
};

const dg: OpKind<{ readonly dx: Value; readonly y: Value | null; readonly dy: Value }> = {
  name: "dg",
  uses: ({ dx, y, dy }) => ({ reads: [dy], writes: y === null ? [dx] : [dx, y] }),
  cost: () => [],
  bind: ({ dx }) => ({ fill: dx }),
};

/** z = h(y): its backward rule reads y, but not at once. */
const h: OpKind<{ readonly z: Value; readonly y: Value }> = {
  name: "h",
  uses: ({ z, y }) => ({ reads: [y, parameter()], writes: [z] }),
  cost: () => [],
  bind: ({ z }) => ({ fill: z }),
  backward({ z, y }, walk) {
    walk.prepare(y);
    const dy = walk.gradientLike(y);
    const dz = walk.gradient(z) as Value;
    walk.emit(df, { dx: dy, dy: dz, x: dz });
    walk.contribute(y, dy);
    walk.later(y, (there) => walk.emit(late, { x: there }));
  },
};

const late: OpKind<{ readonly x: Value }> = {
  name: "late",
  uses: ({ x }) => ({ reads: [x], writes: [] }),
  cost: () => [],
  bind: ({ x }) => ({ fill: x }),
};

function restoring(kept: boolean, trained: boolean) {
  const builder = new ProgramBuilder();
  const make = (name: string, role: SaveRole | null = null) =>
    makeValue(name, "f32", [4, 4], { role });
  const [x, v, y, z] = [make("x"), make("v"), make("y", kept ? "qkv" : null), make("z")];
  builder.emit(f, { y: v, inputs: trained ? [x, parameter()] : [x] });
  builder.emit(g, { y, x: v });
  builder.emit(h, { z, y });
  backward(builder, z, ({ role }) => role !== null);
  return builder.ops.slice(3);
}

test("emitBackward() lets a rule write its output again instead of recomputing it", () => {
  const ops = restoring(false, true);
  assert.deepEqual(
    ops.slice(0, 4).map(({ kind, phase }) => `${phase}:${kind.name}`),
    ["recompute:f", "backward:df", "backward:dg", "backward:late"],
  );
  // What the rule wrote is what was waited for.
  assert.equal(ops[3]?.uses.reads[0], ops[2]?.uses.writes[1]);
});

test("emitBackward() restores nothing that is kept", () => {
  const ops = restoring(true, true);
  assert.equal(ops.find(({ kind }) => kind.name === "dg")?.uses.writes.length, 1);
  assert.equal(ops.find(({ kind }) => kind.name === "late")?.uses.reads[0]?.name, "y");
});

test("emitBackward() recomputes what is waited for where the producer has no backward pass", () => {
  const names = restoring(false, false).map(({ kind, phase }) => `${phase}:${kind.name}`);
  assert.deepEqual(names, ["backward:df", "recompute:f", "recompute:g", "backward:late"]);
});
