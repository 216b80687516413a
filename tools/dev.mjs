/**
 * Everything a checkout can do, for Node.js (20 or newer), Bun and Deno alike:
 *
 *     node tools/dev.mjs demo        bun tools/dev.mjs demo        deno run -A tools/dev.mjs demo
 *
 * Each command first does what it needs and skips what is done already.
 */

import { existsSync, readdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { BUILD, build } from "./build.mjs";
import { checkMachine, Failure, HOST, ROOT, run } from "./machine.mjs";
import { installPackages, runtimePath } from "./packages.mjs";
import { printSizes } from "./size.mjs";
import {
  countLine,
  matches,
  printOutcome,
  runCTests,
  runFile,
  runJobs,
  testFiles,
} from "./test_run.mjs";

/** @typedef {import("./test_run.mjs").Outcome} Outcome */
/** @typedef {import("./test_run.mjs").Tier} Tier */
/** @typedef {import("./packages.mjs").RuntimeName} RuntimeName */

const DEMO_ARGUMENTS = [
  ["--model", "examples/demo/model"],
  ["--data", "examples/demo/train.jsonl"],
  ["--eval-data", "examples/demo/valid.jsonl"],
  ["--out", "out/demo"],
  ["--epochs", "1"],
  ["--batch-size", "8"],
  ["--learning-rate", "2e-3"],
  ["--warmup-steps", "10"],
  ["--rank", "16"],
  ["--alpha", "32"],
  ["--sample", "Define: love"],
  ["--sample", "Define: lawyer"],
  ["--sample", "Define: money"],
].flat();

/** @type {Record<string, { about: string, action: (args: string[]) => Promise<number> }>} */
const COMMANDS = {
  demo: { about: "fine-tune the demo model (further flags go to `train`)", action: demo },
  setup: { about: "install packages and runtimes for development", action: setup },
  build: { about: "build libloramem.so", action: buildOnly },
  test: {
    about: "check, then run every test under Bun and Deno (arguments: parts of file names)",
    action: (args) => test("test", args),
  },
  "test:oracles": { about: "compare with other programs", action: (args) => test("oracles", args) },
  "test:long": { about: "fuzzing, soak and kill tests", action: (args) => test("long", args) },
  bench: {
    about: "run the benchmarks under Bun and Deno (arguments: parts of file names)",
    action: bench,
  },
  check: { about: "type check, lint, and lines per layer", action: check },
  format: { about: "format the sources and apply safe lint fixes", action: format },
};

/** Deno looks for newer versions of itself now and then; a test or a training run should not. */
const QUIET = { DENO_NO_UPDATE_CHECK: "1" };

/** @param {RuntimeName} name @param {string} program @param {string[]} args a script and its arguments */
function runScript(name, program, args) {
  const prefix = name === "deno" ? ["run", "-A"] : [];
  return run(program, [...prefix, ...args], { show: true, env: QUIET });
}

/** @param {string[]} args */
async function demo(args) {
  checkMachine();
  await installPackages(ROOT, { dev: false });
  const name = HOST === "node" ? "bun" : HOST;
  const program = HOST === "node" ? await runtimePath(name) : process.execPath;
  await build({ everything: false });
  const { code } = await runScript(name, program, ["cli.ts", "train", ...DEMO_ARGUMENTS, ...args]);
  return code;
}

async function setup() {
  checkMachine();
  await installPackages(ROOT, { dev: true });
  await runtimePath("bun");
  await runtimePath("deno");
  return 0;
}

async function buildOnly() {
  checkMachine();
  await build({ everything: true });
  return 0;
}

/**
 * @param {Tier} tier
 * @param {string[]} filters
 */
async function test(tier, filters) {
  await setup();
  const programs = { bun: await runtimePath("bun"), deno: await runtimePath("deno") };
  await build({ everything: true });

  // Tests that start a runtime by name find the tested versions first.
  const path = [dirname(programs.bun), dirname(programs.deno), process.env.PATH].join(":");
  const allowed = JSON.parse(readFileSync(join(ROOT, "tools/skips.json"), "utf8"));
  const settings = { tier, allowed, env: { ...QUIET, PATH: path } };
  const runtimes = /** @type {const} */ (["bun", "deno"]);
  const jobs = testFiles(ROOT, tier, filters).flatMap((file) =>
    runtimes.map((name) => () => runFile(ROOT, name, programs[name], file, settings)),
  );

  const total = { passed: 0, failed: 0, skipped: 0 };
  const count = (/** @type {Outcome} */ outcome) => {
    printOutcome(outcome);
    total.passed += outcome.passed;
    total.failed += outcome.failed;
    total.skipped += outcome.skipped;
  };
  if (tier === "test" && filters.length === 0) {
    for (const job of CHECKS) count(await job());
    count(await runProgram("types under Deno", programs.deno, ["check", ...ENTRIES]));
  }
  const native = await runCTests(BUILD, tier, filters, allowed);
  if (native) count(native);
  await runJobs(jobs, count);
  if (total.passed + total.failed === 0) console.log("no test matches");
  console.log(countLine(total));
  return total.failed > 0 || total.passed === 0 ? 1 : 0;
}

/**
 * A development tool from node_modules, run by the present runtime: its launcher script needs no node.
 *
 * @param {string} label
 * @param {string[]} command script and arguments
 * @returns {Promise<Outcome>}
 */
function runTool(label, command) {
  const prefix = HOST === "deno" ? ["run", "-A"] : [];
  return runProgram(label, process.execPath, [...prefix, ...command]);
}

/**
 * A program that passes or fails as a whole.
 *
 * @param {string} label
 * @param {string} program
 * @param {string[]} args
 * @returns {Promise<Outcome>}
 */
async function runProgram(label, program, args) {
  const start = performance.now();
  const { code, output } = await run(program, args, { env: QUIET });
  const seconds = (performance.now() - start) / 1000;
  return {
    label,
    passed: code === 0 ? 1 : 0,
    failed: code === 0 ? 0 : 1,
    skipped: 0,
    seconds,
    output,
  };
}

/** What users import or start; Deno checks the types of whatever these reach. */
const ENTRIES = ["mod.ts", "cli.ts", "train.ts"];

const BIOME = "node_modules/@biomejs/biome/bin/biome";
const CHECKS = [
  () => runTool("types", ["node_modules/typescript/bin/tsc", "-p", "."]),
  () => runTool("format and lint", [BIOME, "check", "--error-on-warnings", "."]),
];

async function check() {
  checkMachine();
  await installPackages(ROOT, { dev: true });
  let failed = 0;
  for (const job of CHECKS) {
    const outcome = await job();
    printOutcome(outcome);
    failed += outcome.failed;
  }
  printSizes(ROOT);
  return failed > 0 ? 1 : 0;
}

async function format() {
  await installPackages(ROOT, { dev: true });
  const outcome = await runTool("format", [BIOME, "check", "--write", "."]);
  printOutcome(outcome);
  return outcome.failed;
}

/** @param {string[]} filters */
async function bench(filters) {
  await setup();
  await build({ everything: true });
  const folder = join(ROOT, "bench");
  const files = existsSync(folder)
    ? readdirSync(folder).filter((file) => file.endsWith(".ts"))
    : [];
  const wanted = files.sort().filter((file) => matches(file, filters));
  for (const file of wanted) {
    for (const name of /** @type {const} */ (["bun", "deno"])) {
      console.log(`\n${name} bench/${file}`);
      const { code } = await runScript(name, await runtimePath(name), [`bench/${file}`]);
      if (code !== 0) return code;
    }
  }
  return 0;
}

const [name = "", ...args] = process.argv.slice(2);
const command = Object.hasOwn(COMMANDS, name) ? COMMANDS[name] : undefined;
if (command) {
  try {
    process.exitCode = await command.action(args);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    console.error(error.message);
    process.exitCode = 1;
  }
} else {
  const lines = Object.entries(COMMANDS).map(([key, { about }]) => `  ${key.padEnd(14)}${about}`);
  console.error(`${name ? `unknown command: ${name}\n` : ""}usage: dev.mjs COMMAND [ARGUMENT ...]`);
  console.error(lines.join("\n"));
  process.exitCode = name ? 1 : 0;
}
