/** Proof (c): a plan whose slots are 256 bytes smaller, one at a time, must not pass the verifier. */
import { ALIGNMENT, aligned, bytesOf, rootOf, type Value } from "../../src/api/graph/value.ts";
import type { Plan } from "../../src/api/plan/plan.ts";
import { verifyProgram } from "../../src/api/plan/verify.ts";

/** How many slots were shrunk, and the names of those whose loss went unnoticed. */
export function shrunkSlots(plan: Plan): { checked: number; accepted: string[] } {
  let checked = 0;
  const accepted: string[] = [];
  for (const { program } of plan.programs.values()) {
    const touched = program.ops.flatMap(({ uses }) =>
      [...uses.reads, ...uses.writes, ...(uses.updates ?? []), ...(uses.scratch ?? [])].map(rootOf),
    );
    const values = new Set([...program.carried, ...touched]);
    for (const shrunk of values) {
      const smaller = plan.slot(shrunk).bytes - ALIGNMENT;
      // A buffer that several values share is as large as the largest: a smaller one may still fit.
      if (smaller >= aligned(bytesOf(shrunk))) continue;
      checked++;
      const slot = (value: Value) =>
        value === shrunk ? { ...plan.slot(value), bytes: smaller } : plan.slot(value);
      try {
        verifyProgram(program, { classes: plan.classes, resident: plan.resident, slot });
        accepted.push(`${program.name}: ${shrunk.name}`);
      } catch (error) {
        if (!/slot is too small/.test((error as Error).message)) throw error;
      }
    }
  }
  return { checked, accepted };
}
