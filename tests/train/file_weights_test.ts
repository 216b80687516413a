/** Weights that stream from a file: late reads, disks that fail or lie, and what is left behind. */
import assert from "node:assert/strict";
import {
  closeSync,
  fstatSync,
  ftruncateSync,
  openSync,
  readdirSync,
  readlinkSync,
  readSync,
  writeSync,
} from "node:fs";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { after, test } from "node:test";
import { LoramemError, LoraTrainer, type TrainOptions } from "../../mod.ts";
import { openSafetensors } from "../../src/api/io/safetensors.ts";
import { leaksOf } from "../../src/api/memory/leaks.ts";
import { Device, type SimOptions } from "../../src/api/memory/mod.ts";
import { WeightsFile } from "../../src/api/run/weights_file.ts";
import { exportAdapters, importAdapters } from "../../src/api/train/adapter_state.ts";
import { loadWeights } from "../../src/api/train/load_weights.ts";
import { Session } from "../../src/api/train/session.ts";
import { temporary } from "../cli/support.ts";
import { rejects } from "../io/scratch.ts";
import { filesIn } from "./checkpoint_rig.ts";
import { smallRun } from "./checkpoint_support.ts";
import { parseLog } from "./crash_disk.ts";
import { deepGolden } from "./deep.ts";
import { openGolden, planGolden } from "./support.ts";

const LAYERS = 5;
const RING = { slots: 3, slotBytes: 1 << 16, threads: 1 };
const golden = await deepGolden("llama", LAYERS);
after(() => golden[Symbol.dispose]());

/** A session on the simulated device with its layers in a file in `folder`. */
async function openFile(folder: string, sim: SimOptions = {}) {
  await using undo = new AsyncDisposableStack();
  const setup = { device: "sim", weights: "file", policy: "offload" } as const;
  const run = await planGolden(golden, setup);
  await using files = await openSafetensors(`${golden.folder}/model`);
  const device = undo.use(await Device.open("sim", { threads: 1, ...sim }));
  undo.defer(() => assert.deepEqual(leaksOf(device), []));
  const session = Session.commit(device, run, "graph");
  const ring = device.createFileRing(RING);
  undo.defer(() => ring.dispose());
  undo.defer(() => {
    const { slots, freeSlots, requests } = ring.stats();
    assert.deepEqual({ freeSlots, requests }, { freeSlots: slots, requests: 0 });
  });
  undo.defer(() => session.dispose());
  await loadWeights(session.executor, run, files, ring, { folder });
  await importAdapters(session.executor, run, golden.adapter0.tensors);
  const resources = undo.move();
  return { session, [Symbol.asyncDispose]: () => resources.disposeAsync() };
}

/** Two steps and evaluations. */
async function outcome(session: Session) {
  const results: number[] = [];
  for (const documents of golden.batches.slice(0, 2)) {
    results.push((await session.trainStep(documents, golden.settings)).loss);
    results.push(await session.evaluate(documents));
  }
  return { results, tensors: await exportAdapters(session.executor, session.run) };
}

/** Descriptors of this process for unlinked files that were made in a folder. */
function unlinkedIn(folder: string): number[] {
  return readdirSync("/proc/self/fd")
    .map(Number)
    .filter((fd) => {
      try {
        const path = readlinkSync(`/proc/self/fd/${fd}`);
        return path.startsWith(folder) && path.endsWith("(deleted)");
      } catch {
        return false; // the descriptor that the listing itself took
      }
    });
}

/** Changes the weights file in a folder, which has no name. */
function change(folder: string, edit: (fd: number, bytes: number) => void): void {
  const fd = openSync(`/proc/self/fd/${unlinkedIn(folder)[0]}`, "r+");
  edit(fd, fstatSync(fd).size);
  closeSync(fd);
}

const expected = await (async () => {
  await using session = await openGolden(golden);
  return await outcome(session);
})();

// Mutants that these kill: WeightsFile.#read() without `stream` (a window is filled while a late op still reads it), and
// arrived() without the read (a layer computes before it is there).
test("Session gives the same bits however late ops and reads of the weights file are", async () => {
  // Microseconds before every op, the three streams of copies, and the two of the ring, to the device first or last.
  for (const delays of [
    [3000, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 2000, 2000],
    [2000, 0, 1000, 0, 1000, 1000],
  ]) {
    await using folder = await temporary();
    await using opened = await openFile(folder.path, { delays });
    assert.deepEqual(await outcome(opened.session), expected, String(delays));
  }
});

test("WeightsFile has no name while it is used, and is gone afterwards", async () => {
  await using folder = await temporary();
  {
    await using opened = await openFile(folder.path);
    assert.deepEqual(readdirSync(folder.path), []);
    assert.ok(unlinkedIn(folder.path).length > 0);
    await outcome(opened.session);
  }
  assert.deepEqual(unlinkedIn(folder.path), []);
});

// The mutant that this kills: a checksum that is not compared.
test("Session reports a flipped bit of every layer by its name, and runs nothing any more", async () => {
  for (let layer = 0; layer < LAYERS; layer++) {
    await using folder = await temporary();
    await using opened = await openFile(folder.path);
    change(folder.path, (fd, bytes) => {
      const at = Math.floor(((layer + 0.4) * bytes) / LAYERS);
      const byte = new Uint8Array(1);
      readSync(fd, byte, 0, 1, at);
      writeSync(
        fd,
        byte.map((value) => value ^ 4),
        0,
        1,
        at,
      );
    });
    const text = new RegExp(`weights: layer ${layer} cannot be read: its checksum`);
    await rejects(() => outcome(opened.session), "IO", text);
    // The mutant that this kills: a failure that is forgotten, with windows that hold the wrong layers.
    await rejects(() => opened.session.evaluate(golden.batches[0] ?? []), "IO", text);
  }
});

test("Session reports a weights file that was cut", async () => {
  await using folder = await temporary();
  await using opened = await openFile(folder.path);
  change(folder.path, (fd, bytes) => ftruncateSync(fd, (bytes * 3.5) / LAYERS));
  await rejects(() => outcome(opened.session), "IO", /layer 3 cannot be read: .*file ends at byte/);
});

for (const error of ["EIO", "EOF"] as const) {
  test(`Session reports ${error} at every file call as one error, and leaves nothing behind`, async () => {
    const step = async (session: Session) =>
      (await session.trainStep(golden.batches[0] ?? [], golden.settings)).loss;
    await using logs = await temporary();
    const log = join(logs.path, "log");
    const counted = async (use: (session: Session) => Promise<unknown>) => {
      await using folder = await temporary();
      await using opened = await openFile(folder.path, { files: { log } });
      await use(opened.session);
      return parseLog(await readFile(log)).length;
    };
    const loading = await counted(async () => {});
    const all = await counted(step);
    let reported = 0;
    for (let failAt = 1; failAt < all; failAt++) {
      await using folder = await temporary();
      try {
        // Two calls, as a read asks the page cache first, where a failure says nothing.
        const files = { failAt, fails: 2, error };
        await using opened = await openFile(folder.path, { files });
        assert.equal(await step(opened.session), expected.results[0], `call ${failAt}`);
      } catch (failure) {
        assert.ok(failure instanceof LoramemError, `call ${failAt}: ${failure}`);
        assert.ok(failure.is("IO") || failure.is("BAD_FILE"), `call ${failAt}: ${failure.message}`);
        if (failAt > loading) {
          assert.match(failure.message, /weights: layer \d cannot be read/);
          reported++;
        }
      }
      assert.deepEqual(unlinkedIn(folder.path), [], `call ${failAt}`);
    }
    assert.ok(reported > 10, `${reported} of ${all - loading}`);
  });
}

test("WeightsFile.create() refuses a folder that is missing, and a disk that is too small", async () => {
  await using folder = await temporary();
  await using device = await Device.open("cpu");
  await using ring = device.createFileRing(RING);
  const create = (path: string, bytes: number) => () => WeightsFile.create(ring, path, bytes);
  await rejects(create(join(folder.path, "none"), 4096), "IO", /none/);
  await rejects(create(folder.path, 2 ** 60), "IO", /1048576\.00 TiB needed.*set weightsFolder/);
  assert.deepEqual(readdirSync(folder.path), []);
});

test("LoraTrainer trains, saves, resumes and generates with weights in a file as with resident ones", async () => {
  const trace = async (more: Partial<TrainOptions>, stopAt: number) => {
    await using trainer = await LoraTrainer.open(smallRun({ saveEvery: 2, ...more }));
    assert.equal(trainer.weights, more.weights);
    const losses: number[] = [];
    for await (const { step, loss } of trainer.steps()) {
      losses.push(loss);
      if (step === stopAt) break;
    }
    const text = await trainer.generate("Define: love");
    return { losses, text, evaluation: await trainer.evaluate() };
  };
  await using resident = await temporary();
  await using file = await temporary();
  const expected = await trace({ weights: "resident", runDir: resident.path }, 6);
  await trace({ weights: "file", runDir: file.path }, 5);
  const { losses, ...others } = await trace(
    { weights: "file", runDir: file.path, resume: "auto" },
    6,
  );
  assert.deepEqual({ losses, ...others }, { ...expected, losses: expected.losses.slice(4) });
  assert.deepEqual((await filesIn(file.path)).others, (await filesIn(resident.path)).others);
});
