/**
 * What the machine offers: the project folder, programs on PATH, child processes, and the checks that
 * come before a build. Plain JavaScript over node: modules, because it runs before anything is installed.
 */

import { spawn, spawnSync } from "node:child_process";
import { accessSync, constants, existsSync, realpathSync, statSync } from "node:fs";
import { constants as osConstants } from "node:os";
import { delimiter, join } from "node:path";
import { fileURLToPath } from "node:url";

/** The project folder, symbolic links resolved, so that every runtime sees the same path. */
export const ROOT = realpathSync(fileURLToPath(new URL("..", import.meta.url)));

/** Which runtime executes this file: "node", "bun" or "deno". */
export const HOST = process.versions.bun ? "bun" : process.versions.deno ? "deno" : "node";

/** A failure that the user can mend: its message is printed without a stack trace. */
export class Failure extends Error {}

/**
 * The full path of a program on PATH.
 *
 * @param {string} name
 * @returns {string | undefined}
 */
export function which(name) {
  for (const folder of (process.env.PATH ?? "").split(delimiter)) {
    const path = join(folder || ".", name);
    try {
      accessSync(path, constants.X_OK);
      if (statSync(path).isFile()) return path;
    } catch {
      // Not here: try the next folder.
    }
  }
  return undefined;
}

/**
 * The first line that a program prints, or undefined where it cannot be run.
 *
 * @param {string} program
 * @param {readonly string[]} args
 */
export function firstLine(program, args) {
  const result = spawnSync(program, args, { encoding: "utf8" });
  return result.status === 0 ? result.stdout.split("\n")[0] : undefined;
}

/**
 * @typedef {object} RunOptions
 * @property {string} [cwd] working folder, the project folder by default
 * @property {Record<string, string>} [env] variables added to the present environment
 * @property {boolean} [show] hand the terminal to the program instead of collecting its output
 * @property {number} [limitMs] kill the program after this time
 */

/**
 * Runs a program to its end.
 *
 * SIGINT and SIGTERM are left to the program, which knows how to stop cleanly: Ctrl-C reaches it
 * through the terminal, SIGTERM is passed on.
 *
 * @param {string} program
 * @param {readonly string[]} args
 * @param {RunOptions} [options]
 * @returns {Promise<{ code: number, output: string, timedOut: boolean }>} the exit code (128 + n after
 *   signal n), and stdout and stderr in the order they came (empty with `show`)
 */
export function run(program, args, options = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, {
      cwd: options.cwd ?? ROOT,
      env: { ...process.env, ...options.env },
      stdio: options.show ? "inherit" : ["ignore", "pipe", "pipe"],
    });
    /** @type {Buffer[]} */
    const chunks = [];
    child.stdout?.on("data", (chunk) => chunks.push(chunk));
    child.stderr?.on("data", (chunk) => chunks.push(chunk));

    let timedOut = false;
    const timer = options.limitMs
      ? setTimeout(() => {
          timedOut = true;
          child.kill("SIGKILL");
        }, options.limitMs)
      : undefined;
    const wait = () => {};
    const pass = () => void child.kill("SIGTERM");
    process.on("SIGINT", wait);
    process.on("SIGTERM", pass);
    const release = () => {
      clearTimeout(timer);
      process.off("SIGINT", wait);
      process.off("SIGTERM", pass);
    };

    child.on("error", (error) => {
      release();
      reject(error);
    });
    child.on("close", (code, signal) => {
      release();
      const output = Buffer.concat(chunks).toString("utf8");
      resolve({ code: code ?? 128 + (signal ? osConstants.signals[signal] : 0), output, timedOut });
    });
  });
}

/**
 * Runs a step of the set-up: quiet when it works, its whole output in the failure when it does not.
 *
 * @param {string} what what the step does, for the message
 * @param {string} program
 * @param {readonly string[]} args
 * @param {RunOptions} [options]
 */
export async function step(what, program, args, options) {
  const { code, output } = await run(program, args, options);
  if (code !== 0) {
    const command = [program, ...args].join(" ");
    throw new Failure(`${output.trimEnd()}\n${what} failed (exit code ${code}): ${command}`);
  }
}

/** Distribution package managers and how each installs packages without asking. */
const PACKAGE_MANAGERS = [
  ["apt-get", "apt-get install -y"],
  ["dnf", "dnf install -y"],
  ["pacman", "pacman -S --noconfirm"],
];

/** @param {string} packages */
function installCommand(packages) {
  const [, command] =
    PACKAGE_MANAGERS.find(([name]) => which(name ?? "")) ?? PACKAGE_MANAGERS[0] ?? [];
  return `${process.getuid?.() === 0 ? "" : "sudo "}${command} ${packages}`;
}

/**
 * Whether a dotted version is at least another one.
 *
 * @param {string} version
 * @param {readonly [number, number]} least
 */
export function atLeast(version, [major, minor]) {
  const [a = 0, b = 0] = version.split(".").map(Number);
  return a > major || (a === major && b >= minor);
}

/** The oldest CMake with `ctest --output-junit`, and the oldest glibc that loramem is built for. */
const CMAKE = /** @type {const} */ ([3, 21]);
const GLIBC = /** @type {const} */ ([2, 34]);

/**
 * Why this platform cannot run loramem, or undefined.
 *
 * @param {string} platform as `process.platform`
 * @param {string} arch as `process.arch`
 * @param {string | undefined} libc as `getconf GNU_LIBC_VERSION` prints it; undefined if it cannot be asked
 */
export function platformProblem(platform, arch, libc) {
  if (platform !== "linux" || arch !== "x64") {
    return `loramem runs on Linux x86-64: this is ${platform} ${arch}`;
  }
  const version = libc?.match(/^glibc (\d+\.\d+)/)?.[1];
  if (libc !== undefined && (version === undefined || !atLeast(version, GLIBC))) {
    return `loramem needs glibc ${GLIBC.join(".")} or newer: this is ${libc}`;
  }
  return undefined;
}

/**
 * One line for each missing build tool, with the command that installs it.
 *
 * @returns {string[]}
 */
export function missingTools() {
  /** @type {string[]} */
  const lines = [];
  /** @param {string} what @param {string} packages */
  const miss = (what, packages) => {
    lines.push(`missing: ${what}: install it with: ${installCommand(packages)}`);
  };
  const compiler = process.env.CC
    ? (which(process.env.CC) ?? existsSync(process.env.CC))
    : undefined;
  if (!compiler && !which("cc") && !which("gcc")) {
    miss("a C compiler (cc or gcc)", which("apt-get") ? "gcc libc6-dev" : "gcc");
  }
  const cmake = which("cmake");
  const version = cmake && firstLine(cmake, ["--version"])?.match(/(\d+\.\d+[.\d]*)/)?.[1];
  if (!version) miss(`CMake ${CMAKE.join(".")} or newer`, "cmake");
  else if (!atLeast(version, CMAKE)) {
    miss(`CMake ${CMAKE.join(".")} or newer (found ${version})`, "cmake");
  }
  if (!which("ninja") && !which("make")) miss("make or ninja", "make");
  if (HOST === "node" && !which("npm") && !which("bun") && !which("deno")) {
    miss("npm, Bun or Deno", "npm");
  }
  return lines;
}

/**
 * Throws a failure that lists everything missing on this machine, one line each.
 */
export function checkMachine() {
  // Other C libraries have a getconf too, which does not know the variable.
  const getconf = which("getconf");
  const libc = getconf && (firstLine(getconf, ["GNU_LIBC_VERSION"]) ?? "another C library");
  const problem = platformProblem(process.platform, process.arch, libc);
  if (problem) throw new Failure(problem);
  const lines = missingTools();
  if (lines.length > 0) throw new Failure(lines.join("\n"));
}
