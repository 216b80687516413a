/** Runs the command line in a child process of the runtime that runs the test. */
import { spawn } from "node:child_process";
import { cp, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";

export const ROOT = fileURLToPath(new URL("../../", import.meta.url));
export const DEMO = join(ROOT, "examples/demo");

export interface Result {
  readonly code: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

export interface RunOptions {
  /** Close the reading end of its output at the first byte. */
  readonly closeOutput?: boolean;
  readonly env?: Readonly<Record<string, string>>;
  /** Milliseconds after which it is killed, unless it has ended: from its start, or from when it printed `killFrom`. */
  readonly killAfter?: number;
  readonly killFrom?: string;
  /** Called with everything printed so far; may send signals. */
  readonly onOutput?: (text: string, kill: (signal: "SIGINT" | "SIGTERM") => void) => void;
}

/** Runs `script` of the repository with `args`. */
export function run(
  script: string,
  args: readonly string[],
  options: RunOptions = {},
): Promise<Result> {
  const prefix = "Bun" in globalThis ? ["run"] : ["run", "-A", "--no-check"];
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, [...prefix, join(ROOT, script), ...args], {
      cwd: ROOT,
      env: { ...process.env, NO_COLOR: "1", ...options.env },
    });
    const { killAfter, killFrom = "" } = options;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const lookAt = (text: string) => {
      if (killAfter === undefined || timer !== undefined || !text.includes(killFrom)) return;
      timer = setTimeout(() => process.kill(child.pid as number, "SIGKILL"), killAfter);
    };
    lookAt("");
    let [stdout, stderr] = ["", ""];
    child.stdout.on("data", (chunk) => {
      if (options.closeOutput) child.stdout.destroy();
      stdout += chunk;
      lookAt(stdout);
      // Not child.kill: Deno then reports the signal that was sent, not how the child ended.
      options.onOutput?.(stdout, (signal) => process.kill(child.pid as number, signal));
    });
    child.stderr.on("data", (chunk) => {
      stderr += chunk;
    });
    child.on("error", reject);
    child.on("close", (code) => {
      clearTimeout(timer);
      resolve({ code, stdout, stderr });
    });
  });
}

/** A temporary folder that goes away with the scope. */
export async function temporary(): Promise<{ readonly path: string } & AsyncDisposable> {
  const path = await mkdtemp(join(tmpdir(), "loramem-"));
  return { path, [Symbol.asyncDispose]: () => rm(path, { recursive: true, force: true }) };
}

/** A copy of the demo model, to be damaged. */
export async function copyModel(to: string): Promise<string> {
  const model = join(to, "model");
  await cp(join(DEMO, "model"), model, { recursive: true });
  return model;
}

/** Changes a JSON file. */
export async function editJson(
  file: string,
  change: (json: Record<string, unknown>) => void,
): Promise<void> {
  const json = JSON.parse(await readFile(file, "utf8"));
  change(json);
  await writeFile(file, JSON.stringify(json));
}
