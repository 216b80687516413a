/** The optimizer over one flat arena of trainables. */
import { badArgument } from "../memory/arguments.ts";
import type { TensorView } from "../memory/tensor_view.ts";
import {
  checkTensors,
  expect,
  float,
  type KernelOptions,
  launch,
  type MaybeTensor,
  optional,
  typeCode,
} from "./tensors.ts";

/** Elements that one partial sum of {@linkcode gradNorm} covers. */
const NORM_BLOCK = 65536;

/** Options of {@linkcode gradNorm}. */
export interface GradNormOptions extends KernelOptions {
  /** f32 [8]: gradient scaler whose scale is in g; it takes its step here. Default: a scale of 1. */
  readonly scaler?: MaybeTensor;
  /** f32 [1]: not 0 says that another part of the gradient is not finite. Default: 0. */
  readonly found?: MaybeTensor;
}

/**
 * The L2 norm of a gradient in a fixed order, and with it everything that is decided about an optimizer step, so that the
 * host need not wait for it: whether g is finite as it stands (if not, {@linkcode adamw} skips the update), the norm with the
 * loss scale taken out, the factor of clipping min(1, maxNorm / (gradNorm + 1e-6)), the learning rate, the count of updates,
 * and the next loss scale.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(8192);
 * stream.fill(memory, 0);
 * const metrics = memory.as("f64", [9]);
 * const partial = memory.as("f64", [1], { offset: 256 });
 * const state = memory.as("f64", [2], { offset: 512 }); // zero bytes: no update was applied yet
 * const control = memory.as("f64", [9], { offset: 768 });
 * const g = memory.as("f32", [1000], { offset: 1024 });
 * kernels.gradNorm(metrics, partial, state, g, control, { stream });
 * await stream.done();
 * ```
 *
 * @param metrics f64 [9], written but for the sum of losses; see {@linkcode readStepMetrics}.
 * @param partial f64 [ceil(n / 65536)], workspace.
 * @param state f64 [2], updated: two 64-bit integers, updates applied and updates skipped.
 * @param g [n] f32, read.
 * @param control f64 [9]: what {@linkcode packOptimizerControl} made, read.
 * @param options The stream, and what scaled the gradient.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function gradNorm(
  metrics: TensorView,
  partial: TensorView,
  state: TensorView,
  g: TensorView,
  control: TensorView,
  options: GradNormOptions,
): void {
  const op = "gradNorm";
  const { scaler = null, found = null } = options;
  checkTensors(op, {
    metrics: expect(metrics, "9", "f64"),
    partial: expect(partial, "blocks", "f64"),
    state: expect(state, "2", "f64"),
    g: expect(g, "n", "f32"),
    control: expect(control, "9", "f64"),
    scaler: optional(expect(scaler, "8", "f32")),
    found: optional(expect(found, "1", "f32")),
  });
  const blocks = Math.ceil(g.width / NORM_BLOCK);
  if (partial.width < blocks) {
    badArgument(
      op,
      `partial is too small: partial is ${partial}, g is ${g}: pass f64 [${blocks}]`,
      "partial",
    );
  }
  launch(op, "lm_grad_norm", options, {
    type: typeCode(g),
    metrics,
    partial,
    state,
    scaler,
    found,
    g,
    control,
    n: g.width,
  });
}

/**
 * One AdamW update of a flat arena (Loshchilov & Hutter 2017, arXiv:1711.05101), then g = 0. Where
 * {@linkcode gradNorm} decided to skip the update, p, m, v and copy keep every bit and g is zeroed all the same.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using host = device.createPinnedBuffer(128);
 * using memory = device.createBuffer(16384);
 * stream.fill(memory, 0);
 * host.view(Uint8Array).set(kernels.packOptimizerControl({ learningRate: 1e-3 }));
 * stream.copy(memory, host, { bytes: 72 });
 * const [p, m, v, g] = [1, 2, 3, 4].map((at) => memory.as("f32", [256], { offset: at * 1024 }));
 * const control = memory.as("f64", [9]);
 * const metrics = memory.as("f64", [9], { offset: 256 });
 * const [partial, state] = [memory.as("f64", [1], { offset: 512 }), memory.as("f64", [2], { offset: 768 })];
 * if (p && m && v && g) {
 *   kernels.gradNorm(metrics, partial, state, g, control, { stream });
 *   kernels.adamw(p, m, v, g, null, control, metrics, { stream });
 * }
 * await stream.done();
 * ```
 *
 * @param p [n] f32 master weights, updated.
 * @param m [n] f32 first moment, updated.
 * @param v [n] f32 second moment, updated.
 * @param g [n] f32 gradient, read and zeroed.
 * @param copy [n] of any float type, written with the new p; or null.
 * @param control f64 [9]: what {@linkcode packOptimizerControl} made, read.
 * @param metrics f64 [9], read: what {@linkcode gradNorm} decided.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function adamw(
  p: TensorView,
  m: TensorView,
  v: TensorView,
  g: TensorView,
  copy: TensorView | null,
  control: TensorView,
  metrics: TensorView,
  options: KernelOptions,
): void {
  const op = "adamw";
  checkTensors(op, {
    p: expect(p, "n", "f32"),
    m: expect(m, "n", "f32"),
    v: expect(v, "n", "f32"),
    g: expect(g, "n", "f32"),
    copy: optional(float(copy, "n")),
    control: expect(control, "9", "f64"),
    metrics: expect(metrics, "9", "f64"),
  });
  launch(op, "lm_adamw", options, {
    type: typeCode(p),
    p,
    m,
    v,
    g,
    copy,
    control,
    metrics,
    n: p.width,
    copy_type: typeCode(copy),
  });
}
