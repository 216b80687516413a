import assert from "node:assert/strict";
import { test } from "node:test";
import { layerFaults } from "../tools/layers.ts";
import { importsOf, scan } from "../tools/source_scan.ts";
import { readText, readTree } from "./help.ts";

/** The faults of a planted tree. */
function faultsOf(files: Record<string, string>): string[] {
  return layerFaults(new Map(Object.entries(files)));
}

test("layerFaults() finds nothing in the project", () => {
  const typescript = readTree(["mod.ts", "cli.ts", "train.ts", "src"], /\.ts$/);
  const native = readTree(["csrc"], /\.(c|h|cu|cuh|cpp)$/);
  assert.ok(typescript.size > 20 && native.size > 10);
  assert.deepEqual(layerFaults(new Map([...typescript, ...native])), []);
});

test("train.ts stays within 80 lines", () => {
  const lines = readText("train.ts").trimEnd().split("\n").length;
  assert.ok(lines <= 80, `train.ts has ${lines} lines`);
});

test("layerFaults() accepts imports that point down", () => {
  assert.deepEqual(
    faultsOf({
      "cli.ts": 'import { main } from "./src/cli/train.ts";',
      "mod.ts": 'export * from "./src/api/mod.ts";',
      "src/api/mod.ts": 'export * from "./train/trainer.ts";\nexport * from "../ffi/error.ts";',
      "src/api/train/trainer.ts": 'import { plan } from "../plan/plan.ts";\nimport "./loop.ts";',
      "src/api/train/loop.ts": 'const { z } = await import("zod");',
      "src/api/plan/plan.ts": 'import type { Ptr2 } from "../graph/value.ts";',
      "src/api/graph/value.ts": 'import { open } from "node:fs";',
      "src/api/kernels/scale.ts": 'import { TensorView } from "../memory/view.ts";',
      "src/ffi/error.ts": "",
      "src/ffi/runtime.ts": 'await import("./runtime_bun.ts");',
      "src/ffi/runtime_bun.ts": 'import { dlopen } from "bun:ffi";\nBun.gc(true);',
    }),
    [],
  );
});

test("layerFaults() finds an import that points up, in every form", () => {
  for (const line of [
    'import { x } from "../train/x.ts";',
    'import type { X } from "../train/x.ts";',
    'export * from "../train/x.ts";',
    'export {\n  x,\n} from "../train/x.ts";',
    'import "../train/x.ts";',
    'const x = await import("../train/x.ts");',
    "const x = await import(`../train/x.ts`);",
    'type X = import("../train/x.ts").X;',
  ]) {
    const faults = faultsOf({ "src/api/plan/p.ts": line });
    assert.deepEqual(faults, [
      "src/api/plan/p.ts:1: plan must not import train (src/api/train/x.ts)",
    ]);
  }
});

test("layerFaults() finds imports between siblings, of the outside, and of unknown layers", () => {
  assert.deepEqual(
    faultsOf({
      "src/api/nn/n.ts": '\nimport { g } from "../generate/g.ts";',
      "src/api/memory/m.ts": 'import { k } from "../kernels/k.ts";',
      "src/cli/c.ts": 'import { t } from "../../tests/help.ts";',
      "src/api/io/i.ts": 'import { s } from "../strange/s.ts";',
      "src/api/loose.ts": "",
    }),
    [
      "src/api/nn/n.ts:2: nn must not import generate (src/api/generate/g.ts)",
      "src/api/memory/m.ts:1: memory must not import kernels (src/api/kernels/k.ts)",
      "src/cli/c.ts:1: tests/help.ts is not part of the library",
      "src/api/io/i.ts:1: io must not import strange (src/api/strange/s.ts)",
      "src/api/loose.ts: belongs to no layer",
    ],
  );
});

test("layerFaults() finds computed imports and held pointers", () => {
  assert.deepEqual(
    faultsOf({
      "src/api/io/i.ts": "await import(path);",
      "src/api/plan/p.ts": 'import type { Ptr } from "../../ffi/types.ts";',
      "src/api/run/r.ts": 'import type { Ptr } from "../../ffi/types.ts";',
    }),
    [
      "src/api/io/i.ts:1: the path of import() must be a plain string",
      "src/api/plan/p.ts:1: plan must not hold a native pointer (Ptr)",
    ],
  );
});

test("layerFaults() finds runtime names in code, not in comments and strings", () => {
  assert.deepEqual(
    faultsOf({
      "src/ffi/load.ts":
        '// Deno.dlopen\nconst text = "Bun.";\nDeno.cwd();\nconst isBun = "Bun" in globalThis;',
      "src/ffi/other.ts": 'import { ptr } from "bun:ffi";',
      "src/cli/c.ts": "const text = `in ${Bun.version}`;",
    }),
    [
      "src/ffi/load.ts:3: only src/ffi/runtime_*.ts may name Deno",
      "src/ffi/other.ts:1: only src/ffi/runtime_*.ts may import bun:ffi",
      "src/cli/c.ts:1: only src/ffi/runtime_*.ts may name Bun",
    ],
  );
});

test("layerFaults() finds what mod.ts must not load statically", () => {
  assert.deepEqual(
    faultsOf({
      "mod.ts": 'export * from "./src/api/mod.ts";',
      "src/api/mod.ts": 'export * from "./data/d.ts";\nimport type { Z } from "zod";',
      "src/api/data/d.ts": 'import { z } from "zod";\nimport "../../ffi/runtime_deno.ts";',
      "src/cli/c.ts": 'import { Command } from "commander";',
    }),
    [
      "src/api/data/d.ts:1: mod.ts loads zod statically: use import()",
      "src/api/data/d.ts:2: mod.ts loads src/ffi/runtime_deno.ts statically: use import()",
    ],
  );
});

test("layerFaults() accepts C backends that see core and the public header", () => {
  assert.deepEqual(
    faultsOf({
      "csrc/include/loramem.h": "LM_API int32_t lm_scale(void *x);",
      "csrc/core/backend.h": "",
      "csrc/core/scale.c": '#include "backend.h"\nLM_API int32_t lm_scale(void *x) { return 0; }',
      "csrc/cpu/gemm.h": "",
      "csrc/cpu/scale.c":
        '#include "core/backend.h"\n#include "gemm.h"\n#include <stdint.h>\n' +
        "static int cpu_scale(void *x) { if (lm_scale(x)) { return 1; } return 0; }",
      "csrc/cpu/other.c": '#include "../core/backend.h"\n#include "loramem.h"',
      "csrc/tests/any.c": '#include "../cpu/gemm.h"',
    }),
    [],
  );
});

test("layerFaults() finds C includes across backends and exported functions outside core", () => {
  assert.deepEqual(
    faultsOf({
      "csrc/include/loramem.h": "LM_API int32_t lm_scale(void *x);\nLM_API void *lm_get(void);",
      "csrc/cpu/gemm.h": "",
      "csrc/core/a.c": '#include "../cpu/gemm.h"',
      "csrc/sim/b.c": '// note\n#include "cpu/gemm.h"',
      "csrc/cuda/c.cu": '#include "sim/missing.h"',
      "csrc/cpu/d.c": "int32_t lm_scale(void *x) { return 0; }",
      "csrc/cpu/e.cpp": 'extern "C" {\nvoid *lm_get(void)\n{ return 0; }\n}',
      "csrc/sim/f.c": "LM_API int lm_new(int a) { return a; }",
    }),
    [
      "csrc/core/a.c:1: core must not include ../cpu/gemm.h",
      "csrc/sim/b.c:2: sim must not include cpu/gemm.h",
      "csrc/cuda/c.cu:1: cuda must not include sim/missing.h",
      "csrc/cpu/d.c: only csrc/core defines exported functions: lm_scale",
      "csrc/cpu/e.cpp: only csrc/core defines exported functions: lm_get",
      "csrc/sim/f.c: only csrc/core defines exported functions: lm_new",
    ],
  );
});

test("scan() separates code from comments, strings, templates and regular expressions", () => {
  const source = [
    'const a = "x // y"; // import "z"',
    "const b = `t ${ { k: `n ${1}` }.k } import(u)` + c;",
    "const d = e / f / g; const h = /[/\"'`]\\//.test('i');",
    "/* import 'j' \n */ const l = 'it\\'s';",
  ].join("\n");
  const { code, strings } = scan(source, "ts");
  assert.deepEqual(strings, ["x // y", "i", "it\\'s"]);
  assert.equal(code.split("\n").length, source.split("\n").length);
  assert.doesNotMatch(code, /import|x|z|[`']/);
  assert.match(code, /e \/ f \/ g/);
  assert.match(code, /\+ c;/);
});

test("importsOf() reports kinds and lines", () => {
  const source =
    'import a from "a";\n\nimport type { B } from "b";\nawait import("c");\nimport.meta.url;';
  const found = importsOf(source).map(({ specifier, kind, line }) => [specifier, kind, line]);
  assert.deepEqual(found, [
    ["a", "static", 1],
    ["b", "type", 3],
    ["c", "dynamic", 4],
  ]);
});
