/** The simulated device: a CPU that is late or fails on purpose, each handle by its own options. */
import { badArgument, checkInteger } from "./arguments.ts";

/** What a `"sim"` device does on purpose. Counts start at 1. */
export interface SimOptions {
  /** Microseconds before each operation of a stream, by order of stream creation; streams beyond the list have none. */
  readonly delays?: readonly number[];
  /** This call of the device fails at once. */
  readonly failAt?: number;
  /** This kernel, copy or fill fails later, on its stream. */
  readonly faultAt?: number;
  /** This heap allocation of the library fails. */
  readonly heapFailAt?: number;
  /** Bytes that can be page-locked. */
  readonly pinnedLimit?: number;
  /** Microseconds that taking memory from the system and giving it back last. */
  readonly driverDelay?: number;
}

/** What the native library calls the options, in the order of the device's name. */
const NAMES = {
  failAt: "fail_at",
  faultAt: "fault_at",
  heapFailAt: "heap_fail_at",
  pinnedLimit: "pinned_limit",
  driverDelay: "driver_delay",
} as const;

const MOST_DELAYS = 16;
const MOST = 2 ** 32 - 1;

/** The native name of a device: `kind`, or with options `sim:fail_at=7,delays=100/0`. */
export function simName(op: string, kind: string, options: SimOptions): string {
  const parts: string[] = [];
  for (const [key, name] of Object.entries(NAMES) as [keyof typeof NAMES, string][]) {
    const value = options[key];
    if (value === undefined) continue;
    checkInteger(op, key, value, 1, MOST);
    parts.push(`${name}=${value}`);
  }
  const { delays } = options;
  if (delays !== undefined) {
    if (!Array.isArray(delays) || delays.length === 0 || delays.length > MOST_DELAYS) {
      badArgument(op, `delays must be a list of 1 to ${MOST_DELAYS} numbers`, "delays", delays);
    }
    for (const delay of delays) checkInteger(op, "a value of delays", delay, 0, MOST);
    parts.push(`delays=${delays.join("/")}`);
  }
  if (parts.length === 0) return kind;
  if (kind !== "sim") {
    badArgument(
      op,
      `delays and failures are for "sim" only: the device is "${kind}"`,
      "kind",
      kind,
    );
  }
  return `sim:${parts.join(",")}`;
}
