/**
 * Opens libloramem.so: once per thread, on the first Device.open, and never closes it (worker threads of the library may
 * still run).
 *
 * Candidates are tried by opening them, not by asking the file system: Deno grants dlopen without read permission.
 */
import process from "node:process";
import { fileURLToPath } from "node:url";
import { LoramemError } from "./error.ts";
import { ABI, HEADER_HASH } from "./header_hash.ts";
import { loadRuntime } from "./runtime.ts";
import { decodeText } from "./status.ts";
import { HANDSHAKE, SYMBOLS } from "./symbols.ts";
import type { Bound, Runtime } from "./types.ts";

/** The opened library. */
export interface Native {
  /** Its functions, the runtime's own function objects. */
  readonly fn: Bound<typeof SYMBOLS>;
  readonly runtime: Runtime;
  /** File that was opened. */
  readonly path: string;
}

interface Candidate {
  readonly path: string;
  /** What named it, for the error text. */
  readonly from: string;
  /** Whether there is a file to open; a package that is not installed has none. */
  readonly present: boolean;
}

let opened: Native | undefined;

/**
 * The library; opened by the first call.
 *
 * @throws {LoramemError} `UNSUPPORTED` on another platform, `NATIVE_LIBRARY` where no candidate can be used.
 */
export async function openLibrary(): Promise<Native> {
  if (opened !== undefined) return opened;
  const runtime = await loadRuntime();
  opened ??= loadLibrary(runtime, process.platform, process.arch);
  return opened;
}

/** The library that {@linkcode openLibrary} opened; for code that holds a device and so knows that it is there. */
export function native(): Native {
  if (opened === undefined) {
    throw new LoramemError(
      "INTERNAL",
      "native: the library is not open: await Device.open() comes first",
    );
  }
  return opened;
}

/** {@linkcode openLibrary} without its memory. */
export function loadLibrary(runtime: Runtime, platform: string, arch: string): Native {
  checkPlatform(platform, arch);
  const failures: string[] = [];
  const tried: string[] = [];
  for (const { path, from, present } of candidates(runtime, arch)) {
    try {
      if (!present) throw new Error("not installed");
      return tryLibrary(runtime, path);
    } catch (error) {
      tried.push(path);
      failures.push(`  ${path} (${from}): ${oneLine(error)}`);
    }
  }
  const message =
    `Device.open: libloramem.so cannot be used: tried\n${failures.join("\n")}\n` +
    "build it with: node tools/dev.mjs build (or: npm run build)";
  throw new LoramemError("NATIVE_LIBRARY", message, { tried });
}

function checkPlatform(platform: string, arch: string): void {
  if (platform === "linux" && (arch === "x64" || arch === "arm64")) return;
  const message = `Device.open: loramem runs on Linux (x86-64 or arm64, glibc 2.34 or newer) only: this is ${platform} ${arch}`;
  throw new LoramemError("UNSUPPORTED", message, { what: `${platform}-${arch}` });
}

/** An explicit choice stands alone: falling back would hide its mistake. */
function candidates(runtime: Runtime, arch: string): Candidate[] {
  const chosen = runtime.env("LORAMEM_LIB");
  if (chosen) return [{ path: chosen, from: "LORAMEM_LIB", present: true }];
  const built = fileURLToPath(new URL("../../build/lib/libloramem.so", import.meta.url));
  return [{ path: built, from: "build", present: true }, platformPackage(arch)];
}

function platformPackage(arch: string): Candidate {
  const name = `@loramem/linux-${arch}/libloramem.so`;
  const from = "npm package";
  try {
    return { path: fileURLToPath(import.meta.resolve(name)), from, present: true };
  } catch {
    return { path: name, from, present: false };
  }
}

function tryLibrary(runtime: Runtime, path: string): Native {
  const handshake = runtime.bind(path, HANDSHAKE);
  const version = handshake.lm_abi_version();
  const major = version >>> 16;
  const minor = version & 0xffff;
  const hash = handshake.lm_header_hash();
  // A later minor only adds to the header; within one minor another hash is a build of other sources.
  const fits =
    major === ABI.major && (minor > ABI.minor || (minor === ABI.minor && hash === HEADER_HASH));
  if (!fits) {
    const info = new Uint8Array(256);
    handshake.lm_build_info(info, BigInt(info.length));
    const found = `ABI ${major}.${minor}, header ${hex(hash)} (${decodeText(info)})`;
    const needed = `ABI ${ABI.major}.${ABI.minor}, header ${hex(HEADER_HASH)}`;
    throw new LoramemError(
      "NATIVE_LIBRARY",
      `it is of another version: found ${found}, needed ${needed}`,
    );
  }
  return { fn: runtime.bind(path, SYMBOLS), runtime, path };
}

function hex(hash: bigint): string {
  return hash.toString(16).padStart(16, "0");
}

function oneLine(error: unknown): string {
  return (error instanceof Error ? error.message : String(error)).replaceAll(/\s+/g, " ");
}
