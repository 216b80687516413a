/** The adapter for Bun. */

import { dlopen, type FFIFunction, JSCallback, type Pointer, toArrayBuffer } from "bun:ffi";
import process from "node:process";
import { isMainThread } from "node:worker_threads";
import type { Bound, Completed, CType, FnTable, NativeCallback, Ptr, Runtime } from "./types.ts";

/** Lent views are "ptr": Bun's "buffer" rejects null. `ptr(view)` is never called, as small views move. */
const TYPES = {
  void: "void",
  i32: "i32",
  u32: "u32",
  i64: "i64",
  u64: "u64",
  f32: "f32",
  f64: "f64",
  ptr: "ptr",
  buf: "ptr",
  fn: "ptr",
} as const satisfies Record<CType, string>;

export const runtime: Runtime = {
  bind<T extends FnTable>(path: string, table: T): Bound<T> {
    const declarations: Record<string, FFIFunction> = {};
    for (const [name, { args, ret }] of Object.entries(table)) {
      declarations[name] = { args: args.map((type) => TYPES[type]), returns: TYPES[ret] };
    }
    return dlopen(path, declarations).symbols as unknown as Bound<T>;
  },

  view(pointer: Ptr, bytes: number): ArrayBuffer {
    return toArrayBuffer(pointer as unknown as Pointer, 0, bytes);
  },

  callback(completed: Completed): NativeCallback | null {
    if (!isMainThread) return null;
    const native = new JSCallback(completed, {
      args: ["u64", "i32"],
      returns: "void",
      threadsafe: true,
    });
    // A thread-safe callback does not keep Bun alive, so an idle timer does.
    let pending = 0;
    let timer: ReturnType<typeof setInterval> | undefined;
    return {
      pointer: native.ptr as unknown as Ptr,
      ref(): void {
        if (pending++ === 0) timer = setInterval(() => {}, 2 ** 30);
      },
      unref(): void {
        if (--pending === 0) clearInterval(timer);
      },
    };
  },

  address(pointer: Ptr): bigint {
    return BigInt(pointer as unknown as number | bigint);
  },

  fromAddress(address: bigint): Ptr | null {
    return address === 0n ? null : (Number(address) as unknown as Ptr);
  },

  collectGarbage(): void {
    // Not by its global name: Deno type-checks this file too.
    (globalThis as unknown as { Bun: { gc(force: boolean): void } }).Bun.gc(true);
  },

  env(name: string): string | undefined {
    return process.env[name];
  },
};
