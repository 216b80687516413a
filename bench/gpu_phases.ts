/**
 * Where the time of a training step goes on a GPU, kernel by kernel as CUPTI records graph replays: time per phase beside its
 * floor, and the share of the time in which the GPU was busy.
 *
 *     cmake --build build --target cuda_activity
 *     bun bench/gpu_phases.ts [result.json] [model ...]
 *
 * Every model runs in a process of its own, once as it is and once recorded. A step lasts from the copy of its input to the
 * end of its update; busy is the union of its kernels, copies and fills.
 */
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";
import { linearModules } from "../src/api/nn/config_tensors.ts";
import type { SavePolicy } from "../src/api/plan/save_points.ts";
import { planRun } from "../src/api/train/run_plan.ts";
import { type Shape, shapeSpec } from "../tests/shapes/session.ts";
import { shapeDocuments, shapesOf } from "./gpu_shapes.ts";
import { measureRun } from "./random_session.ts";
import { writeResult } from "./results.ts";

const POLICIES: readonly SavePolicy[] = ["keep", "checkpoint"];
const [WARM, STEPS] = [3, 10];
const DEVICE = "cuda:0";
const SHAPES = shapesOf(DEVICE);

interface Activity {
  readonly kind: "kernel" | "memcpy" | "memset";
  readonly start: number;
  readonly end: number;
  readonly name: string;
}

/** Phases by what their kernels are called; matrix products are told apart by what stands around them. */
const NAMES: readonly (readonly [phase: string, name: RegExp])[] = [
  ["attention forward", /attention_(hopper_)?forward|attention_run/],
  ["attention backward", /attention/],
  ["loss", /loss_|labelled/],
  ["optimizer", /adamw|norm_partial|grad_norm|norm_of|scaler|square/],
  ["LoRA", /(down|da|gradient)_tiles|gradient_add|short_product|lm_tensor_product|simt|lora/],
  ["elementwise", /rms_norm|glu|rope|embedding|add_kernel|cast|scale/],
];

/** The phase of every activity of a step, in order. */
function phasesOf(step: readonly Activity[]): string[] {
  const firstHead = step.findIndex(({ name }) => name.includes("gather_labelled"));
  let head = false;
  return step.map(({ kind, name, start, end }, index) => {
    if (kind !== "kernel") return "copies and fills";
    const own = name.includes("hopper_product");
    const known = NAMES.find(([, pattern]) => pattern.test(name));
    // The head's products stand between the gathering of rows and the norm's backward pass.
    if (name.includes("gather_labelled")) head = true;
    else if (known?.[0] === "elementwise") head = false;
    if (!own && known !== undefined) return known[0];
    if (head) return "head";
    // A LoRA term that makes a way of its own stands right before the library's product, and is short beside it.
    const next = step[index + 1];
    const library = (other: Activity | undefined) =>
      other !== undefined &&
      !other.name.includes("hopper_product") &&
      !NAMES.some(([, pattern]) => pattern.test(other.name));
    const short = next !== undefined && end - start < (next.end - next.start) / 3;
    if (own && library(next) && short) return "LoRA";
    return index < firstHead ? "GEMM forward" : "GEMM backward";
  });
}

/** Milliseconds in which at least one activity ran. */
function busyTime(step: readonly Activity[]): number {
  let [busy, end] = [0, 0];
  for (const activity of step) {
    busy += Math.max(0, activity.end - Math.max(end, activity.start));
    end = Math.max(end, activity.end);
  }
  return busy / 1e6;
}

/** Every step: from its first copy to the device, fill or kernel to the end of its optimizer. */
function stepsOf(activities: readonly Activity[]): Activity[][] {
  const steps: Activity[][] = [];
  let step: Activity[] = [];
  let updated = false;
  for (const activity of activities) {
    const optimizer = activity.name.includes("adamw");
    if (updated && !optimizer) {
      steps.push(step);
      [step, updated] = [[], false];
    }
    const toHost = activity.kind === "memcpy" && activity.name === "2";
    if (step.length > 0 || !toHost) step.push(activity);
    updated = optimizer;
  }
  return steps;
}

/**
 * Milliseconds that each phase would take at the rates measured on an H200: products 760 TFLOP/s, copies 4.15 TB/s, attention
 * by cuDNN (head size 64: 319 and 264 TFLOP/s forward and backward, 128: 484 and 370).
 */
function floorsOf(shape: Shape, policy: SavePolicy): Record<string, number> {
  const { documents, tokens } = shape;
  const { config } = shapeSpec(shape, { device: DEVICE });
  const {
    hiddenSize: h,
    intermediateSize: mlp,
    layers,
    heads,
    kvHeads,
    headDim,
    vocabSize,
  } = config;
  const T = documents * tokens;
  const [q, k] = [heads * headDim, kvHeads * headDim];
  const linears = layers * (h * (q + 2 * k) + q * h + 3 * h * mlp);
  const again = policy === "checkpoint" ? linears - layers * h * mlp : 0;
  const product = (weights: number) => (2 * T * weights) / 760e9;
  const copy = (bytes: number) => bytes / 4.15e9;
  const [forward, backward] = headDim <= 64 ? [319e9, 264e9] : [484e9, 370e9];
  const pairs = (documents * tokens * (tokens + 1)) / 2;
  const attention = 4 * q * pairs * layers;
  const widths = linearModules(config).reduce(
    (sum, { inFeatures, outFeatures }) => sum + 2 * inFeatures + outFeatures,
    0,
  );
  return {
    "GEMM forward": product(linears),
    "GEMM backward": product(linears + again),
    head: 2 * product(h * vocabSize),
    "attention forward": attention / forward,
    "attention backward": (2.5 * attention) / backward + (again > 0 ? attention / forward : 0),
    elementwise: copy((9 * mlp + 14 * h + 4 * (q + k) + 2 * q) * 2 * T * layers),
    loss: copy(4 * vocabSize * 2 * T),
    LoRA: copy(widths * 2 * T),
  };
}

/** Child: runs the steps; gives the milliseconds of the median one. */
async function runSteps(shape: Shape, policy: SavePolicy): Promise<void> {
  const spec = shapeSpec(shape, { device: DEVICE });
  const lossChunkTokens = policy === "checkpoint" ? 512 : 1024;
  const run = planRun({ ...spec, dims: { ...spec.dims, lossChunkTokens } }, policy);
  const how = { device: DEVICE, warm: WARM, steps: STEPS } as const;
  const { seconds } = await measureRun(run, shapeDocuments(shape), how);
  await new Promise((resolve) => setTimeout(resolve, 500)); // the recorder asks for the last records
  console.log(JSON.stringify({ median: seconds * 1000 }));
}

function spawnSteps(shape: Shape, policy: SavePolicy, env: Record<string, string>): number {
  const script = fileURLToPath(import.meta.url);
  const runtime = "Deno" in globalThis ? ["run", "-A", script] : [script];
  const args = [...runtime, "--steps", String(SHAPES.indexOf(shape)), policy];
  const child = spawnSync(process.execPath, args, {
    env: { ...process.env, ...env },
    encoding: "utf8",
    maxBuffer: 1 << 26,
  });
  const line = child.stdout.trim().split("\n").at(-1) ?? "";
  if (child.status !== 0 || !line.startsWith("{")) {
    throw new Error(`steps failed (${child.status}): ${child.stdout}${child.stderr}`);
  }
  if (child.stderr !== "") console.log(child.stderr.trim());
  return (JSON.parse(line) as { median: number }).median;
}

function readActivities(file: string): Activity[] {
  const lines = readFileSync(file, "utf8").trimEnd().split("\n");
  const origin = BigInt(lines[0]?.split(" ")[1] ?? "0");
  const activities = lines.map((text): Activity => {
    const [kind, start, end, ...name] = text.split(" ");
    // Beyond 2^53: only differences of nanoseconds are of interest.
    const at = (value = "0") => Number(BigInt(value) - origin);
    return {
      kind: kind as Activity["kind"],
      start: at(start),
      end: at(end),
      name: name.join(" "),
    };
  });
  return activities.sort((a, b) => a.start - b.start);
}

function report(shape: Shape, policy: SavePolicy): Record<string, unknown> {
  const { model, documents, tokens } = shape;
  const folder = mkdtempSync(join(tmpdir(), "loramem-phases-"));
  try {
    const file = join(folder, "activity");
    const plain = spawnSteps(shape, policy, {});
    const library =
      process.env.LORAMEM_ACTIVITY_LIB ??
      fileURLToPath(new URL("../build/lib/libcuda_activity.so", import.meta.url));
    const recorded = spawnSteps(shape, policy, {
      CUDA_INJECTION64_PATH: library,
      LORAMEM_ACTIVITY: file,
    });
    const activities = readActivities(file);
    const steps = stepsOf(activities).slice(WARM);
    const spans = steps.map((step) => {
      const [first, last] = [step[0] as Activity, step.at(-1) as Activity];
      return { step, ms: (last.end - first.start) / 1e6 };
    });
    const middle = spans.toSorted((a, b) => a.ms - b.ms)[spans.length >> 1];
    if (middle === undefined) {
      const names = new Set(activities.map(({ kind, name }) => `${kind} ${name.slice(0, 60)}`));
      const seen = [...names].slice(0, 40).join("\n");
      throw new Error(`no step was recorded: ${activities.length} activities\n${seen}`);
    }
    const names = phasesOf(middle.step);
    const phases: Record<string, number> = {};
    middle.step.forEach(({ start, end }, index) => {
      const phase = names[index] as string;
      phases[phase] = (phases[phase] ?? 0) + (end - start) / 1e6;
    });
    const busy = busyTime(middle.step);
    phases.idle = middle.ms - busy;
    const floors = floorsOf(shape, policy);
    const kernels = new Map<string, { ms: number; calls: number; phase: string }>();
    middle.step.forEach(({ kind, name, start, end }, index) => {
      const key = kind === "kernel" ? name : kind;
      const row = kernels.get(key) ?? { ms: 0, calls: 0, phase: names[index] as string };
      kernels.set(key, { ...row, ms: row.ms + (end - start) / 1e6, calls: row.calls + 1 });
    });
    const top = [...kernels].sort(([, a], [, b]) => b.ms - a.ms).slice(0, 24);
    console.log(
      `\n${model} ${documents} x ${tokens} ${policy}: step ${plain.toFixed(1)} ms, recorded ${recorded.toFixed(1)} ms, ` +
        `on the device ${middle.ms.toFixed(1)} ms, busy ${((100 * busy) / middle.ms).toFixed(1)} % of it, ` +
        `${((100 * busy) / plain).toFixed(1)} % of the step as it is; ${middle.step.length} activities`,
    );
    for (const [phase, ms] of Object.entries(phases).sort(([, a], [, b]) => b - a)) {
      const floor = floors[phase];
      const beside =
        floor === undefined ? "" : `   floor ${floor.toFixed(2)}, ${(ms - floor).toFixed(2)} above`;
      console.log(`  ${phase.padEnd(20)} ${ms.toFixed(2).padStart(8)} ms${beside}`);
    }
    for (const [name, { ms, calls, phase }] of top)
      console.log(
        `    ${ms.toFixed(3).padStart(9)} ms ${String(calls).padStart(5)} x  ${phase}: ${name.slice(0, 110)}`,
      );
    return {
      model,
      batch: `${documents} x ${tokens}`,
      policy,
      stepMs: plain,
      recordedMs: recorded,
      deviceMs: middle.ms,
      busyShare: busy / middle.ms,
      busyShareOfStep: busy / plain,
      phases,
      floors,
      kernels: Object.fromEntries(top),
    };
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

const [mode, index, policy] = process.argv.slice(2);
if (mode === "--steps") {
  await runSteps(SHAPES[Number(index)] as Shape, policy as SavePolicy);
} else {
  const [file, ...wanted] = process.argv.slice(2);
  const shapes = SHAPES.filter(({ model }) => wanted.length === 0 || wanted.includes(model));
  const rows = shapes.flatMap((shape) => POLICIES.map((each) => report(shape, each)));
  if (file !== undefined) await writeResult(file, { bench: "gpu_phases", rows });
}
