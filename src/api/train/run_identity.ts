/** What a run is, for its checkpoints: the settings that its bits depend on, and what its plan had chosen. */
import type { Precision } from "../amp/precision.ts";
import type { TensorFile } from "../io/safetensors.ts";
import type { ModelConfig } from "../nn/config.ts";
import type { LoraTarget } from "../nn/lora_config.ts";
import { planHash } from "../plan/hash.ts";
import { describePoints } from "../plan/save_points.ts";
import { type CheckpointState, clip, type RunSettings, settingsOf } from "./checkpoint_state.ts";
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

/** What `"auto"` and timing came to. */
export function chosenBy({ run, executor }: Session): CheckpointState["chosen"] {
  const { kind, name } = executor.device.info();
  return {
    device: String(name ?? kind),
    weights: run.spec.weights ?? "resident",
    savePoints: describePoints(run.savePoints),
    lossChunkTokens: run.spec.dims.lossChunkTokens,
    algorithms: executor.algorithms,
    plan: planHash(run.plan),
  };
}

/** What differs between the choices of a run and of its checkpoint, in words; null = nothing. */
export function changedChoices(
  run: CheckpointState["chosen"],
  checkpoint: CheckpointState["chosen"],
): string | null {
  const names = Object.keys(run) as (keyof typeof run)[];
  const changed = names
    .filter((name) => run[name] !== checkpoint[name])
    .map((name) => `${name} is ${clip(run[name])}, was ${clip(checkpoint[name])}`);
  return changed.length === 0 ? null : changed.join("; ");
}
