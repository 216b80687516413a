/** Greedy generation with a KV cache: prefill in pieces of the planned size, then one token at a time. */
import { LoramemError } from "../../ffi/error.ts";
import type { Value } from "../graph/value.ts";
import type { GenerationBlock } from "../nn/programs.ts";
import type { Executor } from "../run/executor.ts";

/** Where generation reads and writes. */
export interface GenerationIO {
  readonly executor: Executor;
  readonly block: GenerationBlock;
  /** Host twin of `block.block`. */
  readonly hostBlock: Value;
  /** Host twin of `block.token`. */
  readonly hostToken: Value;
  /** Planned rows of the KV cache. */
  readonly contextTokens: number;
}

/** When to stop. */
export interface GenerationLimits {
  readonly maxTokens: number;
  readonly stopIds: ReadonlySet<number>;
  readonly signal?: AbortSignal | undefined;
}

/**
 * The most likely continuation of `prompt`, without the token that ended it.
 *
 * @param prompt i32 token ids, at least one.
 * @throws {LoramemError} OVER_PLAN if prompt and answer do not fit the planned context; CANCELLED by the signal.
 */
export async function generateTokens(
  { executor, block, hostBlock, hostToken, contextTokens }: GenerationIO,
  prompt: ArrayLike<number>,
  { maxTokens, stopIds, signal }: GenerationLimits,
): Promise<number[]> {
  if (prompt.length === 0) {
    throw new LoramemError("BAD_ARGUMENT", "generate: the prompt has no tokens: give it text", {
      name: "prompt",
    });
  }
  const requested = prompt.length + maxTokens;
  if (requested > contextTokens) {
    throw new LoramemError(
      "OVER_PLAN",
      `generate: prompt and answer do not fit the plan: ${prompt.length} + ${maxTokens} tokens, ` +
        `${contextTokens} planned: raise promptTokens or answerTokens, or ask for fewer tokens`,
      { planned: contextTokens, requested },
    );
  }
  const ints = executor.hostView(hostBlock, Int32Array);
  const token = executor.hostView(hostToken, Int32Array);
  const at = (value: Value) => value.view?.elements ?? 0;
  let past = 0;
  const feed = async (ids: ArrayLike<number>, program: "prefill" | "decode"): Promise<number> => {
    ints[at(block.live)] = ids.length;
    ints[at(block.past)] = past;
    ints[at(block.last)] = ids.length - 1;
    ints.set(ids, at(block.ids));
    for (let row = 0; row < ids.length; row++) ints[at(block.positions) + row] = past + row;
    executor.upload(block.block, hostBlock);
    await executor.run(program);
    executor.download(hostToken, block.token);
    await executor.stream.done();
    past += ids.length;
    return token[0] as number;
  };

  const rows = block.ids.shape[0] as number;
  let next = -1;
  for (let start = 0; start < prompt.length; start += rows) {
    next = await feed(Array.prototype.slice.call(prompt, start, start + rows), "prefill");
  }
  const answer: number[] = [];
  while (answer.length < maxTokens && !stopIds.has(next)) {
    if (signal?.aborted) throw new LoramemError("CANCELLED", "generate: cancelled by its signal");
    answer.push(next);
    if (answer.length < maxTokens) next = await feed([next], "decode");
  }
  return answer;
}
