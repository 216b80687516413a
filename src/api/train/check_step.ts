/** Whether a run may go on after a step. */
import { LoramemError } from "../../ffi/error.ts";
import type { ResolvedOptions } from "./options.ts";
import type { StepResult } from "./session.ts";

/**
 * Throws where going on is of no use. A lower loss scale mends a gradient that overflowed, but neither a loss that is not
 * finite nor a gradient that was not scaled.
 *
 * @throws {LoramemError} DEVICE naming loss, gradient norm and the first adapter matrix whose gradient is not finite.
 */
export function checkStep(
  step: number,
  result: StepResult,
  { precision, minLossScale }: Pick<ResolvedOptions, "precision" | "minLossScale">,
): void {
  const { loss, skipped, lossScale, gradNorm, badTensor } = result;
  const scaled = precision === "fp16";
  if (Number.isFinite(loss) && (!skipped || (scaled && lossScale > minLossScale))) return;
  const floor = `the gradient is not finite at the lowest loss scale, ${lossScale}`;
  const gradient = scaled ? floor : "the gradient is not finite";
  const what = Number.isFinite(loss) ? gradient : "the loss is not finite";
  const where = badTensor === null ? "" : `, first in ${badTensor}`;
  const advice = scaled && Number.isFinite(loss) ? 'use precision "bf16"' : "check the data";
  throw new LoramemError(
    "DEVICE",
    `steps: the run diverged at step ${step}: ${what}: loss ${loss}, gradient norm ${gradNorm}${where}: ` +
      `lower learningRate, or ${advice}`,
  );
}
