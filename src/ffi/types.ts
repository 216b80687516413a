/**
 * What the C types of the ABI mean in TypeScript. 64-bit arguments are bigint only: on Deno a number there leaves the fast
 * call path and costs 20 times as much, so the type error is the performance rule.
 */

/** A type of the C ABI. `ptr` is native memory or a native object, `buf` is JavaScript memory lent for one call. */
export type CType = "void" | "i32" | "u32" | "i64" | "u64" | "f32" | "f64" | "ptr" | "buf" | "fn";

declare const pointerBrand: unique symbol;

/** An opaque native address, a number or an object by runtime. Nothing outside the adapters looks inside. */
export interface Ptr {
  readonly [pointerBrand]: true;
}

/** Signature of one native function. */
export interface FnDecl {
  readonly args: readonly CType[];
  readonly ret: CType;
}

/** A table of native functions by name. */
export type FnTable = Readonly<Record<string, FnDecl>>;

interface ArgOf {
  i32: number;
  u32: number;
  i64: bigint;
  u64: bigint;
  f32: number;
  f64: number;
  ptr: Ptr | null;
  buf: ArrayBufferView<ArrayBuffer> | null;
  fn: Ptr | null;
  void: never;
}

interface RetOf {
  i32: number;
  u32: number;
  i64: bigint;
  u64: bigint;
  f32: number;
  f64: number;
  ptr: Ptr | null;
  buf: never;
  fn: Ptr | null;
  void: undefined;
}

type Args<A extends readonly CType[]> = { [I in keyof A]: ArgOf[A[I]] };
type Call<D extends FnDecl> = (...args: Args<D["args"]>) => RetOf[D["ret"]];

/** The callable functions of a table. */
export type Bound<T extends FnTable> = { readonly [K in keyof T]: Call<T[K]> };

/** Called with the tag of a finished piece of work and its status. */
export type Completed = (tag: bigint, status: number) => void;

/** A C function pointer that any native thread may call; it runs on the JavaScript thread that made it. */
export interface NativeCallback {
  readonly pointer: Ptr;
  /** Keep the process alive for it, once per call. */
  ref(): void;
  /** Undo one {@linkcode NativeCallback.ref}. */
  unref(): void;
}

/** All that differs between the runtimes. */
export interface Runtime {
  /** Open a library, never to be closed, and bind a table; throws if the file or a name is missing. */
  bind<T extends FnTable>(path: string, table: T): Bound<T>;
  /** Native memory as an ArrayBuffer, without a copy and without ownership. */
  view(pointer: Ptr, bytes: number): ArrayBuffer;
  /**
   * A thread-safe `lm_done_fn`. Made once and never closed: native threads may hold it until the process ends. Null in a
   * Worker, whose end would free it under them: both runtimes then crash.
   */
  callback(completed: Completed): NativeCallback | null;
  /** The address as a number, to be written into a struct. */
  address(pointer: Ptr): bigint;
  /** The pointer of an address that was read out of a struct; null for 0. */
  fromAddress(address: bigint): Ptr | null;
  /** Collects garbage now; finalizers run in later tasks. */
  collectGarbage(): void;
  /** An environment variable, or undefined where it is unset or may not be read; never prompts. */
  env(name: string): string | undefined;
}
