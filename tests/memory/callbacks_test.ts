import assert from "node:assert/strict";
import { test } from "node:test";
import { readTree } from "../help.ts";

/** What is called between the braces of a C function; what the same file defines is followed. */
function callsOf(source: string, name: string): string[] | undefined {
  const body = new RegExp(`^[\\w *]+\\b${name}\\([^)]*\\) \\{\\n([\\s\\S]*?)^\\}`, "m").exec(
    source,
  );
  if (body === null) return undefined;
  const calls = [...(body[1] ?? "").matchAll(/([\w>.-]+)\s*\(/g)];
  return calls.flatMap(([, callee = ""]) => callsOf(source, callee) ?? [callee]);
}

// mlx#2099: a driver call inside a host callback deadlocks. Mutant: call lm_retired_sweep in post() of notifier.c.
test("host callbacks inside streams only lock, link and signal", () => {
  const allowed = /^(pthread_mutex_(un)?lock|pthread_cond_signal|atomic_\w+)$/;
  let found = 0;
  for (const [file, source] of readTree(["csrc/core"], /\.c$/)) {
    for (const [, name = ""] of source.matchAll(/stream_call\([^;]*?,\s*(\w+),\s*\w+\)/g)) {
      const calls = callsOf(source, name);
      assert.ok(calls !== undefined, `${file}: ${name} is not in the file`);
      assert.deepEqual(
        calls.filter((callee) => !allowed.test(callee)),
        [],
        `${file}: ${name}`,
      );
      found++;
    }
  }
  assert.ok(found >= 1);
});
