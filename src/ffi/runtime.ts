/** Picks the adapter of the runtime that runs this. */
import { LoramemError } from "./error.ts";
import type { Runtime } from "./types.ts";

/**
 * Loads the adapter. Dynamic, so that neither runtime evaluates the other's adapter.
 *
 * @throws {LoramemError} `UNSUPPORTED` outside Bun and Deno.
 */
export async function loadRuntime(): Promise<Runtime> {
  if ("Bun" in globalThis) return (await import("./runtime_bun.ts")).runtime;
  if ("Deno" in globalThis) return (await import("./runtime_deno.ts")).runtime;
  const message =
    "Device.open: this JavaScript runtime has no foreign functions that loramem can use: " +
    `${globalThis.navigator?.userAgent ?? "unknown runtime"}: run the program with bun or deno`;
  throw new LoramemError("UNSUPPORTED", message, { what: "runtime" });
}
