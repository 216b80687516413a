/**
 * Machines whose driver cannot serve: one clear message, and `auto` takes the CPU and says why. The driver is a stand-in
 * that the dynamic linker finds first, so that the tests run with and without a GPU.
 */
import assert from "node:assert/strict";
import { existsSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { openLibrary } from "../../src/ffi/load.ts";
import { DEMO, run } from "../cli/support.ts";
import { compileC, runFile, SLOW, temporaryFolder } from "../ffi/support.ts";
import { ROOT } from "../help.ts";

const { path: library } = await openLibrary();
const HAS_BACKEND = existsSync(join(dirname(library), "libloramem_cuda.so"));

interface Driver {
  /** Source of libcuda.so.1; null is a file that is no library. */
  readonly source: string | null;
  readonly expect: RegExp;
}

const REMEDY = 'install NVIDIA driver R580 or later, or use device "cpu"$';

const DRIVERS: Readonly<Record<string, Driver>> = {
  "that does not load": {
    source: null,
    expect: new RegExp(`no CUDA device: the driver does not load: \\S*libcuda.so.1: .*: ${REMEDY}`),
  },
  "that fails": {
    source: "int cuDriverGetVersion(int *version) { *version = 0; return 999; }",
    expect: new RegExp(
      `no CUDA device: the driver does not tell its version: error 999: ${REMEDY}`,
    ),
  },
  "that is too old": {
    source: "int cuDriverGetVersion(int *version) { *version = 12080; return 0; }",
    expect: new RegExp(
      `no CUDA device: the driver is too old: it supports CUDA 12\\.8, this build needs 13\\.0: ${REMEDY}`,
    ),
  },
  "that finds no card": {
    // Answers every function that the runtime asks for with CUDA_ERROR_NO_DEVICE.
    source: `#include <string.h>
      typedef unsigned long flags;
      static int none(void) { return 100; }
      int cuInit(unsigned now) { (void)now; return 100; }
      int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
      int cuGetExportTable(const void **table, const void *id) { (void)table; (void)id; return 100; }
      int cuGetProcAddress_v2(const char *name, void **found, int version, flags how, int *status) {
        (void)version; (void)how;
        if (status) *status = 0;
        *found = (void *)none;
        if (!strcmp(name, "cuGetProcAddress")) *found = (void *)cuGetProcAddress_v2;
        if (!strcmp(name, "cuDriverGetVersion")) *found = (void *)cuDriverGetVersion;
        return 0;
      }`,
    expect:
      /no CUDA device: the driver finds none: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device "cpu"$/,
  },
};

/** Without the CUDA backend the driver is never asked. */
const NO_BACKEND = /this build has no CUDA backend: .*: build it with nvcc/;

/** Puts a driver into `folder`; gives the environment in which it is found. */
function install(folder: string, { source }: Driver): Record<string, string> {
  const path = join(folder, "libcuda.so.1");
  if (source === null) writeFileSync(path, "");
  else compileC(path, source, true);
  return { LD_LIBRARY_PATH: folder };
}

const PROGRAM = `
const { Device } = await import(${JSON.stringify(`file://${ROOT}/mod.ts`)});
const said = await Device.open("cuda:0").then(() => "opened", ({ code, message }) => ({ code, message }));
await using device = await Device.open("auto", { threads: 1 });
const { kind, noCuda } = device.info();
console.log(JSON.stringify({ said, kind, noCuda }));`;

for (const [name, driver] of Object.entries(DRIVERS)) {
  test(
    `Device.open() names a driver ${name}, and "auto" gives that as its reason for the CPU`,
    SLOW,
    () => {
      using folder = temporaryFolder();
      const env = install(folder.path, driver);
      const file = join(folder.path, "program.ts");
      writeFileSync(file, PROGRAM);
      const { stdout, stderr } = runFile(file, { env });
      assert.ok(stdout.startsWith("{"), stderr);
      const { said, kind, noCuda } = JSON.parse(stdout);
      assert.equal(said.code, "DEVICE");
      assert.match(said.message, HAS_BACKEND ? driver.expect : NO_BACKEND);
      assert.equal(kind, "cpu");
      assert.equal(said.message, `Device.open: ${noCuda}`);
    },
  );
}

test(
  "train says why it runs on the CPU, and where a GPU was asked for ends with the reason",
  SLOW,
  async () => {
    using folder = temporaryFolder();
    const driver = DRIVERS["that is too old"] as Driver;
    const env = install(folder.path, driver);
    const out = join(folder.path, "out");
    const flags = [
      "train",
      "--model",
      `${DEMO}/model`,
      "--data",
      `${DEMO}/valid.jsonl`,
      "--out",
      out,
    ];
    const wanted = HAS_BACKEND ? driver.expect : NO_BACKEND;

    const refused = await run("cli.ts", [...flags, "--device", "cuda:0"], { env });
    assert.equal(refused.code, 1);
    assert.match(refused.stderr.trim(), wanted);
    assert.match(refused.stderr, /^error: .*\n$/, "one line");
    assert.ok(!existsSync(out), "nothing is written");

    const small = ["--max-steps", "1", "--prompt-tokens", "0", "--batch-size", "1"];
    const trained = await run("cli.ts", [...flags, "--device", "auto", ...small], { env });
    assert.equal(trained.code, 0, trained.stderr);
    const line = /^Device cpu \((.*)\), fp32$/m.exec(trained.stdout);
    assert.match(line?.[1] ?? trained.stdout, wanted);
  },
);
