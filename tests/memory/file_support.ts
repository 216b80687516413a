/** Helpers of the tests of device files. */
import { existsSync, mkdtempSync, readdirSync, readFileSync, readlinkSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Device, type DeviceOptions, type FileRing, type PinnedBuffer } from "../../src/api/mod.ts";

/** Byte at a place of a file; no short period. */
export function patternAt(at: number): number {
  return (at * 37 + (at >>> 8) * 11 + (at >>> 16) * 5 + Math.floor(at / 2 ** 32)) & 255;
}

/** Bytes of the pattern from a place on. */
export function pattern(offset: number, bytes: number): Uint8Array<ArrayBuffer> {
  return Uint8Array.from({ length: bytes }, (_, i) => patternAt(offset + i));
}

/** Writes the pattern of a file into page-locked memory. */
export function fillPattern(host: PinnedBuffer, offset = 0): void {
  host.view(Uint8Array).set(pattern(offset, host.bytes));
}

/** A new folder in memory where there is such a place, for tests that sync very often; removed with the scope. */
export function memoryFolder(): { readonly path: string } & Disposable {
  const parent = existsSync("/dev/shm") ? "/dev/shm" : tmpdir();
  const path = mkdtempSync(join(parent, "loramem-"));
  return { path, [Symbol.dispose]: () => rmSync(path, { recursive: true }) };
}

/** A device with a small ring. */
export async function openRing(
  kind: "cpu" | "sim" = "cpu",
  options: DeviceOptions = {},
): Promise<{ device: Device; ring: FileRing } & AsyncDisposable> {
  const device = await Device.open(kind, { threads: 1, ...options });
  try {
    const ring = device.createFileRing({ slots: 3, slotBytes: 16384, threads: 2 });
    return { device, ring, [Symbol.asyncDispose]: () => device.dispose() };
  } catch (error) {
    await device.dispose();
    throw error;
  }
}

/** Descriptors of this process that lead into a folder. */
export function descriptorsInto(folder: string): string[] {
  return readdirSync("/proc/self/fd").flatMap((fd) => {
    try {
      const target = readlinkSync(`/proc/self/fd/${fd}`);
      return target.startsWith(folder) ? [target] : [];
    } catch {
      return []; // it was closed meanwhile
    }
  });
}

/** Resident bytes of this process. */
export function residentBytes(): number {
  return Number(/^VmRSS:\s+(\d+)/m.exec(readFileSync("/proc/self/status", "utf8"))?.[1]) * 1024;
}

/** One call of a log of file calls. */
export interface FileCall {
  readonly call: string;
  readonly result: number;
  readonly path?: string;
  readonly to?: string;
  readonly fd?: number;
  readonly offset?: number;
  readonly bytes?: number;
  readonly data: Uint8Array;
}

/** Reads a log of file calls, see `SimFileOptions.log`. */
export function readFileLog(path: string): FileCall[] {
  const log = readFileSync(path);
  const calls: FileCall[] = [];
  for (let at = 0; at < log.length; ) {
    const end = log.indexOf(10, at);
    const entry = JSON.parse(log.subarray(at, end).toString());
    at = end + 1 + entry.data;
    calls.push({ ...entry, data: new Uint8Array(log.subarray(end + 1, at)) });
  }
  return calls;
}
