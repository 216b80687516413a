/** Builds the native library with CMake into `build/`. */

import { existsSync, readFileSync, rmSync, statSync } from "node:fs";
import { availableParallelism } from "node:os";
import { join } from "node:path";
import { Failure, ROOT, step, which } from "./machine.mjs";

export const BUILD = join(ROOT, "build");
const LIBRARY = join(BUILD, "lib", "libloramem.so");

/**
 * Configures once, then builds what is out of date: the library, and with `everything` also the test library, the C tests
 * and, where nvcc is found, the CUDA backend.
 *
 * CMake configures again by itself when a CMakeLists.txt changed. A folder that a failed first try left
 * behind, or that belongs to a checkout at another place, is started afresh.
 *
 * @param {{ everything: boolean }} options
 */
export async function build({ everything }) {
  const configured = ["build.ninja", "Makefile"].some((file) => existsSync(join(BUILD, file)));
  const usable = configured && cacheHas(`CMAKE_HOME_DIRECTORY:INTERNAL=${ROOT}`);
  // A first build for the demo leaves nvcc alone: it takes minutes, and a broken one must not stand in the way.
  const lacksCuda = everything && usable && cacheHas("LORAMEM_CUDA:STRING=OFF");
  if (!usable) rmSync(BUILD, { recursive: true, force: true });
  if (!usable || lacksCuda) {
    const generator = !usable && which("ninja") ? ["-G", "Ninja"] : [];
    const args = ["-S", ROOT, "-B", BUILD, "-DCMAKE_BUILD_TYPE=Release", "-DLORAMEM_SIM=ON"];
    args.push(`-DLORAMEM_CUDA=${everything ? "AUTO" : "OFF"}`);
    await step("configuring the build", "cmake", [...args, ...generator]);
  }
  const before = modified(LIBRARY);
  const start = performance.now();
  const target = everything ? [] : ["--target", "loramem_product"];
  const jobs = ["-j", String(availableParallelism())];
  await step("the build", "cmake", ["--build", BUILD, ...jobs, ...target]);
  const after = modified(LIBRARY);
  if (after === undefined)
    throw new Failure(`the build made no ${LIBRARY}: remove build/ and try again`);
  if (after !== before) {
    const seconds = ((performance.now() - start) / 1000).toFixed(1);
    console.log(`built build/lib/libloramem.so in ${seconds} s`);
  }
}

/** @param {string} line */
function cacheHas(line) {
  return readFileSync(join(BUILD, "CMakeCache.txt"), "utf8").split("\n").includes(line);
}

/** @param {string} path */
function modified(path) {
  return statSync(path, { throwIfNoEntry: false })?.mtimeMs;
}
