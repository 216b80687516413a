import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { LoramemError } from "../../src/ffi/error.ts";
import { ABI, HEADER_HASH } from "../../src/ffi/header_hash.ts";
import { loadLibrary, type Native, native, openLibrary } from "../../src/ffi/load.ts";
import { loadRuntime } from "../../src/ffi/runtime.ts";
import type { Runtime } from "../../src/ffi/types.ts";
import { ROOT } from "../help.ts";
import { compileC, DENO, runFile, temporaryFolder } from "./support.ts";

const RUNTIME = await loadRuntime();

/** The present runtime with LORAMEM_LIB set. */
function choosing(path: string): Runtime {
  return { ...RUNTIME, env: (name) => (name === "LORAMEM_LIB" ? path : undefined) };
}

function failureOf(runtime: Runtime, platform = "linux", arch = "x64"): LoramemError {
  try {
    loadLibrary(runtime, platform, arch);
  } catch (error) {
    if (error instanceof LoramemError) return error;
    throw error;
  }
  throw new Error("the library was opened");
}

/** A library that answers the handshake, and nothing else. */
function fakeLibrary(path: string, abi: number, hash: bigint): void {
  const text = `#include <stdint.h>
    #include <string.h>
    uint32_t lm_abi_version(void) { return ${abi}u; }
    uint64_t lm_header_hash(void) { return ${hash}ull; }
    int32_t lm_build_info(void *buf, uint64_t cap) { strncpy(buf, "9.9.9; fake; cc", cap); return 16; }`;
  compileC(path, text, true);
}

test("native() is for code that comes after openLibrary()", async () => {
  const name = "fresh"; // a module of its own, in which nothing was opened
  const fresh = await import(`../../src/ffi/load.ts?${name}`);
  assert.throws(() => fresh.native(), { code: "INTERNAL", message: /await Device\.open\(\)/ });
});

test("openLibrary() opens the built library once", async () => {
  const first = await openLibrary();
  assert.equal(await openLibrary(), first);
  assert.equal(native(), first);
  assert.equal(first.fn.lm_abi_version(), (ABI.major << 16) | ABI.minor);
  assert.equal(first.fn.lm_header_hash(), HEADER_HASH);
});

test("loadLibrary() lists every path that it tried and the command that mends it", () => {
  const bind = (): never => {
    throw new Error("no such\n  file");
  };
  const error = failureOf({ ...RUNTIME, bind, env: () => undefined });
  assert.equal(error.code, "NATIVE_LIBRARY");
  assert.ok(error.is("NATIVE_LIBRARY"));
  const built = join(ROOT, "build/lib/libloramem.so");
  assert.deepEqual(error.details.tried, [built, "@loramem/linux-x64/libloramem.so"]);
  assert.ok(error.message.includes(`${built} (build): no such file`));
  assert.match(error.message, /node tools\/dev\.mjs build/);
  assert.match(error.message, /npm run build/);
});

test("loadLibrary() tries nothing but LORAMEM_LIB where it is set", () => {
  const error = failureOf(choosing("/nowhere/libloramem.so"));
  assert.ok(error.is("NATIVE_LIBRARY"));
  assert.deepEqual(error.details.tried, ["/nowhere/libloramem.so"]);
  assert.match(error.message, /\(LORAMEM_LIB\): /);
});

test("loadLibrary() refuses a file that is no library", () => {
  using folder = temporaryFolder();
  const path = join(folder.path, "text.so");
  writeFileSync(path, "not a library");
  assert.equal(failureOf(choosing(path)).code, "NATIVE_LIBRARY");
});

test("loadLibrary() refuses another major version, a lower minor and another header", () => {
  using folder = temporaryFolder();
  const cases = [
    { name: "major", abi: ((ABI.major + 1) << 16) | ABI.minor, hash: HEADER_HASH },
    { name: "minor", abi: (ABI.major << 16) | (ABI.minor - 1), hash: HEADER_HASH },
    { name: "header", abi: (ABI.major << 16) | ABI.minor, hash: HEADER_HASH ^ 1n },
  ];
  for (const { name, abi, hash } of cases) {
    const path = join(folder.path, `${name}.so`);
    fakeLibrary(path, abi, hash);
    const error = failureOf(choosing(path));
    assert.equal(error.code, "NATIVE_LIBRARY");
    assert.match(error.message, /of another version: found ABI .*9\.9\.9; fake; cc.*, needed ABI /);
  }
});

test("loadLibrary() refuses a library that lacks functions, and names one", () => {
  using folder = temporaryFolder();
  const path = join(folder.path, "lacking.so");
  fakeLibrary(path, (ABI.major << 16) | ABI.minor, HEADER_HASH);
  assert.match(
    failureOf(choosing(path)).message,
    /lacking\.so \(LORAMEM_LIB\): .*\blm_(?!abi|header|build)/,
  );
  const stranger = join(folder.path, "stranger.so");
  compileC(stranger, "int other(void) { return 0; }", true);
  assert.match(
    failureOf(choosing(stranger)).message,
    /stranger\.so \(LORAMEM_LIB\): .*\blm_(?:abi|header|build)/,
  );
});

test("loadLibrary() says in one sentence which platforms it runs on", () => {
  for (const [platform, arch] of [
    ["darwin", "arm64"],
    ["win32", "x64"],
    ["linux", "riscv64"],
  ] as const) {
    const error = failureOf(RUNTIME, platform, arch);
    assert.equal(error.code, "UNSUPPORTED");
    assert.match(
      error.message,
      new RegExp(`^Device\\.open: .*Linux.*: this is ${platform} ${arch}$`),
    );
  }
});

test("Device.open() without permission for the environment neither prompts nor fails", () => {
  using folder = temporaryFolder();
  const file = join(folder.path, "open.ts");
  const text = `import { Device } from ${JSON.stringify(join(ROOT, "mod.ts"))};
    await using device = await Device.open("cpu");
    console.log(device.kind);`;
  writeFileSync(file, text);
  const env: Record<string, string> = DENO ? { LORAMEM_LIB: "/nowhere/libloramem.so" } : {};
  const flags = ["--allow-ffi", `--allow-read=${ROOT}`];
  const { stdout, stderr, code } = runFile(file, { flags, env });
  assert.equal(stdout, "cpu\n", stderr);
  assert.equal(code, 0);
});

test("Bound takes bigint, not number, for 64-bit parameters", () => {
  // On Deno a number leaves the fast call path, so that it is a type error; the compiler checks this test.
  type CreatePool = Parameters<Native["fn"]["lm_pool_create"]>;
  const good: CreatePool = [null, 1n];
  // @ts-expect-error a number
  const bad: CreatePool = [null, 1];
  // @ts-expect-error too few
  const few: CreatePool = [null];
  assert.deepEqual([good.length, bad.length, few.length], [2, 2, 1]);
});
