/** Everything that loramem offers: the trainer, the planner, the primitives, and the formats. */
export { type ErrorCode, type ErrorDetails, LoramemError } from "../ffi/error.ts";
export {
  GradScaler,
  type GradScalerOptions,
  type GradScalerState,
  type NamedGradients,
  type OptimizerKey,
} from "./amp/grad_scaler.ts";
export type { ChatMessage } from "./data/chat_template.ts";
export type { RecordSource } from "./data/records.ts";
export { type Adapter, type AdapterTensors, readAdapter, writeAdapter } from "./io/adapter.ts";
export type { AdapterConfig } from "./io/adapter_config.ts";
export type { InspectedFile, InspectedTensor } from "./io/inspect_file.ts";
export {
  type LoadOptions,
  type LoadProgress,
  loadTensors,
  type TensorTarget,
} from "./io/load_tensors.ts";
export {
  openSafetensors,
  type TensorData,
  type TensorEntry,
  type TensorFile,
  writeSafetensors,
} from "./io/safetensors.ts";
export * as kernels from "./kernels/mod.ts";
export * from "./memory/mod.ts";
export { type ModelConfig, parseModelConfig, readModelConfig } from "./nn/config.ts";
export {
  expectedTensors,
  type LinearModule,
  linearModules,
  validateCheckpoint,
} from "./nn/config_tensors.ts";
export {
  compressTargets,
  type LoraConfig,
  type LoraTarget,
  resolveLoraTargets,
} from "./nn/lora_config.ts";
export { type RopeTable, ropeInverseFrequencies, ropeTable } from "./nn/rope.ts";
export type { Plan } from "./plan/plan.ts";
export type { DeviceProfile } from "./plan/profiles.ts";
export type { SavePolicy } from "./plan/save_points.ts";
export type { StepForecast } from "./plan/time.ts";
export { type Inspection, type InspectOptions, inspectFiles } from "./train/inspect.ts";
export type { Notice, NoticeListener, OpenOptions } from "./train/notice.ts";
export type { TrainOptions } from "./train/options.ts";
export {
  type Alternative,
  type PlanOptions,
  planTraining,
  type TrainingPlan,
} from "./train/plan_training.ts";
export { LoraTrainer, type StepInfo } from "./train/trainer.ts";
