/**
 * LoRA on the CPU beside PEFT + torch: the demo model, 8 documents of 128 tokens, all labelled, r = 16 on all linears,
 * fp32, AdamW, clipping. Alternates the two, so that both see the same machine. PEFT is left out where Python lacks it.
 *
 *     bun bench/peers/cpu.ts [result.json]
 */
import { execFileSync } from "node:child_process";
import { availableParallelism } from "node:os";
import process from "node:process";
import { SETTINGS } from "../../tests/shapes/session.ts";
import { BATCH, MODEL, openDemoSession, SEQUENCE } from "../demo_session.ts";
import { writeResult } from "../results.ts";

const [WARM, STEPS, ROUNDS] = [3, 12, 3];

async function loramem(threads: number): Promise<number> {
  await using demo = await openDemoSession(threads, "graph");
  const seconds: number[] = [];
  for (let step = 0; step < WARM + STEPS; step++) {
    const start = performance.now();
    await demo.session.trainStep(demo.documents, SETTINGS);
    if (step >= WARM) seconds.push((performance.now() - start) / 1000);
  }
  return (BATCH * SEQUENCE) / median(seconds);
}

function peft(threads: number): number | null {
  try {
    const args = ["bench/peers/peft_cpu.py", MODEL, threads, BATCH, SEQUENCE].map(String);
    const stdio = ["ignore", "pipe", "ignore"] as const;
    const output = execFileSync("python3", args, { encoding: "utf8", stdio: [...stdio] });
    return JSON.parse(output.trim().split("\n").at(-1) ?? "").tokensPerSecond;
  } catch {
    return null;
  }
}

function median(values: readonly number[]): number {
  return values.toSorted((a, b) => a - b)[values.length >> 1] as number;
}

const rows: Record<string, unknown>[] = [];
for (const threads of new Set([2, availableParallelism()])) {
  const ours: number[] = [];
  const theirs: number[] = [];
  for (let round = 0; round < ROUNDS; round++) {
    ours.push(await loramem(threads));
    const speed = peft(threads);
    if (speed !== null) theirs.push(speed);
  }
  const speed = median(ours);
  const peer = theirs.length === 0 ? null : median(theirs);
  const ratio = peer === null ? null : speed / peer;
  rows.push({ threads, loramem: speed, peft: peer, ratio });
  const beside = ratio === null ? "" : `, PEFT ${Math.round(peer ?? 0)}, ratio ${ratio.toFixed(2)}`;
  console.log(`${threads} threads: loramem ${Math.round(speed)} tokens/s${beside}`);
}
const file = process.argv[2];
if (file !== undefined) {
  await writeResult(file, { bench: "peers/cpu", batch: BATCH, sequence: SEQUENCE, rows });
}
