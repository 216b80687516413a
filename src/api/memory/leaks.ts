/** What debug mode knows about objects that are still there: who made them, where and when. */
import process from "node:process";
import { type Cell, isOpen } from "../../ffi/handle.ts";
import type { Device } from "./device.ts";

/** An object that was not disposed. */
export interface Leak {
  /** Kind and name, such as `DeviceBuffer "x"`. */
  readonly label: string;
  /** Its size; 0 for what is no memory. */
  readonly bytes: number;
  /** Milliseconds since it was made. */
  readonly ageMs: number;
  /** Where it was made. */
  readonly stack: string;
  /** Whether nobody referred to it any more, so that the garbage collector gave it back. */
  readonly collected: boolean;
}

/** Objects of a device that were not disposed when the device was, or when the process ended. */
export interface LeakReport {
  /** Kind of the device. */
  readonly device: string;
  /** When it was made: `"close"` by the device's dispose, `"exit"` by the end of the process. */
  readonly at: "close" | "exit";
  /** The objects, oldest first. */
  readonly leaks: readonly Leak[];
}

interface Entry {
  readonly cell: Cell;
  readonly bytes: number;
  readonly since: number;
  readonly stack: string;
}

const lists = new WeakMap<Device, LeakList>();

/** Lists whose device is open, for the end of the process; they refer to no handle. */
const open = new Set<LeakList>();
let hooked = false;

/** Objects that were left to the garbage collector and are remembered. */
const MOST_COLLECTED = 1000;

class LeakList {
  readonly #device: string;
  readonly #report: ((report: LeakReport) => void) | undefined;
  #entries: Entry[] = [];
  #cleanAt = 1024;

  constructor(device: string, report: ((report: LeakReport) => void) | undefined) {
    this.#device = device;
    this.#report = report;
  }

  add(cell: Cell, bytes: number): void {
    // Closed cells are dropped now and then, so that the list stays in proportion to what lives.
    if (this.#entries.length >= this.#cleanAt) {
      this.#clean();
      this.#cleanAt = Math.max(1024, 2 * this.#entries.length);
    }
    const stack = (new Error().stack ?? "").split("\n").slice(3).join("\n");
    this.#entries.push({ cell, bytes, since: performance.now(), stack });
  }

  leaks(): Leak[] {
    this.#clean();
    const now = performance.now();
    return this.#entries.map(({ cell, bytes, since, stack }) => ({
      label: cell.label,
      bytes,
      ageMs: now - since,
      stack,
      collected: cell.collected === true,
    }));
  }

  end(at: LeakReport["at"]): void {
    open.delete(this);
    const leaks = this.leaks();
    if (leaks.length > 0) this.#report?.({ device: this.#device, at, leaks });
  }

  #clean(): void {
    let collected = 0;
    const kept = this.#entries
      .reverse() // the last ones are kept
      .filter(({ cell }) => isOpen(cell) || (cell.collected && ++collected <= MOST_COLLECTED));
    this.#entries = kept.reverse();
  }
}

/** Begins to keep track of a device's objects. */
export function watchLeaks(
  device: Device,
  report: ((report: LeakReport) => void) | undefined,
): void {
  const list = new LeakList(device.kind, report);
  lists.set(device, list);
  open.add(list);
  if (hooked) return;
  hooked = true;
  process.on("exit", () => {
    for (const list of [...open]) list.end("exit");
  });
}

/** Notes a new object of a device; does nothing unless the device is in debug mode. */
export function noteMade(device: Device, cell: Cell, bytes = 0): void {
  if (device.debug) lists.get(device)?.add(cell, bytes);
}

/** What is still there. */
export function leaksOf(device: Device): Leak[] {
  return lists.get(device)?.leaks() ?? [];
}

/** Reports what is still there, as the device closes. */
export function endLeaks(device: Device): void {
  lists.get(device)?.end("close");
}
