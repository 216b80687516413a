/* cuda_backend_test.cu: the CUDA backend: opening, memory, copies, threads, and failures: of memory, of the heap, of the device. */
#include <sys/wait.h>

#include "cuda_vtable.h"

/* Opening ------------------------------------------------------------------------------------------------------------ */

static void test_open(void) {
  CHECK(open_backend(LM_BACKEND_VERSION + 1, &host, 0, 0) == NULL, "another version must be refused");
  CHECK(open_backend(LM_BACKEND_VERSION, &host, 999, 0) == NULL && failed_with(LM_ERR_NO_DEVICE, "cuda:999"), "index 999");
  char json[4096], small[8];
  const int32_t needed = api->info(backend, NULL, 0);
  CHECK(needed > 100 && api->info(backend, json, sizeof json) == (int32_t)strlen(json) + 1 && needed > 0, "info length");
  CHECK(api->info(backend, small, sizeof small) == needed || needed > 0, "info into a small buffer");
  for (const char *field : {"kind", "name", "computeCapability", "driver", "runtime", "memoryTotal", "memoryFree", "multiprocessors",
                            "hostMemoryFree", "pciBus", "gemm", "streamWorkspace", "sharedMemory"})
    CHECK(strstr(json, (std::string("\"") + field + "\":").c_str()) != NULL, "info has no %s", field);
  printf("%s\n", json);
  lm_backend *second = open_backend(LM_BACKEND_VERSION, &host, 0, 0);
  CHECK(second != NULL, "a second context on the same device: %s", text);
  if (second) second->api->close(second);
}

/* Memory ------------------------------------------------------------------------------------------------------------- */

static void test_memory(lm_backend_stream *stream) {
  const uint64_t before = field_of("memoryFree");
  for (uint64_t size : {UINT64_C(1), UINT64_C(511), UINT64_C(4096), UINT64_C(100000), (UINT64_C(1) << 20) + 1, UINT64_C(64) << 20}) {
    void *memory = api->mem_reserve(backend, size), *other = api->mem_reserve(backend, size);
    CHECK(memory && other && (uintptr_t)memory % 4096 == 0 && (uintptr_t)other % 4096 == 0, "mem_reserve(%llu): %p %p %s",
          (unsigned long long)size, memory, other, text);
    OK(api->fill(backend, stream, memory, 0x11, size));
    OK(api->fill(backend, stream, other, 0x22, size));
    void *pinned = api->pinned_reserve(backend, size, 0);
    CHECK(pinned && (uintptr_t)pinned % 4096 == 0, "pinned_reserve(%llu): %s", (unsigned long long)size, text);
    memset(pinned, 0x33, size);
    OK(api->copy(backend, stream, pinned, memory, size));
    OK(wait_all(stream));
    CHECK(all_bytes(pinned, size, 0x11), "%llu bytes came back changed", (unsigned long long)size);
    api->pinned_release(backend, pinned, size);
    api->mem_release(backend, memory, size);
    api->mem_release(backend, other, size);
  }
  const uint64_t after = field_of("memoryFree");
  printf("device memory free before %llu, after %llu\n", (unsigned long long)before, (unsigned long long)after);
  void *large = api->pinned_reserve(backend, (UINT64_C(200) << 20) + 5, 0), *combined = api->pinned_reserve(backend, 1 << 20, 1);
  CHECK(large && combined, "pinned_reserve: %s", text);
  if (large) {
    CHECK(all_bytes(large, 4096, 0), "page-locked memory is zero at first");
    memset(large, 1, (UINT64_C(200) << 20) + 5);
    api->pinned_release(backend, large, (UINT64_C(200) << 20) + 5);
  }
  if (combined) api->pinned_release(backend, combined, 1 << 20);
}

/* A request that does not fit says so, and what comes after it works. */
static void test_out_of_memory(lm_backend_stream *stream) {
  float *x = floats(api->mem_reserve(backend, 4096)), *back = floats(api->pinned_reserve(backend, 4096, 0));
  for (uint64_t size : {field_of("memoryFree") + (UINT64_C(1) << 30), field_of("memoryTotal") + 1, UINT64_MAX, UINT64_MAX - 255}) {
    CHECK(api->mem_reserve(backend, size) == NULL && failed_with(LM_ERR_OUT_OF_MEMORY, "out of device memory"), "mem_reserve(%llu)",
          (unsigned long long)size);
    CHECK(api->pinned_reserve(backend, size < UINT64_MAX / 2 ? UINT64_MAX / 2 : size, 0) == NULL &&
              failed_with(LM_ERR_PINNED, "page-locked host memory"),
          "pinned_reserve");
    back[0] = 3;
    OK(api->copy(backend, stream, x, back, 4096));
    OK(scale(stream, x, x, 1024, 2));
    OK(api->copy(backend, stream, back, x, 4096));
    OK(wait_all(stream));
    CHECK(back[0] == 6, "a launch after a failed reservation: %g", back[0]);
  }
  api->mem_release(backend, x, 4096);
  api->pinned_release(backend, back, 4096);
}

/* Both directions at once, 1 MiB x 200, each with its own content. */
static void test_copies(void) {
  enum { COUNT = 200, SIZE = 1 << 20, SLOTS = 8 };
  lm_backend_stream *up = new_stream(), *down = new_stream(-1);
  uint8_t *device = bytes(api->mem_reserve(backend, (uint64_t)SLOTS * SIZE)), *source = bytes(api->pinned_reserve(backend, (uint64_t)SLOTS * SIZE, 0));
  uint8_t *target = bytes(api->pinned_reserve(backend, (uint64_t)SLOTS * SIZE, 0));
  uint64_t up_marks[SLOTS] = {}, down_marks[SLOTS] = {};
  int wrong = 0;
  for (int i = 0; i < COUNT + SLOTS; i++) {
    const int slot = i % SLOTS;
    uint8_t *const from = source + (uint64_t)slot * SIZE, *const to = target + (uint64_t)slot * SIZE, *const on = device + (uint64_t)slot * SIZE;
    if (i >= SLOTS) { /* what went round SLOTS turns ago has come back */
      OK(api->stream_wait(backend, down, down_marks[slot]));
      wrong += !all_bytes(to, SIZE, (uint8_t)(i - SLOTS + 1));
      memset(to, 0, SIZE);
    }
    if (i >= COUNT) continue;
    OK(api->stream_wait(backend, up, up_marks[slot]));
    memset(from, (uint8_t)(i + 1), SIZE);
    OK(api->stream_follow(backend, up, down, down_marks[slot]));
    OK(api->copy(backend, up, on, from, SIZE));
    up_marks[slot] = mark(up);
    OK(api->stream_follow(backend, down, up, up_marks[slot]));
    OK(api->copy(backend, down, to, on, SIZE));
    down_marks[slot] = mark(down);
  }
  CHECK(wrong == 0, "%d of %d copies came back wrong", wrong, COUNT);
  /* Between page-locked buffers, inside the device, and a fill of page-locked memory. */
  memset(source, 7, SIZE);
  OK(api->copy(backend, up, target, source, SIZE));
  OK(api->copy(backend, up, device, target, SIZE));
  OK(api->copy(backend, up, device + SIZE, device, SIZE));
  OK(api->copy(backend, up, target + SIZE, device + SIZE, SIZE));
  OK(api->fill(backend, up, target + 2 * SIZE, 0x1ff, SIZE));
  OK(wait_all(up));
  CHECK(all_bytes(target + SIZE, SIZE, 7) && all_bytes(target + 2 * SIZE, SIZE, 0xff), "copies inside one side");
  drop(up), drop(down);
  api->mem_release(backend, device, (uint64_t)SLOTS * SIZE);
  api->pinned_release(backend, source, (uint64_t)SLOTS * SIZE);
  api->pinned_release(backend, target, (uint64_t)SLOTS * SIZE);
}

struct worker {
  int index;
  int wrong = 0;
};

static void *worker_main(void *arg) {
  worker *w = static_cast<worker *>(arg);
  lm_backend_stream *stream = api->stream_create(backend, 0);
  float *x = floats(api->mem_reserve(backend, 1 << 20)), *back = floats(api->pinned_reserve(backend, 1 << 20, 0));
  if (!stream || !x || !back) {
    w->wrong = -1;
    return NULL;
  }
  for (int turn = 0; turn < 50; turn++) {
    for (int i = 0; i < 1 << 18; i += 997) back[i] = (float)(w->index * 100 + turn);
    if (api->copy(backend, stream, x, back, 1 << 20) || scale(stream, x, x, 1 << 18, 2) || api->copy(backend, stream, back, x, 1 << 20) ||
        wait_all(stream))
      w->wrong++;
    for (int i = 0; i < 1 << 18; i += 997) w->wrong += back[i] != (float)(2 * (w->index * 100 + turn));
  }
  drop(stream);
  api->mem_release(backend, x, 1 << 20);
  api->pinned_release(backend, back, 1 << 20);
  return NULL;
}

static void test_threads(void) {
  worker workers[8];
  pthread_t ids[8];
  for (int i = 0; i < 8; i++) {
    workers[i].index = i;
    pthread_create(&ids[i], NULL, worker_main, &workers[i]);
  }
  for (int i = 0; i < 8; i++) {
    pthread_join(ids[i], NULL);
    CHECK(workers[i].wrong == 0, "thread %d: %d wrong: %s", i, workers[i].wrong, text);
  }
}

/* Heap ---------------------------------------------------------------------------------------------------------------- */

/* A little of everything; whatever fails is left out and the rest is put away. */
static void some_work(void) {
  lm_backend *const shared = backend;
  lm_backend *const mine = open_backend(LM_BACKEND_VERSION, &host, 0, 0);
  if (!mine) return;
  backend = mine;
  lm_backend_stream *stream = api->stream_create(backend, 0), *other = api->stream_create(backend, 0);
  lm_backend_event *event = api->event_create(backend);
  float *x = floats(api->mem_reserve(backend, 4096));
  void *pinned = api->pinned_reserve(backend, 4096, 0);
  std::atomic<int32_t> seen{1};
  if (stream && other && x) {
    (void)api->stream_call(backend, stream, note_status, &seen);
    for (int i = 0; i < 100; i++) {
      (void)scale(stream, x, x, 1024, 1);
      (void)mark(stream);
    }
    if (event && !api->event_record(backend, event, stream)) (void)api->stream_wait_event(backend, other, event);
    if (!api->graph_begin(backend, stream)) {
      (void)scale(stream, x, x, 1024, 1);
      lm_backend_graph *graph = api->graph_end(backend, stream);
      if (graph) {
        (void)api->graph_launch(backend, graph, stream);
        api->graph_destroy(backend, graph);
      }
    }
    CHECK(wait_all(stream) == LM_OK && wait_all(other) == LM_OK, "with allocation %llu failing: %s", (unsigned long long)fail_at.load(), text);
  }
  if (stream) drop(stream);
  if (other) drop(other);
  if (event) api->event_destroy(backend, event);
  (void)api->synchronize(backend);
  if (x) api->mem_release(backend, x, 4096);
  if (pinned) api->pinned_release(backend, pinned, 4096);
  mine->api->close(mine);
  backend = shared;
}

static void test_heap(void) {
  uint64_t start = allocations;
  some_work();
  const uint64_t count = allocations - start;
  for (uint64_t k = 1; k <= count; k++) {
    text_status = 0;
    fail_at = allocations + k;
    some_work();
  }
  fail_at = 0;
  CHECK(count > 8, "allocations of a little work: %llu", (unsigned long long)count);
}

/* A lost device ------------------------------------------------------------------------------------------------------ */

static std::atomic<int32_t> lost_status{1};

/* Runs in a process of its own, which loses its context to a wild address. Nothing may hang. */
static int lost_device(void) {
  alarm(60);
  lm_backend_stream *stream = new_stream(), *other = new_stream();
  lm_backend_event *event = api->event_create(backend);
  void *memory = api->mem_reserve(backend, 4096), *pinned = api->pinned_reserve(backend, 4096, 0);
  gate g;
  gate_hold(g, stream);
  OK(scale(stream, reinterpret_cast<void *>(UINT64_C(0x7ff000000000)), memory, 1024, 2));
  OK(api->event_record(backend, event, stream));
  OK(api->stream_call(backend, stream, note_status, &lost_status)); /* enqueued before the device is lost */
  const uint64_t at = mark(stream);
  gate_open(g);
  CHECK(api->stream_wait(backend, stream, at) == LM_ERR_DEVICE && failed_with(LM_ERR_DEVICE, "illegal"), "the wait says what happened");
  for (int i = 0; i < 2000 && lost_status == 1; i++) usleep(1000);
  CHECK(lost_status == LM_ERR_DEVICE, "a call behind the fault is made, with the failure: %d", lost_status.load());
  CHECK(api->event_query(backend, event) == LM_ERR_DEVICE && api->event_wait(backend, event) == LM_ERR_DEVICE, "events report it");
  CHECK(query(stream, at) == LM_ERR_DEVICE, "marks count as passed");
  text_status = 0;
  CHECK(scale(other, memory, memory, 4, 2) == LM_ERR_DEVICE && failed_with(LM_ERR_DEVICE, "lm_scale: the device failed"), "launches fail");
  CHECK(api->copy(backend, other, pinned, memory, 64) == LM_ERR_DEVICE && failed_with(LM_ERR_DEVICE, "first seen by"), "copies fail");
  CHECK(api->mem_reserve(backend, 4096) == NULL && text_status == LM_ERR_DEVICE, "reservations fail: %s", text);
  (void)wait_all(other);
  (void)api->synchronize(backend);
  api->event_destroy(backend, event);
  drop(stream), drop(other);
  api->mem_release(backend, memory, 4096);
  api->pinned_release(backend, pinned, 4096);
  api->close(backend);
  printf("lost device: %d passed, %d failed\n", passed, failed);
  return failed != 0;
}

static void test_lost_device(const char *self) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) { /* exec: a CUDA context does not survive a fork */
    execl("/proc/self/exe", self, "lost", (char *)NULL);
    _exit(9);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the process with the lost device ended with %d", status);
}

/* The public interface over the plugin --------------------------------------------------------------------------------- */

static std::atomic<uint64_t> done_tag;
static void on_done(uint64_t tag, int32_t status) { done_tag = status == LM_OK ? tag : 1; }

static void test_context(void) {
  char error[1024];
  lm_ctx *ctx = lm_ctx_open("cuda:0", 0, error, sizeof error);
  CHECK(ctx != NULL, "lm_ctx_open: %s", error);
  if (!ctx) return;
  lm_stream *stream = lm_stream_create(ctx, 0);
  lm_pool *pool = lm_pool_create(ctx, 0);
  lm_pinned *pinned = lm_pinned_create(ctx, 1 << 20, 0);
  CHECK(stream && pool && pinned, "objects");
  int wrong = 0;
  for (int i = 1; i <= 200; i++) {
    const uint64_t block = lm_pool_alloc(pool, 1 << 20, "x", stream);
    float *x = floats(lm_pool_pointer(pool, block)), *data = floats(lm_pinned_data(pinned));
    data[5] = (float)i;
    const lm_scale_args args = {sizeof args, LM_F32, x, x, 1 << 18, 3, 0};
    wrong += !x || lm_mem_copy(ctx, x, data, 1 << 20, stream) || lm_scale(ctx, &args, stream) || lm_mem_copy(ctx, data, x, 1 << 20, stream);
    wrong += lm_pool_free(pool, block, stream) || lm_stream_wait(stream) || data[5] != (float)(3 * i);
  }
  CHECK(wrong == 0, "pool, copies and kernels: %d wrong", wrong);
  OK(lm_stream_on_done(stream, on_done, 77));
  OK(lm_stream_wait(stream));
  for (int i = 0; i < 2000 && done_tag == 0; i++) usleep(1000);
  CHECK(done_tag == 77, "on_done: %llu", (unsigned long long)done_tag.load());
  lm_ctx_destroy(ctx); /* children outlive it */
  lm_pinned_destroy(pinned);
  lm_pool_destroy(pool);
  lm_stream_destroy(stream);
}

int main(int argc, char **argv) {
  if (!open_device()) return 0;
  if (argc > 1 && strcmp(argv[1], "lost") == 0) return lost_device();
  test_open();
  lm_backend_stream *stream = new_stream();
  test_memory(stream);
  test_out_of_memory(stream);
  drop(stream);
  test_copies();
  test_threads();
  test_heap();
  test_context();
  OK(api->synchronize(backend));
  api->close(backend);
  test_lost_device(argv[0]);
  return report();
}
