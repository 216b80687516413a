/** The small structs in device memory that steer a step and report on it. */
import { packStruct, readStruct } from "../../ffi/structs.ts";
import { checkFinite, checkInteger } from "../memory/arguments.ts";

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

/** Settings of one AdamW step. */
export interface OptimizerControl {
  /** Step size. */
  readonly learningRate: number;
  /** Which update this is, from 1; the bias corrections follow from it. */
  readonly step: number;
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
 * Bytes of the settings of an optimizer step, to be copied to an f32 [8] in device memory.
 *
 * @example Usage
 * ```ts
 * import { kernels } from "./mod.ts";
 * console.log(kernels.packOptimizerControl({ learningRate: 2e-4, step: 1, maxNorm: 1 }).length); // 32
 * ```
 *
 * @returns 32 bytes.
 * @throws {LoramemError} `BAD_ARGUMENT`.
 */
export function packOptimizerControl(control: OptimizerControl): Uint8Array<ArrayBuffer> {
  const op = "packOptimizerControl";
  const {
    learningRate,
    step,
    beta1 = 0.9,
    beta2 = 0.999,
    eps = 1e-8,
    weightDecay = 0,
    maxNorm = 0,
  } = control;
  for (const [name, value] of Object.entries({
    learningRate,
    beta1,
    beta2,
    eps,
    weightDecay,
    maxNorm,
  })) {
    checkFinite(op, name, value);
  }
  checkInteger(op, "step", step, 1);
  return packStruct("lm_optimizer_control", {
    learning_rate: learningRate,
    beta1,
    beta2,
    eps,
    weight_decay: weightDecay,
    bias_correction1: 1 - beta1 ** step,
    bias_correction2: 1 - beta2 ** step,
    max_norm: maxNorm,
  });
}

/** What a step reports. */
export interface StepMetrics {
  /** Sum of the row losses since it was zeroed. */
  readonly lossSum: number;
  /** L2 norm of the gradient before clipping. */
  readonly gradNorm: number;
  /** Factor that was applied to the gradient. */
  readonly clip: number;
}

/**
 * Reads the metrics of a step out of host memory that the f64 [4] was copied to.
 *
 * @example Usage
 * ```ts
 * import { kernels } from "./mod.ts";
 * console.log(kernels.readStepMetrics(Float64Array.of(12.5, 0.7, 1, 0)).lossSum); // 12.5
 * ```
 *
 * @param bytes View of at least 32 bytes.
 * @returns The values.
 */
export function readStepMetrics(bytes: ArrayBufferView<ArrayBuffer>): StepMetrics {
  const op = "readStepMetrics";
  checkInteger(op, "bytes.byteLength", bytes.byteLength, 32);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const { loss_sum, grad_norm, clip } = readStruct("lm_step_metrics", view);
  return { lossSum: loss_sum, gradNorm: grad_norm, clip };
}
