/**
 * Device profiles: the rates that a device sustains in a training step, for predicting times. They decide in which order
 * plans are tried, never what a plan computes; a wrong profile costs speed, not correctness.
 */
import { LoramemError } from "../../ffi/error.ts";

/** Arithmetic by width of the operands, FLOP/s. */
export interface Rates {
  /** f32 operands, no tensor cores. */
  readonly single: number;
  /** bf16 or f16 operands, sums in f32. */
  readonly half: number;
}

/** What a device sustains. */
export interface DeviceProfile {
  /** Name on the command line. */
  readonly name: string;
  /** Name for people, with where the figures come from. */
  readonly title: string;
  /** What the data sheet promises of dense matrix products, which utilisation is measured by; null = `matrix`. */
  readonly peak: Rates | null;
  /** Large matrix products. */
  readonly matrix: Rates;
  /** Attention forward and backward together, a head size of 64 to 128. */
  readonly attention: Rates;
  /** Bytes per second, read and written together. */
  readonly bandwidth: number;
  /** Bytes per second between page-locked host memory and the device, one way. */
  readonly link: number;
  /** Bytes per second read from the disk that streamed weights may be on, around the page cache. */
  readonly disk: number;
  /** Seconds that every kernel costs besides: its launch, and filling and draining the device. */
  readonly launch: number;
  /** Device memory in bytes; null = ask the machine. */
  readonly memory: number | null;
  /** Bytes that the driver takes besides the plan: context, library, graphs; null = not measured. */
  readonly driver: number | null;
}

const MIB = 1 << 20;
const GIB = 2 ** 30;

/** PCIe 4 with 16 lanes; stands in where a profile names no rate of its link. */
const LINK = 25e9;

/** One NVMe drive; stands in where a profile names no rate of its disk. */
const DISK = 2e9;

/** The profiles that come with loramem. */
export const PROFILES: readonly DeviceProfile[] = [
  {
    // Products, attention, bandwidth and launch fitted to the measured steps of three models under keep and checkpoint
    // (bench/results/gpu_step.json), all within 3 %: products alone reach 740-815 TFLOP/s on random data; copies reach 4.15 TB/s,
    // the norms, activations, adapters and losses of a step together three fifths of that. Attention at head sizes 64 to 128.
    // Context 527 MiB, cuBLASLt 4 MiB, graphs 4 MiB. The link is what PCIe 5 with 16 lanes leaves to large copies, the
    // disk what cold reads of its host reached.
    name: "h200",
    title: "NVIDIA H200 (measured)",
    peak: { single: 67e12, half: 989e12 },
    matrix: { single: 40e12, half: 755e12 },
    attention: { single: 15e12, half: 430e12 },
    bandwidth: 2.55e12,
    link: 55e9,
    disk: 2.1e9,
    launch: 3e-6,
    memory: 139 * GIB,
    driver: 535 * MIB,
  },
  {
    // Data sheet of the 80 GB SXM part: 312 TFLOP/s bf16, 19.5 fp32, 2.04 TB/s; about 80 % of it is reached.
    // Attention: FlashAttention-2 (Dao 2023, arXiv:2307.08691) reports 170-230 forward, 150-190 backward.
    name: "a100",
    title: "NVIDIA A100 80 GB (from data sheets)",
    peak: { single: 19.5e12, half: 312e12 },
    matrix: { single: 14e12, half: 250e12 },
    attention: { single: 6e12, half: 160e12 },
    bandwidth: 1.7e12,
    link: LINK,
    disk: DISK,
    launch: 4e-6,
    memory: 79 * GIB,
    driver: null,
  },
  {
    // Ada white paper: 165 TFLOP/s bf16 with fp32 sums, 83 fp32, 1.01 TB/s.
    name: "rtx-4090",
    title: "NVIDIA GeForce RTX 4090 (from data sheets)",
    peak: { single: 82.6e12, half: 165e12 },
    matrix: { single: 45e12, half: 145e12 },
    attention: { single: 15e12, half: 110e12 },
    bandwidth: 0.9e12,
    link: LINK,
    disk: DISK,
    launch: 3e-6,
    memory: 23.5 * GIB,
    driver: null,
  },
  {
    // Ampere white paper: 71 TFLOP/s bf16 with fp32 sums, 36 fp32, 0.94 TB/s.
    name: "rtx-3090",
    title: "NVIDIA GeForce RTX 3090 (from data sheets)",
    peak: { single: 35.6e12, half: 71e12 },
    matrix: { single: 20e12, half: 60e12 },
    attention: { single: 7e12, half: 45e12 },
    bandwidth: 0.82e12,
    link: LINK,
    disk: DISK,
    launch: 4e-6,
    memory: 23.5 * GIB,
    driver: null,
  },
  {
    // Measured on two threads of a Zen 4 server core with AVX-512; arithmetic is fp32 over every storage type.
    name: "cpu",
    title: "CPU, 2 threads with AVX-512 (measured)",
    peak: null,
    matrix: { single: 80e9, half: 80e9 },
    attention: { single: 30e9, half: 30e9 },
    bandwidth: 20e9,
    link: 10e9,
    disk: DISK,
    launch: 5e-6,
    memory: null,
    driver: null,
  },
];

/** A shipped profile by name, or null. */
export function findProfile(name: string): DeviceProfile | null {
  return PROFILES.find((profile) => profile.name === name) ?? null;
}

/**
 * The profile of an opened device: by the name that its driver gives, else the nearest shipped one.
 *
 * @param kind `"cpu"` or `"cuda:<n>"`.
 * @param deviceName Such as `"NVIDIA GeForce RTX 4090"`.
 */
export function profileOf(kind: string, deviceName: string): DeviceProfile {
  const wanted = deviceName.toLowerCase().replaceAll(" ", "-");
  const onDevice = kind.startsWith("cuda")
    ? PROFILES.find(({ name }) => wanted.includes(name))
    : findProfile("cpu");
  if (onDevice !== undefined && onDevice !== null) return onDevice;
  const nearest = findProfile("a100") as DeviceProfile;
  return { ...nearest, title: `${nearest.title}, for want of one for ${deviceName}` };
}

/**
 * Reads a profile from JSON, in the form of {@linkcode DeviceProfile}.
 *
 * @throws {LoramemError} BAD_ARGUMENT naming the field.
 */
export function parseProfile(json: unknown, where: string): DeviceProfile {
  const fields = (json ?? {}) as Record<string, unknown>;
  const rate = (value: unknown, name: string): number => {
    if (typeof value === "number" && Number.isFinite(value) && value > 0) return value;
    throw badProfile(where, `${name} is ${JSON.stringify(value)}, not a positive number`);
  };
  const rates = (name: string): Rates => {
    const { single, half } = (fields[name] ?? {}) as Record<string, unknown>;
    return { single: rate(single, `${name}.single`), half: rate(half, `${name}.half`) };
  };
  const bytes = (name: string) =>
    fields[name] === null || fields[name] === undefined ? null : rate(fields[name], name);
  const text = (name: string): string => {
    const value = fields[name];
    if (typeof value === "string" && value !== "") return value;
    throw badProfile(where, `${name} is ${JSON.stringify(value)}, not a text`);
  };
  return {
    name: text("name"),
    title: text("title"),
    peak: fields.peak === null || fields.peak === undefined ? null : rates("peak"),
    matrix: rates("matrix"),
    attention: rates("attention"),
    bandwidth: rate(fields.bandwidth, "bandwidth"),
    link: rate(fields.link ?? LINK, "link"),
    disk: rate(fields.disk ?? DISK, "disk"),
    launch: rate(fields.launch, "launch"),
    memory: bytes("memory"),
    driver: bytes("driver"),
  };
}

function badProfile(where: string, what: string): LoramemError {
  const names = PROFILES.map(({ name }) => name).join(", ");
  const message = `deviceProfile: not a device profile: ${where}: ${what}: use ${names}, or a JSON file of that form`;
  return new LoramemError("BAD_ARGUMENT", message, { name: "deviceProfile", value: where });
}
