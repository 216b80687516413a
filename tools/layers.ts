/** The rules of ARCHITECTURE.md section 3, as a pure function over source files: who may import whom. */

import { dirname, join, normalize } from "node:path/posix";
import { type Import, importsOf, scan } from "./source_scan.ts";

/** Path relative to the project folder -> source text. */
export type Sources = ReadonlyMap<string, string>;

/** TypeScript layers from the top down. A layer imports from lower rows only, and not from its own row. */
const ORDER: readonly (readonly string[])[] = [
  ["program"], // cli.ts and train.ts
  ["cli"],
  ["public"], // mod.ts and src/api/mod.ts
  ["train"],
  ["generate", "data", "io", "amp", "nn", "run"],
  ["plan"],
  ["graph"],
  ["kernels", "memory"],
  ["ffi"],
];

/** Imports inside one row that are allowed all the same: [from, to, why]. */
const SIDEWAYS: readonly (readonly [string, string, string])[] = [
  ["kernels", "memory", "a kernel's arguments are tensor views and streams"],
  ["generate", "run", "generation replays the prefill and decode programs"],
  ["generate", "nn", "it fills the input block that those programs were built over"],
];

/** Layers that may hold an opaque native pointer. */
const POINTER_HOLDERS = ["ffi", "memory", "kernels", "run"];

/** The only files that may name a runtime. */
const RUNTIME_FILE = /^src\/ffi\/runtime_\w+\.ts$/;

const C_BACKENDS = ["cpu", "cuda", "sim"];
/** The one symbol of a backend that is a library of its own; core finds it by name. */
const PLUGIN_ENTRY = "lm_backend_open";

const C_SOURCE = /\.(?:c|h|cu|cuh|cpp)$/;

/** Every breach of the layer rules, as `file:line: what is wrong`; an empty list means none. */
export function layerFaults(sources: Sources): string[] {
  const faults: string[] = [];
  for (const [file, source] of sources) {
    if (file.startsWith("csrc/")) faults.push(...cFaults(file, source, sources));
    else if (layerOf(file) !== "outside") faults.push(...tsFaults(file, source));
  }
  faults.push(...entryFaults(sources));
  return faults;
}

/** The layer of a TypeScript file; "outside" for tests, benchmarks and tools. */
function layerOf(file: string): string {
  if (file === "mod.ts" || file === "src/api/mod.ts") return "public";
  if (file === "cli.ts" || file === "train.ts") return "program";
  const match = /^src\/(?:api\/(\w+)|(ffi|cli))\//.exec(file);
  return match?.[1] ?? match?.[2] ?? (file.startsWith("src/") ? "unknown" : "outside");
}

const rankOf = (layer: string): number => ORDER.findIndex((row) => row.includes(layer));

function tsFaults(file: string, source: string): string[] {
  const faults: string[] = [];
  const layer = layerOf(file);
  if (rankOf(layer) < 0) return [`${file}: belongs to no layer`];
  for (const found of importsOf(source)) {
    const fault = importFault(file, layer, found);
    if (fault !== undefined) faults.push(`${file}:${found.line}: ${fault}`);
  }
  if (!RUNTIME_FILE.test(file)) {
    const { code } = scan(source, "ts");
    for (const match of code.matchAll(/(?<![\w$])(?:Deno|Bun)(?![\w$])/g)) {
      const line = code.slice(0, match.index).split("\n").length;
      faults.push(`${file}:${line}: only src/ffi/runtime_*.ts may name ${match[0]}`);
    }
  }
  return faults;
}

function importFault(file: string, layer: string, found: Import): string | undefined {
  const { specifier, clause } = found;
  if (specifier === undefined) return "the path of import() must be a plain string";
  if (!specifier.startsWith(".")) {
    const named = /^(?:bun|deno)(?::|$)/.test(specifier);
    return named && !RUNTIME_FILE.test(file)
      ? `only src/ffi/runtime_*.ts may import ${specifier}`
      : undefined;
  }
  const target = resolve(file, specifier);
  const other = layerOf(target);
  if (other === "outside") return `${target} is not part of the library`;
  if (/(?<![\w$])Ptr(?![\w$])/.test(clause) && !POINTER_HOLDERS.includes(layer)) {
    return `${layer} must not hold a native pointer (Ptr)`;
  }
  const allowed =
    layer === other ||
    rankOf(layer) < rankOf(other) ||
    SIDEWAYS.some(([from, to]) => from === layer && to === other);
  return allowed ? undefined : `${layer} must not import ${other} (${target})`;
}

const resolve = (file: string, specifier: string): string =>
  normalize(join(dirname(file), specifier));

/** What loads together with mod.ts must need no npm package and no particular runtime. */
function entryFaults(sources: Sources): string[] {
  const faults: string[] = [];
  const reached = new Set(["mod.ts"]);
  for (const file of reached) {
    for (const { specifier, kind, line } of importsOf(sources.get(file) ?? "")) {
      if (kind !== "static" || specifier === undefined) continue;
      if (specifier.startsWith(".")) {
        const target = resolve(file, specifier);
        reached.add(target);
        if (RUNTIME_FILE.test(target)) {
          faults.push(`${file}:${line}: mod.ts loads ${target} statically: use import()`);
        }
      } else if (!specifier.startsWith("node:")) {
        faults.push(`${file}:${line}: mod.ts loads ${specifier} statically: use import()`);
      }
    }
  }
  return faults;
}

function cFaults(file: string, source: string, sources: Sources): string[] {
  const folder = file.split("/")[1] ?? "";
  if (!C_SOURCE.test(file) || ![...C_BACKENDS, "core"].includes(folder)) return [];
  const faults: string[] = [];
  const { code, strings } = scan(source, "c");
  for (const match of code.matchAll(/^[ \t]*#[ \t]*include\s*"(\d+)"/gm)) {
    const name = strings[Number(match[1])] ?? "";
    const target = includedFolder(file, name, sources);
    if (target !== folder && target !== "core" && target !== "include") {
      const line = code.slice(0, match.index).split("\n").length;
      faults.push(`${file}:${line}: ${folder} must not include ${name}`);
    }
  }
  if (folder !== "core") {
    for (const name of exportedDefinitions(code, sources)) {
      if (name === PLUGIN_ENTRY && file.startsWith("csrc/cuda/")) continue;
      faults.push(`${file}: only csrc/core defines exported functions: ${name}`);
    }
  }
  return faults;
}

/** The folder of csrc that holds an included header; a generated header counts as the includer's own. */
function includedFolder(file: string, name: string, sources: Sources): string {
  const own = dirname(file);
  for (const base of [own, "csrc", "csrc/core", "csrc/include"]) {
    const path = normalize(join(base, name));
    if (sources.has(path)) return path.split("/")[1] ?? "";
  }
  return C_BACKENDS.find((backend) => name.split("/").includes(backend)) ?? own.split("/")[1] ?? "";
}

/** Functions that a backend file defines and that carry LM_API, here or in the public header. */
function exportedDefinitions(code: string, sources: Sources): string[] {
  const declared = new Set<string>();
  for (const [file, source] of sources) {
    if (!file.startsWith("csrc/include/")) continue;
    for (const match of scan(source, "c").code.matchAll(/\bLM_API\b[^();]*?(\w+)\s*\(/g)) {
      if (match[1]) declared.add(match[1]);
    }
  }
  const names: string[] = [];
  for (const match of topLevel(code).matchAll(/([\w\s*]*?)\b(\w+)\s*\([^(){};]*\)\s*\{/g)) {
    const [, before = "", name = ""] = match;
    if (/\bLM_API\b/.test(before) || declared.has(name)) names.push(name);
  }
  return names;
}

/** The code with the insides of all braces removed, except those of `extern "C" {`. */
function topLevel(code: string): string {
  let depth = 0;
  let text = "";
  for (const character of code.replace(/\bextern\s*"\d+"\s*\{/g, "")) {
    if (character === "}") depth = Math.max(0, depth - 1);
    if (depth === 0) text += character;
    if (character === "{") depth += 1;
  }
  return text;
}
