/* Streams and events: order, waiting, failures, completion. */
#include "core_test.h"

static lm_ctx *ctx;

typedef struct trace {
  _Atomic int32_t count;
  int32_t values[64];
} trace;

typedef struct step {
  trace *into;
  int32_t value;
} step;

static int32_t note(void *arg, int32_t status) {
  (void)status;
  step *s = arg;
  int32_t at = atomic_fetch_add(&s->into->count, 1);
  if (at < 64) s->into->values[at] = s->value;
  return LM_OK;
}

static void runs_in_order(void) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  trace t = {0};
  step steps[64];
  for (int i = 0; i < 64; i++) {
    steps[i] = (step){&t, i};
    call_in(stream, note, &steps[i]);
  }
  EXPECT(lm_stream_wait(stream) == LM_OK && t.count == 64);
  for (int i = 0; i < 64; i++) EXPECT(t.values[i] == i);
  lm_stream_destroy(stream);
}

static void copies_and_fills(void) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  lm_pinned *pinned = lm_pinned_create(ctx, 1000, 0);
  uint8_t *host = lm_pinned_data(pinned), *device = lm_mem_reserve(ctx, 1000);
  for (int i = 0; i < 1000; i++) host[i] = (uint8_t)i;
  EXPECT(lm_mem_copy(ctx, device, host, 1000, stream) == LM_OK);
  EXPECT(lm_mem_fill(ctx, device + 10, 0x1ff, 5, stream) == LM_OK);
  EXPECT(lm_mem_copy(ctx, host, device, 1000, stream) == LM_OK);
  EXPECT(lm_stream_wait(stream) == LM_OK);
  for (int i = 0; i < 1000; i++) EXPECT(host[i] == (i >= 10 && i < 15 ? 0xff : (uint8_t)i));
  lm_pinned_destroy(pinned);
  lm_mem_release(ctx, device);
  lm_stream_destroy(stream);
}

static void streams_are_independent(void) {
  lm_stream *a = lm_stream_create(ctx, 0), *b = lm_stream_create(ctx, -1);
  gate g = GATE_CLOSED;
  trace t = {0};
  step in_a = {&t, 1}, in_b = {&t, 2};
  hold(a, &g);
  call_in(a, note, &in_a);
  call_in(b, note, &in_b);
  EXPECT(lm_stream_wait(b) == LM_OK);
  EXPECT(lm_stream_query(b) == LM_OK && lm_stream_query(a) == LM_NOT_READY);
  EXPECT(t.count == 1 && t.values[0] == 2);
  gate_open(&g);
  EXPECT(lm_stream_wait(a) == LM_OK && t.count == 2);
  lm_stream_destroy(a);
  lm_stream_destroy(b);
}

static void *open_later(void *arg) {
  usleep(20000);
  gate_open(arg);
  return NULL;
}

static void full_ring_blocks(void) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  uint8_t *memory = lm_mem_reserve(ctx, 4096);
  gate g = GATE_CLOSED;
  hold(stream, &g);
  pthread_t opener;
  pthread_create(&opener, NULL, open_later, &g);
  for (int i = 0; i < 20000; i++) EXPECT(lm_mem_fill(ctx, memory, i, 1, stream) == LM_OK);
  EXPECT(g.open);
  EXPECT(lm_stream_wait(stream) == LM_OK && memory[0] == (uint8_t)19999);
  pthread_join(opener, NULL);
  lm_mem_release(ctx, memory);
  lm_stream_destroy(stream);
}

#define PRODUCERS 6
#define EACH 20000
static lm_stream *shared;
static _Atomic int64_t sum;

static int32_t add_up(void *arg, int32_t status) {
  (void)status;
  atomic_fetch_add_explicit(&sum, (int64_t)(intptr_t)arg, memory_order_relaxed);
  return LM_OK;
}

static void *produce(void *arg) {
  for (int i = 1; i <= EACH; i++) {
    call_in(shared, add_up, (void *)(intptr_t)i);
    if (i % 4096 == 0) lm_stream_wait(shared);
  }
  return arg;
}

static void many_producers(void) {
  shared = lm_stream_create(ctx, 0);
  sum = 0;
  pthread_t threads[PRODUCERS];
  for (int i = 0; i < PRODUCERS; i++) pthread_create(&threads[i], NULL, produce, NULL);
  for (int i = 0; i < PRODUCERS; i++) pthread_join(threads[i], NULL);
  EXPECT(lm_stream_wait(shared) == LM_OK);
  EXPECT(sum == (int64_t)PRODUCERS * EACH * (EACH + 1) / 2);
  lm_stream_destroy(shared);
}

static void events_order_streams(void) {
  lm_stream *a = lm_stream_create(ctx, 0), *b = lm_stream_create(ctx, 0);
  lm_event *event = lm_event_create(ctx);
  EXPECT(lm_event_query(event) == LM_OK && lm_event_wait(event) == LM_OK);
  EXPECT(lm_stream_wait_event(b, event) == LM_OK);
  gate g = GATE_CLOSED;
  trace t = {0};
  step first = {&t, 1}, second = {&t, 2};
  hold(a, &g);
  call_in(a, note, &first);
  EXPECT(lm_event_record(event, a) == LM_OK);
  EXPECT(lm_stream_wait_event(b, event) == LM_OK);
  call_in(b, note, &second);
  EXPECT(lm_event_query(event) == LM_NOT_READY && lm_stream_query(b) == LM_NOT_READY);
  /* A later record does not change what b waits for already, and destroying neither. */
  EXPECT(lm_event_record(event, a) == LM_OK);
  lm_event_destroy(event);
  gate_open(&g);
  EXPECT(lm_stream_wait(b) == LM_OK && t.count == 2 && t.values[0] == 1 && t.values[1] == 2);
  lm_stream_destroy(a);
  lm_stream_destroy(b);
}

static void event_follows_last_record(void) {
  lm_stream *a = lm_stream_create(ctx, 0), *b = lm_stream_create(ctx, 0);
  lm_event *event = lm_event_create(ctx);
  gate g = GATE_CLOSED;
  hold(a, &g);
  EXPECT(lm_event_record(event, a) == LM_OK && lm_event_query(event) == LM_NOT_READY);
  EXPECT(lm_event_record(event, b) == LM_OK);
  EXPECT(lm_event_wait(event) == LM_OK && lm_event_query(event) == LM_OK);
  lm_stream_destroy(b);
  EXPECT(lm_event_query(event) == LM_OK);
  gate_open(&g);
  lm_stream_destroy(a);
  lm_event_destroy(event);
}

static void event_measures_time(void) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  lm_event *start = lm_event_create(ctx), *end = lm_event_create(ctx);
  float ms = -1;
  EXPECT(lm_event_elapsed(&ms, start, end) == LM_ERR_STATE && failed_with(ctx, LM_ERR_STATE, "start"));
  gate g = GATE_CLOSED;
  EXPECT(lm_event_record(start, stream) == LM_OK);
  hold(stream, &g);
  EXPECT(lm_event_record(end, stream) == LM_OK);
  lm_event_wait(start);
  EXPECT(lm_event_elapsed(&ms, start, end) == LM_ERR_STATE && failed_with(ctx, LM_ERR_STATE, "end"));
  usleep(2000);
  gate_open(&g);
  EXPECT(lm_event_wait(end) == LM_OK);
  EXPECT(lm_event_elapsed(&ms, start, end) == LM_OK && ms >= 1.5f && ms < 10000.0f);
  EXPECT(lm_event_elapsed(&ms, end, start) == LM_OK && ms <= -1.5f);
  EXPECT(lm_event_elapsed(NULL, start, end) == LM_ERR_ARGUMENT);
  gate again = GATE_CLOSED;
  hold(stream, &again);
  EXPECT(lm_event_record(end, stream) == LM_OK && lm_event_elapsed(&ms, start, end) == LM_ERR_STATE);
  gate_open(&again);
  lm_event_destroy(start);
  lm_event_destroy(end);
  lm_stream_destroy(stream);
}

static void destroyed_stream_finishes(void) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  gate g = GATE_CLOSED;
  lm_event *event = lm_event_create(ctx);
  trace t = {0};
  step s = {&t, 7};
  hold(stream, &g);
  call_in(stream, note, &s);
  lm_event_record(event, stream);
  lm_stream_destroy(stream); /* does not wait: the gate is closed */
  EXPECT(t.count == 0 && lm_event_query(event) == LM_NOT_READY);
  gate_open(&g);
  EXPECT(lm_event_wait(event) == LM_OK && t.count == 1);
  lm_event_destroy(event);
}

/* Completion callbacks --------------------------------------------------------------------------------------------- */

static trace done_trace;
static _Atomic int32_t done_status;
static gate done_gate = GATE_CLOSED;

static void on_done(uint64_t tag, int32_t status) {
  int32_t at = atomic_load(&done_trace.count);
  if (at < 64) done_trace.values[at] = (int32_t)tag;
  atomic_store(&done_status, status);
  atomic_fetch_add(&done_trace.count, 1);
}

static void await_done(int32_t count) {
  for (int i = 0; i < 20000 && atomic_load(&done_trace.count) < count; i++) usleep(500);
  EXPECT(atomic_load(&done_trace.count) == count);
}

static void callbacks_follow_work(void) {
  memset(&done_trace, 0, sizeof done_trace);
  lm_stream *stream = lm_stream_create(ctx, 0);
  gate g = GATE_CLOSED;
  hold(stream, &g);
  for (uint64_t tag = 0; tag < 10; tag++) EXPECT(lm_stream_on_done(stream, on_done, tag) == LM_OK);
  usleep(2000);
  EXPECT(atomic_load(&done_trace.count) == 0);
  gate_open(&g);
  await_done(10);
  for (int i = 0; i < 10; i++) EXPECT(done_trace.values[i] == i);
  EXPECT(atomic_load(&done_status) == LM_OK);
  EXPECT(lm_stream_on_done(stream, NULL, 0) == LM_ERR_ARGUMENT);
  uint64_t before = stats_of(ctx).heap_allocs;
  for (int i = 0; i < 10; i++) {
    EXPECT(lm_stream_on_done(stream, on_done, 1) == LM_OK);
    await_done(11 + i);
  }
  EXPECT(stats_of(ctx).heap_allocs == before);
  lm_stream_destroy(stream);
}

static void on_done_blocked(uint64_t tag, int32_t status) {
  gate_pass(&done_gate, status);
  on_done(tag, status);
}

/* A callback that never ends must hold up neither the stream nor the end of the context. */
static void callbacks_hold_nobody_up(void) {
  memset(&done_trace, 0, sizeof done_trace);
  lm_ctx *own = open_device("cpu");
  lm_stream *stream = lm_stream_create(own, 0);
  EXPECT(lm_stream_on_done(stream, on_done_blocked, 1) == LM_OK);
  gate_await(&done_gate);
  EXPECT(lm_stream_wait(stream) == LM_OK);
  EXPECT(lm_stream_on_done(stream, on_done, 2) == LM_OK);
  EXPECT(lm_stream_wait(stream) == LM_OK);
  lm_stream_destroy(stream);
  lm_ctx_destroy(own);
  EXPECT(atomic_load(&done_trace.count) == 0);
  gate_open(&done_gate);
  await_done(2);
  EXPECT(done_trace.values[0] == 1 && done_trace.values[1] == 2);
}

/* Failures --------------------------------------------------------------------------------------------------------- */

static void failure_stays(void) {
  memset(&done_trace, 0, sizeof done_trace);
  lm_stream *a = lm_stream_create(ctx, 0), *b = lm_stream_create(ctx, 0), *c = lm_stream_create(ctx, 0);
  uint8_t *memory = lm_mem_reserve(ctx, 4096);
  lm_event *event = lm_event_create(ctx);
  EXPECT(lm_mem_fill(ctx, memory, 1, 4096, a) == LM_OK);
  call_in(a, fail_here, NULL);
  EXPECT(lm_mem_fill(ctx, memory, 2, 4096, a) == LM_OK);
  EXPECT(lm_event_record(event, a) == LM_OK);
  EXPECT(lm_stream_wait_event(b, event) == LM_OK);
  EXPECT(lm_mem_fill(ctx, memory + 1, 3, 1, b) == LM_OK);
  EXPECT(lm_stream_on_done(a, on_done, 1) == LM_OK);
  EXPECT(lm_stream_wait(a) == LM_ERR_DEVICE);
  EXPECT(failed_with(ctx, LM_ERR_DEVICE, "lm_stream_wait: work enqueued earlier failed"));
  EXPECT(lm_stream_query(a) == LM_ERR_DEVICE);
  EXPECT(lm_event_query(event) == LM_ERR_DEVICE && lm_event_wait(event) == LM_ERR_DEVICE);
  EXPECT(lm_stream_wait(b) == LM_ERR_DEVICE);
  lm_stream *late = lm_stream_create(ctx, 0);
  EXPECT(lm_stream_wait_event(late, event) == LM_OK && lm_stream_wait(late) == LM_ERR_DEVICE);
  lm_stream_destroy(late);
  await_done(1);
  EXPECT(atomic_load(&done_status) == LM_ERR_DEVICE);
  EXPECT(memory[0] == 1 && memory[1] == 1);
  EXPECT(lm_mem_fill(ctx, memory, 4, 4096, c) == LM_OK && lm_stream_wait(c) == LM_OK && memory[0] == 4);
  EXPECT(lm_mem_release(ctx, memory) == LM_ERR_DEVICE);
  EXPECT(stats_of(ctx).reserved == 0);
  lm_event_destroy(event);
  lm_stream_destroy(a);
  lm_stream_destroy(b);
  lm_stream_destroy(c);
}

static void *wait_here(void *arg) {
  EXPECT(lm_stream_wait(arg) == LM_OK);
  return NULL;
}

static void many_wait(void) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  for (int round = 0; round < 50; round++) {
    gate g = GATE_CLOSED;
    hold(stream, &g);
    pthread_t threads[5];
    for (int i = 0; i < 5; i++) {
      pthread_create(&threads[i], NULL, wait_here, stream);
      call_in(stream, add_up, NULL);
    }
    gate_open(&g);
    for (int i = 0; i < 5; i++) pthread_join(threads[i], NULL);
  }
  lm_stream_destroy(stream);
}

static void release_waits_for_all(void) {
  lm_stream *a = lm_stream_create(ctx, 0), *b = lm_stream_create(ctx, 0);
  uint8_t *memory = lm_mem_reserve(ctx, 4096);
  gate g = GATE_CLOSED;
  hold(b, &g);
  lm_mem_fill(ctx, memory, 9, 4096, b);
  pthread_t opener;
  pthread_create(&opener, NULL, open_later, &g);
  EXPECT(lm_mem_release(ctx, memory) == LM_OK);
  EXPECT(lm_stream_query(b) == LM_OK);
  pthread_join(opener, NULL);
  lm_stream_destroy(a);
  lm_stream_destroy(b);
}

static void streams_share_the_workers(void) {
  enum { N = 1 << 18, TURNS = 20 };
  lm_stream *streams[3];
  float *x[3];
  for (int i = 0; i < 3; i++) {
    streams[i] = lm_stream_create(ctx, 0);
    x[i] = lm_mem_reserve(ctx, N * sizeof(float));
    for (int k = 0; k < N; k++) x[i][k] = 1;
  }
  for (int turn = 0; turn < TURNS; turn++) {
    for (int i = 0; i < 3; i++) {
      lm_scale_args args = {.size = sizeof args, .type = LM_F32, .y = x[i], .x = x[i], .n = N, .factor = i == 0 ? 2 : 0.5f};
      EXPECT(lm_scale(ctx, &args, streams[i]) == LM_OK);
    }
  }
  for (int i = 0; i < 3; i++) {
    EXPECT(lm_stream_wait(streams[i]) == LM_OK);
    float wanted = i == 0 ? 1 << TURNS : 1.0f / (1 << TURNS);
    for (int k = 0; k < N; k++) test_good = test_good && x[i][k] == wanted;
    EXPECT(x[i][N - 1] == wanted);
    EXPECT(lm_mem_release(ctx, x[i]) == LM_OK);
    lm_stream_destroy(streams[i]);
  }
}

static void streams_come_and_go(void) {
  lm_event *event = lm_event_create(ctx);
  for (int i = 0; i < 300; i++) {
    lm_stream *stream = lm_stream_create(ctx, 0);
    EXPECT(lm_event_record(event, stream) == LM_OK);
    lm_stream_destroy(stream);
  }
  EXPECT(lm_event_wait(event) == LM_OK);
  lm_event_destroy(event);
}

int main(void) {
  ctx = open_device("cpu");
  test("lm_stream runs its work in order", runs_in_order);
  test("lm_mem_copy() and lm_mem_fill() move bytes in stream order", copies_and_fills);
  test("lm_stream does not wait for another stream", streams_are_independent);
  test("lm_stream with a full queue makes the caller wait", full_ring_blocks);
  test("lm_stream takes work from several threads", many_producers);
  test("lm_stream_wait_event() orders two streams as of the call", events_order_streams);
  test("lm_event_record() replaces the earlier record", event_follows_last_record);
  test("lm_event_elapsed() measures reached events only", event_measures_time);
  test("lm_stream_destroy() does not wait and the work still runs", destroyed_stream_finishes);
  test("lm_stream_on_done() calls once, in order, after the work, without heap use when warm", callbacks_follow_work);
  test("lm_stream_on_done() with a callback that blocks holds up neither stream nor context", callbacks_hold_nobody_up);
  test("lm_stream keeps a failure, skips later work and passes it on", failure_stays);
  test("lm_stream_wait() works from several threads at once", many_wait);
  test("lm_mem_release() waits for all streams", release_waits_for_all);
  test("lm_stream runs kernels beside other streams", streams_share_the_workers);
  test("lm_stream_create() and lm_stream_destroy() leave nothing behind", streams_come_and_go);
  EXPECT(stats_of(ctx).reserved == 0 && stats_of(ctx).pinned == 0);
  lm_ctx_destroy(ctx);
  return summary();
}
