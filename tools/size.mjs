/** Counts the lines of each layer, so that growth is seen and is a decision. */

import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const FOLDERS = ["src", "csrc", "tests", "bench", "tools"];
const SOURCE = /\.(ts|mjs|c|h|cu|cuh|cpp)$/;
/** Files above this are worth splitting by subject. */
const LONGEST = 500;

/**
 * The layer of a source file: its folder, without the file.
 *
 * @param {string} file
 */
function layerOf(file) {
  const parts = file.split("/").slice(0, -1);
  const depth = parts[0] === "src" && parts[1] === "api" ? 3 : parts[0]?.endsWith("src") ? 2 : 1;
  return parts.slice(0, depth).join("/");
}

/**
 * Files and lines per layer, and the source files that are too long.
 *
 * @param {string} root the project folder
 * @returns {{ layers: Map<string, { files: number, lines: number }>, long: string[] }}
 */
export function measure(root) {
  const layers = new Map();
  const long = [];
  for (const folder of FOLDERS) {
    for (const file of sourceFiles(root, folder)) {
      const lines = readFileSync(join(root, file), "utf8").split("\n").length - 1;
      const layer = layers.get(layerOf(file)) ?? { files: 0, lines: 0 };
      layers.set(layerOf(file), { files: layer.files + 1, lines: layer.lines + lines });
      if (lines > LONGEST && /^c?src\//.test(file)) long.push(`${file}: ${lines} lines`);
    }
  }
  return { layers, long };
}

/** @param {string} root @param {string} folder */
function sourceFiles(root, folder) {
  try {
    return readdirSync(join(root, folder), { recursive: true, encoding: "utf8" })
      .map((name) => `${folder}/${name}`)
      .filter((file) => SOURCE.test(file))
      .sort();
  } catch {
    return []; // A part that this checkout does not have.
  }
}

/** @param {string} root the project folder */
export function printSizes(root) {
  const { layers, long } = measure(root);
  let total = 0;
  for (const [layer, { files, lines }] of layers) {
    console.log(`${String(lines).padStart(7)} lines ${String(files).padStart(4)} files  ${layer}`);
    total += lines;
  }
  console.log(`${String(total).padStart(7)} lines in all`);
  for (const line of long) console.log(`longer than ${LONGEST} lines: ${line}`);
}
