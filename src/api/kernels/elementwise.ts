/** Kernels that treat every element alike. */
import { checkFinite } from "../memory/arguments.ts";
import type { TensorView } from "../memory/tensor_view.ts";
import { checkElementwise, type KernelOptions, launch, typeCode } from "./tensors.ts";

/**
 * y = x * factor.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using host = device.createPinnedBuffer(16);
 * using buffer = device.createBuffer(16);
 * host.view(Float32Array).set([1, 2, 3, 4]);
 * stream.copy(buffer, host);
 * kernels.scale(buffer.as("f32", [4]), buffer.as("f32", [4]), 0.5, { stream });
 * stream.copy(host, buffer);
 * await stream.done();
 * console.log(host.view(Float32Array)); // 0.5, 1, 1.5, 2
 * ```
 *
 * @param y Any shape, f32, bf16 or f16, written; may be `x`.
 * @param x Same shape and type, read.
 * @param factor Finite number; the product is rounded once, to the type of `y`.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function scale(y: TensorView, x: TensorView, factor: number, options: KernelOptions): void {
  const op = "scale";
  const n = checkElementwise(op, { y, x }, "activation");
  checkFinite(op, "factor", factor);
  launch(op, "lm_scale", options, { type: typeCode(y), y, x, n, factor });
}

/**
 * y = a + b.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using buffer = device.createBuffer(4096);
 * stream.fill(buffer, 0);
 * const x = buffer.as("bf16", [4, 512]);
 * kernels.add(x, x, x, { stream });
 * await stream.done();
 * ```
 *
 * @param y Any shape, f32, bf16 or f16, written; may be `a` or `b`.
 * @param a Same shape and type, read.
 * @param b Same shape and type, read.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function add(y: TensorView, a: TensorView, b: TensorView, options: KernelOptions): void {
  const op = "add";
  const n = checkElementwise(op, { y, a, b }, "activation");
  launch(op, "lm_add", options, { type: typeCode(y), y, a, b, n });
}

/**
 * y = x in another element type, rounded to nearest even; a value beyond the range of `y` becomes infinite.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using wide = device.createBuffer(4096);
 * using narrow = device.createBuffer(2048);
 * stream.fill(wide, 0);
 * kernels.cast(narrow.as("f16", [1024]), wide.as("f32", [1024]), { stream });
 * await stream.done();
 * ```
 *
 * @param y Any shape, f32, bf16 or f16, written.
 * @param x Same shape, f32, bf16 or f16, read.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function cast(y: TensorView, x: TensorView, options: KernelOptions): void {
  const op = "cast";
  const n = checkElementwise(op, { y, x }, "float");
  launch(op, "lm_cast", options, { type: typeCode(x), y, x, n, y_type: typeCode(y) });
}
