import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { codeBlocks, ROOT, readText, runPrograms } from "./help.ts";

const BLOCKS = codeBlocks(readText("README.md"));
const SCRIPTS: object = JSON.parse(readText("package.json")).scripts;
const TASKS: object = JSON.parse(readText("deno.json")).tasks;

/** What is wrong with a command of the README, or undefined. */
function commandFault(command: string): string | undefined {
  const npm = /^(?:npm|bun) run ([\w:]+)$/.exec(command) ?? /^npm (test)$/.exec(command);
  if (npm) return Object.hasOwn(SCRIPTS, npm[1] ?? "") ? undefined : `no npm script: ${command}`;
  const task = /^deno task ([\w:]+)$/.exec(command);
  if (task) return Object.hasOwn(TASKS, task[1] ?? "") ? undefined : `no Deno task: ${command}`;
  const file = /^(?:bun(?: run)?|deno run -A|node) (\S+\.(?:ts|mjs))\b/.exec(command)?.[1];
  if (file) return existsSync(join(ROOT, file)) ? undefined : `no such file: ${command}`;
  return `unknown command: ${command}`;
}

/** The commands of a shell block; a comment may list others: `# or: bun run demo, deno task demo`. */
function commandsOf(text: string): string[] {
  return text
    .split(/\n|# or:|, /)
    .map((command) => command.trim())
    .filter((command) => command !== "");
}

test("README.md: the programs run as they are, in an empty home folder", () => {
  const programs = BLOCKS.filter(({ language }) => language === "ts").map(({ text, line }) => ({
    name: `README.md:${line}`,
    text,
  }));
  assert.ok(programs.length >= 2);
  const failed = runPrograms(programs);
  assert.equal(failed.length, 0, failed.join("\n"));
});

test("README.md: every command exists", () => {
  const commands = BLOCKS.filter(({ language }) => language === "sh").flatMap(({ text }) =>
    commandsOf(text),
  );
  assert.ok(commands.length >= 6);
  assert.deepEqual(commands.map(commandFault).filter(Boolean), []);
});

test("README.md: every link to a file leads to one", () => {
  const links = [...readText("README.md").matchAll(/\]\((?!https?:)([^)#]+)/g)];
  const missing = links
    .map((link) => link[1] ?? "")
    .filter((path) => !existsSync(join(ROOT, path)));
  assert.ok(links.length > 0);
  assert.deepEqual(missing, []);
});

test("package.json and deno.json offer the same commands and version", () => {
  const manifest = JSON.parse(readText("package.json"));
  const deno = JSON.parse(readText("deno.json"));
  assert.deepEqual(Object.keys(deno.tasks).sort(), Object.keys(manifest.scripts).sort());
  assert.deepEqual([deno.name, deno.version], [manifest.name, manifest.version]);
});

test("commandFault() finds commands that do not exist", () => {
  assert.deepEqual(
    ["npm run nothing", "deno task nothing", "bun nothing.ts --x", "make"].map(commandFault),
    [
      "no npm script: npm run nothing",
      "no Deno task: deno task nothing",
      "no such file: bun nothing.ts --x",
      "unknown command: make",
    ],
  );
});
