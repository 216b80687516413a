/** Adapters between the flat arena on the device and PEFT's tensors on the host. */
import { LoramemError } from "../../ffi/error.ts";
import { philox4x32 } from "../data/order.ts";
import type { AdapterTensors } from "../io/adapter.ts";
import type { AdapterTensor } from "../nn/adapters.ts";
import type { Executor } from "../run/executor.ts";
import { downloadFloats, uploadFloats } from "./load_weights.ts";
import type { RunPlan } from "./run_plan.ts";

/** Stream of the random numbers of adapter initialization, apart from that of the data order. */
const INIT_STREAM = 0x1a0b;

/**
 * Fresh adapters: A uniform in +-1 / sqrt(in), which is Kaiming-uniform with a = sqrt(5) (He et al. 2015,
 * arXiv:1502.01852), B zero. A depends on the seed and on its place in the arena only.
 */
export async function initializeAdapters(
  executor: Executor,
  run: RunPlan,
  seed: number,
): Promise<void> {
  clearState(executor, run);
  const { tensors, master } = run.adapters;
  for (const [index, tensor] of tensors.entries()) {
    if (tensor.matrix !== "A") continue;
    const values = kaimingUniform(tensor, seed, index);
    await uploadFloats(executor, run.staging.transfer, master, tensor.element, values);
  }
  await castMasters(executor, run);
}

/**
 * Adapters from a PEFT adapter of the same modules and ranks.
 *
 * @throws {LoramemError} BAD_FILE naming a module that is missing or has another shape.
 */
export async function importAdapters(
  executor: Executor,
  run: RunPlan,
  from: readonly AdapterTensors[],
): Promise<void> {
  const byPath = new Map(from.map((pair) => [pair.path, pair]));
  const names = new Set(run.adapters.tensors.map((tensor) => modulePath(tensor)));
  for (const path of byPath.keys()) {
    if (!names.has(path))
      throw mismatch(path, "the model has no such module, or it is not adapted");
  }
  clearState(executor, run);
  for (const tensor of run.adapters.tensors) {
    const path = modulePath(tensor);
    const pair = byPath.get(path);
    const values = tensor.matrix === "A" ? pair?.a : pair?.b;
    if (values === undefined) throw mismatch(path, "it is not in the adapter");
    if (values.length !== tensor.shape[0] * tensor.shape[1]) {
      throw mismatch(
        path,
        `lora_${tensor.matrix} has ${values.length} elements, not [${tensor.shape}]`,
      );
    }
    await uploadFloats(executor, run.staging.transfer, run.adapters.master, tensor.element, values);
  }
  await castMasters(executor, run);
}

/** The adapters as PEFT's tensors: the f32 masters, or with `which` their gradients. */
export async function exportAdapters(
  executor: Executor,
  run: RunPlan,
  which: "master" | "gradient" = "master",
): Promise<AdapterTensors[]> {
  const pairs = new Map<
    string,
    { a?: Float32Array; b?: Float32Array; shapes: Record<"A" | "B", readonly [number, number]> }
  >();
  for (const tensor of run.adapters.tensors) {
    const path = modulePath(tensor);
    const pair = pairs.get(path) ?? { shapes: { A: [0, 0], B: [0, 0] } };
    const count = tensor.shape[0] * tensor.shape[1];
    const values = await downloadFloats(
      executor,
      run.staging.transfer,
      run.adapters[which],
      tensor.element,
      count,
    );
    pair.shapes[tensor.matrix] = tensor.shape;
    if (tensor.matrix === "A") pair.a = values;
    else pair.b = values;
    pairs.set(path, pair);
  }
  return [...pairs].map(([path, { a, b, shapes }]) => ({
    path,
    rank: shapes.A[0],
    inFeatures: shapes.A[1],
    outFeatures: shapes.B[0],
    a: a as Float32Array,
    b: b as Float32Array,
  }));
}

function modulePath(tensor: AdapterTensor): string {
  return tensor.name.replace(/\.lora_[AB]\.weight$/, "");
}

function mismatch(path: string, what: string): LoramemError {
  const advice = "choose the adapter that was trained on this model with these target modules";
  return new LoramemError(
    "BAD_FILE",
    `adapter: module does not match: ${path}: ${what}: ${advice}`,
    { tensor: path },
  );
}

/** A run from its beginning: zeroes masters (and so the padding between them), gradients, moments and the count of steps. */
export function clearState(executor: Executor, { adapters }: RunPlan): void {
  const { master, copy, gradient, m, v, state, metrics } = adapters;
  for (const value of [master, copy, gradient, m, v, state, metrics]) {
    if (value !== null) executor.clear(value);
  }
}

/** Brings the compute copy in line with the masters. */
export async function castMasters(executor: Executor, { adapters }: RunPlan): Promise<void> {
  if (adapters.copy !== null) executor.cast(adapters.copy, adapters.master);
  await executor.stream.done();
}

function kaimingUniform({ shape }: AdapterTensor, seed: number, index: number): Float32Array {
  const bound = 1 / Math.sqrt(shape[1]);
  const values = new Float32Array(shape[0] * shape[1]);
  const out = new Uint32Array(4);
  const counter = new Uint32Array(4);
  const key = Uint32Array.of(seed, INIT_STREAM);
  for (let at = 0; at < values.length; at += 4) {
    counter[0] = at / 4;
    counter[1] = index;
    philox4x32(out, counter, key);
    for (let lane = 0; lane < 4 && at + lane < values.length; lane++) {
      values[at + lane] = ((((out[lane] as number) + 0.5) / 2 ** 32) * 2 - 1) * bound;
    }
  }
  return values;
}
