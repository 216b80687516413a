import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { join } from "node:path";
import { test } from "node:test";
import {
  packInto,
  packStruct,
  readStruct,
  STRUCTS,
  type StructName,
  structLayout,
} from "../../src/ffi/structs.ts";
import { ROOT } from "../help.ts";
import { compileC, temporaryFolder } from "./support.ts";

const NAMES = Object.keys(STRUCTS) as StructName[];

test("structLayout() places every field where the C compiler does", () => {
  using folder = temporaryFolder();
  const lines = NAMES.flatMap((name) => [
    `printf("${name} %zu\\n", sizeof(${name}));`,
    ...structLayout(name).fields.map(
      (field) => `printf("${name}.${field.name} %zu\\n", offsetof(${name}, ${field.name}));`,
    ),
  ]);
  const program = join(folder.path, "layout");
  const text = `#include <stddef.h>\n#include <stdio.h>\n#include "loramem.h"\nint main(void) {${lines.join("\n")}}`;
  compileC(program, text, false, join(ROOT, "csrc/include"));
  const { stdout } = spawnSync(program, { encoding: "utf8" });
  const expected = NAMES.flatMap((name) => {
    const { size, fields } = structLayout(name);
    return [`${name} ${size}`, ...fields.map((field) => `${name}.${field.name} ${field.offset}`)];
  });
  assert.deepEqual(stdout.trim().split("\n"), expected);
});

test("packStruct() fills size and reserved and writes every type", () => {
  const bytes = packStruct("lm_scale_args", {
    type: 1,
    y: 0x1234_5678_9abcn,
    x: 8n,
    n: 2 ** 40,
    factor: 0.5,
  });
  const view = new DataView(bytes.buffer);
  assert.equal(bytes.length, 40);
  assert.equal(view.getUint32(0, true), 40);
  assert.equal(view.getInt32(4, true), 1);
  assert.equal(view.getBigUint64(8, true), 0x1234_5678_9abcn);
  assert.equal(view.getBigInt64(24, true), 2n ** 40n);
  assert.equal(view.getFloat32(32, true), 0.5);
});

test("packStruct() refuses missing and unknown fields", () => {
  const all = { type: 0, y: 1n, x: 1n, n: 1, factor: 1 };
  const { n, ...missing } = all;
  assert.equal(n, 1);
  assert.throws(() => packStruct("lm_scale_args", missing), {
    code: "INTERNAL",
    message: /lacks a field: n$/,
  });
  assert.throws(() => packStruct("lm_scale_args", { ...all, m: 1, k: 2 }), {
    code: "INTERNAL",
    message: /no such field: m, k$/,
  });
});

test("readStruct() reads back what packInto() wrote, at an offset", () => {
  const view = new DataView(new ArrayBuffer(128));
  const state = { loss_sum: 12.25, grad_norm: 1e-300, clip: 1, learning_rate: 0.5, step: 2 ** 40 };
  const report = { bad_element: -1, loss_scale: 0.25, skipped: 1 };
  const factors = { factor: 4, decay: 1, rate: 0.125, root: 8 };
  const written = { ...state, ...report, ...factors };
  packInto(view, 24, "lm_step_metrics", written);
  assert.deepEqual({ ...readStruct("lm_step_metrics", view, 24) }, written);
});
