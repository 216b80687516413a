/** A session on the simulated device that writes checkpoints: for failures and delays at every file call. */
import { readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { Device, type DeviceOptions, type FileRing, openSafetensors } from "../../mod.ts";
import { importAdapters } from "../../src/api/train/adapter_state.ts";
import { Checkpoints } from "../../src/api/train/checkpoints.ts";
import { loadWeights } from "../../src/api/train/load_weights.ts";
import type { Notice } from "../../src/api/train/notice.ts";
import { Session } from "../../src/api/train/session.ts";
import { type Golden, planGolden, readGolden } from "./support.ts";

/** Small enough that a save takes many file calls. */
const RING = { slots: 3, slotBytes: 16384, threads: 1 };

const golden: Golden = await readGolden("llama");

export const SETTINGS = { model: "golden", data: "golden" };
const CHOSEN = {
  device: "sim",
  weights: "resident",
  savePoints: "keep",
  lossChunkTokens: 32,
  algorithms: "estimated",
  plan: "none",
} as const;

/** A session, its ring and its checkpoints. */
export interface Rig extends AsyncDisposable {
  readonly session: Session;
  readonly ring: FileRing;
  readonly checkpoints: Checkpoints;
  readonly notices: Notice[];
  /** One optimizer step. */
  step(): Promise<void>;
  /** A checkpoint of the state as it is; its failure, or null. */
  save(): ReturnType<Checkpoints["settled"]>;
}

/** Opens a rig that writes to `dir`; the newest checkpoint stays. */
export async function openRig(dir: string, options: DeviceOptions = {}): Promise<Rig> {
  const programs = ["train", "optimizer"] as const;
  const run = await planGolden(golden, { programs, snapshot: true });
  await using files = await openSafetensors(`${golden.folder}/model`);
  await using undo = new AsyncDisposableStack();
  const device = undo.use(await Device.open("sim", { threads: 1, ...options }));
  const session = Session.commit(device, run, "graph"); // the first stream is the session's
  undo.defer(() => session.dispose());
  const ring = undo.use(device.createFileRing(RING));
  await loadWeights(session.executor, run, files, ring);
  await importAdapters(session.executor, run, golden.adapter0.tensors);
  const notices: Notice[] = [];
  const about = {
    facts: { settings: SETTINGS, chosen: CHOSEN, options: {} },
    evalData: "",
    notice: (notice: Notice) => void notices.push(notice),
  };
  const policy = { dir, saveEvery: 1, keepLast: 1 };
  const checkpoints = await Checkpoints.open(ring, session, policy, about, null);
  undo.defer(() => checkpoints.dispose());
  const resources = undo.move();
  return {
    session,
    ring,
    checkpoints,
    notices,
    async step() {
      const documents = golden.batches[session.steps % golden.batches.length] ?? [];
      await session.trainStep(documents, golden.settings);
    },
    async save() {
      await checkpoints.save({ step: session.steps, epoch: 0, batch: session.steps });
      return await checkpoints.settled();
    },
    [Symbol.asyncDispose]: () => resources.disposeAsync(),
  };
}

/** What a healthy device writes after each of `steps` steps, in order. */
export async function referenceFiles(dir: string, steps: number): Promise<Buffer[]> {
  await using rig = await openRig(dir);
  const files: Buffer[] = [];
  for (let step = 1; step <= steps; step++) {
    await rig.step();
    await rig.save();
    files.push(await readFile(join(dir, `checkpoint-${step}.safetensors`)));
  }
  return files;
}

/** The checkpoints in a folder by step, and other files. */
export async function filesIn(
  dir: string,
): Promise<{ readonly checkpoints: Map<number, Buffer>; readonly others: string[] }> {
  const checkpoints = new Map<number, Buffer>();
  const others: string[] = [];
  for (const name of (await readdir(dir)).sort()) {
    const step = /^checkpoint-(\d+)\.safetensors$/.exec(name)?.[1];
    if (step === undefined) others.push(name);
    else checkpoints.set(Number(step), await readFile(join(dir, name)));
  }
  return { checkpoints, others };
}
