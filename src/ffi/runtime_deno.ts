/** The adapter for Deno. */
import v8 from "node:v8";
import vm from "node:vm";
import type { Bound, Completed, CType, FnTable, NativeCallback, Ptr, Runtime } from "./types.ts";

const TYPES = {
  void: "void",
  i32: "i32",
  u32: "u32",
  i64: "i64",
  u64: "u64",
  f32: "f32",
  f64: "f64",
  ptr: "pointer",
  buf: "buffer",
  fn: "function",
} as const satisfies Record<CType, Deno.NativeResultType>;

const DONE = { parameters: ["u64", "i32"], result: "void" } as const;

type Pointer = Deno.PointerObject;

export const runtime: Runtime = {
  bind<T extends FnTable>(path: string, table: T): Bound<T> {
    const declarations: Record<string, Deno.ForeignFunction> = {};
    for (const [name, { args, ret }] of Object.entries(table)) {
      const parameters = args.map((type) => TYPES[type] as Deno.NativeType);
      declarations[name] = { parameters, result: TYPES[ret] };
    }
    return Deno.dlopen(path, declarations).symbols as unknown as Bound<T>;
  },

  view(pointer: Ptr, bytes: number): ArrayBuffer {
    return Deno.UnsafePointerView.getArrayBuffer(pointer as unknown as Pointer, bytes);
  },

  callback(completed: Completed): NativeCallback | null {
    if ("DedicatedWorkerGlobalScope" in globalThis) return null;
    const native = new Deno.UnsafeCallback(DONE, completed);
    return {
      pointer: native.pointer as unknown as Ptr,
      ref: () => void native.ref(),
      unref: () => void native.unref(),
    };
  },

  address(pointer: Ptr): bigint {
    return Deno.UnsafePointer.value(pointer as unknown as Pointer);
  },

  fromAddress(address: bigint): Ptr | null {
    return Deno.UnsafePointer.create(address) as unknown as Ptr | null;
  },

  collectGarbage(): void {
    v8.setFlagsFromString("--expose-gc");
    vm.runInNewContext("gc")();
  },

  env(name: string): string | undefined {
    const { state } = Deno.permissions.querySync({ name: "env", variable: name });
    return state === "granted" ? Deno.env.get(name) : undefined;
  },
};
