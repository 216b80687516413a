/** A power cut at any moment of a save, with any part of what was not synced lost: the checkpoint before or the new one is whole. */
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import { Resume } from "../../src/api/train/resume.ts";
import { temporary } from "../cli/support.ts";
import { openRig, referenceFiles, SETTINGS } from "./checkpoint_rig.ts";
import { CrashDisk, parseLog } from "./crash_disk.ts";

/** All choices are tried where there are at most 2^12, else so many. */
const EXHAUSTIVE = 12;
const RANDOM = 150;

/** Deterministic random numbers below 1 (xorshift32). */
function randomNumbers(seed: number): () => number {
  let state = seed;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 2 ** 32;
  };
}

/** Choices among `count` changes: none, all, all but one, one, and all or many random ones. */
function* choices(count: number, random: () => number): Generator<(change: number) => boolean> {
  if (count <= EXHAUSTIVE) {
    for (let bits = 0; bits < 2 ** count; bits++) yield (change) => ((bits >> change) & 1) === 1;
    return;
  }
  yield () => true;
  yield () => false;
  for (let only = 0; only < count; only++) {
    yield (change) => change === only;
    yield (change) => change !== only;
  }
  for (let turn = 0; turn < RANDOM; turn++) {
    const share = random();
    const bits = Array.from({ length: count }, () => random() < share);
    yield (change) => bits[change] === true;
  }
}

test("Checkpoints leave the one before or the new one whole, wherever the power is cut and whatever is lost", async () => {
  await using folder = await temporary();
  await using reference = await temporary();
  const expected = await referenceFiles(reference.path, 3);
  const log = `${reference.path}/log`;
  /** Calls in the log when a save was said to be done. */
  const done: number[] = [];
  {
    await using rig = await openRig(folder.path, { files: { log } });
    for (let step = 1; step <= 3; step++) {
      await rig.step();
      assert.equal(await rig.save(), null);
      done.push(parseLog(await readFile(log)).length);
    }
  }
  const calls = parseLog(await readFile(log));
  assert.ok(calls.length > 60, `${calls.length} calls`);
  const disk = new CrashDisk();
  const random = randomNumbers(1);
  const seen = new Map<string, Map<string, Uint8Array>>();
  let states = 0;
  for (let at = 0; at <= calls.length; at++) {
    const acknowledged = done.filter((count) => count <= at).length;
    for (const kept of choices(disk.unsynced, random)) {
      states++;
      const files = disk.after(kept);
      let newest = 0;
      const hash = createHash("sha256");
      for (const [name, content] of [...files].sort(([a], [b]) => (a < b ? -1 : 1))) {
        hash.update(`\n${name}\n`);
        const step = Number(/^checkpoint-(\d+)\.safetensors$/.exec(name)?.[1] ?? 0);
        if (step === 0) continue;
        // Mutants: no fsync before the rename; the header goes first and the data after the rename.
        assert.deepEqual(
          content,
          new Uint8Array(expected[step - 1] as Buffer),
          `${name}, call ${at}`,
        );
        hash.update(content);
        newest = Math.max(newest, step);
      }
      // Mutants: the older one is removed first, or before the folder is synced.
      assert.ok(newest >= acknowledged, `${newest} is left of ${acknowledged}, call ${at}`);
      seen.set(hash.digest("hex"), files);
    }
    const call = calls[at];
    if (call !== undefined) disk.apply(call);
  }
  assert.ok(states > 10_000, `${states} states`);
  // And what is left can be resumed from: every state of the folder that differs.
  assert.ok(seen.size > 6, `${seen.size} different states`);
  await using rig = await openRig(reference.path);
  for (const files of seen.values()) {
    await using crashed = await temporary();
    for (const [name, content] of files) await writeFile(join(crashed.path, name), content);
    const resume = await Resume.find(crashed.path, SETTINGS, ({ kind }) => {
      assert.equal(kind, "resumed");
    });
    const steps = [...files.keys()].map((name) => Number(/^checkpoint-(\d+)/.exec(name)?.[1] ?? 0));
    assert.equal(resume?.state.step ?? 0, Math.max(0, ...steps));
    await resume?.load(rig.session, rig.ring);
  }
  await rm(log);
});
