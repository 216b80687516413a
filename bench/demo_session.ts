/** The demo model as a session for benchmarks: 8 random documents of 128 tokens, r = 16 on all linears, fp32. */
import type { Document } from "../src/api/data/conversation.ts";
import { shuffledOrder } from "../src/api/data/order.ts";
import { openSafetensors } from "../src/api/io/safetensors.ts";
import { Device } from "../src/api/memory/mod.ts";
import { readModelConfig } from "../src/api/nn/config.ts";
import { linearModules } from "../src/api/nn/config_tensors.ts";
import { resolveLoraTargets } from "../src/api/nn/lora_config.ts";
import type { ExecutionMode } from "../src/api/run/executor.ts";
import { initializeAdapters } from "../src/api/train/adapter_state.ts";
import { loadWeights, storedType } from "../src/api/train/load_weights.ts";
import { planRun } from "../src/api/train/run_plan.ts";
import { Session } from "../src/api/train/session.ts";

export const MODEL = "examples/demo/model";
export const BATCH = 8;
export const SEQUENCE = 128;

export interface DemoSession extends AsyncDisposable {
  readonly session: Session;
  readonly documents: readonly Document[];
}

export async function openDemoSession(threads: number, mode: ExecutionMode): Promise<DemoSession> {
  const config = await readModelConfig(MODEL);
  await using files = await openSafetensors(MODEL);
  const lora = { rank: 16, alpha: 32, targetModules: "all-linear" };
  const spec = {
    config,
    targets: resolveLoraTargets(linearModules(config), lora),
    dtypeOf: (tensor: string) => storedType(files, tensor),
    precision: "fp32" as const,
    backend: "cpu" as const,
    dims: {
      tokensPerMicroBatch: BATCH * SEQUENCE,
      documentsPerMicroBatch: BATCH,
      lossChunkTokens: 1024,
      prefillTokens: 0,
      contextTokens: 0,
    },
    programs: ["train", "optimizer"] as const,
  };
  const device = await Device.open("cpu", { threads });
  const session = Session.commit(device, planRun(spec, "keep"), mode);
  await using ring = device.createFileRing();
  await loadWeights(session.executor, session.run, files, ring);
  await initializeAdapters(session.executor, session.run, 0);
  const documents = Array.from({ length: BATCH }, (_, index): Document => {
    const ids = Int32Array.from(shuffledOrder(config.vocabSize, 1, index).subarray(0, SEQUENCE));
    return { ids, labelled: new Uint8Array(SEQUENCE).fill(1).fill(0, 0, 1), where: "random" };
  });
  return {
    session,
    documents,
    async [Symbol.asyncDispose]() {
      await session.dispose();
      await device[Symbol.asyncDispose]();
    },
  };
}
