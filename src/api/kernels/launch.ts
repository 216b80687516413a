/** From named fields to one native call. */
import { pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { nativeError } from "../../ffi/status.ts";
import { packStruct, STRUCTS } from "../../ffi/structs.ts";
import type { KERNELS } from "../../ffi/symbols.ts";
import type { Ptr } from "../../ffi/types.ts";
import type { Device } from "../memory/device.ts";
import type { Stream } from "../memory/stream.ts";

/** A kernel, named as in csrc/include/loramem_kernels.h. */
export type KernelName = keyof typeof KERNELS;

/**
 * The argument struct of a kernel. `size` is filled in, `reserved` is 0, every other field must be given.
 *
 * @param fields Pointers, or null where the header allows it; numbers for everything else.
 * @throws {LoramemError} `INTERNAL` for a missing, unknown or mistyped field.
 */
export function packKernelArgs(
  name: KernelName,
  fields: Readonly<Record<string, Ptr | number | null>>,
): Uint8Array<ArrayBuffer> {
  const struct = `${name}_args` as const;
  const types: Readonly<Record<string, string>> = STRUCTS[struct];
  const values: Record<string, number | bigint> = {};
  for (const [field, value] of Object.entries(fields)) {
    const pointer = types[field] === "ptr";
    if (pointer) values[field] = value === null ? 0n : native().runtime.address(value as Ptr);
    else values[field] = value as number;
  }
  return packStruct(struct, values);
}

/**
 * Enqueues a kernel with arguments that were packed before: the hot path of a step, one native call and one comparison.
 *
 * The caller keeps the memory alive that the arguments point to, until the stream has passed.
 *
 * @throws {LoramemError} `BAD_ARGUMENT` where the kernel refuses them, `DISPOSED`, `DEVICE`.
 */
export function launchPacked(
  device: Device,
  name: KernelName,
  packed: Uint8Array<ArrayBuffer>,
  stream: Stream,
): void {
  const ctx = pointerOf(device);
  const status = native().fn[name](ctx, packed, pointerOf(stream));
  if (status !== 0) throw nativeError(native(), ctx, status, name);
}
