/**
 * Files to device memory and back: the ring beside simpler ways, and beside what the disk and the page cache give to plain
 * threads (bench/file_raw.c, built with cc).
 *
 *     bun bench/device_file.ts --device cuda:0 --sizes 4GiB --folder . --json bench/results/device_file.json
 *     deno run -A bench/device_file.ts --sizes 64MiB,1GiB
 *
 * The ways: `pageable`, one buffer of plain memory, read, then copied; `pinned`, the same with page-locked memory; `double`,
 * two page-locked halves of 32 MiB made for each call, one read by one thread while the other is copied (the scheme of
 * llm.c); `ring`. Warm: the file was read just before. Cold: POSIX_FADV_DONTNEED drops it from the page cache first, by dd. A
 * save ends with fdatasync, inside the time, and is made under a new name. Rounds go over all ways in turn; the median is
 * shown. CPU is what the process uses meanwhile, in cores.
 */
import { execFileSync } from "node:child_process";
import { closeSync, fdatasyncSync, openSync, readSync, rmSync, writeSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import {
  Device,
  type DeviceBuffer,
  type DeviceKind,
  type FileRing,
  type PinnedBuffer,
  type Stream,
} from "../mod.ts";
import { writeResult } from "./results.ts";

const HALF = 32 << 20;

/** What a way needs. */
interface Place {
  readonly device: Device;
  readonly stream: Stream;
  readonly ring: FileRing;
  /** One buffer for each GiB or part of it. */
  readonly memory: readonly DeviceBuffer[];
  readonly path: string;
  readonly bytes: number;
}

type Work = (place: Place) => Promise<void>;

interface Way {
  readonly load: Work;
  readonly save: Work;
}

/** One figure. */
interface Row {
  readonly way: string;
  readonly what: "load warm" | "load cold" | "save";
  readonly bytes: number;
  readonly seconds: number;
  readonly gigabytesPerSecond: number;
  readonly cores: number;
}

const GIB = 2 ** 30;

/** The buffer and offset of a place of the file. */
function at({ memory }: Place, offset: number): { buffer: DeviceBuffer; offset: number } {
  return { buffer: memory[Math.floor(offset / GIB)] as DeviceBuffer, offset: offset % GIB };
}

function readAll(fd: number, into: Uint8Array, position: number): void {
  for (let done = 0; done < into.length; ) {
    done += readSync(fd, into, done, into.length - done, position + done);
  }
}

function writeAll(fd: number, from: Uint8Array, position: number): void {
  for (let done = 0; done < from.length; ) {
    done += writeSync(fd, from, done, from.length - done, position + done);
  }
}

async function withFile(path: string, flags: string, use: (fd: number) => Promise<void>) {
  const fd = openSync(path, flags);
  try {
    await use(fd);
    if (flags === "w") fdatasyncSync(fd);
  } finally {
    closeSync(fd);
  }
}

/** One buffer: read, then copied, in turn. */
function oneBuffer(take: (device: Device) => Disposable & { readonly buffer: PinnedBuffer }): Way {
  const each = async (
    place: Place,
    use: (part: PinnedBuffer, offset: number, bytes: number) => Promise<void>,
  ) => {
    using taken = take(place.device);
    for (let offset = 0; offset < place.bytes; offset += HALF) {
      await use(taken.buffer, offset, Math.min(HALF, place.bytes - offset));
    }
  };
  return {
    load: (place) =>
      withFile(place.path, "r", (fd) =>
        each(place, async (part, offset, bytes) => {
          readAll(fd, part.view(Uint8Array, 0, bytes), offset);
          const to = at(place, offset);
          place.stream.copy(to.buffer, part, { bytes, dstOffset: to.offset });
          await place.stream.done();
        }),
      ),
    save: (place) =>
      withFile(place.path, "w", (fd) =>
        each(place, async (part, offset, bytes) => {
          const from = at(place, offset);
          place.stream.copy(part, from.buffer, { bytes, srcOffset: from.offset });
          await place.stream.done();
          writeAll(fd, part.view(Uint8Array, 0, bytes), offset);
        }),
      ),
  };
}

/** Two halves: while one is copied, the other is read or written. */
const doubleBuffer: Way = {
  load: (place) =>
    withFile(place.path, "r", async (fd) => {
      using a = place.device.createPinnedBuffer(HALF);
      using b = place.device.createPinnedBuffer(HALF);
      let [full, empty] = [a, b];
      const size = (offset: number) => Math.max(0, Math.min(HALF, place.bytes - offset));
      readAll(fd, full.view(Uint8Array, 0, size(0)), 0);
      for (let offset = 0; offset < place.bytes; offset += HALF) {
        const to = at(place, offset);
        place.stream.copy(to.buffer, full, { bytes: size(offset), dstOffset: to.offset });
        const next = offset + HALF;
        if (next < place.bytes) readAll(fd, empty.view(Uint8Array, 0, size(next)), next);
        await place.stream.done();
        [full, empty] = [empty, full];
      }
    }),
  save: (place) =>
    withFile(place.path, "w", async (fd) => {
      using a = place.device.createPinnedBuffer(HALF);
      using b = place.device.createPinnedBuffer(HALF);
      let [full, empty] = [a, b];
      const size = (offset: number) => Math.max(0, Math.min(HALF, place.bytes - offset));
      const fill = (part: PinnedBuffer, offset: number) => {
        const from = at(place, offset);
        place.stream.copy(part, from.buffer, { bytes: size(offset), srcOffset: from.offset });
      };
      fill(full, 0);
      await place.stream.done();
      for (let offset = 0; offset < place.bytes; offset += HALF) {
        if (offset + HALF < place.bytes) fill(empty, offset + HALF);
        writeAll(fd, full.view(Uint8Array, 0, size(offset)), offset);
        await place.stream.done();
        [full, empty] = [empty, full];
      }
    }),
};

function extents({ memory, bytes }: Place) {
  return memory.map((buffer, i) => ({
    offset: i * GIB,
    bytes: Math.min(GIB, bytes - i * GIB),
    memory: buffer,
  }));
}

const ringWay: Way = {
  load: async (place) => {
    await using file = await place.ring.open(place.path, { mode: "read" });
    await file.read(extents(place));
  },
  save: async (place) => {
    await using file = await place.ring.open(`${place.path}.tmp`, {
      mode: "create",
      bytes: place.bytes,
    });
    await file.write(extents(place));
    await file.publish(place.path);
  },
};

const WAYS: Readonly<Record<string, Way>> = {
  pageable: oneBuffer((device) => {
    // A pool that may lock one page gives out pageable memory; a copy from it returns when it has ended.
    const pool = device.createPinnedPool({ limit: 4096 });
    const buffer = pool.acquire(HALF);
    const dispose = () => {
      buffer.dispose();
      pool.dispose();
    };
    return { buffer, [Symbol.dispose]: dispose };
  }),
  pinned: oneBuffer((device) => {
    const buffer = device.createPinnedBuffer(HALF);
    return { buffer, [Symbol.dispose]: () => buffer.dispose() };
  }),
  double: doubleBuffer,
  ring: ringWay,
};

/** Drops a file from the page cache: dd of nothing with `nocache`, which is POSIX_FADV_DONTNEED. */
function drop(path: string): void {
  execFileSync("dd", [
    `of=${path}`,
    "oflag=nocache",
    "conv=notrunc,fdatasync",
    "count=0",
    "status=none",
  ]);
}

/** Seconds and cores of a piece of work. */
async function timed(work: () => Promise<void>): Promise<{ seconds: number; cores: number }> {
  const cpu = process.cpuUsage();
  const start = performance.now();
  await work();
  const seconds = (performance.now() - start) / 1000;
  const { user, system } = process.cpuUsage(cpu);
  return { seconds, cores: (user + system) / 1e6 / seconds };
}

function raw(program: string, kind: string, path: string, bytes: number, threads: number) {
  const text = execFileSync(program, [kind, path, String(bytes), String(threads)], {
    encoding: "utf8",
  });
  const [seconds = 0, busy = 0] = text.split(" ").map(Number);
  return { seconds, cores: busy / seconds };
}

function buildRaw(): string {
  const program = join(tmpdir(), `loramem_file_raw_${process.pid}`);
  const source = fileURLToPath(new URL("file_raw.c", import.meta.url));
  execFileSync("cc", ["-O2", "-pthread", "-o", program, source], { stdio: "inherit" });
  return program;
}

function parseSize(text: string): number {
  const match = /^(\d+)(MiB|GiB)$/.exec(text);
  if (match === null) throw new Error(`a size is a number and MiB or GiB: ${text}`);
  return Number(match[1]) * (match[2] === "GiB" ? GIB : 2 ** 20);
}

/** Everything for one size, in rounds. */
async function measure(
  place: Place,
  program: string,
  threads: number,
  rounds: number,
): Promise<Row[]> {
  const { path, bytes } = place;
  const found = new Map<string, { seconds: number; cores: number }[]>();
  const note = (way: string, what: Row["what"], figure: { seconds: number; cores: number }) => {
    const key = `${way}\n${what}`;
    found.set(key, [...(found.get(key) ?? []), figure]);
  };
  for (let round = 0; round < rounds; round++) {
    rmSync(path, { force: true });
    note("raw", "save", raw(program, "write-direct", path, bytes, threads));
    for (const [name, { save }] of Object.entries(WAYS)) {
      rmSync(path, { force: true });
      note(name, "save", await timed(() => save(place)));
    }
    drop(path);
    note("raw", "load cold", raw(program, "read-direct", path, bytes, threads));
    for (const [name, { load }] of Object.entries(WAYS)) {
      drop(path);
      note(name, "load cold", await timed(() => load(place)));
    }
    raw(program, "read-cached", path, bytes, threads);
    note("raw", "load warm", raw(program, "read-cached", path, bytes, threads));
    for (const [name, { load }] of Object.entries(WAYS)) {
      note(name, "load warm", await timed(() => load(place)));
    }
  }
  rmSync(path, { force: true });
  return [...found].map(([key, figures]) => {
    const [way = "", what = ""] = key.split("\n");
    const sorted = figures.toSorted((a, b) => a.seconds - b.seconds);
    const { seconds, cores } = sorted[Math.floor(sorted.length / 2)] as (typeof figures)[0];
    return {
      way,
      what: what as Row["what"],
      bytes,
      seconds,
      gigabytesPerSecond: bytes / seconds / 1e9,
      cores,
    };
  });
}

function print(rows: readonly Row[]): void {
  const ways = ["raw", ...Object.keys(WAYS)];
  console.log(`\n${(rows[0]?.bytes ?? 0) / 2 ** 20} MiB: GB/s (cores)`);
  const line = (cells: readonly string[]) =>
    console.log(cells.map((cell) => cell.padStart(14)).join(""));
  line(["", ...ways, "ring/raw", "ring/double"]);
  for (const what of ["load warm", "load cold", "save"] as const) {
    const rate = (way: string) => {
      const row = rows.find((one) => one.way === way && one.what === what) as Row;
      return { gigabytes: row.gigabytesPerSecond, cores: row.cores };
    };
    const cells = ways.map(rate).map((r) => `${r.gigabytes.toFixed(2)} (${r.cores.toFixed(2)})`);
    const ratios = ["raw", "double"].map((way) => rate("ring").gigabytes / rate(way).gigabytes);
    line([what, ...cells, ...ratios.map((ratio) => ratio.toFixed(2))]);
  }
}

const { values } = parseArgs({
  options: {
    device: { type: "string", default: "auto" },
    sizes: { type: "string", default: "64MiB,256MiB" },
    folder: { type: "string", default: "." },
    rounds: { type: "string", default: "3" },
    slots: { type: "string", default: "8" },
    "slot-mib": { type: "string", default: "8" },
    threads: { type: "string", default: "0" },
    json: { type: "string" },
  },
});

await using device = await Device.open(values.device as DeviceKind);
await using stream = device.createStream();
await using ring = device.createFileRing({
  slots: Number(values.slots),
  slotBytes: Number(values["slot-mib"]) << 20,
  threads: Number(values.threads),
});
const { threads, slots, slotBytes } = ring.stats();
const program = buildRaw();
const path = join(values.folder, `device_file_${process.pid}.bin`);
const rows: Row[] = [];
console.log(`device ${device.kind}, ring of ${slots} x ${slotBytes >> 20} MiB, ${threads} threads`);
try {
  for (const bytes of values.sizes.split(",").map(parseSize)) {
    const memory = Array.from({ length: Math.ceil(bytes / GIB) }, (_, i) =>
      device.createBuffer(Math.min(GIB, bytes - i * GIB)),
    );
    for (const buffer of memory) stream.fill(buffer, 7);
    await stream.done();
    const measured = await measure(
      { device, stream, ring, memory, path, bytes },
      program,
      threads,
      Number(values.rounds),
    );
    print(measured);
    rows.push(...measured);
    for (const buffer of memory) buffer.dispose();
  }
} finally {
  for (const file of [path, `${path}.tmp`, program]) rmSync(file, { force: true });
}
if (values.json !== undefined) {
  const { kind, name } = device.info();
  await writeResult(values.json, {
    device: { kind, name },
    threads,
    slots,
    slotBytes,
    rows,
    ring: ring.stats(),
  });
}
