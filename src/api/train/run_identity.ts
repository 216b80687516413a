/** What a run is, for its checkpoints: the settings that its bits depend on, and what its plan had chosen. */
import type { Precision } from "../amp/precision.ts";
import type { TensorFile } from "../io/safetensors.ts";
import type { DeviceInfo } from "../memory/mod.ts";
import type { ModelConfig } from "../nn/config.ts";
import type { LoraTarget } from "../nn/lora_config.ts";
import { planHash } from "../plan/hash.ts";
import { describePoints } from "../plan/save_points.ts";
import { type CheckpointState, type RunSettings, settingsOf } from "./checkpoint_state.ts";
import { dataFingerprint, modelFingerprint } from "./fingerprint.ts";
import type { ResolvedOptions } from "./options.ts";
import { type RunData, stepCounts } from "./run_inputs.ts";
import type { Session } from "./session.ts";

/** Settings and data of a run. */
export interface RunIdentity {
  readonly settings: RunSettings;
  /** Fingerprint of the evaluation data; empty without. */
  readonly evalData: string;
}

/** Works out the identity of a run: reads samples of the weights, hashes the data. */
export async function identify(
  options: ResolvedOptions,
  config: ModelConfig,
  files: TensorFile,
  targets: readonly LoraTarget[],
  precision: Precision,
  tokensPerMicroBatch: number,
  { data, evalData }: RunData,
): Promise<RunIdentity> {
  const settings = settingsOf({
    options,
    precision,
    targets,
    tokensPerMicroBatch,
    totalSteps: stepCounts(options, data.documents.length).total,
    model: await modelFingerprint(config, files),
    data: dataFingerprint(data.documents),
  });
  return { settings, evalData: evalData === null ? "" : dataFingerprint(evalData.documents) };
}

/** What `"auto"` came to. */
export function chosenBy(
  { run, executor }: Session,
  { kind, name }: DeviceInfo,
): CheckpointState["chosen"] {
  return {
    device: String(name ?? kind),
    weights: run.spec.weights ?? "resident",
    savePoints: describePoints(run.savePoints),
    lossChunkTokens: run.spec.dims.lossChunkTokens,
    plan: planHash(run.plan),
    algorithms: executor.algorithms,
  };
}

/** What differs between the choices of a run and of its checkpoint, in words; null = nothing. */
export function changedChoices(
  run: CheckpointState["chosen"],
  checkpoint: CheckpointState["chosen"],
): string | null {
  const names = ["device", "weights", "savePoints", "lossChunkTokens", "plan"] as const;
  const changed = names
    .filter((name) => run[name] !== checkpoint[name])
    .map((name) => `${name} is ${run[name]}, was ${checkpoint[name]}`);
  if (run.algorithms !== checkpoint.algorithms) changed.push("algorithms of matrix products");
  return changed.length === 0 ? null : changed.join("; ");
}
