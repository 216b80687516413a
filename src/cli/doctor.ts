/** `loramem doctor`: what this machine offers, and with `--calibrate` how fast it is. */
import { readFile } from "node:fs/promises";
import process from "node:process";
import type { Command } from "commander";
import { Device, type DeviceInfo } from "../api/memory/mod.ts";
import type { DeviceProfile } from "../api/plan/profiles.ts";
import { formatBytes } from "../api/plan/report.ts";
import { measureProfile, profileOfDevice, writeOwnProfile } from "../api/train/own_profile.ts";
import { LoramemError } from "../ffi/error.ts";
import { native } from "../ffi/load.ts";

/** Adds the subcommand to the program. */
export function addDoctorCommand(program: Command): void {
  program
    .command("doctor")
    .description("say what this machine offers: library, devices, limits, profiles")
    .option(
      "--calibrate",
      "measure the devices, some seconds each, and keep it for predicted times",
    )
    .option("--device <kind>", "only this device: cpu or cuda:<n>")
    .action(async ({ calibrate, device }: { calibrate?: true; device?: string }) => {
      const print = (text: string) => process.stdout.write(`${text}\n`);
      const kinds = device === undefined ? ["cpu", ...(await cudaKinds(print))] : [device];
      for (const [index, kind] of kinds.entries()) {
        await using opened = await Device.open(kind as "cpu");
        if (index === 0) print(`Library: ${native().path}`);
        await examine(opened, print);
        if (calibrate) await measure(opened, print);
      }
      print(`Locked memory: ${await lockedLimit()}`);
      print(`Memory limit of the control group: ${await groupLimit()}`);
    });
}

/** Every CUDA device; says why there is none. */
async function cudaKinds(print: (text: string) => void): Promise<string[]> {
  const kinds: string[] = [];
  for (;;) {
    const kind = `cuda:${kinds.length}` as const;
    try {
      await using _opened = await Device.open(kind);
    } catch (error) {
      // A library that cannot be opened is reported with the CPU.
      if (!(error instanceof LoramemError) || error.code === "NATIVE_LIBRARY") return kinds;
      if (kinds.length === 0) print(`No GPU: ${error.message}`);
      return kinds;
    }
    kinds.push(kind);
  }
}

async function examine(device: Device, print: (text: string) => void): Promise<void> {
  const info = device.info();
  const name = String(info.name ?? device.kind);
  const [total, free] = [info.memoryTotal, info.memoryFree].map((bytes) =>
    formatBytes(Number(bytes)),
  );
  print(`Device ${device.kind}: ${name}, ${total}, ${free} free`);
  if (device.kind === "cpu") {
    print(`  ${info.threads} threads, instructions: ${info.isa}`);
  } else {
    print(`  Compute capability ${info.computeCapability}, driver for CUDA ${info.driver}`);
    print(`  Matrix products: ${describeProducts(info)}`);
  }
  print(`  Profile: ${describeProfile(await profileOfDevice(device.kind, name))}`);
}

/** Which library multiplies matrices, and what that means. */
function describeProducts({ gemm }: DeviceInfo): string {
  const text = String(gemm);
  if (!text.startsWith("own kernels")) return `${text}, the fastest`;
  return `${text}; everything works; but on Hopper, large products may take up to twice as long: install libcublasLt of CUDA 13 for full speed`;
}

function describeProfile({ title, matrix, attention, bandwidth, link, launch }: DeviceProfile) {
  const tera = (rate: number) => `${(rate / 1e12).toPrecision(3)}`;
  const giga = (rate: number) => `${(rate / 1e9).toPrecision(3)} GB/s`;
  return (
    `${title}: products ${tera(matrix.half)} (16 bits) and ${tera(matrix.single)} TFLOP/s (32), ` +
    `attention ${tera(attention.half)} and ${tera(attention.single)}, memory ${giga(bandwidth)}, ` +
    `host link ${giga(link)}, launch ${(launch * 1e6).toPrecision(2)} us`
  );
}

async function measure(device: Device, print: (text: string) => void): Promise<void> {
  const started = performance.now();
  const profile = await measureProfile(device);
  const file = await writeOwnProfile(device.kind, String(device.info().name ?? ""), profile);
  const seconds = (performance.now() - started) / 1000;
  print(`  Measured in ${seconds.toFixed(1)} s: ${describeProfile(profile)}`);
  print(`  Written to ${file}: plan and train use it from now on`);
}

/** What the process may lock with mlock; drivers lock beyond it. */
async function lockedLimit(): Promise<string> {
  const limits = await readFile("/proc/self/limits", "utf8").catch(() => "");
  const soft = /^Max locked memory\s+(\S+)/m.exec(limits)?.[1];
  if (soft === undefined) return "not known";
  const limit = soft === "unlimited" ? "no limit" : `at most ${formatBytes(Number(soft))}`;
  return `${limit} (ulimit -l); page-locked memory of a GPU's driver does not count`;
}

/** Memory that the control group of the process may use, of either version. */
async function groupLimit(): Promise<string> {
  for (const file of ["memory.max", "memory/memory.limit_in_bytes"]) {
    const text = await readFile(`/sys/fs/cgroup/${file}`, "utf8").catch(() => null);
    if (text === null) continue;
    const bytes = Number(text);
    // Version 1 says "no limit" with a number of nearly 2^63.
    return Number.isFinite(bytes) && bytes < 2 ** 60 ? formatBytes(bytes) : "none";
  }
  return "none";
}
