import assert from "node:assert/strict";
import { test } from "node:test";
import type { Native } from "../../src/ffi/load.ts";
import { STATUS } from "../../src/ffi/status.ts";
import type { Completed, Ptr, Runtime } from "../../src/ffi/types.ts";

const POINTER = {} as Ptr;

/** A library whose streams end when a test says so. */
interface FakeNative {
  readonly native: Native;
  /** Requests that were made: tags of the callback. */
  readonly tags: bigint[];
  /** Ends one. */
  complete: Completed;
  /** How often the callback keeps the process alive now. */
  alive: number;
  /** What the next native call returns. */
  status: number;
  /** Results of queries, one each. */
  readonly queries: number[];
  events: number;
}

function fakeNative(withCallback: boolean): FakeNative {
  const fake: FakeNative = {
    tags: [],
    complete: () => {},
    alive: 0,
    status: 0,
    queries: [],
    events: 0,
    native: undefined as never,
  };
  const runtime = {
    callback: (completed: Completed) => {
      fake.complete = completed;
      return withCallback
        ? { pointer: POINTER, ref: () => void fake.alive++, unref: () => void fake.alive-- }
        : null;
    },
  } as unknown as Runtime;
  const fn = {
    lm_stream_on_done: (_stream: Ptr, _fn: Ptr, tag: bigint) => {
      if (fake.status === 0) fake.tags.push(tag);
      return fake.status;
    },
    lm_event_create: () => {
      fake.events++;
      return POINTER;
    },
    lm_event_record: () => 0,
    lm_event_query: () => fake.queries.shift() ?? 0,
    lm_event_destroy: () => void fake.events--,
    lm_last_error: (_ctx: Ptr, text: Uint8Array) => {
      text.set(new TextEncoder().encode("planted failure").subarray(0, text.length - 1));
      return STATUS.LM_ERR_DEVICE.value;
    },
  };
  return Object.assign(fake, { native: { fn, runtime, path: "" } as unknown as Native });
}

/** The module keeps its callback, so every fake gets a module of its own. */
async function load(name: string): Promise<typeof import("../../src/ffi/completion.ts")> {
  return await import(`../../src/ffi/completion.ts?${name}`);
}

test("streamDone() resolves by tag, in any order, and keeps the process alive meanwhile", async () => {
  const { streamDone } = await load("order");
  const fake = fakeNative(true);
  const seen: number[] = [];
  const waits = [0, 1, 2].map((index) =>
    streamDone(fake.native, POINTER, POINTER, "x").then(() => seen.push(index)),
  );
  assert.equal(fake.alive, 3);
  const [first, second, third] = fake.tags as [bigint, bigint, bigint];
  for (const tag of [third, first, second]) fake.complete(tag, 0);
  await Promise.all(waits);
  assert.deepEqual(seen, [2, 0, 1]);
  assert.equal(fake.alive, 0);
});

test("streamDone() rejects with code and text of a failed stream", async () => {
  const { streamDone } = await load("failed");
  const fake = fakeNative(true);
  const wait = streamDone(fake.native, POINTER, POINTER, "Stream.done");
  fake.complete(fake.tags[0] as bigint, STATUS.LM_ERR_DEVICE.value);
  await assert.rejects(wait, {
    code: "DEVICE",
    message: "Stream.done: planted failure",
    details: { status: STATUS.LM_ERR_DEVICE.value },
  });
  assert.equal(fake.alive, 0);
});

test("streamDone() rejects where the request itself fails", async () => {
  const { streamDone } = await load("refused");
  const fake = fakeNative(true);
  fake.status = STATUS.LM_ERR_OUT_OF_MEMORY.value;
  await assert.rejects(streamDone(fake.native, POINTER, POINTER, "x"), { code: "OUT_OF_MEMORY" });
  assert.equal(fake.alive, 0);
});

test("streamDone() asks again and again where no callback can be made", async () => {
  const { streamDone } = await load("polled");
  const fake = fakeNative(false);
  const { LM_NOT_READY, LM_OK, LM_ERR_DEVICE } = STATUS;
  fake.queries.push(LM_NOT_READY.value, LM_NOT_READY.value, LM_OK.value);
  await streamDone(fake.native, POINTER, POINTER, "x");
  assert.equal(fake.queries.length, 0);
  fake.queries.push(LM_NOT_READY.value, LM_ERR_DEVICE.value);
  await assert.rejects(streamDone(fake.native, POINTER, POINTER, "x"), { code: "DEVICE" });
  assert.equal(fake.events, 0);
});
