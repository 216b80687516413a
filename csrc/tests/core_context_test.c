/* Contexts: opening, errors, counters, and destruction in any order. */
#include "core_test.h"

static void opens_and_describes(void) {
  lm_ctx *ctx = open_device("cpu");
  EXPECT(ctx);
  int32_t bytes = lm_ctx_info(ctx, NULL, 0);
  char text[1024];
  EXPECT(bytes > 2 && bytes < (int32_t)sizeof text);
  EXPECT(lm_ctx_info(ctx, text, sizeof text) > 2);
  EXPECT(text[0] == '{' && strstr(text, "\"kind\":\"cpu\"") && strstr(text, "\"memoryFree\":"));
  char small[8] = "xxxxxxx";
  EXPECT(lm_ctx_info(ctx, small, sizeof small) > 8);
  EXPECT(strlen(small) == 7);
  EXPECT(lm_last_error(ctx, text, sizeof text) == LM_OK && text[0] == 0);
  lm_ctx_destroy(ctx);
}

static void refuses_bad_devices(void) {
  const struct {
    const char *device;
    int32_t threads;
    const char *text;
  } cases[] = {
      {NULL, 0, "device is NULL"},
      {"", 0, "unknown device"},
      {"gpu", 0, "unknown device: device=\"gpu\""},
      {"cpu ", 0, "unknown device"},
      {"cuda:", 0, "unknown device"},
      {"cuda:-1", 0, "unknown device"},
      {"cuda:1x", 0, "unknown device"},
      {"cuda:99999999999", 0, "unknown device"},
      {"cuda:0", 0, "no CUDA backend"},
      {"cuda", 0, "no CUDA backend"},
      {"cpu", -1, "threads is out of range: threads=-1"},
      {"cpu", 1 << 20, "threads is out of range"},
      {"sim:", 0, "options of the simulated device are malformed: device=\"sim:\""},
      {"sim:fail_at=", 0, "malformed"},
      {"sim:delays=1/", 0, "malformed"},
      {"sim:fail_at=1;", 0, "malformed"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char error[512] = "";
    lm_ctx *ctx = lm_ctx_open(cases[i].device, cases[i].threads, error, sizeof error);
    EXPECT(!ctx);
    EXPECT(strstr(error, cases[i].text));
    EXPECT(strncmp(error, "lm_ctx_open: ", 13) == 0);
  }
  char tiny[4] = "xyz";
  EXPECT(!lm_ctx_open("gpu", 0, tiny, sizeof tiny));
  EXPECT(strcmp(tiny, "lm_") == 0);
  EXPECT(!lm_ctx_open("gpu", 0, NULL, 0));
}

static void null_is_harmless(void) {
  lm_ctx_destroy(NULL);
  lm_stream_destroy(NULL);
  lm_event_destroy(NULL);
  lm_graph_destroy(NULL);
  lm_pool_destroy(NULL);
  lm_pinned_destroy(NULL);
  char text[64];
  EXPECT(lm_mem_release(NULL, NULL) == LM_OK);
  EXPECT(lm_last_error(NULL, text, sizeof text) == LM_ERR_ARGUMENT);
  EXPECT(!lm_stream_create(NULL, 0) && !lm_event_create(NULL) && !lm_pool_create(NULL, 0) && !lm_pinned_create(NULL, 1, 0));
  EXPECT(!lm_mem_reserve(NULL, 1) && !lm_graph_end(NULL) && !lm_pinned_data(NULL));
  EXPECT(lm_stream_query(NULL) == LM_ERR_ARGUMENT && lm_stream_wait(NULL) == LM_ERR_ARGUMENT);
  EXPECT(lm_event_record(NULL, NULL) == LM_ERR_ARGUMENT && lm_event_query(NULL) == LM_ERR_ARGUMENT);
  EXPECT(lm_event_wait(NULL) == LM_ERR_ARGUMENT && lm_event_elapsed(NULL, NULL, NULL) == LM_ERR_ARGUMENT);
  EXPECT(lm_stream_wait_event(NULL, NULL) == LM_ERR_ARGUMENT && lm_graph_launch(NULL, NULL) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_copy(NULL, NULL, NULL, 1, NULL) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_fill(NULL, NULL, 0, 1, NULL) == LM_ERR_ARGUMENT);
  EXPECT(lm_pool_alloc(NULL, 1, NULL, NULL) == 0 && !lm_pool_pointer(NULL, 1) && lm_pool_trim(NULL) == LM_ERR_ARGUMENT);
  EXPECT(lm_pool_free(NULL, 1, NULL) == LM_ERR_ARGUMENT && lm_pool_stats_get(NULL, NULL) == LM_ERR_ARGUMENT);
  EXPECT(lm_ctx_stats(NULL, NULL) == LM_ERR_ARGUMENT && lm_scale(NULL, NULL, NULL) == LM_ERR_ARGUMENT);
}

/* All orders of destroying a context and one child of each kind, with work on its way. */
enum { CTX, STREAM, EVENT, GRAPH, POOL, PINNED, RESERVED, KINDS };

static void one_order(const int *order) {
  lm_ctx *ctx = open_device("cpu");
  lm_stream *stream = lm_stream_create(ctx, 0);
  lm_event *event = lm_event_create(ctx);
  lm_pool *pool = lm_pool_create(ctx, 0);
  lm_pinned *pinned = lm_pinned_create(ctx, 4096, 0);
  void *reserved = lm_mem_reserve(ctx, 4096);
  EXPECT(lm_graph_begin(stream) == LM_OK);
  EXPECT(lm_mem_copy(ctx, lm_pinned_data(pinned), reserved, 4096, stream) == LM_OK);
  lm_graph *graph = lm_graph_end(stream);
  EXPECT(graph);
  uint64_t block = lm_pool_alloc(pool, 1000, "block", stream);
  EXPECT(block && lm_mem_fill(ctx, lm_pool_pointer(pool, block), 1, 1000, stream) == LM_OK);
  EXPECT(lm_mem_copy(ctx, reserved, lm_pinned_data(pinned), 4096, stream) == LM_OK);
  EXPECT(lm_event_record(event, stream) == LM_OK);
  EXPECT(lm_graph_launch(graph, stream) == LM_OK);
  for (int i = 0; i < KINDS; i++) {
    switch (order[i]) {
      case CTX: lm_ctx_destroy(ctx); break;
      case STREAM: lm_stream_destroy(stream); break;
      case EVENT: lm_event_destroy(event); break;
      case GRAPH: lm_graph_destroy(graph); break;
      case POOL: lm_pool_destroy(pool); break;
      case PINNED: lm_pinned_destroy(pinned); break;
      case RESERVED: EXPECT(lm_mem_release(ctx, reserved) == LM_OK); break;
    }
  }
}

static void destroys_in_any_order(void) {
  /* Every permutation of 7 would be 5040 contexts; every rotation of every pair swap reaches each "x before y". */
  for (int a = 0; a < KINDS; a++) {
    for (int b = a; b < KINDS; b++) {
      for (int turn = 0; turn < KINDS; turn++) {
        int order[KINDS];
        for (int i = 0; i < KINDS; i++) order[i] = (i + turn) % KINDS;
        int swap = order[a];
        order[a] = order[b];
        order[b] = swap;
        /* Memory still named by commands must outlive them: releasing waits, the context does too. */
        one_order(order);
      }
    }
  }
}

static void counts(void) {
  lm_ctx *ctx = open_device("cpu");
  lm_stats start = stats_of(ctx);
  EXPECT(start.reserved == 0 && start.pinned == 0 && start.driver_allocs == 0 && start.kernel_launches == 0);
  void *a = lm_mem_reserve(ctx, 1 << 20), *b = lm_mem_reserve(ctx, 100);
  lm_pinned *pinned = lm_pinned_create(ctx, 5000, 1);
  lm_stats now = stats_of(ctx);
  EXPECT(now.reserved == (1 << 20) + 100 && now.pinned == 5000 && now.driver_allocs == 3 && now.driver_frees == 0);
  EXPECT(((uintptr_t)a | (uintptr_t)b | (uintptr_t)lm_pinned_data(pinned)) % 4096 == 0);
  EXPECT(lm_mem_release(ctx, a) == LM_OK && lm_mem_release(ctx, b) == LM_OK);
  lm_pinned_destroy(pinned);
  now = stats_of(ctx);
  EXPECT(now.reserved == 0 && now.pinned == 0 && now.driver_allocs == 3 && now.driver_frees == 3);
  EXPECT(now.reserved_peak == (1 << 20) + 100 && now.pinned_peak == 5000);
  lm_ctx_destroy(ctx);
}

static void refuses_impossible_sizes(void) {
  lm_ctx *ctx = open_device("cpu");
  const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 255, UINT64_MAX / 2, UINT64_C(1) << 50};
  for (int i = 0; i < 4; i++) {
    EXPECT(!lm_mem_reserve(ctx, sizes[i]));
    EXPECT(failed_with(ctx, LM_ERR_OUT_OF_MEMORY, "lm_mem_reserve: this would leave the machine without memory: req"));
    EXPECT(!lm_pinned_create(ctx, sizes[i], 0));
    EXPECT(failed_with(ctx, LM_ERR_PINNED, "lm_pinned_create: this would leave the machine without memory: requested="));
  }
  EXPECT(!lm_mem_reserve(ctx, 0) && failed_with(ctx, LM_ERR_ARGUMENT, "bytes is 0"));
  EXPECT(!lm_pinned_create(ctx, 0, 0) && failed_with(ctx, LM_ERR_ARGUMENT, "bytes=0"));
  EXPECT(!lm_pinned_create(ctx, 1, 2) && failed_with(ctx, LM_ERR_ARGUMENT, "flags=2"));
  EXPECT(stats_of(ctx).reserved == 0 && stats_of(ctx).driver_allocs == 0);
  lm_ctx_destroy(ctx);
}

static void refuses_foreign_memory(void) {
  lm_ctx *ctx = open_device("cpu");
  lm_stream *stream = lm_stream_create(ctx, 0);
  uint8_t *memory = lm_mem_reserve(ctx, 8192);
  static uint8_t foreign[64];
  EXPECT(lm_mem_copy(ctx, memory, foreign, 64, stream) == LM_ERR_ARGUMENT && failed_with(ctx, LM_ERR_ARGUMENT, "src"));
  EXPECT(lm_mem_copy(ctx, foreign, memory, 64, stream) == LM_ERR_ARGUMENT && failed_with(ctx, LM_ERR_ARGUMENT, "dst"));
  EXPECT(lm_mem_fill(ctx, memory + 1, 0, 8192, stream) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_fill(ctx, memory + 8192, 0, 1, stream) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_fill(ctx, memory - 1, 0, 2, stream) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_fill(ctx, memory, 0, UINT64_MAX, stream) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_fill(ctx, NULL, 0, 1, stream) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_fill(ctx, memory + 8191, 0, 1, stream) == LM_OK);
  EXPECT(lm_mem_fill(ctx, NULL, 0, 0, stream) == LM_OK);
  EXPECT(lm_mem_release(ctx, memory + 4096) == LM_ERR_ARGUMENT && failed_with(ctx, LM_ERR_ARGUMENT, "not a reservation"));
  EXPECT(lm_mem_release(ctx, memory) == LM_OK);
  EXPECT(lm_mem_release(ctx, memory) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_fill(ctx, memory, 0, 1, stream) == LM_ERR_ARGUMENT);
  lm_stream_destroy(stream);
  lm_ctx_destroy(ctx);
}

static void keeps_contexts_apart(void) {
  lm_ctx *a = open_device("cpu"), *b = open_device("cpu");
  lm_stream *stream = lm_stream_create(a, 0);
  lm_pool *pool = lm_pool_create(b, 0);
  lm_event *event = lm_event_create(b);
  void *memory = lm_mem_reserve(b, 4096);
  EXPECT(lm_mem_fill(b, memory, 0, 1, stream) == LM_ERR_ARGUMENT && failed_with(b, LM_ERR_ARGUMENT, "another context"));
  EXPECT(lm_pool_alloc(pool, 1, "x", stream) == 0 && failed_with(b, LM_ERR_ARGUMENT, "another context"));
  EXPECT(lm_event_record(event, stream) == LM_ERR_ARGUMENT);
  EXPECT(lm_stream_wait_event(stream, event) == LM_ERR_ARGUMENT && failed_with(a, LM_ERR_ARGUMENT, "another context"));
  EXPECT(lm_mem_release(a, memory) == LM_ERR_ARGUMENT);
  EXPECT(lm_mem_release(b, memory) == LM_OK);
  lm_event_destroy(event);
  lm_pool_destroy(pool);
  lm_stream_destroy(stream);
  lm_ctx_destroy(b);
  lm_ctx_destroy(a);
}

static void *fail_often(void *arg) {
  for (int i = 0; i < 2000; i++) lm_mem_reserve(arg, i % 2 ? 0 : UINT64_MAX);
  return NULL;
}

static void keeps_errors_whole(void) {
  lm_ctx *ctx = open_device("cpu");
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, fail_often, ctx);
  for (int i = 0; i < 2000; i++) {
    char text[LM_ERROR_TEXT_MAX];
    int32_t status = lm_last_error(ctx, text, sizeof text);
    bool zero = strstr(text, "bytes is 0"), huge = strstr(text, "requested=18446744073709551615");
    EXPECT(status == LM_OK || (status == LM_ERR_ARGUMENT && zero) || (status == LM_ERR_OUT_OF_MEMORY && huge));
  }
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  lm_ctx_destroy(ctx);
}

static void names_itself(void) {
  char text[128];
  EXPECT(lm_abi_version() >> 16 == LM_ABI_MAJOR && (lm_abi_version() & 0xffff) == LM_ABI_MINOR);
  EXPECT(lm_build_info(text, sizeof text) == (int32_t)strlen(text) + 1);
  EXPECT(strstr(text, "; cpu; gcc") || strstr(text, "; cpu; clang"));
  EXPECT(lm_header_hash() != 0);
  EXPECT(lm_ptr_add(text, 5) == text + 5 && lm_ptr_add(text + 5, -5) == text);
}

int main(void) {
  test("lm_ctx_open() opens the CPU, and lm_ctx_info() describes it as JSON", opens_and_describes);
  test("lm_ctx_open() refuses bad devices with a text that fits any buffer", refuses_bad_devices);
  test("lm_*() take NULL without harm", null_is_harmless);
  test("lm_*_destroy() work in any order", destroys_in_any_order);
  test("lm_ctx_stats() counts memory exactly", counts);
  test("lm_mem_reserve() and lm_pinned_create() refuse impossible sizes", refuses_impossible_sizes);
  test("lm_mem_copy() and lm_mem_fill() stay inside memory of the context", refuses_foreign_memory);
  test("lm_ctx objects of two contexts do not mix", keeps_contexts_apart);
  test("lm_last_error() never mixes the texts of two threads", keeps_errors_whole);
  test("lm_abi_version(), lm_build_info() and lm_ptr_add() work without a context", names_itself);
  return summary();
}
