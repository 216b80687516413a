/**
 * How far bf16 leads from fp32, here and in PEFT: losses of every step and gradients of the first, on learnable data. The
 * reference is PEFT with everything in fp32 and TF32 off; the weights are bf16 numbers, so all sides start alike. With
 * `--fp16` also fp16 with a gradient scaler that starts too high, so that it skips steps, beside bf16.
 *
 *     bun bench/peers/distance.ts --shapes 0.5B --fp16 0.5B
 */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { toFloat32 } from "../../src/api/io/dtype.ts";
import { openSafetensors } from "../../src/api/io/safetensors.ts";
import { SETTINGS, SHAPES, type ShapeName } from "../../tests/shapes/session.ts";
import { makeCase } from "./case.ts";
import {
  figure,
  listOf,
  mergeRows,
  type Row,
  resultsFile,
  runLoramem,
  runPeft,
  table,
} from "./measure.ts";

const { values } = parseArgs({
  options: {
    shapes: { type: "string", default: "0.5B,1B,8B" },
    reference: { type: "string", default: "fp32" },
    settings: { type: "string", default: "default,bf16a" },
    fp16: { type: "string", default: "none" },
    "initial-scale": { type: "string", default: String(2 ** 30) },
    device: { type: "string", default: "cuda:0" },
    steps: { type: "string", default: "50" },
    seed: { type: "string", default: "0" },
    limit: { type: "string", default: "300" },
    folder: { type: "string", default: join(tmpdir(), "loramem-cases") },
    out: { type: "string", default: resultsFile("distance_gpu.json") },
  },
});
const { device, reference } = values;
const [steps, seed, limit] = [values.steps, values.seed, values.limit].map(Number) as [
  number,
  number,
  number,
];

/** What is kept of a run: no times, as fp32 and the first gradients disturb them. */
interface Distance extends Row {
  readonly fall?: number;
  /** Of the losses, in nats. */
  readonly meanLossDistance?: number;
  readonly maxLossDistance?: number;
  /** ||g - g32|| / ||g32|| in the first step: over all adapter matrices, and over those of one kind of linear. */
  readonly gradientDistance?: number;
  readonly gradientDistances?: Readonly<Record<string, number>>;
}

const about = { bench: "peers/distance", seed, steps, reference, settings: SETTINGS };
for (const shape of listOf(values.shapes) as ShapeName[]) {
  const folder = await makeCase(values.folder, shape, seed);
  const gradients = await mkdtemp(join(tmpdir(), "loramem-gradients-"));
  try {
    const own = join(gradients, "loramem.safetensors");
    const flags = { warm: 0, steps };
    const rows = [
      await runLoramem(folder, "keep", { ...flags, device, gradients: own }, limit),
      ...(await runPeft(
        folder,
        [reference, ...listOf(values.settings)],
        { ...flags, device: device.replace(/:.*/, ""), gradients },
        limit,
      )),
    ];
    const exact = rows.find((row) => row.setting === reference) as Row;
    const exactGradients = join(gradients, `${reference}.safetensors`);
    const distances: Distance[] = [];
    for (const row of rows) {
      const file = row.system === "loramem" ? own : join(gradients, `${row.setting}.safetensors`);
      const failed = row.error !== undefined || exact.error !== undefined;
      const gradient = failed ? {} : await gradientDistances(file, exactGradients);
      distances.push({ ...asDistance(row, exact), ...gradient });
    }
    await mergeRows(values.out, about, shape, distances);
    report(shape, distances);
  } finally {
    await rm(gradients, { recursive: true });
  }
}
for (const shape of listOf(values.fp16) as ShapeName[]) {
  const folder = await makeCase(values.folder, shape, seed);
  const flags = { warm: 0, steps, device };
  const bf16 = await runLoramem(folder, "keep", flags, limit);
  const scaled = { precision: "fp16", "initial-scale": values["initial-scale"] };
  const fp16 = await runLoramem(folder, "fp16 keep", { ...flags, ...scaled }, limit);
  const distances = [asDistance(bf16, bf16), asDistance(fp16, bf16)];
  await mergeRows(values.out, about, shape, distances.slice(1));
  report(`${shape}, distances from bf16`, distances);
}

function asDistance(row: Row, exact: Row): Distance {
  const { system, setting, error, losses, skipped } = row;
  if (error !== undefined || losses === undefined) return { system, setting, error: error ?? "" };
  const apart = losses.map((loss, step) => Math.abs(loss - (exact.losses?.[step] ?? Number.NaN)));
  return {
    system,
    setting,
    losses,
    ...(skipped === undefined ? {} : { skipped }),
    fall: (losses[0] as number) - (losses.at(-1) as number),
    meanLossDistance: apart.reduce((sum, one) => sum + one, 0) / apart.length,
    maxLossDistance: Math.max(...apart),
  };
}

/** Relative distances between two files of the same tensors. */
async function gradientDistances(
  path: string,
  exactPath: string,
): Promise<Required<Pick<Distance, "gradientDistance" | "gradientDistances">>> {
  await using file = await openSafetensors(path);
  await using exact = await openSafetensors(exactPath);
  const sums = new Map<string, { apart: number; norm: number }>([["", { apart: 0, norm: 0 }]]);
  for (const entry of exact.tensors.values()) {
    const mine = file.tensors.get(entry.name);
    if (mine === undefined) throw new Error(`${path} lacks ${entry.name}`);
    const [a, b] = [new Uint8Array(mine.bytes), new Uint8Array(entry.bytes)];
    await file.read(mine, a);
    await exact.read(entry, b);
    const [values, expected] = [toFloat32("F32", a), toFloat32("F32", b)];
    let [apart, norm] = [0, 0];
    for (let index = 0; index < expected.length; index++) {
      apart += ((values[index] as number) - (expected[index] as number)) ** 2;
      norm += (expected[index] as number) ** 2;
    }
    for (const kind of ["", entry.name.replace(/^.*\.(\w+)\.lora_[AB]$/, "$1")]) {
      const sum = sums.get(kind) ?? { apart: 0, norm: 0 };
      sums.set(kind, { apart: sum.apart + apart, norm: sum.norm + norm });
    }
  }
  const relative = [...sums].map(([kind, { apart, norm }]) => [kind, Math.sqrt(apart / norm)]);
  const { "": gradientDistance, ...kinds } = Object.fromEntries(relative);
  return { gradientDistance, gradientDistances: kinds };
}

function report(title: string, rows: readonly Distance[]): void {
  const kinds = Object.keys(rows.find((row) => row.gradientDistances)?.gradientDistances ?? {});
  const header = ["", "loss 1", "loss end", "fall", "mean |d|", "max |d|", "skipped", "gradient"];
  const lines = rows.map((row) => [
    `${row.system} ${row.setting}`,
    figure(row.losses?.[0], 4),
    figure(row.losses?.at(-1), 4),
    figure(row.fall, 3),
    figure(row.meanLossDistance, 5),
    figure(row.maxLossDistance, 5),
    row.error ?? figure(row.skipped?.length, 0),
    figure(row.gradientDistance, 6),
    ...kinds.map((kind) => figure(row.gradientDistances?.[kind], 4)),
  ]);
  console.log(`${title}: ${SHAPES[title as ShapeName]?.model ?? ""}`);
  console.log(table([[...header, ...kinds], ...lines]));
}
