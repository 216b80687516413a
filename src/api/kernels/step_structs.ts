/** The small structs in device memory that steer a step and report on it. */
import { packStruct, readStruct, structLayout } from "../../ffi/structs.ts";
import { badArgument, checkFinite, checkInteger } from "../memory/arguments.ts";

/** What a micro-batch holds. */
export interface BatchHeader {
  /** Live rows. */
  readonly tokens: number;
  /** Documents in cu_seqlens. */
  readonly documents: number;
  /** Rows that carry a label. */
  readonly labelled: number;
  /** d(step loss) / d(row loss): 1 / labelled tokens of the whole optimizer step. */
  readonly lossWeight: number;
}

/**
 * Bytes of a micro-batch header, to be copied to an i32 [4] in device memory.
 *
 * @example Usage
 * ```ts
 * import { kernels } from "./mod.ts";
 * console.log(kernels.packBatchHeader({ tokens: 128, documents: 3, labelled: 40, lossWeight: 1 / 40 }).length); // 16
 * ```
 *
 * @returns 16 bytes.
 * @throws {LoramemError} `BAD_ARGUMENT`.
 */
export function packBatchHeader(header: BatchHeader): Uint8Array<ArrayBuffer> {
  const op = "packBatchHeader";
  const { tokens, documents, labelled, lossWeight } = header;
  for (const [name, value] of Object.entries({ tokens, documents, labelled })) {
    checkInteger(op, name, value, 0, 2 ** 31 - 1);
  }
  checkFinite(op, "lossWeight", lossWeight);
  return packStruct("lm_batch_header", { tokens, documents, labelled, loss_weight: lossWeight });
}

/** How a learning rate falls over a run; see `learningRateAt` of the trainer for the formulas. */
export type Schedule = "constant" | "cosine" | "linear";

/** `LM_SCHEDULE_*` of csrc/include/loramem_kernels.h. */
const SCHEDULE_CODES: Readonly<Record<Schedule, number>> = { constant: 0, cosine: 1, linear: 2 };

/** Settings of the optimizer, the same for every step of a run. */
export interface OptimizerControl {
  /** Peak learning rate. */
  readonly learningRate: number;
  /** Default `"constant"`. */
  readonly schedule?: Schedule;
  /** Steps of linear warm-up. Default 0. */
  readonly warmupSteps?: number;
  /** Steps of the run, warm-up included; the schedule ends there. Default 1. */
  readonly totalSteps?: number;
  /** Decay of the first moment. Default 0.9. */
  readonly beta1?: number;
  /** Decay of the second moment. Default 0.999. */
  readonly beta2?: number;
  /** Added to the square root of the second moment. Default 1e-8. */
  readonly eps?: number;
  /** Decoupled weight decay. Default 0. */
  readonly weightDecay?: number;
  /** The gradient is clipped to this L2 norm; 0, the default, means it is not. */
  readonly maxNorm?: number;
}

/**
 * Bytes of the settings of the optimizer, to be copied to an f64 [9] in device memory.
 *
 * @example Usage
 * ```ts
 * import { kernels } from "./mod.ts";
 * console.log(kernels.packOptimizerControl({ learningRate: 2e-4, maxNorm: 1 }).length); // 72
 * ```
 *
 * @returns 72 bytes.
 * @throws {LoramemError} `BAD_ARGUMENT`.
 */
export function packOptimizerControl(control: OptimizerControl): Uint8Array<ArrayBuffer> {
  const op = "packOptimizerControl";
  const {
    learningRate,
    schedule = "constant",
    warmupSteps = 0,
    totalSteps = 1,
    beta1 = 0.9,
    beta2 = 0.999,
    eps = 1e-8,
    weightDecay = 0,
    maxNorm = 0,
  } = control;
  const numbers = { learningRate, beta1, beta2, eps, weightDecay, maxNorm };
  for (const [name, value] of Object.entries(numbers)) checkFinite(op, name, value);
  checkInteger(op, "warmupSteps", warmupSteps, 0);
  checkInteger(op, "totalSteps", totalSteps, 1);
  if (!Object.hasOwn(SCHEDULE_CODES, schedule)) {
    const known = Object.keys(SCHEDULE_CODES).join(", ");
    badArgument(op, `unknown schedule: ${schedule}: use one of ${known}`, "schedule", schedule);
  }
  return packStruct("lm_optimizer_control", {
    learning_rate: learningRate,
    beta1,
    beta2,
    eps,
    weight_decay: weightDecay,
    max_norm: maxNorm,
    warmup_steps: warmupSteps,
    total_steps: totalSteps,
    schedule: SCHEDULE_CODES[schedule],
  });
}

/** What a step reports. */
export interface StepMetrics {
  /** Sum of the row losses since it was zeroed. */
  readonly lossSum: number;
  /** L2 norm of the gradient, loss scale taken out, before clipping; NaN if the gradient is not finite. */
  readonly gradNorm: number;
  /** Factor of clipping. */
  readonly clip: number;
  /** Learning rate of the step. */
  readonly learningRate: number;
  /** Updates applied so far, this one included unless it was skipped. */
  readonly step: number;
  /** First element of the gradient that is not finite, or -1. */
  readonly badElement: number;
  /** What the gradient was multiplied by. */
  readonly lossScale: number;
  /** Whether the update was left out. */
  readonly skipped: boolean;
}

/**
 * Reads the metrics of a step out of host memory that the f64 [9] was copied to.
 *
 * @example Usage
 * ```ts
 * import { kernels } from "./mod.ts";
 * console.log(kernels.readStepMetrics(Float64Array.of(12.5, 0.7, 1, 0, 0, 0, 0, 0, 0)).lossSum); // 12.5
 * ```
 *
 * @param bytes View of at least 72 bytes.
 * @returns The values.
 */
export function readStepMetrics(bytes: ArrayBufferView<ArrayBuffer>): StepMetrics {
  const op = "readStepMetrics";
  const { size } = structLayout("lm_step_metrics");
  checkInteger(op, "bytes.byteLength", bytes.byteLength, size);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const metrics = readStruct("lm_step_metrics", view);
  return {
    lossSum: metrics.loss_sum,
    gradNorm: metrics.grad_norm,
    clip: metrics.clip,
    learningRate: metrics.learning_rate,
    step: metrics.step,
    badElement: metrics.bad_element,
    lossScale: metrics.loss_scale,
    skipped: metrics.skipped !== 0,
  };
}
