/** Helpers that several test files share. */

import { spawnSync } from "node:child_process";
import {
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

/** The project folder. */
export const ROOT = fileURLToPath(new URL("..", import.meta.url)).replace(/\/$/, "");

/** The text of a file of the project. */
export function readText(path: string): string {
  return readFileSync(join(ROOT, path), "utf8");
}

/**
 * Files of the project by their paths, sorted.
 *
 * @param parts files, or folders that are taken whole
 * @param pattern which paths to keep
 */
export function readTree(parts: readonly string[], pattern: RegExp): Map<string, string> {
  const paths = parts.flatMap((part) =>
    pattern.test(part)
      ? [part]
      : readdirSync(join(ROOT, part), { recursive: true, encoding: "utf8" })
          .map((name) => `${part}/${name}`)
          .filter((path) => pattern.test(path)),
  );
  return new Map(paths.sort().map((path) => [path, readText(path)]));
}

/** A fenced code block of a Markdown text. */
export interface CodeBlock {
  readonly language: string;
  readonly text: string;
  /** Line of the opening fence, from 1. */
  readonly line: number;
}

/** The fenced code blocks of a Markdown text, in order. */
export function codeBlocks(markdown: string): CodeBlock[] {
  return [...markdown.matchAll(/^```(\w*)\n([\s\S]*?)^```$/gm)].map((match) => ({
    language: match[1] ?? "",
    text: match[2] ?? "",
    line: markdown.slice(0, match.index).split("\n").length,
  }));
}

/**
 * The `ts` blocks that follow an `@example` in the documentation comments of a source, without the comment's asterisks.
 *
 * @param file names the blocks: `file:line`
 */
export function docExamples(file: string, source: string): Program[] {
  const examples: Program[] = [];
  for (const comment of source.matchAll(/\/\*\*[\s\S]*?\*\//g)) {
    const first = source.slice(0, comment.index).split("\n").length;
    const text = comment[0].replace(/^[ \t]*\* ?/gm, "");
    for (const example of text.matchAll(/^@example\b[\s\S]*?(?=^@|(?![\s\S]))/gm)) {
      const before = text.slice(0, example.index).split("\n").length;
      for (const block of codeBlocks(example[0])) {
        const name = `${file}:${first + before + block.line - 2}`;
        if (block.language === "ts") examples.push({ name, text: block.text });
      }
    }
  }
  return examples;
}

/** A program that reads as if it stood in the project folder: it imports `./mod.ts`. */
export interface Program {
  readonly name: string;
  readonly text: string;
}

/** Runs programs one after another and marks in the output where each begins and ends. */
const DRIVER = `
for (const [index, name] of NAMES.entries()) {
  console.log("\\n@begin " + name);
  try {
    await import("./program_" + index + ".ts");
    console.log("\\n@end " + name);
  } catch (error) {
    console.log(error);
  }
}`;

/**
 * Runs programs in one process of the present runtime, with an empty home folder. The working folder is a new one that
 * shows the project's `examples/` and `tests/`, so that what the programs write disturbs nothing.
 *
 * @returns what each program that did not reach its end printed; an empty list if all did
 */
export function runPrograms(programs: readonly Program[]): string[] {
  mkdirSync(join(ROOT, "out"), { recursive: true });
  const folder = mkdtempSync(join(ROOT, "out", "programs-"));
  try {
    for (const part of ["examples", "tests"]) symlinkSync(join(ROOT, part), join(folder, part));
    mkdirSync(join(folder, "home"));
    programs.forEach(({ text }, index) => {
      const placed = text.replace(/(\bfrom\s*|\bimport\s*\(?\s*)"\.\//g, '$1"../../');
      writeFileSync(join(folder, `program_${index}.ts`), placed);
    });
    const names = JSON.stringify(programs.map(({ name }) => name));
    writeFileSync(join(folder, "driver.ts"), `const NAMES: string[] = ${names};${DRIVER}`);

    const prefix = process.versions.deno === undefined ? [] : ["run", "-A"];
    const { stdout, stderr } = spawnSync(process.execPath, [...prefix, "driver.ts"], {
      cwd: folder,
      env: { ...process.env, HOME: join(folder, "home"), NO_COLOR: "1" },
      encoding: "utf8",
      maxBuffer: 1 << 26,
    });
    return programs
      .filter(({ name }) => !stdout.includes(`\n@end ${name}\n`))
      .map(({ name }) => {
        const printed = stdout.split(`\n@begin ${name}\n`)[1]?.split("\n@begin ")[0];
        return `${name}: ${printed ?? "did not run"}\n${stderr}`;
      });
  } finally {
    rmSync(folder, { recursive: true });
  }
}
