/**
 * Runs the tests: each file in a process of its own, so that a crash hides nothing but itself, under Bun
 * and under Deno, and the C tests through ctest. Counts come from JUnit reports, not from printed text.
 */

import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseJunit } from "./junit.mjs";
import { run } from "./machine.mjs";

/** @typedef {import("./packages.mjs").RuntimeName} RuntimeName */
/** @typedef {import("./junit.mjs").TestResult} TestResult */
/** @typedef {"test" | "oracles" | "long"} Tier */
/** @typedef {{ file: string, test: string, reason: string }} AllowedSkip */

/**
 * What one file, or one other check, came to.
 *
 * @typedef {object} Outcome
 * @property {string} label
 * @property {number} passed
 * @property {number} failed
 * @property {number} skipped
 * @property {number} seconds
 * @property {string} output printed when something failed
 */

/** Processes at one time: few, because the code under test runs threads of its own. */
const CONCURRENCY = 2;

/** A file that runs longer than this hangs. The long tier has no limit. */
const LIMIT_MS = /** @type {Record<Tier, number>} */ ({
  test: 600_000,
  oracles: 1_800_000,
  long: 0,
});

/** Bun gives a test of node:test 5 s unless told otherwise, which a loaded machine exceeds. */
const TEST_MS = 120_000;

/**
 * Whether a name contains any of the filters, or there is none.
 *
 * @param {string} name
 * @param {readonly string[]} filters
 */
export function matches(name, filters) {
  return filters.length === 0 || filters.some((filter) => name.includes(filter));
}

/**
 * The test files of a tier under `tests/`, sorted; `oracles/` and `long/` are tiers of their own.
 *
 * @param {string} root the project folder
 * @param {Tier} tier
 * @param {readonly string[]} filters
 */
export function testFiles(root, tier, filters) {
  return readdirSync(join(root, "tests"), { recursive: true, encoding: "utf8" })
    .map((name) => `tests/${name}`)
    .filter((file) => file.endsWith("_test.ts"))
    .filter((file) => (/^tests\/(oracles|long)\//.exec(file)?.[1] ?? "test") === tier)
    .filter((file) => matches(file, filters))
    .sort();
}

/**
 * The command that runs one test file and writes a JUnit report.
 *
 * @param {RuntimeName} runtime
 * @param {string} file relative to the project folder
 * @param {string} report
 */
function testArguments(runtime, file, report) {
  return runtime === "bun"
    ? [
        "test",
        `--timeout=${TEST_MS}`,
        "--reporter=junit",
        `--reporter-outfile=${report}`,
        `./${file}`,
      ]
    : ["test", "-A", "--no-check", "--v8-flags=--expose-gc", `--junit-path=${report}`, file];
}

/**
 * Judges one finished process: every test case, plus one failure for a crash, a time-out, a file without
 * tests, or a failing exit code that no test case explains. A skip counts as a failure unless it is allowed.
 *
 * @param {string} file
 * @param {{ code: number, timedOut: boolean }} ended
 * @param {string | undefined} report the JUnit text, if one was written
 * @param {readonly AllowedSkip[]} allowed
 */
export function judge(file, ended, report, allowed) {
  const results = report === undefined ? [] : parseJunit(report);
  const isAllowed = (/** @type {TestResult} */ { name }) =>
    allowed.some((skip) => skip.file === file && skip.test === name);
  const skips = results.filter((result) => result.status === "skipped");
  /** @type {string[]} */
  const notes = skips
    .filter((skip) => !isAllowed(skip))
    .map((skip) => `skipped, and not in tools/skips.json: ${skip.name}`);
  const skipped = skips.length - notes.length;
  const passed = results.filter((result) => result.status === "passed").length;
  let failed = results.filter((result) => result.status === "failed").length;

  if (ended.timedOut) notes.push("took too long and was stopped");
  else if (ended.code !== 0 && failed === 0) notes.push(`ended with exit code ${ended.code}`);
  else if (results.length === 0) notes.push("holds no test");
  failed += notes.length;
  return { passed, failed, skipped, notes };
}

/**
 * @param {string} root
 * @param {RuntimeName} runtime
 * @param {string} program
 * @param {string} file
 * @param {{ tier: Tier, allowed: readonly AllowedSkip[], env: Record<string, string> }} settings
 * @returns {Promise<Outcome>}
 */
export async function runFile(root, runtime, program, file, settings) {
  const folder = mkdtempSync(join(tmpdir(), "loramem-test-"));
  const report = join(folder, "report.xml");
  const start = performance.now();
  const args = testArguments(runtime, file, report);
  const { tier, allowed, env } = settings;
  const ended = await run(program, args, { cwd: root, env, limitMs: LIMIT_MS[tier] });
  const text = existsSync(report) ? readFileSync(report, "utf8") : undefined;
  rmSync(folder, { recursive: true });
  const { notes, ...counts } = judge(file, ended, text, allowed);
  const seconds = (performance.now() - start) / 1000;
  const output = [ended.output.trimEnd(), ...notes].join("\n");
  return { label: `${runtime.padEnd(5)} ${file}`, ...counts, seconds, output };
}

/**
 * The C tests of a build folder: those labelled with the tier's name, and for "test" those without a label
 * of another tier. A folder without C tests counts nothing.
 *
 * @param {string} folder
 * @param {Tier} tier
 * @param {readonly string[]} filters
 * @param {readonly AllowedSkip[]} allowed
 * @returns {Promise<Outcome | undefined>}
 */
export async function runCTests(folder, tier, filters, allowed) {
  const report = join(folder, "ctest.xml");
  rmSync(report, { force: true });
  const labels = tier === "test" ? ["-LE", "oracles|long"] : ["-L", tier];
  const names = filters.map((filter) => filter.replace(/[^\w]/g, "\\$&")).join("|");
  const args = ["--test-dir", folder, "--output-on-failure", "--output-junit", report, ...labels];
  const start = performance.now();
  const ended = await run("ctest", names ? [...args, "-R", names] : args);
  const text = existsSync(report) ? readFileSync(report, "utf8") : "";
  if (ended.code === 0 && parseJunit(text).length === 0) return undefined;
  const { notes, ...counts } = judge("ctest", ended, text, allowed);
  const seconds = (performance.now() - start) / 1000;
  return { label: "C     ctest", ...counts, seconds, output: [ended.output, ...notes].join("\n") };
}

/** @param {Outcome} outcome */
export function printOutcome({ label, passed, failed, skipped, seconds, output }) {
  const counts = countLine({ passed, failed, skipped });
  console.log(`${failed > 0 ? "FAIL" : "ok  "} ${label}: ${counts} (${seconds.toFixed(1)} s)`);
  if (failed > 0) console.log(output.replace(/^/gm, "    "));
}

/** @param {{ passed: number, failed: number, skipped: number }} counts */
export function countLine({ passed, failed, skipped }) {
  return `${passed} passed, ${failed} failed${skipped > 0 ? `, ${skipped} skipped` : ""}`;
}

/**
 * Runs jobs a few at a time and hands each outcome on as it comes.
 *
 * @param {readonly (() => Promise<Outcome>)[]} jobs
 * @param {(outcome: Outcome) => void} each
 */
export async function runJobs(jobs, each) {
  const rest = [...jobs];
  const worker = async () => {
    for (let job = rest.shift(); job; job = rest.shift()) each(await job());
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, worker));
}
