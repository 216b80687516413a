/**
 * Copies that run beside the ops: `transfer` starts one once the ops before it have ended, `arrival` holds the ops after it
 * back until it has ended. In between neither end may be written, and what is copied to may not be read.
 */
import type { OpKind, Transfer } from "../program.ts";

/** Starts a copy. */
export const transfer: OpKind<Transfer> = {
  name: "transfer",
  uses: ({ to, from }) => ({ reads: [from], writes: [to] }),
  cost: () => [], // of the host link or the disk, which src/api/plan/time.ts runs beside the ops
  bind: ({ to, from }) => ({ copyTo: to, copyFrom: from }),
};

/** Waits for a copy. It names both ends, so that they live until here. */
export const arrival: OpKind<Transfer> = {
  name: "arrival",
  uses: ({ to, from }) => ({ reads: [to, from], writes: [] }),
  cost: () => [],
  bind: ({ to, from }) => ({ awaited: to, awaitedFrom: from }),
};
