/**
 * Speed against memory at the shapes that PEFT was measured at: our measured curve from the leanest to the fastest plan; at
 * each peer's peak memory, our tokens per second; at each peer's tokens per second, our smallest memory; and for 1B the most
 * tokens of one step that train in the bytes of PEFT's best settings.
 *
 *     bun bench/memory_curve.ts [--part curve|tokens|all] [--shapes 0,1,2] [--points 5] [--steps 5] [--device auto]
 *         [--out result.json]
 *
 * `--device cpu` runs a small model against made-up peers, to try the mechanics.
 */
import { parseArgs } from "node:util";
import { describePoints } from "../src/api/plan/save_points.ts";
import { FitSearch, largestTokens } from "../src/api/train/fit_run.ts";
import type { RunPlan } from "../src/api/train/run_plan.ts";
import { type Shape, shapeSpec } from "../tests/shapes/session.ts";
import { benchDevice, searchShape, shapeDocuments, shapesOf, spread } from "./gpu_shapes.ts";
import { gib, type Measured, measureRun, printTable, randomLoad } from "./random_session.ts";
import { writeResult } from "./results.ts";

const { values: flags } = parseArgs({
  options: {
    part: { type: "string", default: "all" },
    shapes: { type: "string", default: "0,1,2" },
    points: { type: "string", default: "5" },
    steps: { type: "string", default: "5" },
    device: { type: "string", default: "auto" },
    out: { type: "string" },
  },
});
const { device, profile } = await benchDevice(flags.device);
const steps = Number(flags.steps);
const GIB = 2 ** 30;
/** Page-locked host memory that plans may take: for layer inputs, and in the search for the most tokens also for weights. */
const HOST = 32 * GIB;

/** A peer's setting: tokens per second and the allocator's peak in GiB. */
type Peer = readonly [name: string, tokensPerSecond: number, gib: number];

/**
 * PEFT 0.21 on torch 2.11 on an H200: bf16 base, r = 16 on all linears, fused AdamW, no gradient accumulation; "bf16" =
 * adapters in bf16, where PEFT's default is fp32; "lean" = bf16 + Liger + checkpointing.
 */
const PEERS: Readonly<Record<string, readonly Peer[]>> = {
  "Qwen2.5-0.5B": [
    ["default", 43_100, 30.0],
    ["compile", 81_800, 19.2],
    ["bf16", 64_100, 24.8],
    ["bf16 + compile", 113_000, 16.0],
    ["bf16 + Liger", 47_300, 8.6],
    ["lean", 24_100, 1.83],
  ],
  "Llama-3.2-1B": [
    ["default", 36_500, 33.6],
    ["compile", 51_200, 22.5],
    ["bf16", 53_100, 26.5],
    ["bf16 + compile", 66_100, 18.4],
    ["bf16 + Liger", 73_100, 12.0],
    ["lean", 41_600, 3.76],
  ],
  "Llama-3.1-8B": [
    ["default", 8850, 57.4],
    ["bf16", 12_300, 43.7],
    ["bf16 + compile", 14_100, 36.8],
    ["bf16 + Liger", 14_800, 32.5],
    ["lean", 10_100, 17.0],
  ],
  "four layers": [
    ["made up", 3000, 0.03],
    ["made up, lean", 5, 0.0001],
  ],
};

interface Point extends Measured {
  readonly savePoints: string;
  readonly lossChunkTokens: number;
}

interface Curve {
  readonly model: string;
  readonly batch: string;
  readonly points: readonly Point[];
  readonly peers: readonly {
    readonly name: string;
    readonly tokensPerSecond: number;
    readonly gib: number;
    /** The fastest of our plans in the peer's memory; null = none fits. */
    readonly atItsMemory: Point | null;
    /** The leanest of our plans that is as fast; null = none is. */
    readonly atItsSpeed: Point | null;
  }[];
}

interface MostTokens {
  readonly model: string;
  readonly peer: string;
  readonly gib: number;
  readonly peerTokens: number;
  readonly tokens: number;
  readonly documents: number;
  readonly measured: Measured;
}

async function measure(shape: Shape, run: RunPlan): Promise<Point> {
  const measured = await measureRun(run, shapeDocuments(shape), { device, warm: 2, steps });
  const savePoints = describePoints(run.savePoints);
  return { savePoints, lossChunkTokens: run.spec.dims.lossChunkTokens, ...measured };
}

/** Measures plans spread over the curve, and those that are the fastest in a peer's memory. */
async function curveOf(shape: Shape): Promise<Curve> {
  const { model, documents, tokens } = shape;
  const search = searchShape(shape, device, profile, { weights: "resident", hostBudget: HOST });
  const front = search.frontier();
  const peers = PEERS[model] ?? [];
  const within = (bytes: number) => front.findLast(({ deviceBytes }) => deviceBytes <= bytes);
  const wanted = new Set([
    ...spread(front, Number(flags.points)),
    ...peers.flatMap(([, , peak]) => within(peak * GIB) ?? []),
  ]);
  const points: Point[] = [];
  for (const candidate of front) {
    if (wanted.has(candidate)) points.push(await measure(shape, search.plan(candidate)));
  }
  const fastest = (some: readonly Point[]) =>
    some.toSorted((a, b) => b.tokensPerSecond - a.tokensPerSecond)[0] ?? null;
  return {
    model,
    batch: `${documents} x ${tokens}`,
    points,
    peers: peers.map(([name, tokensPerSecond, peak]) => ({
      name,
      tokensPerSecond,
      gib: peak,
      atItsMemory: fastest(points.filter(({ planBytes }) => planBytes <= peak * GIB)),
      atItsSpeed: points.find((point) => point.tokensPerSecond >= tokensPerSecond) ?? null,
    })),
  };
}

/** The most tokens of one micro-batch that train in a peer's bytes, whole documents, run within those bytes. */
async function mostTokens(shape: Shape, peer: Peer): Promise<MostTokens | null> {
  const { model, tokens } = shape;
  const [name, , peak] = peer;
  const many = (documents: number): Shape => ({ model, documents, tokens });
  const optionsFor = (documents: number) => ({
    savePoints: null,
    lossChunkTokens: null,
    hostBudget: HOST,
    profile,
    step: { load: randomLoad(documents, tokens), microBatches: 1 },
  });
  const most = device === "cpu" ? 8 : 64;
  const rows = largestTokens(
    shapeSpec(many(most), { device }),
    optionsFor(most),
    peak * GIB,
    most * tokens,
  );
  const documents = Math.floor((rows ?? 0) / tokens);
  if (documents === 0) return null;
  const run = new FitSearch(shapeSpec(many(documents), { device }), optionsFor(documents)).fit(
    peak * GIB,
  );
  const times = { warm: 1, steps: 2, limit: peak * GIB };
  const measured = await measureRun(run, shapeDocuments(many(documents)), { device, ...times });
  const peerTokens = shape.documents * tokens;
  return {
    model,
    peer: name,
    gib: peak,
    peerTokens,
    tokens: documents * tokens,
    documents,
    measured,
  };
}

const curves: Curve[] = [];
const most: MostTokens[] = [];
const shapes = shapesOf(device);
const chosen = shapes.filter((_, index) => flags.shapes.split(",").includes(String(index)));
if (flags.part !== "tokens") for (const shape of chosen) curves.push(await curveOf(shape));
if (flags.part !== "curve") {
  const shape = shapes.find(({ model }) => model === "Llama-3.2-1B") ?? (shapes[0] as Shape);
  // PEFT's fastest setting and its leanest one.
  for (const peer of (PEERS[shape.model] ?? []).slice(-2)) {
    const row = await mostTokens(shape, peer);
    if (row !== null) most.push(row);
  }
}

const speed = (value: number) => String(Math.round(value));
for (const { model, batch, points, peers } of curves) {
  console.log(`${model} ${batch}`);
  printTable(
    ["plan GiB", "driver", "tokens/s", "save points"],
    points.map((point) => [
      gib(point.planBytes),
      gib(point.driverEnd),
      speed(point.tokensPerSecond),
      point.savePoints,
    ]),
  );
  printTable(
    ["PEFT", "GiB", "tokens/s", "ours in its GiB", "ratio", "our GiB at its tokens/s", "ratio"],
    peers.map(({ name, tokensPerSecond, gib: peak, atItsMemory, atItsSpeed }) => [
      name,
      peak.toFixed(2),
      speed(tokensPerSecond),
      atItsMemory === null ? "does not fit" : speed(atItsMemory.tokensPerSecond),
      atItsMemory === null ? "-" : (atItsMemory.tokensPerSecond / tokensPerSecond).toFixed(2),
      atItsSpeed === null ? "not as fast" : gib(atItsSpeed.planBytes),
      atItsSpeed === null ? "-" : (atItsSpeed.planBytes / GIB / peak).toFixed(2),
    ]),
  );
}
if (most.length > 0) {
  printTable(
    ["equal bytes", "PEFT", "its tokens/step", "ours", "ratio", "plan GiB", "driver", "tokens/s"],
    most.map((row) => [
      `${row.model} ${row.gib} GiB`,
      row.peer,
      String(row.peerTokens),
      String(row.tokens),
      (row.tokens / row.peerTokens).toFixed(2),
      gib(row.measured.planBytes),
      gib(row.measured.driverEnd),
      speed(row.measured.tokensPerSecond),
    ]),
  );
}
if (flags.out !== undefined) {
  const settings = { device, steps, precision: "bf16", rank: 16, seed: 0, profile: profile.name };
  await writeResult(flags.out, { bench: "memory_curve", settings, curves, mostTokens: most });
}
