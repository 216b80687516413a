import assert from "node:assert/strict";
import { test } from "node:test";
import { Device } from "../../src/api/memory/mod.ts";
import { choiceKey } from "../../src/api/run/choices.ts";
import { planRun } from "../../src/api/train/run_plan.ts";
import { Session } from "../../src/api/train/session.ts";
import { specOf } from "../plan/models.ts";
import { KINDS } from "./support.ts";

for (const kind of KINDS) {
  test(`Session.commit() times the algorithms of matrix products, or takes them over, on ${kind}`, async () => {
    const onGpu = kind.startsWith("cuda");
    const dims = { tokensPerMicroBatch: 512, prefillTokens: 0, contextTokens: 0 };
    const spec = specOf("four layers", dims);
    const backend = onGpu ? ("cuda" as const) : ("cpu" as const);
    const run = planRun({ ...spec, backend, programs: ["train", "optimizer"] }, "keep");
    /** What a session says that it chose. */
    const chosen = async (algorithms: string): Promise<string> => {
      await using device = await Device.open(kind);
      const session = Session.commit(device, run, "graph", {}, algorithms);
      try {
        return session.executor.algorithms;
      } finally {
        await session.dispose();
      }
    };
    assert.equal(await chosen("estimated"), "estimated");
    const timed = await chosen("timed");
    if (!onGpu || timed === "estimated") return; // nothing to choose from: a CPU, or no library
    const lines = timed.trimEnd().split("\n");
    assert.match(lines[0] ?? "", /^loramem products 1: .*cuBLASLt/);
    assert.ok(lines.length > 4 && lines.slice(1).every((line) => / (own|library) /.test(line)));
    assert.equal(await chosen(timed), timed);
    const refused = { code: "BAD_ARGUMENT", message: /not understood/ };
    await assert.rejects(chosen("no such text"), refused);
  });
}

test("choiceKey() tells calls with a choice apart by their sizes, not by where things lie", () => {
  const view = { name: "x" } as never;
  const fields = { rows: 4, dx: view, da: null };
  const kernel = "lm_lora_linear_backward";
  const key = choiceKey({ kernel, fields });
  assert.equal(key, choiceKey({ kernel, fields: { ...fields } }));
  assert.notEqual(key, choiceKey({ kernel, fields: { ...fields, rows: 5 } }));
  assert.notEqual(key, choiceKey({ kernel, fields: { ...fields, dx: null } }));
  assert.equal(choiceKey({ kernel: "lm_rope", fields }), null);
});
