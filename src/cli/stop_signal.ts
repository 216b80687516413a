/** Ctrl-C and SIGTERM: the first asks the run to stop after its step, the second ends the process at once. */
import process from "node:process";

/** Exit status of a process that a signal ended, by convention 128 + its number. */
const STATUS = { SIGINT: 130, SIGTERM: 143 } as const;

/** Which signal stopped the run; `exitCode` is 0 as long as none did. */
export interface StopSignal extends Disposable {
  readonly signal: AbortSignal;
  readonly exitCode: number;
}

/** Starts listening; `onStop` is called at the first signal. */
export function listenForStop(onStop: () => void): StopSignal {
  const controller = new AbortController();
  let exitCode = 0;
  const handlers = (Object.keys(STATUS) as (keyof typeof STATUS)[]).map((name) => {
    const handler = () => {
      if (controller.signal.aborted) process.exit(STATUS[name]);
      exitCode = STATUS[name];
      controller.abort();
      onStop();
    };
    process.on(name, handler);
    return { name, handler };
  });
  return {
    signal: controller.signal,
    get exitCode() {
      return exitCode;
    },
    [Symbol.dispose]() {
      for (const { name, handler } of handlers) process.off(name, handler);
    },
  };
}
