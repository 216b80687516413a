/** Results of benchmarks as JSON, with what is needed to judge them later: machine, versions, hash of the kernels. */

import { createHash } from "node:crypto";
import { readdir, readFile, writeFile } from "node:fs/promises";
import { cpus, totalmem } from "node:os";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../", import.meta.url));

/** SHA-256 over every C and CUDA source, in the order of their paths, test programs left out. */
export async function kernelHash(): Promise<string> {
  const entries = await readdir(join(ROOT, "csrc"), { recursive: true });
  const hash = createHash("sha256");
  for (const path of entries
    .filter((name) => /\.(c|h|cu|cuh)$/.test(name) && !name.startsWith("tests"))
    .sort()) {
    hash.update(path).update(await readFile(join(ROOT, "csrc", path)));
  }
  return hash.digest("hex").slice(0, 16);
}

/** Writes `result` to `file`. */
export async function writeResult(
  file: string,
  result: Readonly<Record<string, unknown>>,
): Promise<void> {
  const machine = {
    cpu: cpus()[0]?.model ?? "unknown",
    threads: cpus().length,
    memoryGiB: Math.round(totalmem() / 2 ** 30),
  };
  const runtime =
    "Bun" in globalThis ? `Bun ${process.versions.bun}` : `Deno ${process.versions.deno}`;
  const record = { ...result, machine, runtime, kernelHash: await kernelHash() };
  // Lists of numbers on one line: a result is read, and kept in the repository.
  const text = JSON.stringify(record, null, 1).replaceAll(/\[[-\d.e,\s]*\]/g, (list) =>
    list.replaceAll(/\s+/g, ""),
  );
  await writeFile(file, `${text}\n`);
}
