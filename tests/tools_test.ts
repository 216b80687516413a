import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { parseJunit } from "../tools/junit.mjs";
import { atLeast, HOST, platformProblem } from "../tools/machine.mjs";
import { measure } from "../tools/size.mjs";
import { judge, runFile, testFiles } from "../tools/test_run.mjs";
import { ROOT, readText } from "./help.ts";

/** Runs `use` in a folder that holds the given files, and removes it. */
async function inFolder<T>(
  files: Readonly<Record<string, string>>,
  use: (folder: string) => T | Promise<T>,
): Promise<T> {
  const folder = mkdtempSync(join(tmpdir(), "loramem-tools-"));
  try {
    for (const [path, text] of Object.entries(files)) {
      mkdirSync(join(folder, path, ".."), { recursive: true });
      writeFileSync(join(folder, path), text);
    }
    return await use(folder);
  } finally {
    rmSync(folder, { recursive: true });
  }
}

/** Runs tools/dev.mjs under the present runtime with a PATH of its own. */
function dev(args: readonly string[], path: string): { status: number | null; stderr: string } {
  const prefix = HOST === "deno" ? ["run", "-A"] : [];
  return spawnSync(process.execPath, [...prefix, "tools/dev.mjs", ...args], {
    cwd: ROOT,
    env: { ...process.env, PATH: path },
    encoding: "utf8",
  });
}

const TEST_HEAD = 'import { test } from "node:test";\n';

test("parseJunit() reads the reports of both runtimes and of ctest", () => {
  const xml = `<testsuites tests="5"><testsuite name="x" failures="1">
    <testcase name="a &lt;b&gt; &amp;amp; &quot;c&quot;&#10;d" time="0" />
    <testcase name="failed"><failure message="&lt;skipped/&gt;">text</failure></testcase>
    <testcase classname="y" name="skipped"><skipped/></testcase>
    <testcase name="crashed" status="fail"><system-out>Segmentation fault</system-out></testcase>
    <testcase name="not run" status="notrun"></testcase>
    </testsuite></testsuites>`;
  assert.deepEqual(parseJunit(xml), [
    { name: 'a <b> &amp; "c"\nd', status: "passed" },
    { name: "failed", status: "failed" },
    { name: "skipped", status: "skipped" },
    { name: "crashed", status: "failed" },
    { name: "not run", status: "skipped" },
  ]);
  assert.deepEqual(parseJunit(""), []);
});

test("judge() counts a crash, a time-out, a file without tests and an unexplained exit code", () => {
  const passed = '<testcase name="a"/>';
  const failed = '<testcase name="a"><failure/></testcase>';
  const judged = (code: number, report: string | undefined, timedOut = false) => {
    const { notes, ...counts } = judge("f", { code, timedOut }, report, []);
    return [counts.passed, counts.failed, notes.join()];
  };
  assert.deepEqual(judged(0, passed), [1, 0, ""]);
  assert.deepEqual(judged(1, failed), [0, 1, ""]);
  assert.deepEqual(judged(1, passed), [1, 1, "ended with exit code 1"]);
  assert.deepEqual(judged(139, undefined), [0, 1, "ended with exit code 139"]);
  assert.deepEqual(judged(137, passed, true), [1, 1, "took too long and was stopped"]);
  assert.deepEqual(judged(0, ""), [0, 1, "holds no test"]);
});

test("judge() fails skips that are not allowed by file and name", () => {
  const report = '<testcase name="a"><skipped/></testcase>';
  const ended = { code: 0, timedOut: false };
  const allow = (file: string, name: string) => [{ file, test: name, reason: "planted" }];
  const counts = (file: string, name: string) => {
    const { skipped, failed } = judge("f", ended, report, allow(file, name));
    return [skipped, failed];
  };
  assert.deepEqual(counts("f", "a"), [1, 0]);
  assert.deepEqual(counts("g", "a"), [0, 1]);
  assert.deepEqual(counts("f", "b"), [0, 1]);
});

test("testFiles() separates the tiers and takes filters", async () => {
  const names = ["b_test.ts", "a/a_test.ts", "long/l_test.ts", "oracles/deep/o_test.ts", "help.ts"];
  const files = Object.fromEntries(names.map((name) => [`tests/${name}`, ""]));
  await inFolder(files, (folder) => {
    assert.deepEqual(testFiles(folder, "test", []), ["tests/a/a_test.ts", "tests/b_test.ts"]);
    assert.deepEqual(testFiles(folder, "test", ["b_", "x"]), ["tests/b_test.ts"]);
    assert.deepEqual(testFiles(folder, "oracles", []), ["tests/oracles/deep/o_test.ts"]);
    assert.deepEqual(testFiles(folder, "long", []), ["tests/long/l_test.ts"]);
  });
});

test("runFile() counts what the present runtime reports", async () => {
  const files = {
    "package.json": '{ "type": "module" }',
    "tests/mixed_test.ts": `${TEST_HEAD}test("good", () => {});
      test("bad", () => { throw new Error("planted"); });
      test("skipped", { skip: true }, () => {});`,
    "tests/crash_test.ts": `${TEST_HEAD}test("a", () => { process.exit(3); });`,
    "tests/load_test.ts": "throw new Error('planted');",
  };
  const allowed = [{ file: "tests/mixed_test.ts", test: "skipped", reason: "planted" }];
  const settings = { tier: "test" as const, allowed, env: {} };
  const runtime = HOST === "deno" ? "deno" : "bun";
  await inFolder(files, async (folder) => {
    const run = (file: string) => runFile(folder, runtime, process.execPath, file, settings);
    const { passed, failed, skipped, output } = await run("tests/mixed_test.ts");
    assert.deepEqual([passed, failed, skipped], [1, 1, 1]);
    assert.match(output, /planted/);
    assert.equal((await run("tests/crash_test.ts")).failed, 1);
    assert.equal((await run("tests/load_test.ts")).failed, 1);
  });
});

test("dev.mjs names every missing tool with the command that installs it", async () => {
  await inFolder({}, (folder) => {
    const { status, stderr } = dev(["build"], folder);
    assert.equal(status, 1);
    const missing = stderr.trim().split("\n");
    assert.equal(missing.length, 3);
    for (const line of missing) {
      assert.match(line, /^missing: .+: install it with: (?:sudo )?apt-get install -y [\w -]+$/);
    }
  });
});

test("dev.mjs rejects unknown commands and lists the known ones", () => {
  const { status, stderr } = dev(["nonsense"], process.env.PATH ?? "");
  assert.equal(status, 1);
  assert.match(stderr, /^unknown command: nonsense\nusage: [\s\S]*\n {2}demo /);
});

test("platformProblem() names the platform that loramem does not run on", () => {
  assert.equal(platformProblem("linux", "x64", "glibc 2.36"), undefined);
  assert.equal(platformProblem("linux", "x64", undefined), undefined);
  assert.match(platformProblem("linux", "x64", "glibc 2.31") ?? "", /2\.34 or newer.*2\.31/);
  assert.match(platformProblem("linux", "x64", "another C library") ?? "", /another C library/);
  assert.match(platformProblem("darwin", "arm64", undefined) ?? "", /darwin arm64/);
});

test("atLeast() compares versions by number", () => {
  assert.deepEqual(
    ["3.21", "3.9.6", "4.0", "3.21.1", "2.99"].map((version) => atLeast(version, [3, 21])),
    [true, false, true, true, false],
  );
});

test("measure() counts lines by layer and finds long files", async () => {
  const files = {
    "src/ffi/a.ts": "1\n2\n",
    "src/api/plan/b.ts": "1\n",
    "src/api/graph/ops/c.ts": "1\n".repeat(501),
    "csrc/cpu/d.c": "1\n",
    "tools/e.mjs": "1\n",
    "tools/notes.txt": "1\n",
  };
  const { layers, long } = await inFolder(files, measure);
  assert.deepEqual(
    [...layers].map(([layer, { files, lines }]) => [layer, files, lines]),
    [
      ["src/api/graph", 1, 501],
      ["src/api/plan", 1, 1],
      ["src/ffi", 1, 2],
      ["csrc/cpu", 1, 1],
      ["tools", 1, 1],
    ],
  );
  assert.deepEqual(long, ["src/api/graph/ops/c.ts: 501 lines"]);
});

test("package.json pins exact versions, and the lock file names no host", () => {
  const { dependencies, devDependencies } = JSON.parse(readText("package.json"));
  for (const version of Object.values({ ...dependencies, ...devDependencies })) {
    assert.match(String(version), /^\d+\.\d+\.\d+$/);
  }
  const lock = readText("package-lock.json");
  assert.doesNotMatch(lock, /"resolved"|:\/\/registry\./);
  assert.deepEqual(JSON.parse(lock).packages[""].devDependencies, devDependencies);
  assert.deepEqual(JSON.parse(lock).packages[""].dependencies, dependencies);
});
