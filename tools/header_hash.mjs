/**
 * Writes the hash of the C headers into `src/ffi/header_hash.ts`; run it after a change of `csrc/include`:
 *
 *     node tools/header_hash.mjs
 *
 * The library answers with the same hash of the headers that it was built from, so that a stale build is
 * refused when it is loaded.
 */

import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";
import { ROOT } from "./machine.mjs";

/** The headers of the ABI, in the order of their inclusion. */
export const HEADERS = [
  "loramem.h",
  "loramem_kernels.h",
  "loramem_training.h",
  "loramem_files.h",
].map((name) => `csrc/include/${name}`);

/**
 * First 8 bytes of the SHA-256 of the headers, one after the other, big-endian.
 *
 * @param {string} root the project folder
 */
export function headerHash(root) {
  const hash = createHash("sha256");
  for (const path of HEADERS) hash.update(readFileSync(join(root, path)));
  return hash.digest().readBigUInt64BE(0);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const target = join(ROOT, "src/ffi/header_hash.ts");
  const constant = `export const HEADER_HASH = 0x${headerHash(ROOT).toString(16).padStart(16, "0")}n;`;
  const source = readFileSync(target, "utf8");
  writeFileSync(target, source.replace(/^export const HEADER_HASH = .*;$/m, constant));
  console.log(constant);
}
