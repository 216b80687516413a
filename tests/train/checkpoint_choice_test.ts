/** Which checkpoint a run goes on from, and which it refuses. */
import assert from "node:assert/strict";
import {
  cp,
  open,
  readdir,
  readFile,
  rename,
  symlink,
  truncate,
  writeFile,
} from "node:fs/promises";
import { join } from "node:path";
import { after, test } from "node:test";
import { inspectFiles, LoramemError, LoraTrainer, type TrainOptions } from "../../mod.ts";
import { DEMO, temporary } from "../cli/support.ts";
import { RECORDS, smallRun, type Trace, traceRun } from "./checkpoint_support.ts";

const LEAN = { promptTokens: 0, evalData: undefined } as Partial<TrainOptions>;
const lean = (more: Partial<TrainOptions> = {}) => smallRun({ ...LEAN, ...more });

/** The run that the others are compared with, and a folder with its checkpoints 2, 4 and 6. */
const finished = await temporary();
after(() => finished[Symbol.asyncDispose]());
const whole = await traceRun(lean({ runDir: finished.path, saveEvery: 2, keepLast: 3 }));

/** A copy of that folder with the checkpoints of `steps` only. */
async function copyRun(steps: readonly number[]) {
  const folder = await temporary();
  for (const step of steps) await cp(at(finished.path, step), at(folder.path, step));
  return folder;
}

const at = (folder: string, step: number) => join(folder, `checkpoint-${step}.safetensors`);
const kinds = ({ notices }: Trace) => notices.map(({ kind }) => kind);

async function refuses(options: TrainOptions, code: string, ...patterns: RegExp[]): Promise<void> {
  await assert.rejects(LoraTrainer.open(options), (error: unknown) => {
    assert.ok(error instanceof LoramemError && error.code === code, String(error));
    for (const pattern of patterns) assert.match(error.message, pattern);
    return true;
  });
}

test("resume auto starts from the beginning where there is no checkpoint, and else takes the newest", async () => {
  await using folder = await temporary();
  const options = lean({ runDir: folder.path, saveEvery: 2, resume: "auto" });
  const first = await traceRun(options, { after: async (_, step) => step === 5 });
  assert.deepEqual(kinds(first), ["checkpointSaved", "checkpointSaved"]);
  const second = await traceRun(options);
  assert.deepEqual(second.steps, whole.steps.slice(4));
  assert.equal(second.adapter, whole.adapter);
  assert.match(second.notices[0]?.message ?? "", /Resumed after step 4 from .*checkpoint-4/);
  const third = await traceRun(options);
  assert.deepEqual([third.steps, third.adapter], [[], whole.adapter]);
});

test("resume takes a file or a folder of another run folder", async () => {
  await using folder = await temporary();
  for (const resume of [finished.path, at(finished.path, 4), at(finished.path, 2)]) {
    const { steps, adapter } = await traceRun(lean({ resume }));
    assert.deepEqual(steps, whole.steps.slice(6 - steps.length));
    assert.equal(adapter, whole.adapter);
  }
  await refuses(lean({ resume: folder.path }), "BAD_FILE", /holds no checkpoint/);
  await refuses(lean({ resume: join(folder.path, "no") }), "IO", /no such file/);
});

/** Ways in which a newest checkpoint can be damaged. */
const DAMAGE: Readonly<Record<string, (path: string) => Promise<void>>> = {
  "cut in the data": (path) => truncate(path, 50_000),
  "cut in the header": (path) => truncate(path, 1000),
  empty: (path) => writeFile(path, ""),
  "zeros of the right size": async (path) =>
    writeFile(path, new Uint8Array((await readFile(path)).length)),
  "with one changed bit in the data": (path) => flip(path, 60_000),
  "with one changed bit in the header": (path) => flip(path, 200),
  "in the last byte": async (path) => flip(path, (await readFile(path)).length - 1),
};

async function flip(path: string, position: number): Promise<void> {
  await using file = await open(path, "r+");
  const byte = new Uint8Array(1);
  await file.read(byte, 0, 1, position);
  byte[0] = (byte[0] as number) ^ 4;
  await file.write(byte, 0, 1, position);
}

for (const [how, damage] of Object.entries(DAMAGE)) {
  test(`resume auto skips a checkpoint that is damaged: ${how}`, async () => {
    await using folder = await copyRun([2, 4]);
    await damage(at(folder.path, 4));
    const options = lean({ runDir: folder.path, saveEvery: 2, resume: "auto" });
    const resumed = await traceRun(options);
    assert.deepEqual(resumed.steps, whole.steps.slice(2));
    assert.equal(resumed.adapter, whole.adapter);
    assert.deepEqual(kinds(resumed).slice(0, 2), ["checkpointSkipped", "resumed"]);
    assert.match(resumed.notices[0]?.message ?? "", /checkpoint-4\.safetensors/);
    // It is written again, and counts as whole then.
    const again = await traceRun({ ...options, resume: at(folder.path, 4) });
    assert.equal(again.adapter, whole.adapter);
    const names = (await readdir(folder.path)).filter((name) => name !== "run.lock").sort();
    assert.deepEqual(names, ["checkpoint-4.safetensors", "checkpoint-6.safetensors"]);
  });
}

test("a damaged checkpoint does not count among those that are kept", async () => {
  // Mutant: it counts as the newest, and a good one goes for it.
  await using folder = await copyRun([2, 6]);
  await truncate(at(folder.path, 6), 1000);
  const options = lean({ runDir: folder.path, saveEvery: 1, keepLast: 2, resume: "auto" });
  await traceRun(options, { after: async (_, step) => step === 4 });
  const names = (await readdir(folder.path)).filter((name) => name !== "run.lock").sort();
  assert.deepEqual(
    names,
    [2, 3, 6].map((step) => `checkpoint-${step}.safetensors`),
  );
});

test("resume refuses to start from the beginning where every checkpoint is damaged", async () => {
  // Mutant: the run silently starts again, and its checkpoints replace what could be rescued.
  await using folder = await copyRun([2, 4]);
  await flip(at(folder.path, 2), 60_000);
  await truncate(at(folder.path, 4), 99);
  const options = lean({ runDir: folder.path, saveEvery: 2, resume: "auto" });
  await refuses(options, "BAD_FILE", /no checkpoint is whole/, /checksum differs.*checkpoint-2/);
  await refuses(lean({ resume: at(folder.path, 4) }), "BAD_FILE", /checkpoint-4/);
});

test("saveEvery without resume refuses a folder with checkpoints", async () => {
  const options = lean({ runDir: finished.path, saveEvery: 2 });
  await refuses(options, "BAD_ARGUMENT", /checkpoint-6/, /set resume to "auto"/);
});

test("resume from elsewhere refuses a folder with checkpoints of its own", async () => {
  // Mutant: they count as this run's, and go as the older ones.
  await using folder = await copyRun([2, 4]);
  const options = lean({ runDir: folder.path, saveEvery: 2, resume: at(finished.path, 4) });
  await refuses(options, "BAD_ARGUMENT", /earlier run: .*checkpoint-4/);
  const own = await traceRun({ ...options, resume: at(folder.path, 4) });
  assert.equal(own.adapter, whole.adapter);
});

test("saveEvery and resume auto need the folder of the run", async () => {
  await refuses(lean({ saveEvery: 2 }), "BAD_ARGUMENT", /saveEvery needs .*runDir/);
  await refuses(lean({ resume: "auto" }), "BAD_ARGUMENT", /resume: "auto" needs .*runDir/);
});

/** Options that would give other bits, and how the message names each. */
const MISMATCHES: readonly (readonly [Partial<TrainOptions>, RegExp])[] = [
  [{ learningRate: 2e-3 }, /learningRate is 0\.002, the checkpoint has 0\.001/],
  [{ schedule: "linear" }, /schedule is linear, the checkpoint has cosine/],
  [{ warmupSteps: 0 }, /warmupSteps/],
  [{ epochs: 3 }, /totalSteps is 9, the checkpoint has 6/],
  [{ maxSteps: 5 }, /totalSteps is 5/],
  [{ weightDecay: 0.1 }, /weightDecay/],
  [{ beta1: 0.8 }, /beta1/],
  [{ beta2: 0.99 }, /beta2/],
  [{ adamEps: 1e-6 }, /adamEps/],
  [{ maxGradNorm: 0 }, /maxGradNorm/],
  [{ seed: 1 }, /seed is 1, the checkpoint has 0/],
  [{ batchSize: 3 }, /batchSize is 3/],
  [{ dropLast: true }, /dropLast is true/],
  [{ tokensPerMicroBatch: 128 }, /tokensPerMicroBatch is 128/],
  [{ precision: "bf16" }, /precision is bf16, the checkpoint has fp32/],
  [{ data: RECORDS.toReversed() }, /data is [0-9a-f]+, the checkpoint has [0-9a-f]+/],
  [
    { lora: { rank: 8, alpha: 16 } },
    /lora of model\.layers\.0\.self_attn\.q_proj is rank 8, scale 2, .* rank 4, scale 2.*and \d+ more/,
  ],
  [{ lora: { rank: 4, alpha: 16 } }, /rank 4, scale 4/],
  [
    { lora: { rank: 4, alpha: 8, targetModules: ["q_proj"] } },
    /lora of model\.layers\.0\.self_attn\.k_proj is absent, the checkpoint has rank 4/,
  ],
];

for (const [more, message] of MISMATCHES) {
  test(`resume refuses another ${JSON.stringify(more).slice(0, 60)} by name`, async () => {
    await refuses(lean({ resume: at(finished.path, 4), ...more }), "BAD_ARGUMENT", message);
  });
}

test("resume refuses another model with the same shapes", async () => {
  // Mutant: the fingerprint covers names and shapes only.
  await using folder = await temporary();
  const model = join(folder.path, "model");
  await cp(join(DEMO, "model"), model, { recursive: true });
  await flip(
    join(model, "model.safetensors"),
    (await readFile(join(model, "model.safetensors"))).length - 3,
  );
  await refuses(
    lean({ model, resume: at(finished.path, 4) }),
    "BAD_ARGUMENT",
    /model is [0-9a-f]+, /,
  );
});

test("resume goes on to the same bits where what changed cannot change them", async () => {
  const changes: Partial<TrainOptions>[] = [
    { threads: 2 },
    { execution: "eager" },
    { savePoints: "checkpoint" },
    { promptTokens: 16 },
    { memoryBudget: "1GiB" },
  ];
  for (const more of changes) {
    const { steps, adapter } = await traceRun(lean({ resume: at(finished.path, 4), ...more }));
    assert.deepEqual(steps, whole.steps.slice(4), JSON.stringify(more));
    assert.equal(adapter, whole.adapter, JSON.stringify(more));
  }
});

test("resume plans again what the checkpoint had chosen, and says where it could not", async () => {
  await using folder = await temporary();
  let memoryBudget = 0;
  let chosen = "";
  {
    await using roomy = await LoraTrainer.open(lean());
    memoryBudget = roomy.plan.deviceBytes - 1;
  }
  const options = lean({ runDir: folder.path, saveEvery: 2, memoryBudget });
  await traceRun(options, {
    after: async (trainer, step) => {
      chosen = trainer.savePoints;
      return step === 3;
    },
  });
  assert.notEqual(chosen, "keep");
  // Mutant: "auto" chooses afresh, for what is free now.
  await using roomy = await LoraTrainer.open(lean({ resume: folder.path }));
  assert.equal(roomy.savePoints, chosen);
  const { notices } = await traceRun(lean({ resume: folder.path, savePoints: "keep" }));
  assert.match(notices[1]?.message ?? "", /savePoints is keep, was /);
});

test("resume with a constant rate may go on for longer", async () => {
  await using folder = await temporary();
  const constant = { schedule: "constant", runDir: folder.path, saveEvery: 2 } as const;
  await traceRun(lean({ ...constant, epochs: 1 }));
  const longer = await traceRun(lean({ ...constant, resume: "auto" }));
  const once = await traceRun(lean({ schedule: "constant" }));
  assert.deepEqual(longer.steps, once.steps.slice(3));
  assert.equal(longer.adapter, once.adapter);
});

test("resume knows the best evaluation so far, and forgets one on other data", async () => {
  await using folder = await temporary();
  const options = smallRun({ runDir: folder.path, saveEvery: 1, keepLast: 1, promptTokens: 0 });
  const stopped = await traceRun(options, {
    after: async (trainer, step) => {
      if (step === 2) await trainer.evaluate();
      return step === 4;
    },
  });
  assert.equal(stopped.steps.length, 4);
  // Mutant: the best one is not in the state, and its file goes with the next save.
  await traceRun({ ...options, resume: "auto" });
  const names = (await readdir(folder.path)).filter((name) => name !== "run.lock").sort();
  assert.deepEqual(names, ["checkpoint-2.safetensors", "checkpoint-6.safetensors"]);
});

test("a link to a checkpoint, and to a run folder, are followed; a link in the way of a checkpoint is replaced", async () => {
  await using real = await copyRun([2, 4]);
  await using other = await temporary();
  const link = join(other.path, "run");
  await symlink(real.path, link);
  await rename(at(real.path, 4), join(other.path, "elsewhere"));
  await symlink(join(other.path, "elsewhere"), at(real.path, 4));
  const before = await readFile(join(other.path, "elsewhere"));
  await symlink(join(other.path, "elsewhere"), at(real.path, 6));
  const resumed = await traceRun(
    lean({ runDir: link, saveEvery: 2, keepLast: 1, resume: at(link, 4) }),
  );
  assert.equal(resumed.adapter, whole.adapter);
  assert.deepEqual(await readFile(join(other.path, "elsewhere")), before);
  assert.deepEqual(await readFile(at(real.path, 6)), await readFile(at(finished.path, 6)));
});

test("what a killed run left unfinished is removed", async () => {
  await using folder = await copyRun([2]);
  await writeFile(join(folder.path, ".checkpoint-4.safetensors.tmp"), "unfinished");
  await traceRun(lean({ runDir: folder.path, saveEvery: 2, resume: "auto" }));
  // Mutant: it stays, and the save of step 4 fails because its name is taken.
  const names = (await readdir(folder.path)).filter((name) => name !== "run.lock").sort();
  assert.deepEqual(names, ["checkpoint-4.safetensors", "checkpoint-6.safetensors"]);
});

test("inspectFiles() says what a checkpoint holds, and which tensor of it is damaged", async () => {
  const { kind, sound, files } = await inspectFiles(at(finished.path, 4));
  assert.deepEqual([kind, sound], ["checkpoint", true]);
  assert.deepEqual(
    files[0]?.tensors.map(({ name }) => name),
    ["adapters.master", "adapters.m", "adapters.v", "optimizer.state"],
  );
  await using folder = await copyRun([4]);
  await flip(at(folder.path, 4), (files[0]?.bytes ?? 0) - 1);
  const damaged = await inspectFiles(at(folder.path, 4));
  assert.deepEqual([damaged.kind, damaged.sound], ["checkpoint", false]);
  assert.match(
    damaged.faults[0]?.message ?? "",
    /checksum differs: .*checkpoint-4.*optimizer\.state/,
  );
});
