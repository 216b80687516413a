/** Measures the rates of a device with the project's own kernels, for predicted times. A few seconds. */
import { attentionWorkspace } from "../graph/ops/attention.ts";
import { DTYPES } from "../graph/value.ts";
import { attentionBackward, attentionForward } from "../kernels/attention.ts";
import { scale } from "../kernels/elementwise.ts";
import { loraDown, loraLinearForward } from "../kernels/linear.ts";
import { gluForward } from "../kernels/rows.ts";
import type { Device, DeviceBuffer, PinnedBuffer, Stream } from "../memory/mod.ts";
import type { DeviceProfile, Rates } from "../plan/profiles.ts";
import { stepBandwidth } from "./calibrate_step.ts";
import { fillRandom } from "./random_data.ts";

/** Sizes that keep a device busy for long enough to be timed, and no longer. */
interface Sizes {
  /** [T, N, K] of a product, by width of the operands. */
  readonly single: readonly [number, number, number];
  readonly half: readonly [number, number, number];
  /** Tokens of attention, {@linkcode DOCUMENTS} documents of 16 query and 8 key-value heads. */
  readonly tokens: Readonly<Record<keyof Rates, number>>;
  /** Rows of the kernels that memory limits. */
  readonly rows: number;
  /** Bytes of memory that all of it needs. */
  readonly bytes: number;
}

const ON_GPU: Sizes = {
  single: [4096, 4096, 4096],
  half: [8192, 8192, 4096],
  tokens: { single: 4096, half: 8192 },
  rows: 8192,
  bytes: 512 << 20,
};
const ON_CPU: Sizes = {
  single: [256, 1024, 512],
  half: [256, 1024, 512],
  tokens: { single: 256, half: 256 },
  rows: 512,
  bytes: 32 << 20,
};

/** Repeats are timed in batches of about so many seconds. The fastest counts: other programs only slow down. */
const BATCHES = 3;
const SECONDS = 0.05;

/** Kernels that are recorded to time a launch. */
const LAUNCHES = 1000;

/** Rank of the adapters. */
const RANK = 16;

/** Each of 2048 tokens at most: attention is faster in longer ones. */
const DOCUMENTS = 4;
const HEADS = { heads: 16, kvHeads: 8 };
/** Head sizes of common models; the time for both counts. */
const HEAD_DIMS = [64, 128] as const;

const HOST_BYTES = 16 << 20;

/**
 * Measures a device that is otherwise idle.
 *
 * @param base Name, data-sheet figures and memory of the result.
 * @throws {LoramemError} OUT_OF_MEMORY where the device has no room for 64 MiB (CPU) or 1 GiB (GPU).
 */
export async function calibrate(device: Device, base: DeviceProfile): Promise<DeviceProfile> {
  const alone = await measureKernels(device, base);
  return { ...alone, bandwidth: await stepBandwidth(device, alone) };
}

/** The profile with the bandwidth of kernels that run alone. */
async function measureKernels(device: Device, base: DeviceProfile): Promise<DeviceProfile> {
  await using bench = new Bench(device);
  return {
    ...base,
    matrix: { single: await bench.matrix("f32"), half: await bench.matrix("bf16") },
    attention: { single: await bench.attention("f32"), half: await bench.attention("bf16") },
    bandwidth: await bench.bandwidth(),
    link: await bench.link(),
    launch: await bench.launch(),
  };
}

class Bench implements AsyncDisposable {
  readonly #device: Device;
  readonly #sizes: Sizes;
  readonly #stream: Stream;
  readonly #memory: DeviceBuffer;
  readonly #host: PinnedBuffer;

  constructor(device: Device) {
    using undo = new DisposableStack();
    this.#device = device;
    this.#sizes = device.kind.startsWith("cuda") ? ON_GPU : ON_CPU;
    this.#memory = undo.use(device.createBuffer(this.#sizes.bytes, { label: "calibration" }));
    this.#host = undo.use(device.createPinnedBuffer(HOST_BYTES, { label: "calibration" }));
    this.#stream = device.createStream();
    undo.move();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#stream.dispose();
    this.#memory.dispose();
    this.#host.dispose();
  }

  /** FLOP/s of a large product, on random operands: the power that they draw lowers the clock, as in a step. */
  async matrix(dtype: "f32" | "bf16"): Promise<number> {
    const [rows, out, width] = this.#sizes[widthOf(dtype)];
    await this.#fillRandom(dtype);
    const { bytes } = DTYPES[dtype];
    const x = this.#memory.as(dtype, [rows, width]);
    const w = this.#memory.as(dtype, [out, width], { offset: rows * width * bytes });
    const y = this.#memory.as(dtype, [rows, out], { offset: (rows + out) * width * bytes });
    const seconds = await this.#time((stream) => loraLinearForward(y, x, w, [{ out }], { stream }));
    return (2 * rows * out * width) / seconds;
  }

  /** FLOP/s of attention forward and backward together, causal documents. */
  async attention(dtype: "f32" | "bf16"): Promise<number> {
    const tokens = this.#sizes.tokens[widthOf(dtype)];
    const { heads, kvHeads } = HEADS;
    let [flops, seconds] = [0, 0];
    for (const headDim of HEAD_DIMS) {
      await this.#fillRandom(dtype);
      const pitch = (heads + 2 * kvHeads) * headDim;
      const row = headDim * DTYPES[dtype].bytes;
      let end = 0;
      const take = (bytes: number) => {
        end += bytes;
        return end - bytes;
      };
      const packed = () => {
        const first = take(tokens * (heads + 2 * kvHeads) * row);
        const part = (from: number, count: number) =>
          this.#memory.as(dtype, [tokens, count * headDim], { pitch, offset: first + from * row });
        return [part(0, heads), part(heads, kvHeads), part(heads + kvHeads, kvHeads)] as const;
      };
      const dense = () =>
        this.#memory.as(dtype, [tokens, heads * headDim], { offset: take(tokens * heads * row) });
      const statistics = () =>
        this.#memory.as("f32", [heads, tokens], { offset: take(heads * tokens * 4) });
      const [q, k, v] = packed();
      const [dq, dk, dv] = packed();
      const [o, gradO, lse, delta] = [dense(), dense(), statistics(), statistics()];
      const words = attentionWorkspace(tokens, DOCUMENTS, { ...HEADS, headDim });
      const workspace = this.#memory.as("f32", [words], { offset: take(words * 4) });
      const cuSeqlens = this.#memory.as("i32", [DOCUMENTS + 1], { offset: end });
      const document = tokens / DOCUMENTS;
      await this.#write(
        Int32Array.from({ length: DOCUMENTS + 1 }, (_, at) => at * document),
        end,
      );
      seconds += await this.#time((stream) => {
        const options = { stream, ...HEADS };
        attentionForward(o, lse, q, k, v, cuSeqlens, options);
        const backward = { ...options, workspace };
        attentionBackward(dq, dk, dv, delta, gradO, o, lse, q, k, v, cuSeqlens, backward);
      });
      // Two products over every pair forward, five backward.
      flops += 14 * heads * headDim * ((tokens * (document + 1)) / 2);
    }
    return flops / seconds;
  }

  /**
   * Bytes per second, read and written together, of kernels that memory limits, as a step has them: SwiGLU and the product
   * with the A matrices of adapters. A bare copy is faster.
   */
  async bandwidth(): Promise<number> {
    await this.#fillRandom("bf16");
    const [rows, width] = [this.#sizes.rows, 4096];
    const row = width * DTYPES.bf16.bytes;
    const x = this.#memory.as("bf16", [rows, 2 * width]);
    const y = this.#memory.as("bf16", [rows, width], { offset: 2 * rows * row });
    const a = this.#memory.as("bf16", [RANK, width], { offset: 3 * rows * row });
    const s = this.#memory.as("bf16", [rows, RANK], { offset: 3 * rows * row + RANK * row });
    const group = [{ out: width, rank: RANK }];
    const seconds = await this.#time((stream) => {
      gluForward(y, x, { stream });
      loraDown(s, y, a, group, { stream });
    });
    return (4 * rows * row) / seconds;
  }

  /** Bytes per second from and to page-locked host memory, the slower way. */
  async link(): Promise<number> {
    const up = await this.#time((stream) =>
      stream.copy(this.#memory, this.#host, { bytes: HOST_BYTES }),
    );
    const down = await this.#time((stream) =>
      stream.copy(this.#host, this.#memory, { bytes: HOST_BYTES }),
    );
    return HOST_BYTES / Math.max(up, down);
  }

  /** Seconds per kernel of a recording of small ones. */
  async launch(): Promise<number> {
    const x = this.#memory.as("f32", [256]);
    using graph = this.#stream.capture(() => {
      for (let at = 0; at < LAUNCHES; at++) scale(x, x, 1, { stream: this.#stream });
    });
    return (await this.#time((stream) => graph.launch(stream))) / LAUNCHES;
  }

  /** Seconds of `work`, by events, the fastest of some batches of repeats. */
  async #time(work: (stream: Stream) => void): Promise<number> {
    const stream = this.#stream;
    using start = this.#device.createEvent();
    using end = this.#device.createEvent();
    const run = async (repeats: number) => {
      stream.record(start);
      for (let repeat = 0; repeat < repeats; repeat++) work(stream);
      stream.record(end);
      await stream.done();
      return end.elapsed(start) / 1000 / repeats;
    };
    await run(1); // first use: clocks, caches, choices of algorithms
    const once = await run(1);
    const repeats = Math.min(1000, Math.max(1, Math.ceil(SECONDS / once)));
    const times: number[] = [];
    for (let batch = 0; batch < BATCHES; batch++) times.push(await run(repeats));
    return Math.min(...times);
  }

  /** Fills the memory, from one random block. */
  async #fillRandom(dtype: "f32" | "bf16"): Promise<void> {
    fillRandom(this.#host.view(Uint16Array), dtype);
    for (let at = 0; at < this.#memory.bytes; at += HOST_BYTES) {
      const bytes = Math.min(HOST_BYTES, this.#memory.bytes - at);
      this.#stream.copy(this.#memory, this.#host, { bytes, dstOffset: at });
    }
    await this.#stream.done();
  }

  async #write(values: Int32Array, offset: number): Promise<void> {
    this.#host.view(Int32Array, 0, values.length).set(values);
    this.#stream.copy(this.#memory, this.#host, { bytes: values.byteLength, dstOffset: offset });
    await this.#stream.done();
  }
}

function widthOf(dtype: "f32" | "bf16"): keyof Rates {
  return dtype === "f32" ? "single" : "half";
}
