/**
 * Loading a model of real shape: random bf16 weights in four shards, read warm (from the page cache, where writing left
 * them) and cold (where the page cache can be emptied), straight into planned slots. GB/s, and the host memory that it
 * takes besides the ring.
 *
 *     TMPDIR=/fast/disk bun bench/load_model.ts [result.json] [model]
 *
 * Needs as much disk as the model has weights (Llama-3.1-8B: 16.1 GB), and as much device memory.
 */
import { spawnSync } from "node:child_process";
import { randomFillSync } from "node:crypto";
import { type FileHandle, mkdtemp, open, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import process from "node:process";
import { openSafetensors, type TensorFile } from "../src/api/io/safetensors.ts";
import { Device } from "../src/api/memory/mod.ts";
import { expectedTensors } from "../src/api/nn/config_tensors.ts";
import type { WeightSource } from "../src/api/nn/weights.ts";
import { Executor } from "../src/api/run/executor.ts";
import { loadWeights } from "../src/api/train/load_weights.ts";
import { planRun, type RunPlan } from "../src/api/train/run_plan.ts";
import { type MODELS, specOf } from "../tests/plan/models.ts";
import { writeResult } from "./results.ts";

const SHARDS = 4;
const [WARM, BLOCK] = [3, 64 << 20];
const MIB = 2 ** 20;

const [file, name = "Llama-3.1-8B"] = process.argv.slice(2);
const model = name as keyof typeof MODELS;
const spec = specOf(model, { tokensPerMicroBatch: 128, prefillTokens: 0, contextTokens: 0 });

/** Writes the shards and their index. The data is one random block over and over, at another place in every tensor. */
async function writeModel(folder: string): Promise<number> {
  const block = randomFillSync(new Uint8Array(BLOCK));
  const tensors = [...expectedTensors(spec.config)].map(([name, shape]) => {
    return { name, shape, bytes: 2 * shape.reduce((product, size) => product * size, 1) };
  });
  const total = tensors.reduce((sum, { bytes }) => sum + bytes, 0);
  const map: Record<string, string> = {};
  let [first, written] = [0, 0];
  for (let shard = 1; shard <= SHARDS; shard++) {
    const header: Record<string, unknown> = {};
    let [last, end] = [first, 0];
    for (; last < tensors.length && written + end < (total * shard) / SHARDS; last++) {
      const { name, shape, bytes } = tensors[last] as (typeof tensors)[number];
      header[name] = { dtype: "BF16", shape, data_offsets: [end, end + bytes] };
      map[name] = `model-${shard}-of-${SHARDS}.safetensors`;
      end += bytes;
    }
    const json = Buffer.from(JSON.stringify(header));
    const length = Buffer.alloc(8);
    length.writeBigUInt64LE(BigInt(json.byteLength));
    await using handle = await open(join(folder, `model-${shard}-of-${SHARDS}.safetensors`), "w");
    await writeAll(handle, length);
    await writeAll(handle, json);
    for (let at = 0; at < end; at += BLOCK) {
      await writeAll(handle, block.subarray(0, Math.min(BLOCK, end - at)));
    }
    await handle.sync();
    first = last;
    written += end;
  }
  const index = join(folder, "model.safetensors.index.json");
  await writeFile(index, JSON.stringify({ weight_map: map }));
  return total;
}

async function writeAll(handle: FileHandle, bytes: Uint8Array): Promise<void> {
  for (let at = 0; at < bytes.byteLength; ) {
    at += (await handle.write(bytes, at)).bytesWritten;
  }
}

/** Asks the system to forget the pages of the files; whether it did is seen from the rates. */
function dropCache(files: TensorFile): boolean {
  const paths = new Set([...files.tensors.values()].map((entry) => entry.file));
  return [...paths].every((path) => {
    const { status } = spawnSync("dd", [`if=${path}`, "iflag=nocache", "count=0", "status=none"]);
    return status === 0;
  });
}

/** A field of /proc/self/status, bytes. */
async function memory(field: "VmRSS" | "VmHWM"): Promise<number> {
  const text = await readFile("/proc/self/status", "utf8");
  return 1024 * Number(new RegExp(`${field}:\\s+(\\d+)`).exec(text)?.[1] ?? Number.NaN);
}

/** Whether the first and last bytes of every tensor are in their slots. */
async function compare(executor: Executor, run: RunPlan, files: TensorFile): Promise<boolean> {
  using host = executor.device.createPinnedBuffer(4096);
  const same = async ({ tensor, value, element }: WeightSource) => {
    const entry = files.tensors.get(tensor);
    if (entry === undefined) return false;
    const { buffer, offset } = executor.locate(value);
    const bytes = Math.min(host.bytes, entry.bytes);
    for (const at of [0, entry.bytes - bytes]) {
      const srcOffset = offset + 2 * element + at;
      executor.stream.copy(host, buffer, { bytes, srcOffset });
      const expected = new Uint8Array(bytes);
      await files.read(entry, expected, at);
      await executor.stream.done();
      if (Buffer.compare(expected, host.view(Uint8Array, 0, bytes)) !== 0) return false;
    }
    return true;
  };
  for (const source of run.weights.sources) if (!(await same(source))) return false;
  return true;
}

const folder = await mkdtemp(join(tmpdir(), "loramem-bench-"));
try {
  const began = performance.now();
  const bytes = await writeModel(folder);
  const rate = bytes / 1e9 / ((performance.now() - began) / 1000);
  console.log(
    `${model}: ${(bytes / 1e9).toFixed(2)} GB written and synced at ${rate.toFixed(2)} GB/s`,
  );
  await using files = await openSafetensors(folder);
  await using device = await Device.open("auto");
  const target = device.kind === "cpu" ? ({ backend: "cpu", precision: "fp32" } as const) : spec;
  const { backend, precision } = target;
  const run = planRun({ ...spec, backend, precision, programs: ["evaluate"] }, "keep");
  const executor = Executor.commit(device, run.plan, "eager");
  const [atStart, highAtStart] = [await memory("VmRSS"), await memory("VmHWM")];
  const rows: Record<string, unknown>[] = [];
  {
    await using ring = device.createFileRing();
    const { slots, slotBytes } = ring.stats();
    const ringBytes = slots * slotBytes;
    for (let round = 0; round <= WARM; round++) {
      const cold = round === WARM && dropCache(files); // last: a direct read leaves nothing in the cache
      let high = 0;
      const watch = setInterval(async () => {
        high = Math.max(high, await memory("VmRSS"));
      }, 10);
      const { seconds, bytesPerSecond } = await loadWeights(executor, run, files, ring);
      clearInterval(watch);
      const growth = Math.max(high, await memory("VmRSS")) - atStart;
      const row = {
        load: cold ? "cold" : "warm",
        seconds,
        gigabytesPerSecond: bytesPerSecond / 1e9,
        growthMiB: growth / MIB,
        beyondRingMiB: Math.max(0, growth - ringBytes) / MIB,
      };
      rows.push(row);
      console.log(
        `${row.load}  ${seconds.toFixed(2).padStart(6)} s  ${row.gigabytesPerSecond.toFixed(2).padStart(6)} GB/s  ` +
          `host memory +${row.growthMiB.toFixed(0)} MiB, ${row.beyondRingMiB.toFixed(0)} MiB beyond the ring`,
      );
    }
    const highWater = Math.max(0, (await memory("VmHWM")) - highAtStart) / MIB;
    const correct = await compare(executor, run, files);
    console.log(
      `ring ${ringBytes / MIB} MiB; high-water mark of the process +${highWater.toFixed(0)} MiB; ` +
        `bytes in their slots: ${correct ? "as in the files" : "NOT as in the files"}`,
    );
    if (!correct) process.exitCode = 1;
    const about = { model, bytes, ringMiB: ringBytes / MIB, highWaterMiB: highWater, correct };
    const ringStats = ring.stats();
    if (file !== undefined)
      await writeResult(file, { bench: "load_model", ...about, rows, ringStats });
  }
  await executor.dispose();
} finally {
  await rm(folder, { recursive: true });
}
