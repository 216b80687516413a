/** The optimizer over one flat arena of trainables. */
import { badArgument } from "../memory/arguments.ts";
import type { TensorView } from "../memory/tensor_view.ts";
import {
  checkTensors,
  expect,
  float,
  type KernelOptions,
  launch,
  optional,
  typeCode,
} from "./tensors.ts";

/** Elements that one partial sum of {@linkcode gradNorm} covers. */
const NORM_BLOCK = 65536;

/**
 * metrics.gradNorm = L2 norm of g in a fixed order; metrics.clip = min(1, maxNorm / (gradNorm + 1e-6)), or 1 if maxNorm
 * is 0.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(8192);
 * stream.fill(memory, 0);
 * const metrics = memory.as("f64", [4]);
 * const partial = memory.as("f64", [1], { offset: 256 });
 * const control = memory.as("f32", [8], { offset: 512 });
 * const g = memory.as("f32", [1000], { offset: 1024 });
 * kernels.gradNorm(metrics, partial, g, control, { stream });
 * await stream.done();
 * ```
 *
 * @param metrics f64 [4], written; see {@linkcode readStepMetrics}.
 * @param partial f64 [ceil(n / 65536)], workspace.
 * @param g [n] f32, read.
 * @param control f32 [8]: what {@linkcode packOptimizerControl} made, read.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function gradNorm(
  metrics: TensorView,
  partial: TensorView,
  g: TensorView,
  control: TensorView,
  options: KernelOptions,
): void {
  const op = "gradNorm";
  checkTensors(op, {
    metrics: expect(metrics, "4", "f64"),
    partial: expect(partial, "blocks", "f64"),
    g: expect(g, "n", "f32"),
    control: expect(control, "8", "f32"),
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
    g,
    control,
    n: g.width,
  });
}

/**
 * One AdamW update of a flat arena (Loshchilov & Hutter 2017, arXiv:1711.05101), then g = 0.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using host = device.createPinnedBuffer(64);
 * using memory = device.createBuffer(16384);
 * stream.fill(memory, 0);
 * host.view(Uint8Array).set(kernels.packOptimizerControl({ learningRate: 1e-3, step: 1 }));
 * stream.copy(memory, host, { bytes: 32 });
 * const [p, m, v, g] = [1, 2, 3, 4].map((at) => memory.as("f32", [256], { offset: at * 1024 }));
 * const metrics = memory.as("f64", [4], { offset: 512 });
 * if (p && m && v && g) kernels.adamw(p, m, v, g, null, memory.as("f32", [8]), metrics, { stream });
 * await stream.done();
 * ```
 *
 * @param p [n] f32 master weights, updated.
 * @param m [n] f32 first moment, updated.
 * @param v [n] f32 second moment, updated.
 * @param g [n] f32 gradient, read and zeroed.
 * @param copy [n] of any float type, written with the new p; or null.
 * @param control f32 [8]: what {@linkcode packOptimizerControl} made, read.
 * @param metrics f64 [4], read: `clip` scales g.
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
    control: expect(control, "8", "f32"),
    metrics: expect(metrics, "4", "f64"),
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
