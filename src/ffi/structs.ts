/**
 * The structs that cross the ABI, and their bytes. Layout is the natural alignment of C on little-endian machines: every
 * field starts at a multiple of its size and the struct ends at a multiple of its largest field.
 */
import { LoramemError } from "./error.ts";
import { KERNEL_STRUCTS } from "./kernel_structs.ts";

/** Type of a field; a pointer is written and read as its address. */
export type FieldType = "u32" | "i32" | "f32" | "i64" | "u64" | "f64" | "ptr";

/** Structs by name; the order of the keys is the order of the fields. */
export type StructTable = Readonly<Record<string, Readonly<Record<string, FieldType>>>>;

/** Every struct of the ABI that JavaScript fills or reads, named and ordered as in csrc/include. */
export const STRUCTS = {
  lm_stats: {
    reserved: "u64",
    reserved_peak: "u64",
    pinned: "u64",
    pinned_peak: "u64",
    driver_allocs: "u64",
    driver_frees: "u64",
    heap_allocs: "u64",
    kernel_launches: "u64",
  },
  lm_memory_stats: {
    current: "u64",
    peak: "u64",
    requested: "u64",
    count: "u64",
    allocs: "u64",
    frees: "u64",
    failures: "u64",
  },
  lm_pinned_pool_stats: {
    locked: "u64",
    locked_peak: "u64",
    current: "u64",
    peak: "u64",
    requested: "u64",
    pageable: "u64",
    count: "u64",
    acquires: "u64",
    releases: "u64",
    reuses: "u64",
    fallbacks: "u64",
    failures: "u64",
    driver_calls: "u64",
    limit: "u64",
  },
  lm_pool_stats: {
    current: "u64",
    peak: "u64",
    requested: "u64",
    reserved: "u64",
    largest_free: "u64",
    live_blocks: "u64",
    allocs: "u64",
    frees: "u64",
    failures: "u64",
    limit: "u64",
    total_free: "u64",
    retries: "u64",
    driver_calls: "u64",
    fragmentation: "f64",
  },
  lm_file_ring_stats: {
    slots: "u64",
    slot_bytes: "u64",
    threads: "u64",
    free_slots: "u64",
    requests: "u64",
    files: "u64",
    read_direct: "u64",
    read_cached: "u64",
    read_buffered: "u64",
    write_direct: "u64",
    write_buffered: "u64",
    copied: "u64",
    retries: "u64",
    fallbacks: "u64",
    file_seconds: "f64",
    device_seconds: "f64",
    idle_seconds: "f64",
  },
  lm_file_extent: { offset: "u64", bytes: "u64", memory: "ptr" },
  lm_file_result: {
    bytes: "u64",
    value: "u64",
    offset: "u64",
    seconds: "f64",
    status: "i32",
    error: "i32",
    direct: "i32",
    reserved: "i32",
  },
  lm_batch_header: { tokens: "i32", documents: "i32", labelled: "i32", loss_weight: "f32" },
  lm_optimizer_control: {
    learning_rate: "f64",
    beta1: "f64",
    beta2: "f64",
    eps: "f64",
    weight_decay: "f64",
    max_norm: "f64",
    warmup_steps: "i64",
    total_steps: "i64",
    schedule: "i32",
    reserved: "i32",
  },
  lm_optimizer_state: { step: "i64", skipped: "i64" },
  lm_scaler: {
    scale: "f32",
    growth_tracker: "i32",
    growth_factor: "f32",
    backoff_factor: "f32",
    growth_interval: "i32",
    min_scale: "f32",
    max_scale: "f32",
    reserved: "i32",
  },
  lm_step_metrics: {
    loss_sum: "f64",
    grad_norm: "f64",
    clip: "f64",
    learning_rate: "f64",
    step: "i64",
    bad_element: "i64",
    loss_scale: "f32",
    skipped: "i32",
    factor: "f32",
    decay: "f32",
    rate: "f32",
    root: "f32",
  },
  ...KERNEL_STRUCTS,
} as const satisfies StructTable;

/** Name of a struct. */
export type StructName = keyof typeof STRUCTS;

/** Values of a struct's fields; 64-bit integers and addresses may be bigint. */
export type FieldValues = Readonly<Record<string, number | bigint>>;

interface Field {
  readonly name: string;
  readonly type: FieldType;
  readonly offset: number;
}

/** Where the fields of a struct lie. */
export interface StructLayout {
  readonly size: number;
  readonly fields: readonly Field[];
}

/** How a field is stored. */
interface Codec {
  readonly bytes: number;
  readonly set: (view: DataView, at: number, value: number | bigint) => void;
  readonly get: (view: DataView, at: number) => number;
}

const U64: Codec = {
  bytes: 8,
  set: (view, at, value) => view.setBigUint64(at, BigInt(value), true),
  get: (view, at) => Number(view.getBigUint64(at, true)),
};

const CODECS: Readonly<Record<FieldType, Codec>> = {
  u32: {
    bytes: 4,
    set: (view, at, value) => view.setUint32(at, Number(value), true),
    get: (view, at) => view.getUint32(at, true),
  },
  i32: {
    bytes: 4,
    set: (view, at, value) => view.setInt32(at, Number(value), true),
    get: (view, at) => view.getInt32(at, true),
  },
  f32: {
    bytes: 4,
    set: (view, at, value) => view.setFloat32(at, Number(value), true),
    get: (view, at) => view.getFloat32(at, true),
  },
  f64: {
    bytes: 8,
    set: (view, at, value) => view.setFloat64(at, Number(value), true),
    get: (view, at) => view.getFloat64(at, true),
  },
  i64: {
    bytes: 8,
    set: (view, at, value) => view.setBigInt64(at, BigInt(value), true),
    get: (view, at) => Number(view.getBigInt64(at, true)),
  },
  u64: U64,
  ptr: U64,
};

const layouts = new Map<StructName, StructLayout>();

/** Layout of a struct, worked out once. */
export function structLayout(name: StructName): StructLayout {
  let layout = layouts.get(name);
  if (layout === undefined) {
    layout = computeLayout(STRUCTS[name]);
    layouts.set(name, layout);
  }
  return layout;
}

function computeLayout(types: Readonly<Record<string, FieldType>>): StructLayout {
  const fields: Field[] = [];
  let end = 0;
  let alignment = 1;
  for (const [name, type] of Object.entries(types)) {
    const { bytes } = CODECS[type];
    const offset = Math.ceil(end / bytes) * bytes;
    fields.push({ name, type, offset });
    end = offset + bytes;
    alignment = Math.max(alignment, bytes);
  }
  return { size: Math.ceil(end / alignment) * alignment, fields };
}

/**
 * The bytes of a struct. `size` is filled in, `reserved` is 0, every other field must be given.
 *
 * The result has a buffer of its own, never a part of a shared one, so that it can be lent to native calls for good.
 */
export function packStruct(name: StructName, values: FieldValues): Uint8Array<ArrayBuffer> {
  const bytes = new Uint8Array(new ArrayBuffer(structLayout(name).size));
  packInto(new DataView(bytes.buffer), 0, name, values);
  return bytes;
}

/** Writes a struct at a byte offset of `view`; as {@linkcode packStruct}. */
export function packInto(
  view: DataView,
  offset: number,
  name: StructName,
  values: FieldValues,
): void {
  const { size, fields } = structLayout(name);
  let used = 0;
  for (const field of fields) {
    let value = values[field.name];
    if (value !== undefined) used++;
    else if (field.name === "size") value = size;
    else if (field.name === "reserved") value = 0;
    else throw new LoramemError("INTERNAL", `packStruct: ${name} lacks a field: ${field.name}`);
    CODECS[field.type].set(view, offset + field.offset, value);
  }
  if (used === Object.keys(values).length) return;
  const known = new Set(fields.map((field) => field.name));
  const unknown = Object.keys(values).filter((key) => !known.has(key));
  throw new LoramemError(
    "INTERNAL",
    `packStruct: ${name} has no such field: ${unknown.join(", ")}`,
  );
}

/** Values of a struct at a byte offset of `view`. Counts and user-space addresses fit a number. */
export function readStruct<N extends StructName>(
  name: N,
  view: DataView,
  offset = 0,
): Record<keyof (typeof STRUCTS)[N], number> {
  const values: Record<string, number> = {};
  for (const field of structLayout(name).fields) {
    values[field.name] = CODECS[field.type].get(view, offset + field.offset);
  }
  return values as Record<keyof (typeof STRUCTS)[N], number>;
}
