import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { DENO, type Ended, runFile, SLOW, temporaryFolder } from "../ffi/support.ts";
import { ROOT } from "../help.ts";

/** Runs a program; it and its other files import loramem's entry as `./mod.ts`. */
function runProgram(text: string, files: Readonly<Record<string, string>> = {}): Ended {
  using folder = temporaryFolder();
  for (const [name, source] of Object.entries({ ...files, "program.ts": text })) {
    const placed = source.replaceAll('"./mod.ts"', JSON.stringify(join(ROOT, "mod.ts")));
    writeFileSync(join(folder.path, name), placed);
  }
  return runFile(join(folder.path, "program.ts"));
}

/** Opens a device with work that lasts a while. */
const BUSY = `
  import { Device } from "./mod.ts";
  const device = await Device.open("cpu", { threads: 1 });
  const stream = device.createStream();
  const buffer = device.createBuffer(1 << 26);
  for (let round = 0; round < 10; round++) stream.fill(buffer, round);
`;

test("primitives program of the README runs as written", SLOW, () => {
  const { stdout, stderr, code } = runProgram(`
    import { Device, kernels } from "./mod.ts";
    await using device = await Device.open("auto");
    await using stream = device.createStream();
    using pool = device.createPool({ limit: 1 << 28 });
    using host = device.createPinnedBuffer(4096);
    host.view(Float32Array).fill(1);
    using x = pool.alloc(4096, { stream, label: "x" });
    stream.copy(x, host);
    kernels.scale(x.as("f32", [1024]), x.as("f32", [1024]), 2, { stream }); // outputs, inputs, scalars, options
    stream.copy(host, x);
    await stream.done();
    console.log(host.view(Float32Array)[0], pool.stats().peak);`);
  assert.equal(stdout, "2 4096\n", stderr);
  assert.equal(code, 0);
});

test("Stream.done() keeps the process alive until the work has ended, and no longer", SLOW, () => {
  const { stdout, stderr, code } = runProgram(`${BUSY}
    void stream.done().then(() => console.log("done"));
    console.log("end of the program");`);
  assert.equal(stdout, "end of the program\ndone\n", stderr);
  assert.equal(code, 0);
});

test("Device that was never disposed lets the process exit, also while work runs", SLOW, () => {
  const { stdout, stderr, code, signal } = runProgram(`${BUSY}
    await stream.done();
    stream.fill(buffer, 1);
    console.log("end of the program");`);
  assert.equal(stdout, "end of the program\n", stderr);
  assert.deepEqual([code, signal], [0, null]);
});

test("process.exit() while completions are pending ends without a crash", SLOW, () => {
  const { stderr, code, signal } = runProgram(`${BUSY}
    void stream.done();
    process.exit(7);`);
  assert.deepEqual([code, signal], [7, null], stderr);
});

test("error that nobody catches while work runs ends without a crash", SLOW, () => {
  const { stderr, code, signal } = runProgram(`${BUSY}
    void stream.done();
    throw new Error("planted");`);
  assert.deepEqual([code, signal], [1, null], stderr);
  assert.match(stderr, /planted/);
});

test("SIGTERM while work runs ends the process at once, by that signal", SLOW, () => {
  const { stdout, code, signal } = runProgram(`${BUSY}
    void stream.done();
    console.log("working");
    process.kill(process.pid, "SIGTERM");
    setInterval(() => {}, 1000);`);
  assert.match(stdout, /^working\n/);
  assert.ok(signal === "SIGTERM" || code === 143, `${signal} ${code}`);
});

test("Device in debug mode reports leaks at the end of the process, however it ends", SLOW, () => {
  const open = `
    import { Device } from "./mod.ts";
    const device = await Device.open("cpu", {
      threads: 1,
      debug: true,
      onLeak: ({ at, leaks }) => console.log(at, leaks.map(({ label }) => label).join()),
    });
    const stream = device.createStream();
    const buffer = device.createBuffer(1 << 20, { label: "x" });
    stream.fill(buffer, 1);
  `;
  const leaks = 'Stream,DeviceBuffer "x"';
  for (const [end, code, at] of [
    ["", 0, "exit"],
    ["process.exit(3);", 3, "exit"],
    // Deno ends on an error that nobody catches without an exit event.
    ...(DENO ? [] : ([['throw new Error("planted");', 1, "exit"]] as const)),
    ["await device.dispose();", 0, "close"],
  ] as const) {
    const ended = runProgram(`${open}${end}`);
    assert.equal(ended.stdout, `${at} ${leaks}\n`, `${end} ${ended.stderr}`);
    assert.deepEqual([ended.code, ended.signal], [code, null], end);
  }
});

/** Opens a device of its own, works, and leaves work and a completion behind. */
const WORKER = `${BUSY}
  await stream.done();
  for (let round = 0; round < 10; round++) stream.fill(buffer, round);
  void stream.done();
  postMessage("worked");
`;

test("Worker may open devices of its own and be terminated while work runs", SLOW, () => {
  const { stdout, stderr, code, signal } = runProgram(
    `
    import { Device } from "./mod.ts";
    await using device = await Device.open("cpu", { threads: 1 });
    await using stream = device.createStream();
    using host = device.createPinnedBuffer(1 << 20);
    for (let round = 1; round <= 3; round++) {
      const worker = new Worker(new URL("./worker.ts", import.meta.url).href, { type: "module" });
      await new Promise((resolve) => worker.addEventListener("message", resolve));
      worker.terminate();
      stream.fill(host, round);
      await stream.done();
      await new Promise((resolve) => setTimeout(resolve, 200)); // the worker's work ends meanwhile
      console.log(host.view(Uint8Array)[0]);
    }`,
    { "worker.ts": WORKER },
  );
  assert.equal(stdout, "1\n2\n3\n", stderr);
  assert.deepEqual([code, signal], [0, null], stderr);
});

test(
  "Worker that ends by itself with work and memory left does not disturb the process",
  SLOW,
  () => {
    const { stdout, stderr, code, signal } = runProgram(
      `
    import { Device } from "./mod.ts";
    await using device = await Device.open("cpu", { threads: 1 });
    for (let round = 1; round <= 3; round++) {
      const worker = new Worker(new URL("./worker.ts", import.meta.url).href, { type: "module" });
      await new Promise((resolve) => worker.addEventListener("message", resolve));
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    using buffer = device.createBuffer(1 << 20);
    console.log(buffer.bytes);`,
      { "worker.ts": `${BUSY}\n postMessage("worked"); self.close();` },
    );
    assert.equal(stdout, "1048576\n", stderr);
    assert.deepEqual([code, signal], [0, null], stderr);
  },
);
