/* cuda_streams_test.cu: the CUDA backend: order, marks, host work, events and graphs. */
#include <sys/resource.h>

#include "cuda_vtable.h"

/* Streams and marks -------------------------------------------------------------------------------------------------- */

static void test_order(void) {
  lm_backend_stream *a = new_stream(), *b = new_stream(-100), *c = new_stream(100);
  uint8_t *device = bytes(api->mem_reserve(backend, 4096)), *pinned = bytes(api->pinned_reserve(backend, 4096, 0));
  memset(pinned, 0, 4096);
  gate g;
  OK(api->fill(backend, a, device, 1, 4096));
  const uint64_t first = mark(a);
  gate_hold(g, a);
  OK(api->fill(backend, a, device, 2, 4096));
  const uint64_t second = mark(a);
  CHECK(mark(a) == second && second > first && first > 0, "marks grow with work only");
  OK(api->stream_wait(backend, a, first)); /* returns while the stream is held up behind it */
  CHECK(query(a, first) == LM_OK && query(a, 0) == LM_OK && query(a, second) == LM_NOT_READY, "marks before and behind the gate");
  OK(api->stream_follow(backend, c, a, first));
  OK(api->copy(backend, c, pinned, device, 2048));
  OK(wait_all(c));
  CHECK(all_bytes(pinned, 2048, 1), "following an early mark does not wait for later work");
  OK(api->stream_follow(backend, b, a, second));
  OK(api->copy(backend, b, pinned, device, 4096));
  const uint64_t third = mark(b);
  usleep(2000);
  CHECK(query(b, third) == LM_NOT_READY, "a follower waits");
  CHECK(query(a, first) == LM_OK, "a passed mark stays passed");
  gate_open(g);
  OK(api->stream_wait(backend, b, third));
  CHECK(all_bytes(pinned, 4096, 2), "a follower sees what it waited for");
  CHECK(query(a, second) == LM_OK, "the followed mark has passed");
  OK(api->synchronize(backend));
  drop(a), drop(b), drop(c);
  api->mem_release(backend, device, 4096);
  api->pinned_release(backend, pinned, 4096);
}

/* Every slot of a stream gets its event. The driver may let many new events wait for what runs, and so for a closed gate. */
static void make_events(lm_backend_stream *stream, uint8_t *device) {
  for (uint32_t i = 0; i < stream->capacity; i++) {
    if (api->fill(backend, stream, device, 0, 64)) failed++;
    (void)mark(stream);
  }
  OK(wait_all(stream));
}

/* More marks than there is room for at first. The first turn makes new events, so its gate opens by itself; in the second turn
 * all events are there. */
static void test_many_marks(void) {
  enum { COUNT = 90 };
  lm_backend_stream *stream = new_stream();
  uint8_t *device = bytes(api->mem_reserve(backend, 4096));
  std::vector<uint64_t> marks;
  for (int turn = 0; turn < 2; turn++) {
    gate g;
    gate_hold(g, stream, turn == 0 ? 200 : GATE_MILLISECONDS);
    marks.clear();
    for (int i = 0; i < COUNT; i++) {
      if (api->fill(backend, stream, device, i, 64)) failed++;
      marks.push_back(mark(stream));
    }
    int early = 0;
    for (uint64_t at : marks) early += query(stream, at) != LM_NOT_READY;
    CHECK(turn == 0 || early == 0, "%d marks passed too early", early);
    gate_open(g);
    OK(api->stream_wait(backend, stream, marks[COUNT / 2]));
    int late = 0;
    for (int i = 0; i <= COUNT / 2; i++) late += query(stream, marks[(size_t)i]) != LM_OK;
    CHECK(late == 0, "%d marks before a passed one have not passed", late);
    OK(wait_all(stream));
    for (uint64_t at : marks) late += query(stream, at) != LM_OK;
    CHECK(late == 0, "%d marks have not passed at the end", late);
    make_events(stream, device);
  }
  const uint64_t start = allocations;
  for (int i = 0; i < 5 * COUNT; i++) {
    if (api->fill(backend, stream, device, i, 64)) failed++;
    (void)mark(stream);
    if (i % 100 == 0 && wait_all(stream)) failed++;
  }
  CHECK(allocations == start, "marks in a steady state allocate: %llu", (unsigned long long)(allocations - start));
  OK(wait_all(stream));
  drop(stream);
  api->mem_release(backend, device, 4096);
}

struct waiter {
  lm_backend_stream *stream;
  uint64_t mark;
  std::atomic<int> done{0};
  int32_t status = 1;
};

static void *waiter_main(void *arg) {
  waiter *w = static_cast<waiter *>(arg);
  w->status = api->stream_wait(backend, w->stream, w->mark);
  w->done = 1;
  return NULL;
}

/* Threads of their own wait while the stream gets more work and more marks than it had room for; in two turns, as above. */
static void test_waiters(void) {
  lm_backend_stream *stream = new_stream();
  uint8_t *device = bytes(api->mem_reserve(backend, 4096));
  for (int turn = 0; turn < 2; turn++) {
    gate g, h;
    const uint64_t limit = turn == 0 ? 200 : GATE_MILLISECONDS;
    gate_hold(g, stream, limit);
    const uint64_t at = mark(stream);
    gate_hold(h, stream, limit);
    waiter waiters[4];
    pthread_t ids[4];
    for (int i = 0; i < 4; i++) {
      waiters[i].stream = stream, waiters[i].mark = at;
      pthread_create(&ids[i], NULL, waiter_main, &waiters[i]);
    }
    for (int i = 0; i < 150; i++) {
      if (api->fill(backend, stream, device, i, 64)) failed++;
      (void)mark(stream);
    }
    usleep(2000);
    for (waiter &w : waiters) CHECK(turn == 0 || w.done == 0, "a waiter returned before its mark");
    gate_open(g);
    for (int i = 0; i < 4; i++) {
      pthread_join(ids[i], NULL);
      CHECK(waiters[i].status == LM_OK, "a waiter: %d", waiters[i].status);
    }
    CHECK(turn == 0 || query(stream, mark(stream)) == LM_NOT_READY, "waiting for a mark is not waiting for the stream");
    gate_open(h);
    OK(wait_all(stream));
    make_events(stream, device);
  }
  drop(stream);
  api->mem_release(backend, device, 4096);
}

/* A stream that is gone still does its work, and its memory is not needed for it. */
static void test_departed(void) {
  lm_backend_stream *stream = new_stream(), *other = new_stream();
  uint8_t *device = bytes(api->mem_reserve(backend, 4096)), *pinned = bytes(api->pinned_reserve(backend, 4096, 0));
  memset(pinned, 0, 4096);
  gate g;
  gate_hold(g, stream);
  OK(api->fill(backend, stream, device, 9, 4096));
  const uint64_t at = mark(stream);
  OK(api->stream_follow(backend, other, stream, at));
  OK(api->copy(backend, other, pinned, device, 4096));
  drop(stream);
  CHECK(query(other, mark(other)) == LM_NOT_READY, "the follower still waits");
  gate_open(g);
  OK(wait_all(other));
  CHECK(all_bytes(pinned, 4096, 9), "work of a destroyed stream ran");
  drop(other);
  api->mem_release(backend, device, 4096);
  api->pinned_release(backend, pinned, 4096);
}

/* Host work ---------------------------------------------------------------------------------------------------------- */

static std::atomic<int> called;
static int32_t count_call(void *arg, int32_t status) {
  const int expected = (int)(intptr_t)arg;
  if (status != LM_OK || called != expected) called = -1000000;
  called++;
  return LM_OK;
}

static int32_t refuse(void *, int32_t) { return LM_ERR_LIMIT; }

static void test_calls(void) {
  lm_backend_stream *stream = new_stream();
  called = 0;
  for (int i = 0; i < 300; i++) OK(api->stream_call(backend, stream, count_call, (void *)(intptr_t)i));
  OK(wait_all(stream));
  CHECK(called == 300, "calls in order: %d", called.load());
  const uint64_t start = allocations;
  OK(api->stream_call(backend, stream, count_call, (void *)(intptr_t)300));
  OK(wait_all(stream));
  CHECK(allocations == start && called == 301, "calls use their memory again");
  drop(stream);
}

/* Host work that fails its stream: seen by marks, calls, events and followers; other streams go on. */
static void test_failed_stream(void) {
  lm_backend_stream *bad = new_stream(), *follower = new_stream(), *waiting = new_stream(), *free_one = new_stream();
  lm_backend_event *event = api->event_create(backend);
  uint8_t *device = bytes(api->mem_reserve(backend, 4096)), *pinned = bytes(api->pinned_reserve(backend, 4096, 0));
  memset(pinned, 0, 4096);
  gate g;
  std::atomic<int32_t> seen{1};
  OK(api->fill(backend, bad, device, 1, 4096));
  const uint64_t before = mark(bad);
  gate_hold(g, bad);
  OK(api->stream_call(backend, bad, refuse, NULL));
  OK(api->stream_call(backend, bad, note_status, &seen));
  OK(api->event_record(backend, event, bad));
  OK(api->stream_follow(backend, follower, bad, mark(bad)));
  OK(api->stream_wait_event(backend, waiting, event));
  OK(api->stream_wait(backend, bad, before));
  CHECK(api->event_query(backend, event) == LM_NOT_READY, "the event is behind the gate");
  gate_open(g);
  CHECK(wait_all(bad) == LM_ERR_LIMIT, "the stream reports the failure");
  CHECK(seen == LM_ERR_LIMIT, "later calls see the failure: %d", seen.load());
  CHECK(wait_all(follower) == LM_ERR_LIMIT && wait_all(waiting) == LM_ERR_LIMIT, "followers take the failure over");
  CHECK(api->event_query(backend, event) == LM_ERR_LIMIT && api->event_wait(backend, event) == LM_ERR_LIMIT, "so does the event");
  CHECK(api->fill(backend, bad, device, 5, 4096) == LM_OK, "a failed stream takes work ...");
  (void)wait_all(bad);
  OK(api->copy(backend, free_one, pinned, device, 4096));
  OK(wait_all(free_one));
  CHECK(all_bytes(pinned, 4096, 1), "... and skips it; other streams go on");
  OK(api->stream_follow(backend, free_one, free_one, mark(free_one)));
  OK(wait_all(free_one));
  CHECK(api->synchronize(backend) == LM_ERR_LIMIT, "synchronize reports the first failure");
  api->event_destroy(backend, event);
  drop(bad), drop(follower), drop(waiting), drop(free_one);
  OK(api->synchronize(backend));
  api->mem_release(backend, device, 4096);
  api->pinned_release(backend, pinned, 4096);
}

/* Events ------------------------------------------------------------------------------------------------------------- */

static void test_events(void) {
  lm_backend_stream *stream = new_stream(), *other = new_stream();
  lm_backend_event *start = api->event_create(backend), *end = api->event_create(backend), *never = api->event_create(backend);
  float *x = floats(api->mem_reserve(backend, 1 << 24)), ms = -1;
  gate g, h;
  OK(api->event_query(backend, never));
  OK(api->event_wait(backend, never));
  OK(api->stream_wait_event(backend, stream, never));
  CHECK(api->event_elapsed(backend, &ms, never, never) == LM_ERR_STATE && failed_with(LM_ERR_STATE, "start"), "never recorded");
  OK(api->event_record(backend, start, stream));
  for (int i = 0; i < 20; i++) OK(scale(stream, x, x, 1 << 22, 1));
  OK(api->event_record(backend, end, stream));
  OK(api->event_wait(backend, end));
  OK(api->event_query(backend, start));
  OK(api->event_elapsed(backend, &ms, start, end));
  CHECK(ms > 0 && ms < 60000, "elapsed %g ms", ms);
  OK(api->event_elapsed(backend, &ms, end, start));
  CHECK(ms < 0, "elapsed backwards %g ms", ms);
  gate_hold(g, stream);
  OK(api->event_record(backend, end, stream)); /* replaces the first record */
  CHECK(api->event_query(backend, end) == LM_NOT_READY, "a second record replaces the first");
  CHECK(api->event_elapsed(backend, &ms, start, end) == LM_ERR_STATE && failed_with(LM_ERR_STATE, "end"), "not reached yet");
  OK(api->stream_wait_event(backend, other, end));
  const uint64_t at = (api->fill(backend, other, x, 0, 4096), mark(other));
  usleep(1000);
  CHECK(query(other, at) == LM_NOT_READY, "a stream waits for an event");
  gate_open(g);
  OK(api->stream_wait(backend, other, at));
  OK(api->event_wait(backend, end));
  gate_hold(h, stream);
  OK(api->event_record(backend, start, stream));
  api->event_destroy(backend, start); /* while it is under way */
  gate_open(h);
  OK(wait_all(stream));
  api->event_destroy(backend, end), api->event_destroy(backend, never);
  drop(stream), drop(other);
  api->mem_release(backend, x, 1 << 24);
}

/* Graphs ------------------------------------------------------------------------------------------------------------- */

static void test_graphs(void) {
  lm_backend_stream *stream = new_stream(), *other = new_stream();
  float *x = floats(api->mem_reserve(backend, 4096)), *pinned = floats(api->pinned_reserve(backend, 4096, 0));
  pinned[0] = 1;
  OK(api->copy(backend, stream, x, pinned, 4096));
  OK(wait_all(stream));
  OK(api->graph_begin(backend, stream));
  OK(scale(stream, x, x, 1024, 2));
  OK(api->copy(backend, stream, pinned, x, 4096));
  OK(api->fill(backend, stream, x + 512, 0, 2048));
  CHECK(query(stream, mark(stream)) == LM_OK, "a recording is no work");
  /* What a finalizer may do meanwhile, on this thread and through other streams. */
  void *memory = api->mem_reserve(backend, 1 << 20), *locked = api->pinned_reserve(backend, 1 << 20, 0);
  CHECK(memory && locked, "reservations during a recording: %s", text);
  OK(api->fill(backend, other, memory, 1, 1 << 20));
  OK(api->copy(backend, other, locked, memory, 1 << 20));
  OK(api->synchronize(backend));
  api->mem_release(backend, memory, 1 << 20);
  api->pinned_release(backend, locked, 1 << 20);
  lm_backend_graph *graph = api->graph_end(backend, stream);
  CHECK(graph != NULL, "graph_end: %s", text);
  OK(wait_all(stream));
  CHECK(pinned[0] == 1, "a recording does not run");
  for (int i = 0; i < 5; i++) OK(api->graph_launch(backend, graph, stream));
  OK(wait_all(stream));
  CHECK(pinned[0] == 32, "five replays: %g", pinned[0]);
  OK(api->stream_follow(backend, other, stream, mark(stream)));
  OK(api->graph_launch(backend, graph, other));
  OK(wait_all(other));
  CHECK(pinned[0] == 64, "a replay in another stream: %g", pinned[0]);
  const uint64_t start = allocations;
  gate g;
  gate_hold(g, stream);
  OK(api->graph_launch(backend, graph, stream));
  OK(api->graph_launch(backend, graph, stream));
  api->graph_destroy(backend, graph); /* its launches have not run */
  gate_open(g);
  OK(wait_all(stream));
  CHECK(pinned[0] == 256 && allocations <= start + 1, "launches of a destroyed graph: %g", pinned[0]);

  /* Abandoned: the stream is closed while it records; nothing of it runs, other streams are not hurt. */
  OK(api->graph_begin(backend, stream));
  OK(scale(stream, x, x, 1024, 100));
  drop(stream);
  OK(api->copy(backend, other, pinned, x, 4096));
  OK(wait_all(other));
  CHECK(pinned[0] == 256, "an abandoned recording ran: %g", pinned[0]);
  OK(api->graph_begin(backend, other)); /* an empty one */
  lm_backend_graph *empty = api->graph_end(backend, other);
  CHECK(empty != NULL, "an empty graph: %s", text);
  if (empty) {
    OK(api->graph_launch(backend, empty, other));
    OK(wait_all(other));
    api->graph_destroy(backend, empty);
  }
  drop(other);
  api->mem_release(backend, x, 4096);
  api->pinned_release(backend, pinned, 4096);
}

/* Recordings of several threads at once do not disturb each other. */
struct worker {
  int index;
  int wrong = 0;
};

static void *recorder_main(void *arg) {
  worker *w = static_cast<worker *>(arg);
  lm_backend_stream *stream = api->stream_create(backend, 0);
  float *x = floats(api->mem_reserve(backend, 4096)), *pinned = floats(api->pinned_reserve(backend, 4096, 0));
  for (int turn = 0; turn < 10; turn++) {
    pinned[0] = 1;
    if (api->copy(backend, stream, x, pinned, 4096) || api->graph_begin(backend, stream)) w->wrong++;
    for (int i = 0; i < 10; i++) w->wrong += scale(stream, x, x, 1024, 2) != LM_OK;
    lm_backend_graph *graph = api->graph_end(backend, stream);
    if (!graph || api->graph_launch(backend, graph, stream) || api->copy(backend, stream, pinned, x, 4096) || wait_all(stream)) w->wrong++;
    if (graph) api->graph_destroy(backend, graph);
    w->wrong += pinned[0] != 1024;
  }
  drop(stream);
  api->mem_release(backend, x, 4096);
  api->pinned_release(backend, pinned, 4096);
  return NULL;
}

static void test_recorders(void) {
  worker workers[4];
  pthread_t ids[4];
  for (int i = 0; i < 4; i++) pthread_create(&ids[i], NULL, recorder_main, &workers[i]);
  for (int i = 0; i < 4; i++) {
    pthread_join(ids[i], NULL);
    CHECK(workers[i].wrong == 0, "recording thread %d: %d wrong: %s", i, workers[i].wrong, text);
  }
}

/* A reservation that fails leaves nothing behind that a later launch would take for its own failure. Without room in the
 * address space CUDA itself refuses. */
static void test_failed_pin(void) {
  lm_backend_stream *stream = new_stream();
  float *x = floats(api->mem_reserve(backend, 4096));
  struct rlimit limit, none;
  getrlimit(RLIMIT_AS, &limit);
  none = limit;
  none.rlim_cur = 1;
  setrlimit(RLIMIT_AS, &none);
  void *const pinned = api->pinned_reserve(backend, UINT64_C(1) << 28, 1);
  setrlimit(RLIMIT_AS, &limit);
  CHECK(pinned == NULL && text_status < 0, "page-locked without address space: %s", text);
  text_status = 0;
  OK(scale(stream, x, x, 16, 1));
  OK(wait_all(stream));
  CHECK(text_status == 0, "the launch after it reports a failure: %s", text);
  drop(stream);
  api->mem_release(backend, x, 4096);
}

/* Memory that is not page-locked goes through a buffer of the driver: slower, in the order of the stream all the same. */
static void test_pageable(void) {
  enum { BYTES = (3 << 20) + 123 };
  lm_backend_stream *stream = new_stream();
  uint8_t *device = bytes(api->mem_reserve(backend, BYTES)), *from = bytes(malloc(BYTES)), *to = bytes(calloc(1, BYTES));
  for (int i = 0; i < BYTES; i++) from[i] = (uint8_t)(i * 37 + (i >> 8));
  OK(api->fill(backend, stream, device, 0xff, BYTES));
  OK(api->copy(backend, stream, device, from, BYTES));
  OK(api->fill(backend, stream, device + 1000, 7, 24));
  OK(api->copy(backend, stream, to, device, BYTES));
  OK(wait_all(stream));
  memset(from + 1000, 7, 24);
  CHECK(memcmp(from, to, BYTES) == 0, "pageable memory there and back");
  drop(stream);
  free(from), free(to);
  api->mem_release(backend, device, BYTES);
}

/* Says which test runs, so that a hang has a name. */
#define RUN(test) (fprintf(stderr, "%s\n", #test), test())

int main(void) {
  if (!open_device()) return 0;
  RUN(test_order);
  RUN(test_many_marks);
  RUN(test_waiters);
  RUN(test_departed);
  RUN(test_calls);
  RUN(test_failed_stream);
  RUN(test_events);
  RUN(test_graphs);
  RUN(test_recorders);
  RUN(test_failed_pin);
  RUN(test_pageable);
  OK(api->synchronize(backend));
  api->close(backend);
  return report();
}
