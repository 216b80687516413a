/**
 * loramem fine-tunes language models with LoRA from TypeScript, on Bun and on Deno, with every byte planned before the
 * first step. This module loads neither an npm package nor the native library; both come when a device or a run is opened.
 *
 * @module
 */
export * from "./src/api/mod.ts";
