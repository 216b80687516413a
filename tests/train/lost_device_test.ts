/** A device that is lost in the middle of a run, simulated: one clear error, no hang, nothing half-written. */
import assert from "node:assert/strict";
import { existsSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { Device, type DeviceOptions, LoramemError, LoraTrainer } from "../../mod.ts";
import { DEMO, temporary } from "../cli/support.ts";
import { SLOW } from "../ffi/support.ts";

const RECORDS = ["rack", "aim", "selfish", "love"].map((word) => ({
  messages: [
    { role: "user", content: `Define: ${word}` },
    { role: "assistant", content: `The ${word} of another day.` },
  ],
}));

/** Lets the trainer run on a simulated device that is lost at its `faultAt`-th operation. */
function simulate(faultAt: number | null): Disposable {
  const original = Device.open;
  Device.open = (_kind, options: DeviceOptions = {}) =>
    original.call(Device, "sim", { ...options, ...(faultAt === null ? {} : { faultAt }) });
  return {
    [Symbol.dispose]() {
      Device.open = original;
    },
  };
}

/** Everything that a run does; says what it had come to. */
async function wholeRun(out: string, came: (to: string) => void): Promise<void> {
  await using trainer = await LoraTrainer.open({
    model: `${DEMO}/model`,
    data: RECORDS,
    evalData: RECORDS,
    device: "cpu",
    threads: 1,
    batchSize: 2,
    lora: { rank: 2, targetModules: ["v_proj"] },
    promptTokens: 16,
    answerTokens: 4,
  });
  came("opened");
  for await (const { step } of trainer.steps()) came(`step ${step}`);
  await trainer.evaluate();
  came("evaluated");
  await trainer.generate("Define: love", { maxTokens: 2 });
  came("generated");
  await trainer.save(out);
  came("saved");
}

/** The run with a device that is lost at an operation: where it was then, and the error. */
async function lostAt(operation: number) {
  await using folder = await temporary();
  const out = join(folder.path, "adapter");
  let at = "started";
  using _sim = simulate(operation);
  try {
    await wholeRun(out, (to) => {
      at = to;
    });
    return { at, error: null };
  } catch (error) {
    // A SuppressedError here: something that is given back rejects with a failure that was told already.
    assert.ok(error instanceof LoramemError, String(error));
    assert.ok(!existsSync(out), `an adapter was left after ${at}`);
    assert.deepEqual(readdirSync(folder.path), [], `files were left after ${at}`);
    return { at, error };
  }
}

test(
  "LoraTrainer ends with one clear error, and writes nothing, wherever the device is lost",
  SLOW,
  async () => {
    /** What the run had come to when it failed; null if it went through. */
    const visit = async (operation: number) => {
      const { at, error } = await lostAt(operation);
      if (error === null) return null;
      assert.equal(error.code, "DEVICE", error.message);
      assert.match(error.message, /: the device failed: .*: its memory is lost, start the program/);
      return at;
    };
    // The number of operations of a run, by doubling and halving.
    let [reached, beyond] = [0, 1];
    while ((await visit(beyond)) !== null) [reached, beyond] = [beyond, 2 * beyond];
    while (beyond - reached > 1) {
      const middle = (reached + beyond) >> 1;
      if ((await visit(middle)) === null) beyond = middle;
      else reached = middle;
    }
    // From the end back to the loading of the model.
    const stages = new Set<string | null>();
    for (let operation = reached; !stages.has("started"); operation -= 3) {
      stages.add(await visit(operation));
    }
    for (const stage of ["opened", "step 1", "step 2"]) assert.ok(stages.has(stage), stage);
    assert.ok(stages.has("evaluated") || stages.has("generated"), [...stages].join());
  },
);

test("LoraTrainer refuses a card that is too small with the bytes that it has and the bytes that it takes", async () => {
  const { info } = Device.prototype;
  let device: Device | undefined;
  Device.prototype.info = function (this: Device) {
    device = this;
    return { ...info.call(this), memoryFree: 8 << 20 };
  };
  try {
    const opening = LoraTrainer.open({ model: `${DEMO}/model`, data: RECORDS, device: "cpu" });
    await assert.rejects(opening, {
      code: "OUT_OF_MEMORY",
      message: /does not fit .*: 7\.20 MiB given, [\d.]+ MiB \(\d+ bytes\) needed/,
    });
    assert.equal(device?.disposed, true, "nothing stays open");
  } finally {
    Device.prototype.info = info;
  }
});
