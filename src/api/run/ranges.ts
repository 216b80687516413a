/** Named ranges around work that is enqueued, for profilers such as Nsight Systems and for the snapshots of debug mode. */
import { pointerOf } from "../../ffi/handle.ts";
import { native } from "../../ffi/load.ts";
import type { Op } from "../graph/program.ts";
import type { Device } from "../memory/mod.ts";

/** The name of a range as the library takes it. */
export type RangeName = Uint8Array<ArrayBuffer>;

/** Ops of one layer and phase that follow each other. */
export interface OpGroup {
  readonly name: RangeName;
  readonly from: number;
  readonly to: number;
}

const encoder = new TextEncoder();

export function rangeName(text: string): RangeName {
  return encoder.encode(`${text}\0`);
}

/** Cuts ops where layer or phase change. */
export function groupOps(ops: readonly Op[]): OpGroup[] {
  const groups: OpGroup[] = [];
  let from = 0;
  for (let to = 1; to <= ops.length; to++) {
    const [op, next] = [ops[to - 1] as Op, ops[to]];
    if (next?.layer === op.layer && next.phase === op.phase) continue;
    const name = op.layer === null ? op.phase : `${op.phase}, layer ${op.layer}`;
    groups.push({ name: rangeName(name), from, to });
    from = to;
  }
  return groups;
}

/** Opens and closes ranges on a device where somebody looks at them. */
export class Ranges {
  readonly #device: Device;

  private constructor(device: Device) {
    this.#device = device;
  }

  /** Null where nobody looks, so that ranges cost nothing then. */
  static of(device: Device): Ranges | null {
    const { fn } = native();
    const ctx = pointerOf(device);
    if (fn.lm_range_push(ctx, rangeName("loramem")) !== 1) return null;
    fn.lm_range_pop(ctx);
    return new Ranges(device);
  }

  /** Runs `work` inside a range. */
  around(name: RangeName, work: () => void): void {
    const { fn } = native();
    const ctx = pointerOf(this.#device);
    fn.lm_range_push(ctx, name);
    try {
      work();
    } finally {
      fn.lm_range_pop(ctx);
    }
  }
}
