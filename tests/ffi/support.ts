/** Helpers of the tests of native objects. */
import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import v8 from "node:v8";
import vm from "node:vm";

/** Whether the tests run under Deno. */
export const DENO = process.versions.deno !== undefined;

/** For tests that take seconds on a busy machine: Bun gives a test 5 s otherwise. */
export const SLOW = { timeout: 120_000 } as const;

/** Collects garbage and lets the finalization callbacks run, which come as macrotasks. */
export async function collectGarbage(): Promise<void> {
  const { Bun } = globalThis as { Bun?: { gc(force: boolean): void } };
  for (let round = 0; round < 4; round++) {
    if (Bun !== undefined) Bun.gc(true);
    else {
      v8.setFlagsFromString("--expose-gc");
      vm.runInNewContext("gc")();
    }
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

/** A new folder that is removed with the scope. */
export function temporaryFolder(): { readonly path: string } & Disposable {
  const path = mkdtempSync(join(tmpdir(), "loramem-"));
  return { path, [Symbol.dispose]: () => rmSync(path, { recursive: true }) };
}

/** What a program left behind. */
export interface Ended {
  readonly code: number | null;
  readonly signal: string | null;
  readonly stdout: string;
  readonly stderr: string;
}

/** Runs a file with the present runtime; `flags` are Deno permissions. */
export function runFile(
  file: string,
  options: {
    readonly flags?: readonly string[];
    readonly args?: readonly string[];
    readonly env?: Record<string, string>;
  } = {},
): Ended {
  const { args = [] } = options;
  const flags = DENO ? ["run", "--no-prompt", ...(options.flags ?? ["-A"])] : [];
  const { status, signal, stdout, stderr } = spawnSync(
    process.execPath,
    [...flags, file, ...args],
    {
      encoding: "utf8",
      env: { ...process.env, NO_COLOR: "1", DENO_NO_UPDATE_CHECK: "1", ...options.env },
      timeout: 60_000,
    },
  );
  return { code: status, signal, stdout, stderr };
}

/** Compiles C text to a shared library, or to a program where `library` is false. */
export function compileC(path: string, text: string, library: boolean, include = "."): void {
  const source = `${path}.c`;
  writeFileSync(source, text);
  const kind = library ? ["-shared", "-fPIC"] : [];
  const { status, stderr } = spawnSync("cc", [...kind, "-I", include, "-o", path, source], {
    encoding: "utf8",
  });
  if (status !== 0) throw new Error(`cc ${source}: ${stderr}`);
}
