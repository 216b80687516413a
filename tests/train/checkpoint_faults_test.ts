/** Saves on a disk that fails at any call, and on a device that is late or fails. */
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { after, test } from "node:test";
import { LoramemError, type SimFileOptions } from "../../mod.ts";
import { bytesOf } from "../../src/api/graph/value.ts";
import type { PinnedBuffer } from "../../src/api/memory/mod.ts";
import { Snapshot } from "../../src/api/train/snapshot.ts";
import { temporary } from "../cli/support.ts";
import { filesIn, openRig, referenceFiles } from "./checkpoint_rig.ts";
import { parseLog } from "./crash_disk.ts";

const STEPS = 3;
const reference = await temporary();
after(() => reference[Symbol.asyncDispose]());
const expected = await referenceFiles(reference.path, STEPS);
const LOG = `${reference.path}/log`;

async function loggedCalls(): Promise<number> {
  return parseLog(await readFile(LOG)).length;
}

/** File calls that opening a rig makes, which are not looked at here. */
const opening = await countOpening();

async function countOpening(): Promise<number> {
  await using folder = await temporary();
  await using _rig = await openRig(folder.path, { files: { log: LOG } });
  return await loggedCalls();
}

/** Trains and saves in a folder while file calls fail; gives the step of each save and what the disk refused. */
async function saveAll(dir: string, files: SimFileOptions) {
  const refused: (LoramemError | null)[] = [];
  let notices = 0;
  {
    await using rig = await openRig(dir, { files });
    for (let step = 1; step <= STEPS; step++) {
      await rig.step();
      const failure = await rig.save();
      refused.push(failure);
      const { checkpoints } = await filesIn(dir);
      // Whatever fails: what is there is whole, and the newest that was said to be there is there.
      for (const [at, bytes] of checkpoints) assert.deepEqual(bytes, expected[at - 1], `${at}`);
      const newest = Math.max(0, ...checkpoints.keys());
      assert.ok(newest >= refused.lastIndexOf(null) + 1, `${newest} is left`);
    }
    notices = rig.notices.filter(({ kind }) => kind === "checkpointFailed").length;
  }
  return { refused, notices, ...(await filesIn(dir)) };
}

/** Calls that a run without failures makes. */
async function countCalls(): Promise<number> {
  await using folder = await temporary();
  await saveAll(folder.path, { log: LOG });
  return await loggedCalls();
}

for (const error of ["EIO", "ENOSPC", "EOF"] as const) {
  test(`Checkpoints survive ${error} at every file call: the run goes on, and the next save is good`, async () => {
    const calls = await countCalls();
    let failed = 0;
    for (let failAt = opening + 1; failAt <= calls; failAt++) {
      await using folder = await temporary();
      const { refused, notices, checkpoints, others } = await saveAll(folder.path, {
        failAt,
        error,
      });
      const failures = refused.filter((failure) => failure !== null);
      // Mutant: a failed save throws, or is not told.
      for (const failure of failures) assert.ok(failure.is("IO"), `${failAt}: ${failure.message}`);
      assert.ok(failures.length <= 1 && notices >= failures.length, `${failAt}: ${failures}`);
      failed += failures.length;
      // Mutant: the unfinished file stays, and the next save finds its name taken.
      const isUnlink = others.length > 0; // the call that failed was the removal itself
      assert.ok(!isUnlink || others.length === 1, `${failAt}: ${others}`);
      if (refused.at(-1) === null) assert.ok(checkpoints.has(STEPS), `${failAt}`);
    }
    assert.ok(failed > 10, `${failed} saves failed`);
  });
}

test("Checkpoints do not notice calls that are interrupted or move little", async () => {
  for (const files of [{ failAt: opening + 9, error: "EINTR", fails: 3 }, { most: 700 }] as const) {
    await using folder = await temporary();
    const { refused, checkpoints } = await saveAll(folder.path, files);
    assert.deepEqual(refused, [null, null, null], JSON.stringify(files));
    assert.deepEqual([...checkpoints.keys()], [STEPS]);
  }
});

test("Checkpoints keep the one before on a disk that stays full, and say so each time", async () => {
  await using folder = await temporary();
  await using first = await openRig(folder.path);
  await first.step();
  assert.equal(await first.save(), null);
  await using full = await openRig(folder.path, {
    files: { failAt: opening + 1, fails: 1e6, error: "ENOSPC" },
  });
  for (let step = 1; step <= 2; step++) {
    await full.step();
    const refused = await full.save();
    assert.ok(refused?.is("IO") && refused.details.errno === "ENOSPC", String(refused));
  }
  assert.equal(full.notices.length, 2);
  assert.match(full.notices[0]?.message ?? "", /not written, the run goes on/);
  const { checkpoints } = await filesIn(folder.path);
  assert.deepEqual(checkpoints, new Map([[1, expected[0]]]));
});

test("Checkpoints hold the state of their step however late the copy is, and however slow the disk", async () => {
  await using folder = await temporary();
  const fileOf = (step: number) => readFile(join(folder.path, `checkpoint-${step}.safetensors`));
  // Every stream but the session's is late by more than a step lasts, and a write is many calls.
  const delays = [0, ...Array.from({ length: 9 }, () => 4000)];
  await using rig = await openRig(folder.path, { delays, files: { most: 512 } });
  for (let step = 1; step <= STEPS; step++) {
    await rig.step();
    // Mutants: the update does not wait for the copy; a save does not wait for the write before: both mix two steps.
    await rig.checkpoints.save({ step, epoch: 0, batch: step });
    if (step > 1) assert.deepEqual(await fileOf(step - 1), expected[step - 2]);
  }
  await rig.checkpoints.settled();
  assert.deepEqual(await fileOf(STEPS), expected[STEPS - 1]);
});

test("Snapshot.take() copies what the session has enqueued, however late that is", async () => {
  await using folder = await temporary();
  await using rig = await openRig(folder.path, { delays: [5000] });
  const { executor, run } = rig.session;
  await rig.step();
  const snapshot = new Snapshot(rig.session);
  const moment = run.snapshot.find(({ value }) => value === run.adapters.m);
  assert.ok(moment);
  executor.clear(moment.value);
  // Mutant: the copy stream does not wait for the session's.
  snapshot.take();
  await snapshot.stream.done();
  const { buffer, offset } = executor.locate(moment.copy);
  const copied = (buffer as PinnedBuffer).view(Float32Array, offset, bytesOf(moment.copy) / 4);
  assert.ok(copied.every((value) => value === 0));
  await snapshot.dispose();
});

test("Checkpoints report a device that failed under a save as an error", async () => {
  // Mutant: every failure of a save is taken for the disk's.
  await using folder = await temporary();
  let operations = 0;
  {
    await using rig = await openRig(folder.path);
    await rig.step();
    await rig.save();
    operations = rig.session.executor.device.stats().kernelLaunches;
  }
  assert.ok(operations > 0);
  const kinds = new Set<string>();
  for (let faultAt = operations + 1; faultAt < operations + 60; faultAt += 3) {
    await using inner = await temporary();
    const work = async () => {
      await using rig = await openRig(inner.path, { faultAt });
      await rig.step();
      assert.equal(await rig.save(), null);
    };
    await work().then(
      () => kinds.add("none"),
      (error) => kinds.add((error.suppressed ?? error).code ?? String(error)),
    );
    for (const [at, bytes] of (await filesIn(inner.path)).checkpoints) {
      assert.deepEqual(bytes, expected[at - 1]);
    }
  }
  assert.deepEqual([...kinds].sort(), ["DEVICE", "none"]);
});

test("Snapshot gives back what it had made when the device refuses the rest", async () => {
  await using folder = await temporary();
  await using rig = await openRig(folder.path, { debug: true });
  const { device } = rig.session.executor;
  for (const name of ["createEvent", "createStream"] as const) {
    const before = device.leaks().length;
    const original = device[name].bind(device) as () => Disposable;
    let made = 0;
    const failing = () => {
      if (name === "createStream" || made++ === 1) throw new LoramemError("DEVICE", "injected");
      return original();
    };
    Object.defineProperty(device, name, { value: failing, configurable: true });
    assert.throws(() => new Snapshot(rig.session), /injected/);
    Reflect.deleteProperty(device, name);
    // Mutant: the events that were made before it stay.
    assert.equal(device.leaks().length, before, name);
  }
});

test("Checkpoints keep the best one until a better one is on the disk", async () => {
  // Mutant: the best one goes because a better one was wanted, whose save failed.
  const run = async (files: SimFileOptions) => {
    await using folder = await temporary();
    await using rig = await openRig(folder.path, { files });
    const calls: number[] = [];
    for (const [at, loss] of [2, 3, 1, 4].entries()) {
      await rig.step();
      rig.checkpoints.evaluated(at + 1, loss);
      const refused = await rig.save();
      assert.equal(refused === null, files.failAt === undefined || at !== 2);
      if (files.log !== undefined) calls.push(await loggedCalls());
    }
    return { calls, steps: [...(await filesIn(folder.path)).checkpoints.keys()] };
  };
  const good = await run({ log: LOG });
  assert.deepEqual(good.steps, [3, 4]);
  const failed = await run({ failAt: (good.calls[1] as number) + 1 });
  assert.deepEqual(failed.steps, [1, 4]);
});
