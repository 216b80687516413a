/** A gradient scaler in device memory: what {@linkcode GradScaler} enqueues, and what programs of one's own can. */
import { badArgument, checkFinite, checkInteger } from "../memory/arguments.ts";
import type { TensorView } from "../memory/tensor_view.ts";
import { checkElementwise, checkTensors, expect, type KernelOptions, launch } from "./tensors.ts";

/** Settings of a gradient scaler; the defaults are those of Micikevicius et al. 2017 (arXiv:1710.03740) in common use. */
export interface ScalerSettings {
  /** First loss scale. Default 65536. */
  readonly initScale?: number;
  /** The scale is multiplied by this after `growthInterval` finite gradients in a row; above 1. Default 2. */
  readonly growthFactor?: number;
  /** And by this after a gradient that is not finite; between 0 and 1. Default 0.5. */
  readonly backoffFactor?: number;
  /** Default 2000. */
  readonly growthInterval?: number;
  /** The scale never falls below. Default 0: it may fall without end, also below 1. */
  readonly minScale?: number;
  /** The scale never grows beyond. Default 0: no limit but that of f32. */
  readonly maxScale?: number;
}

/** A scaler's values, settings filled in. */
export interface ScalerValues {
  readonly scale: number;
  /** Finite gradients since the scale was last set. */
  readonly growthTracker: number;
  readonly growthFactor: number;
  readonly backoffFactor: number;
  readonly growthInterval: number;
  readonly minScale: number;
  readonly maxScale: number;
}

/**
 * Values of a new scaler.
 *
 * @example Usage
 * ```ts
 * import { kernels } from "./mod.ts";
 * console.log(kernels.scalerValues({ initScale: 1024 }).growthInterval); // 2000
 * ```
 *
 * @param settings What differs from the defaults.
 * @param op Name for messages.
 * @returns Values for {@linkcode scalerSet}.
 * @throws {LoramemError} `BAD_ARGUMENT`.
 */
export function scalerValues(settings: ScalerSettings = {}, op = "scalerValues"): ScalerValues {
  const { initScale = 65536, growthFactor = 2, backoffFactor = 0.5 } = settings;
  const { growthInterval = 2000, minScale = 0, maxScale = 0 } = settings;
  const rest = { growthFactor, backoffFactor, growthInterval, minScale, maxScale };
  return checkScaler(op, { scale: initScale, growthTracker: 0, ...rest });
}

/** Throws `BAD_ARGUMENT` unless a scaler may have these values. */
export function checkScaler(op: string, values: ScalerValues): ScalerValues {
  const { scale, growthTracker, growthFactor, backoffFactor, growthInterval } = values;
  const { minScale, maxScale } = values;
  const positive = (name: string, value: number) => {
    checkFinite(op, name, Math.fround(value));
    if (Math.fround(value) > 0) return;
    badArgument(op, `${name} must be above 0: it is ${value}: give a power of two`, name, value);
  };
  positive("scale", scale);
  checkInteger(op, "growthTracker", growthTracker, 0, 2 ** 31 - 1);
  checkInteger(op, "growthInterval", growthInterval, 1, 2 ** 31 - 1);
  checkFinite(op, "growthFactor", growthFactor);
  if (!(Math.fround(growthFactor) > 1)) {
    const what = `growthFactor must be above 1: it is ${growthFactor}: the usual value is 2`;
    badArgument(op, what, "growthFactor", growthFactor);
  }
  if (!(Math.fround(backoffFactor) > 0 && Math.fround(backoffFactor) < 1)) {
    const what = `backoffFactor must be between 0 and 1: it is ${backoffFactor}: the usual value is 0.5`;
    badArgument(op, what, "backoffFactor", backoffFactor);
  }
  if (minScale !== 0) positive("minScale", minScale);
  if (maxScale !== 0) positive("maxScale", maxScale);
  if (maxScale !== 0 && maxScale < minScale) {
    badArgument(
      op,
      `maxScale is below minScale: ${maxScale} and ${minScale}`,
      "maxScale",
      maxScale,
    );
  }
  return values;
}

/**
 * Writes a scaler. Its values travel with the call: no host memory must be kept.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(256);
 * const scaler = memory.as("f32", [8]);
 * kernels.scalerSet(scaler, kernels.scalerValues({ initScale: 1024 }), { stream });
 * await stream.done();
 * ```
 *
 * @param scaler f32 [8], written: `lm_scaler`.
 * @param values Scale, tracker and settings.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function scalerSet(scaler: TensorView, values: ScalerValues, options: KernelOptions): void {
  const op = "scalerSet";
  checkTensors(op, { scaler: expect(scaler, "8", "f32") });
  checkScaler(op, values);
  launch(op, "lm_scaler_set", options, { type: 0, scaler, ...scalerFields(values) });
}

/** Fields of `lm_scaler`. */
export function scalerFields(values: ScalerValues): Record<string, number> {
  return {
    scale: values.scale,
    growth_tracker: values.growthTracker,
    growth_factor: values.growthFactor,
    backoff_factor: values.backoffFactor,
    growth_interval: values.growthInterval,
    min_scale: values.minScale,
    max_scale: values.maxScale,
  };
}

/**
 * y = x * scale.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(512);
 * stream.fill(memory, 0);
 * const [scaler, loss] = [memory.as("f32", [8]), memory.as("f32", [1], { offset: 256 })];
 * kernels.scalerSet(scaler, kernels.scalerValues(), { stream });
 * kernels.scalerScale(loss, loss, scaler, { stream });
 * await stream.done();
 * ```
 *
 * @param y Any shape, f32, written; may be `x`.
 * @param x Same shape, f32, read.
 * @param scaler f32 [8], read.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function scalerScale(
  y: TensorView,
  x: TensorView,
  scaler: TensorView,
  options: KernelOptions,
): void {
  const op = "scalerScale";
  const n = checkElementwise(op, { y, x }, "f32");
  checkTensors(op, { scaler: expect(scaler, "8", "f32") });
  launch(op, "lm_scaler_scale", options, { type: 0, y, x, scaler, n });
}

/**
 * found = 1 if an element of g is not finite; then g /= scale, by the f32 nearest to 1 / scale.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(1024);
 * stream.fill(memory, 0);
 * const [scaler, found] = [memory.as("f32", [8]), memory.as("f32", [1], { offset: 256 })];
 * kernels.scalerSet(scaler, kernels.scalerValues(), { stream });
 * kernels.scalerUnscale(memory.as("f32", [8, 8], { offset: 512 }), found, scaler, { stream });
 * kernels.scalerUpdate(scaler, found, 0, { stream });
 * await stream.done();
 * ```
 *
 * @param g Any shape, f32, updated.
 * @param found f32 [1], written only if an element is not finite.
 * @param scaler f32 [8], read.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function scalerUnscale(
  g: TensorView,
  found: TensorView,
  scaler: TensorView,
  options: KernelOptions,
): void {
  const op = "scalerUnscale";
  const n = checkElementwise(op, { g }, "f32");
  checkTensors(op, { found: expect(found, "1", "f32"), scaler: expect(scaler, "8", "f32") });
  launch(op, "lm_scaler_unscale", options, { type: 0, g, found, scaler, n });
}

/**
 * The scaler takes its step: it backs off if any of `found` is not 0, else it counts towards its growth. Then found = 0.
 *
 * @example Usage
 * ```ts
 * import { Device, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(512);
 * stream.fill(memory, 0);
 * const scaler = memory.as("f32", [8]);
 * kernels.scalerSet(scaler, kernels.scalerValues(), { stream });
 * kernels.scalerUpdate(scaler, memory.as("f32", [4], { offset: 256 }), 0, { stream });
 * await stream.done();
 * ```
 *
 * @param scaler f32 [8], updated.
 * @param found f32 [count], read and zeroed.
 * @param newScale The scale becomes this and nothing else changes; 0 = by the rule.
 * @param options The stream.
 * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
 */
export function scalerUpdate(
  scaler: TensorView,
  found: TensorView,
  newScale: number,
  options: KernelOptions,
): void {
  const op = "scalerUpdate";
  checkTensors(op, { scaler: expect(scaler, "8", "f32"), found: expect(found, "count", "f32") });
  checkFinite(op, "newScale", Math.fround(newScale));
  if (newScale < 0) badArgument(op, `newScale is negative: ${newScale}`, "newScale", newScale);
  const fields = { type: 0, scaler, found, count: found.width, new_scale: newScale };
  launch(op, "lm_scaler_update", options, fields);
}
