/** Native counters as objects. */
import { pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import { check } from "../../ffi/status.ts";
import { readStruct, type StructName, structLayout } from "../../ffi/structs.ts";
import type { Device } from "./device.ts";

/**
 * Lets a native function fill a struct and gives its fields camelCase names.
 *
 * @param fill Calls the native function; its status is checked.
 */
export function readStats<T>(
  op: string,
  device: Device,
  name: StructName,
  fill: (buf: DataView<ArrayBuffer>) => number,
): T {
  const view = new DataView(new ArrayBuffer(structLayout(name).size));
  check(native(), pointerOf(device), fill(view), op);
  const camelCase = Object.entries(readStruct(name, view)).map(([key, value]) => [
    key.replaceAll(/_([a-z])/g, (_, letter: string) => letter.toUpperCase()),
    value,
  ]);
  return Object.fromEntries(camelCase) as T;
}
