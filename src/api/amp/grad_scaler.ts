/** Dynamic loss scaling over any device buffers. */
import { LoramemError } from "../../ffi/error.ts";
import { scale } from "../kernels/elementwise.ts";
import {
  checkScaler,
  type ScalerSettings,
  type ScalerValues,
  scalerScale,
  scalerSet,
  scalerUnscale,
  scalerUpdate,
  scalerValues,
} from "../kernels/scaler.ts";
import type { KernelOptions } from "../kernels/tensors.ts";
import { badArgument } from "../memory/arguments.ts";
import type { Device, DeviceBuffer } from "../memory/mod.ts";
import { TensorView } from "../memory/tensor_view.ts";
import { readScaler, SCALER_WIDTH } from "./scaler_bytes.ts";

/** Options of {@linkcode GradScaler.open}. */
export interface GradScalerOptions extends ScalerSettings {
  /** A scaler that is not enabled passes everything through, for bf16 and fp32. Default true. */
  readonly enabled?: boolean;
}

/** All that a scaler must save to go on with the same bits; empty for one that is not enabled. */
export type GradScalerState = ScalerValues | Record<never, never>;

/** Gradients by name; the names appear in errors. */
export type NamedGradients = Readonly<Record<string, TensorView>>;

/** What stands for an optimizer: any object, or a name. */
export type OptimizerKey = object | string;

/** Where an optimizer is between two updates of the scaler. */
interface OptimizerRecord {
  stage: "UNSCALED" | "STEPPED";
  /** Gradients that were looked at. */
  readonly checked: number;
  /** f32 [1]: not 0 = one of them is not finite. */
  readonly found: TensorView;
}

/** Optimizers that one scaler serves between two updates. */
const MOST_OPTIMIZERS = 64;

/** Byte where the flags of the optimizers start, behind the scaler itself. */
const FOUND_OFFSET = 256;

/**
 * Scales a loss so that the gradients of 16-bit activations do not underflow, takes the scale out again, leaves updates with
 * overflowed gradients out, and adapts the scale (Micikevicius et al. 2017, arXiv:1710.03740).
 *
 * Everything is decided in device memory: no method waits for the device but {@linkcode GradScaler.stateDict}. For every
 * optimizer the order is {@linkcode GradScaler.scale}, backward, {@linkcode GradScaler.unscale} (needed for clipping only),
 * {@linkcode GradScaler.step}, and for all of them together {@linkcode GradScaler.update}. Gradients may be accumulated over
 * several backward passes in between; one that is not finite in the first of them still is at the end.
 *
 * A scale without `minScale` may fall below 1 and at last to 0 if every gradient is NaN: the reason is then not the scale.
 *
 * @example Usage
 * ```ts
 * import { Device, GradScaler, kernels } from "./mod.ts";
 * await using device = await Device.open("cpu");
 * await using stream = device.createStream();
 * using memory = device.createBuffer(4096);
 * stream.fill(memory, 0);
 * const loss = memory.as("f32", [1]);
 * const weight = memory.as("f32", [64], { offset: 1024 });
 * const gradient = memory.as("f32", [64], { offset: 2048 });
 * using scaler = GradScaler.open(device, { initScale: 1024 });
 * scaler.scale(loss, loss, { stream });
 * // ... the backward pass fills `gradient`
 * scaler.step("sgd", { gradient }, () => kernels.add(weight, weight, gradient, { stream }), { stream });
 * scaler.update({ stream });
 * console.log(await scaler.stateDict({ stream })); // scale 1024, growthTracker 1, and the settings
 * ```
 */
export class GradScaler implements Disposable {
  readonly #memory: DeviceBuffer | null;
  readonly #scaler: TensorView | null;
  readonly #optimizers = new Map<OptimizerKey, OptimizerRecord>();
  /** Values that are still to be written to the device: at first, and after a load. */
  #pending: ScalerValues | null;
  /** Whether anything was scaled since the scaler was opened. */
  #used = false;

  private constructor(memory: DeviceBuffer | null, values: ScalerValues | null) {
    this.#memory = memory;
    this.#scaler = memory?.as("f32", [SCALER_WIDTH]) ?? null;
    this.#pending = values;
  }

  /**
   * Takes 512 bytes of device memory, none if it is not enabled.
   *
   * @param device Where the gradients are.
   * @param options Settings; the defaults are those in common use.
   * @returns A scaler, to be disposed with `using`.
   * @throws {LoramemError} `BAD_ARGUMENT`, `OUT_OF_MEMORY`, `DISPOSED`.
   */
  static open(device: Device, options: GradScalerOptions = {}): GradScaler {
    const { enabled = true, ...settings } = options;
    const values = scalerValues(settings, "GradScaler.open");
    if (!enabled) return new GradScaler(null, null);
    const bytes = FOUND_OFFSET + 4 * MOST_OPTIMIZERS;
    return new GradScaler(device.createBuffer(bytes, { label: "gradScaler" }), values);
  }

  /** Whether it scales at all. */
  get enabled(): boolean {
    return this.#scaler !== null;
  }

  /**
   * y = loss * scale; without scaling, y = loss.
   *
   * @param y Any shape, f32, written; may be `loss`.
   * @param loss Same shape, f32, read.
   * @param options The stream.
   * @throws {LoramemError} `BAD_ARGUMENT`, `DISPOSED`, `DEVICE`.
   */
  scale(y: TensorView, loss: TensorView, options: KernelOptions): void {
    const scaler = this.factor(options);
    if (scaler === null) scale(y, loss, 1, options);
    else scalerScale(y, loss, scaler, options);
  }

  /**
   * The scaler for a kernel that multiplies by the scale itself, such as `kernels.linearCrossEntropy`. Takes the place of
   * {@linkcode GradScaler.scale}.
   *
   * @param options The stream.
   * @returns f32 [8], or null for one that is not enabled.
   * @throws {LoramemError} `DISPOSED`, `DEVICE`.
   */
  factor(options: KernelOptions): TensorView | null {
    if (this.#scaler === null) return null;
    if (!this.#used) {
      options.stream.fill(this.#scaler.buffer, 0);
      this.#used = true;
    }
    this.#flush(this.#scaler, options);
    return this.#scaler;
  }

  /**
   * Looks whether the gradients of an optimizer are finite as they stand, then takes the scale out of them. Needed before
   * clipping or anything else that reads gradients; {@linkcode GradScaler.step} does it otherwise.
   *
   * @param optimizer Any object or name that stands for the optimizer.
   * @param gradients f32 tensors by name, without gaps, updated. Parameters that got no gradient are left out.
   * @param options The stream.
   * @returns f32 [1] in device memory: not 0 = do not update; null for one that is not enabled.
   * @throws {LoramemError} `BAD_ARGUMENT` before anything was scaled, the second time before an update, after the step, or
   * naming a gradient that is not f32; `DISPOSED`, `DEVICE`.
   */
  unscale(
    optimizer: OptimizerKey,
    gradients: NamedGradients,
    options: KernelOptions,
  ): TensorView | null {
    const op = "GradScaler.unscale";
    const scaler = this.#inUse(op);
    if (scaler === null) return null;
    const record = this.#optimizers.get(optimizer);
    if (record !== undefined) {
      const what = record.stage === "UNSCALED" ? "was called already" : "is too late after step()";
      badArgument(op, `${what} for ${nameOf(optimizer)}: call update() first`, "optimizer");
    }
    if (this.#optimizers.size === MOST_OPTIMIZERS) {
      badArgument(op, `more than ${MOST_OPTIMIZERS} optimizers: use a second scaler`, "optimizer");
    }
    const entries = Object.entries(gradients);
    for (const [name, gradient] of entries) checkGradient(op, name, gradient);
    this.#flush(scaler, options);
    const offset = FOUND_OFFSET + 4 * this.#optimizers.size;
    const found = scaler.buffer.as("f32", [1], { offset });
    for (const [, gradient] of entries) scalerUnscale(gradient, found, scaler, options);
    this.#optimizers.set(optimizer, { stage: "UNSCALED", checked: entries.length, found });
    return found;
  }

  /**
   * Lets an optimizer take its step. `run` enqueues it; its kernels must leave parameters and state alone where `found` is
   * not 0: `kernels.gradNorm(..., { stream, found })` followed by `kernels.adamw` do so. No host synchronisation.
   *
   * @param optimizer As in {@linkcode GradScaler.unscale}.
   * @param gradients As there; not touched if `unscale` was called.
   * @param run Enqueues the optimizer. `found` is null where the scaler is not enabled.
   * @param options The stream.
   * @throws {LoramemError} `BAD_ARGUMENT` before anything was scaled, the second time before an update, or without any
   * gradient: a loss on which nothing depends is a mistake and no clean step; `DISPOSED`, `DEVICE`.
   */
  step(
    optimizer: OptimizerKey,
    gradients: NamedGradients,
    run: (found: TensorView | null) => void,
    options: KernelOptions,
  ): void {
    const op = "GradScaler.step";
    if (this.#inUse(op) === null) {
      run(null);
      return;
    }
    if (this.#optimizers.get(optimizer)?.stage === "STEPPED") {
      badArgument(
        op,
        `was called already for ${nameOf(optimizer)}: call update() first`,
        "optimizer",
      );
    }
    if (!this.#optimizers.has(optimizer)) this.unscale(optimizer, gradients, options);
    const record = this.#optimizers.get(optimizer) as OptimizerRecord;
    if (record.checked === 0) {
      const what = `no gradient was checked for ${nameOf(optimizer)}: pass those that the loss depends on`;
      badArgument(op, what, "gradients");
    }
    record.stage = "STEPPED";
    run(record.found);
  }

  /**
   * Adapts the scale to what all optimizers found since the last update, and starts over.
   *
   * @param options The stream. `newScale` sets the scale instead and leaves the growth tracker alone.
   * @throws {LoramemError} `BAD_ARGUMENT` if no gradient was checked and no `newScale` given; `DISPOSED`, `DEVICE`.
   */
  update(options: KernelOptions & { readonly newScale?: number }): void {
    const op = "GradScaler.update";
    const scaler = this.#inUse(op);
    if (scaler === null) return;
    const { newScale } = options;
    if (newScale !== undefined && !(newScale > 0 && Number.isFinite(Math.fround(newScale)))) {
      badArgument(op, `newScale must be a positive f32: it is ${newScale}`, "newScale", newScale);
    }
    const records = [...this.#optimizers.values()];
    if (newScale === undefined && !records.some(({ checked }) => checked > 0)) {
      badArgument(
        op,
        "no gradient was checked since the last update: call step() first",
        "options",
      );
    }
    this.#flush(scaler, options);
    const count = Math.max(1, records.length);
    const found = scaler.buffer.as("f32", [count], { offset: FOUND_OFFSET });
    scalerUpdate(scaler, found, newScale ?? 0, options);
    this.#optimizers.clear();
  }

  /**
   * Waits for the stream and reads the state. Take it after {@linkcode GradScaler.update}.
   *
   * @param options The stream.
   * @returns Scale, growth tracker and settings; `{}` for one that is not enabled.
   * @throws {LoramemError} `BAD_ARGUMENT` in the middle of a step; `DISPOSED`, `DEVICE`.
   */
  async stateDict(options: KernelOptions): Promise<GradScalerState> {
    const op = "GradScaler.stateDict";
    if (this.#scaler === null) return {};
    this.#betweenSteps(op);
    if (this.#pending !== null) return { ...this.#pending };
    const { device } = this.#scaler.buffer;
    using host = device.createPinnedBuffer(4 * SCALER_WIDTH);
    options.stream.copy(host, this.#scaler.buffer, { bytes: host.bytes });
    await options.stream.done();
    return readScaler(host.view(Uint8Array));
  }

  /**
   * Goes on from a saved state, before or after first use.
   *
   * @param state From {@linkcode GradScaler.stateDict}.
   * @throws {LoramemError} `BAD_ARGUMENT` for a state that is not one, the empty state of a scaler that was not enabled, or in
   * the middle of a step.
   */
  loadStateDict(state: GradScalerState): void {
    const op = "GradScaler.loadStateDict";
    if (this.#scaler === null) return;
    this.#betweenSteps(op);
    if (!("scale" in state)) {
      const what = "the state is empty: it is of a scaler that was not enabled";
      badArgument(op, `${what}: load the state of one that was, or none`, "state", state);
    }
    const { scale, growthTracker, growthFactor, backoffFactor, growthInterval } = state;
    const { minScale, maxScale } = state;
    const factors = { growthFactor, backoffFactor, growthInterval };
    const values = { scale, growthTracker, ...factors, minScale, maxScale };
    this.#pending = checkScaler(op, values);
  }

  /** Gives its memory back once the work enqueued so far has ended; twice is fine. */
  [Symbol.dispose](): void {
    this.#memory?.dispose();
  }

  /** The scaler in device memory; null if not enabled. Throws before its first use. */
  #inUse(op: string): TensorView | null {
    if (this.#scaler !== null && !this.#used) {
      badArgument(op, "nothing was scaled yet: call scale() before the backward pass", "scale");
    }
    return this.#scaler;
  }

  #betweenSteps(op: string): void {
    if (this.#optimizers.size === 0) return;
    badArgument(op, "a step is under way: call update() first", "update");
  }

  #flush(scaler: TensorView, options: KernelOptions): void {
    if (this.#pending === null) return;
    scalerSet(scaler, this.#pending, options);
    this.#pending = null;
  }
}

/** Gradients are those of f32 masters: what was rounded to 16 bits cannot be brought back by unscaling. */
function checkGradient(op: string, name: string, gradient: TensorView): void {
  if (gradient instanceof TensorView && gradient.dtype === "f32") return;
  const what = gradient instanceof TensorView ? String(gradient) : typeof gradient;
  const message = `${op}: the gradient ${name} must be f32: it is ${what}: keep f32 master weights and accumulate in f32`;
  throw new LoramemError("BAD_ARGUMENT", message, { name });
}

function nameOf(optimizer: OptimizerKey): string {
  return typeof optimizer === "string" ? `"${optimizer}"` : "this optimizer";
}
