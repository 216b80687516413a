/**
 * LoRA at real model shapes beside PEFT on one device: the same random checkpoint, the same learnable data, the same
 * initial adapter. Tokens per second, memory, and the losses side by side; the rows of several calls collect in one file.
 *
 *     bun bench/peers/run.ts --shapes 0.5B,1B --settings default,bf16a+compile --policies keep,checkpoint
 *
 * `--settings none` or `--policies none` leaves one side out. Without a GPU: `--device cpu --shapes small`.
 * Python is `python3`, or what PYTHON names; a setting that the machine cannot run is a row that says why.
 */
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { SETTINGS, SHAPES, type ShapeName } from "../../tests/shapes/session.ts";
import { makeCase } from "./case.ts";
import {
  compare,
  figure,
  listOf,
  memoryOf,
  mergeRows,
  type Row,
  resultsFile,
  runLoramem,
  runPeft,
  table,
} from "./measure.ts";

/** How PEFT is run, from the usual way to the fastest and the leanest that it offers. */
const PEFT_SETTINGS = [
  "default",
  "compile",
  "bf16a",
  "bf16a+compile",
  "bf16a+liger",
  "bf16a+liger+checkpoint",
];

const { values } = parseArgs({
  options: {
    shapes: { type: "string", default: "0.5B,1B,8B" },
    settings: { type: "string", default: PEFT_SETTINGS.join(",") },
    policies: { type: "string", default: "keep,checkpoint" },
    device: { type: "string", default: "cuda:0" },
    warm: { type: "string", default: "4" },
    steps: { type: "string", default: "12" },
    seed: { type: "string", default: "0" },
    limit: { type: "string", default: "150" },
    folder: { type: "string", default: join(tmpdir(), "loramem-cases") },
    out: { type: "string", default: resultsFile("peers_gpu.json") },
  },
});
const [warm, steps, seed, limit] = [values.warm, values.steps, values.seed, values.limit].map(
  Number,
) as [number, number, number, number];

for (const shape of listOf(values.shapes) as ShapeName[]) {
  const { model, documents, tokens } = SHAPES[shape];
  console.log(`${model}, ${documents} x ${tokens} tokens, ${warm} + ${steps} steps, seed ${seed}`);
  const folder = await makeCase(values.folder, shape, seed);
  const flags = { warm, steps };
  const measured: Row[] = [];
  for (const policy of listOf(values.policies)) {
    const ours = { ...flags, device: values.device, policy };
    measured.push(await runLoramem(folder, policy, ours, limit));
  }
  const device = values.device.replace(/:.*/, "");
  measured.push(...(await runPeft(folder, listOf(values.settings), { ...flags, device }, limit)));
  const about = { bench: "peers/run", seed, warm, steps, settings: SETTINGS, shapes: SHAPES };
  const rows = await mergeRows(values.out, about, shape, measured);
  report(rows.filter((row) => row.shape === shape));
}

/** Prints the rows of one shape, and what they come to. */
function report(rows: readonly Row[]): void {
  const header = ["", "tokens/s", "ms", "GiB", "driver GiB", "process GiB", "loss 1", "loss end"];
  const lines = rows.map((row) => [
    `${row.system} ${row.setting}`,
    figure(row.tokensPerSecond, 0),
    figure(row.stepMs, 1),
    figure(memoryOf(row)),
    figure(row.driverGiB),
    figure(row.processGiB),
    figure(row.losses?.[0], 3),
    row.error ?? figure(row.losses?.at(-1), 3),
  ]);
  console.log(table([header, ...lines]));
  for (const { setting, peer, best, tokensPerSecond, memory } of compare(rows)) {
    const bytes = figure(memory ?? undefined, 3);
    console.log(
      `${setting} beside the ${best} peer (${peer}): ${figure(tokensPerSecond, 3)} of its tokens/s, ${bytes} of its memory`,
    );
  }
}
