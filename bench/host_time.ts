/**
 * Time that JavaScript spends per native call of a training step, and whether its heap grows over many steps.
 *
 *     bun bench/host_time.ts
 *     deno run -A --v8-flags=--expose-gc bench/host_time.ts
 *
 * The demo's programs are enqueued again and again while the device is busy with a first, long one: what is timed is the
 * host's work alone, without waking a sleeping device thread. Batches are short so that the device catches up in time.
 */
import process from "node:process";
import { SETTINGS } from "../tests/shapes/session.ts";
import { openGolden, readGolden } from "../tests/train/support.ts";
import { openDemoSession } from "./demo_session.ts";

const [WARM, ROUNDS, REPEATS, STEPS] = [300, 300, 5, 1000];

function collect(): void {
  const scope = globalThis as { gc?: () => void; Bun?: { gc(force: boolean): void } };
  if (scope.Bun !== undefined) scope.Bun.gc(true);
  else scope.gc?.();
}

for (const mode of ["graph", "eager"] as const) {
  await using demo = await openDemoSession(1, mode);
  const { session } = demo;
  const { executor } = session;
  const [long] = session.pack(demo.documents);
  const short = demo.documents.slice(0, 1).map(({ ids, labelled, where }) => ({
    ids: ids.slice(0, 4),
    labelled: labelled.slice(0, 4),
    where,
  }));
  const [batch] = session.pack(short);
  if (batch === undefined || long === undefined) throw new Error("no batch");
  const chunks = session.headChunks(batch);
  // An eager round fills the stream's queue quickly; a full queue would make the host wait for the device.
  const rounds = mode === "graph" ? ROUNDS : 20;
  const times: number[] = [];
  let calls = 0;
  for (let repeat = 0; repeat < REPEATS; repeat++) {
    await session.stage(long, 1);
    await executor.run("train", session.headChunks(long));
    await session.stage(batch, 1);
    for (let round = 0; round < (repeat === 0 ? WARM : 0); round++) {
      await executor.run("train", chunks);
      if (mode === "eager") await executor.stream.done();
    }
    await executor.stream.done();
    await session.stage(long, 1);
    await executor.run("train", session.headChunks(long));
    await session.stage(batch, 1);
    const before = executor.device.stats().kernelLaunches;
    const start = performance.now();
    for (let round = 0; round < rounds; round++) await executor.run("train", chunks);
    times.push((performance.now() - start) / rounds);
    calls = (executor.device.stats().kernelLaunches - before) / rounds;
    await executor.stream.done();
  }
  const median = times.sort((a, b) => a - b)[REPEATS >> 1] as number;
  const perThousand = (median * 1000 * 1000) / calls;
  console.log(
    `${mode}: ${calls} native calls a step, ${perThousand.toFixed(1)} us per 1,000 of them`,
  );
}

// A tiny model makes many steps quickly; its steps allocate what every step does.
const golden = await readGolden("llama");
await using session = await openGolden(golden);
const heapAfter = async (steps: number) => {
  for (let step = 0; step < steps; step++) {
    await session.trainStep(golden.batches[step % 3] ?? [], SETTINGS);
  }
  collect();
  await new Promise((resolve) => setTimeout(resolve, 50));
  collect();
  return process.memoryUsage().heapUsed;
};
const early = await heapAfter(200);
const late = await heapAfter(STEPS);
console.log(`heap grew by ${late - early} bytes over ${STEPS} steps`);
