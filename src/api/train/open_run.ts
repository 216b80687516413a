/** Puts a run together: options, model, data, plan, device, weights, adapters; in the order in which mistakes are cheap. */
import { tmpdir } from "node:os";
import { LoramemError } from "../../ffi/error.ts";
import { choosePrecision } from "../amp/precision.ts";
import { type Adapter, readAdapter } from "../io/adapter.ts";
import { openSafetensors } from "../io/safetensors.ts";
import { Device, type DeviceInfo } from "../memory/mod.ts";
import { readModelConfig } from "../nn/config.ts";
import { linearModules, validateCheckpoint } from "../nn/config_tensors.ts";
import { resolveLoraTargets } from "../nn/lora_config.ts";
import type { Backend } from "../nn/programs.ts";
import { importAdapters, initializeAdapters } from "./adapter_state.ts";
import { CheckpointSetup, checkRunDir } from "./checkpoint_setup.ts";
import { FitSearch } from "./fit_run.ts";
import { loadWeights, storedType } from "./load_weights.ts";
import type { OpenOptions } from "./notice.ts";
import { budgetBytes, type ResolvedOptions, resolveOptions } from "./options.ts";
import { profileOfDevice } from "./own_profile.ts";
import { RunDir } from "./run_dir.ts";
import { identify } from "./run_identity.ts";
import {
  dimsOf,
  fitOptions,
  hostBudgetOf,
  loraOf,
  programsOf,
  readProfile,
  readRunData,
  scalerOf,
  stepLoadOf,
} from "./run_inputs.ts";
import type { RunPlan } from "./run_plan.ts";
import { Session } from "./session.ts";
import type { OpenedRun } from "./trainer.ts";

/** Share of a plan that could not be reserved that the next plan may take. */
const RETRY_SHARE = 0.95;

/** Opens a run; nothing stays open if it fails. */
export async function openRun(raw: unknown, how: OpenOptions): Promise<OpenedRun> {
  const options = resolveOptions(raw);
  checkRunDir(options);
  const config = await readModelConfig(options.model);
  await using files = await openSafetensors(options.model);
  validateCheckpoint(config, files.tensors);
  const adapter = options.adapter === undefined ? null : await readAdapter(options.adapter);
  const lora = adapter === null ? loraOf(options) : adapter.config;
  const targets = resolveLoraTargets(linearModules(config), lora);
  const read = await readRunData(options, config, options.model);

  await using undo = new AsyncDisposableStack();
  const device = undo.use(
    await Device.open(options.device as "auto", { threads: options.threads }),
  );
  const ring = undo.use(device.createFileRing());
  await using failed = new AsyncDisposableStack();
  if (options.runDir !== undefined) {
    const runDir = undo.use(await RunDir.open(device, ring, options.runDir));
    failed.defer(() => runDir.remove());
  }
  const info = device.info();
  const backend: Backend = device.kind === "cpu" ? "cpu" : "cuda";
  const precision = choosePrecision(options.precision, backend);
  const longest = Math.max(read.data.longest, read.evalData?.longest ?? 0);
  const { tokensPerMicroBatch } = dimsOf(options, config, longest);
  const saves = options.saveEvery !== undefined;
  const setup =
    saves || options.resume !== undefined
      ? await CheckpointSetup.prepare(
          ring,
          options,
          await identify(options, config, files, targets, precision, tokensPerMicroBatch, read),
          how.onNotice,
        )
      : null;
  const planned = setup?.planned ?? options;
  const dims = dimsOf(planned, config, longest);
  const profile = await readProfile(options.deviceProfile, () =>
    profileOfDevice(device.kind, String(info.name ?? device.kind)),
  );
  const step = stepLoadOf(options, config, dims.tokensPerMicroBatch, read.data.documents);
  const spec = {
    config,
    targets,
    dtypeOf: (tensor: string) => storedType(files, tensor),
    precision,
    backend,
    dims,
    programs: programsOf(options),
    snapshot: saves,
  };
  const hostBudget = hostBudgetOf(
    planned,
    budgetBytes(planned.hostMemoryBudget),
    backend === "cpu",
    Number(info.hostMemoryFree ?? info.memoryFree),
  );
  const search = new FitSearch(spec, fitOptions(planned, config, profile, step, hostBudget));
  const session = commitWithin(
    budgetBytes(options.memoryBudget),
    () => freeBytes(device.info()),
    (budget) => search.fit(budget),
    (run) => Session.commit(device, run, options.execution, scalerOf(options), planned.algorithms),
  );
  undo.defer(() => session.dispose());
  const folder = options.weightsFolder ?? options.runDir ?? tmpdir();
  await loadWeights(session.executor, session.run, files, ring, { ...how, folder });
  const resumed = (await setup?.load(session)) ?? null;
  if (resumed === null) await loadAdapters(session, options, adapter);
  const checkpoints = (await setup?.start(session, resumed)) ?? null;
  if (checkpoints !== null) undo.defer(() => checkpoints.dispose());
  failed.move();
  const opened = { lora, device, session, ...read, checkpoints, resumed, resources: undo.move() };
  return { ...opened, options: { ...options, precision } };
}

/**
 * Bytes that `memoryBudget: "auto"` may take: what is free, less the workspace that the stream of the run brings and what
 * the driver adds for graphs and rounding; on the CPU less a tenth, which other programs keep.
 */
function freeBytes({ kind, memoryFree, streamWorkspace = 0 }: DeviceInfo): number {
  const free = Number(memoryFree);
  if (kind === "cpu") return Math.floor(free * 0.9);
  return Math.max(0, Math.floor(free * 0.98) - (64 << 20) - Number(streamWorkspace));
}

/**
 * Plans for a budget and commits. Where the budget is what is free (null), another program may take it in between: then it
 * plans once more, with what is free now and for less than what could not be had.
 */
export function commitWithin<T>(
  budget: number | null,
  free: () => number,
  fit: (budget: number) => RunPlan,
  commit: (run: RunPlan) => T,
): T {
  const run = fit(budget ?? free());
  try {
    return commit(run);
  } catch (error) {
    const retry = budget === null && error instanceof LoramemError && error.is("OUT_OF_MEMORY");
    if (!retry) throw error;
    return commit(fit(Math.min(free(), Math.floor(run.plan.deviceBytes * RETRY_SHARE))));
  }
}

async function loadAdapters(
  session: Session,
  options: ResolvedOptions,
  adapter: Adapter | null,
): Promise<void> {
  if (adapter === null) await initializeAdapters(session.executor, session.run, options.seed);
  else await importAdapters(session.executor, session.run, adapter.tensors);
}
