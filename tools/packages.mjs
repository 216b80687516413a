/**
 * npm packages and JavaScript runtimes, installed by whichever of npm, Bun and Deno is at hand.
 *
 * The runtimes come from their npm platform packages into `.runtimes/`, never into the project's own
 * node_modules: there, `deno task` would find the npm package `deno` and run its binary as JavaScript.
 * The platform packages hold the binary itself, so no install script has to run.
 */

import { chmodSync, existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { Failure, firstLine, HOST, ROOT, step, which } from "./machine.mjs";

/** @typedef {"bun" | "deno"} RuntimeName */

/** @type {Record<RuntimeName, { version: string, package: string, file: string }>} */
const RUNTIMES = {
  bun: { version: "1.4.5", package: "@oven/bun-linux-x64", file: "bin/bun" },
  deno: { version: "2.9.6", package: "@deno/linux-x64-glibc", file: "deno" },
};

/** @returns {{ name: "npm" | RuntimeName, program: string }} */
function installer() {
  if (HOST !== "node") return { name: HOST, program: process.execPath };
  for (const name of /** @type {const} */ (["npm", "bun", "deno"])) {
    const program = which(name);
    if (program) return { name, program };
  }
  throw new Failure("no package manager found: install npm, Bun or Deno");
}

/**
 * @param {"npm" | RuntimeName} name
 * @param {boolean} dev
 */
function installArguments(name, dev) {
  switch (name) {
    case "npm":
      return ["install", "--no-save", "--ignore-scripts", ...(dev ? [] : ["--omit=dev"])];
    case "bun":
      return ["install", "--no-save", "--ignore-scripts", ...(dev ? [] : ["--production"])];
    case "deno":
      return ["install", "--no-lock", ...(dev ? [] : ["--prod"])];
  }
}

/**
 * Installs what a folder's package.json names into its node_modules, unless that was done already.
 *
 * A stamp inside node_modules records what a finished installation was made from; an interrupted one
 * has none and is repeated.
 *
 * @param {string} folder
 * @param {{ dev: boolean }} options dev: the development dependencies too
 */
export async function installPackages(folder, { dev }) {
  const manifest = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const modules = join(folder, "node_modules");
  const stamp = join(modules, ".installed.json");
  const production = JSON.stringify(manifest.dependencies ?? {});
  const development = JSON.stringify(manifest.devDependencies ?? {});
  if (existsSync(stamp)) {
    const done = JSON.parse(readFileSync(stamp, "utf8"));
    if (done.production === production && (!dev || done.development === development)) return;
  }

  const { name, program } = installer();
  // Deno links packages from node_modules/.deno; neither side can take over the other's layout.
  if (existsSync(modules) && existsSync(join(modules, ".deno")) !== (name === "deno")) {
    rmSync(modules, { recursive: true });
  }
  console.log(`installing npm packages with ${name} in ${basename(folder)}/`);
  await step("the installation", program, installArguments(name, dev), { cwd: folder });
  mkdirSync(modules, { recursive: true });
  writeFileSync(stamp, JSON.stringify({ production, development: dev ? development : null }));
}

/**
 * The path of a runtime of exactly the version that loramem is tested with: the one that is running,
 * the one on PATH, or one installed into `.runtimes/`.
 *
 * @param {RuntimeName} name
 */
export async function runtimePath(name) {
  const wanted = RUNTIMES[name];
  if (process.versions[name] === wanted.version) return process.execPath;
  const found = which(name);
  // `bun --version` prints the number alone, `deno --version` the name first.
  if (found && firstLine(found, ["--version"])?.split(" ").includes(wanted.version)) return found;
  return await installRuntime(name, wanted);
}

/**
 * @param {RuntimeName} name
 * @param {{ version: string, package: string, file: string }} wanted
 */
async function installRuntime(name, wanted) {
  const platformPackage = wanted.package + (name === "bun" && !hasAvx2() ? "-baseline" : "");
  const folder = join(ROOT, ".runtimes", name);
  mkdirSync(folder, { recursive: true });
  writeFileSync(
    join(folder, "package.json"),
    JSON.stringify({ private: true, dependencies: { [platformPackage]: wanted.version } }),
  );
  await installPackages(folder, { dev: false });
  const path = join(folder, "node_modules", platformPackage, wanted.file);
  chmodSync(path, 0o755);
  return path;
}

/** Bun's standard build uses AVX2; older processors need its baseline build. */
function hasAvx2() {
  return /\bavx2\b/.test(readFileSync("/proc/cpuinfo", "utf8"));
}
