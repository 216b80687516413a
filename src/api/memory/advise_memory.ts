/** Which kind of memory a use wants. */
import { badArgument, checkInteger } from "./arguments.ts";

/** What is known about a use of memory. */
export interface MemoryUse {
  /** Size. */
  readonly bytes: number;
  /** Whether kernels read or write it. */
  readonly kernels: boolean;
  /** What the host does with it. Default `"never"`. */
  readonly host?: "never" | "writes" | "reads" | "both";
  /** How often it is copied from or to device memory. Default `"never"`. */
  readonly copies?: "never" | "once" | "often";
  /** Whether host and device touch small scattered parts, so that a copy would move mostly what nobody needs. */
  readonly sparse?: boolean;
  /** Free bytes of the device, `device.info().memoryFree`; without it device memory counts as enough. */
  readonly deviceFree?: number;
  /** Bytes that may still be page-locked; without it they count as enough. */
  readonly pinnedFree?: number;
  /** Measured gain of write-combined memory over cacheable memory for this copy, such as 0.05 for 5 %. */
  readonly writeCombinedGain?: number;
}

/** Kinds of memory, by the call that makes them. */
export type MemoryKind = "device" | "pinned" | "write-combined" | "managed" | "pageable";

/** {@linkcode adviseMemory}'s answer. */
export interface MemoryAdviceResult {
  readonly kind: MemoryKind;
  /** Why, in one sentence. */
  readonly reason: string;
}

/** Below this a copy costs its launch, wherever the bytes lie. */
const SMALL = 64 * 1024;

/** Below this the gain is noise, and the price (no host reads) is not worth it. */
const LEAST_GAIN = 0.05;

/**
 * Picks the kind of memory for a use, and says why. A pure function: nothing is allocated or measured.
 *
 * ```text
 * do kernels use it?
 * +- yes: does it fit what is free on the device?
 * |  +- yes: do host and device both touch small scattered parts?
 * |  |  +- yes ................................ managed         createManagedBuffer
 * |  |  +- no ................................. device          createPool().alloc, createBuffer
 * |  +- no: stream it through a window of device memory; where it lies meanwhile is decided below,
 * |         as memory that is copied often
 * +- no: is it copied to or from the device?
 *    +- never ................................. pageable        ArrayBuffer
 *    +- once, and less than 64 KiB ............ pageable        createPinnedPool().acquire copes
 *    +- else: can that much still be page-locked?
 *       +- no ................................. pageable        PinnedPool.acquire falls back by itself
 *       +- yes: host only writes, and write-combined was measured 5 % faster?
 *          +- yes ............................. write-combined  { writeCombined: true }
 *          +- no .............................. pinned          createPinnedPool, createPinnedBuffer
 * ```
 *
 * Managed memory is never an answer to too little memory: a device that swaps is slower than copies in windows.
 * Write-combined memory is very slow to read on the host, and on recent machines often no faster to copy from.
 *
 * @example Usage
 * ```ts
 * import { adviseMemory } from "./mod.ts";
 * const { kind, reason } = adviseMemory({ bytes: 8 << 20, kernels: false, host: "writes", copies: "often" });
 * console.log(kind, reason); // pinned ...
 * ```
 *
 * @param use What is known about the memory.
 * @returns The kind and the reason.
 * @throws {LoramemError} `BAD_ARGUMENT`.
 */
export function adviseMemory(use: MemoryUse): MemoryAdviceResult {
  const op = "adviseMemory";
  checkInteger(op, "bytes", use?.bytes, 1);
  const { bytes, kernels, host = "never", sparse = false } = use;
  const { deviceFree = Infinity, pinnedFree = Infinity, writeCombinedGain = 0 } = use;
  let { copies = "never" } = use;
  if (typeof kernels !== "boolean") badArgument(op, "kernels must be given", "kernels", kernels);
  if (!["never", "writes", "reads", "both"].includes(host)) {
    badArgument(op, `unknown host use: ${String(host)}`, "host", host);
  }
  if (!["never", "once", "often"].includes(copies)) {
    badArgument(op, `unknown number of copies: ${String(copies)}`, "copies", copies);
  }
  let why = "";
  if (kernels) {
    if (bytes <= deviceFree) {
      return sparse && host !== "never"
        ? answer(
            "managed",
            "host and device touch scattered parts: pages move on demand, copies would move all of it",
          )
        : answer(
            "device",
            "kernels use it and it fits: device memory is the fastest they can have",
          );
    }
    copies = "often";
    why = `${bytes} bytes exceed the ${deviceFree} free on the device, so kernels take it in windows; `;
  }
  if (copies === "never") return answer("pageable", "only the host uses it");
  if (copies === "once" && bytes < SMALL) {
    return answer("pageable", "one small copy costs its launch, wherever the bytes lie");
  }
  if (bytes > pinnedFree) {
    return answer(
      "pageable",
      `${why}only ${pinnedFree} bytes may still be page-locked: use a smaller ring, or wait for each copy`,
    );
  }
  if (host === "writes" && !kernels && writeCombinedGain >= LEAST_GAIN) {
    return answer(
      "write-combined",
      "the host only writes it, and it was measured to copy faster that way",
    );
  }
  return answer("pinned", `${why}page-locked memory is copied beside other work and at full speed`);
}

function answer(kind: MemoryKind, reason: string): MemoryAdviceResult {
  return { kind, reason };
}
