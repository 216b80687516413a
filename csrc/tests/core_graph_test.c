/* Graphs: recording, replaying, and recordings that come to nothing. */
#include "core_test.h"

static lm_ctx *ctx;
static lm_stream *stream;
static float *x;

static int32_t scale(float factor, int64_t n, lm_stream *on) {
  lm_scale_args args = {.size = sizeof args, .type = LM_F32, .y = x, .x = x, .n = n, .factor = factor};
  return lm_scale(ctx, &args, on);
}

static void replays(void) {
  for (int i = 0; i < 16; i++) x[i] = 1;
  uint64_t launches = stats_of(ctx).kernel_launches;
  EXPECT(lm_graph_begin(stream) == LM_OK);
  EXPECT(scale(2, 16, stream) == LM_OK);
  EXPECT(scale(3, 8, stream) == LM_OK);
  EXPECT(lm_mem_fill(ctx, x + 15, 0, 4, stream) == LM_OK);
  lm_graph *graph = lm_graph_end(stream);
  EXPECT(lm_graph_nodes(graph) == 3);
  EXPECT(lm_stream_wait(stream) == LM_OK && x[0] == 1); /* recorded, not run */
  EXPECT(stats_of(ctx).kernel_launches == launches);
  for (int i = 0; i < 3; i++) EXPECT(lm_graph_launch(graph, stream) == LM_OK);
  EXPECT(lm_stream_wait(stream) == LM_OK);
  EXPECT(x[0] == 216 && x[8] == 8 && x[15] == 0);
  EXPECT(stats_of(ctx).kernel_launches == launches + 6);
  lm_graph_destroy(graph);
}

static void large_graph(void) {
  x[0] = 1;
  EXPECT(lm_graph_begin(stream) == LM_OK);
  for (int i = 0; i < 10000; i++) EXPECT(scale(i % 2 ? 2.0f : 0.5f, 1, stream) == LM_OK);
  lm_graph *graph = lm_graph_end(stream);
  EXPECT(lm_graph_nodes(graph) == 10000);
  uint64_t heap = stats_of(ctx).heap_allocs;
  EXPECT(lm_graph_launch(graph, stream) == LM_OK && lm_stream_wait(stream) == LM_OK && x[0] == 1);
  EXPECT(stats_of(ctx).heap_allocs == heap);
  lm_graph_destroy(graph);
}

static void runs_elsewhere_and_after_destroy(void) {
  lm_stream *other = lm_stream_create(ctx, 0);
  gate g = GATE_CLOSED;
  x[0] = 1;
  EXPECT(lm_graph_begin(stream) == LM_OK && scale(5, 1, stream) == LM_OK);
  lm_graph *graph = lm_graph_end(stream);
  hold(other, &g);
  EXPECT(lm_graph_launch(graph, other) == LM_OK && lm_graph_launch(graph, other) == LM_OK);
  lm_graph_destroy(graph);
  gate_open(&g);
  EXPECT(lm_stream_wait(other) == LM_OK && x[0] == 25);
  lm_stream_destroy(other);
}

static void refuses_what_cannot_be_recorded(void) {
  lm_stream *other = lm_stream_create(ctx, 0);
  lm_event *event = lm_event_create(ctx);
  lm_pool *pool = lm_pool_create(ctx, 0);
  uint64_t block = lm_pool_alloc(pool, 256, "b", stream);
  EXPECT(!lm_graph_end(stream) && failed_with(ctx, LM_ERR_STATE, "does not record"));
  EXPECT(lm_graph_begin(other) == LM_OK);
  lm_graph *empty = lm_graph_end(other);
  EXPECT(lm_graph_nodes(empty) == 0);
  EXPECT(lm_graph_begin(stream) == LM_OK);
  EXPECT(lm_graph_begin(stream) == LM_ERR_STATE && failed_with(ctx, LM_ERR_STATE, "lm_graph_begin: the stream records"));
  EXPECT(lm_graph_launch(empty, stream) == LM_ERR_STATE);
  EXPECT(lm_event_record(event, stream) == LM_ERR_STATE && lm_stream_wait_event(stream, event) == LM_ERR_STATE);
  EXPECT(lm_stream_query(stream) == LM_ERR_STATE && lm_stream_wait(stream) == LM_ERR_STATE);
  EXPECT(lm_stream_on_done(stream, (lm_done_fn)(uintptr_t)1, 0) == LM_ERR_STATE);
  EXPECT(lm_pool_alloc(pool, 1, "c", stream) == 0 && failed_with(ctx, LM_ERR_STATE, "lm_pool_alloc"));
  EXPECT(lm_pool_free(pool, block, stream) == LM_ERR_STATE && lm_pool_trim(pool) == LM_ERR_STATE);
  EXPECT(!lm_mem_reserve(ctx, 1) && failed_with(ctx, LM_ERR_STATE, "lm_mem_reserve"));
  EXPECT(!lm_pinned_create(ctx, 1, 0) && failed_with(ctx, LM_ERR_STATE, "lm_pinned_create"));
  uint64_t elsewhere = lm_pool_alloc(pool, 1, "d", other); /* another stream goes on */
  EXPECT(elsewhere && lm_stream_wait(other) == LM_OK);
  lm_graph *graph = lm_graph_end(stream);
  EXPECT(lm_graph_nodes(graph) == 0 && lm_graph_launch(graph, stream) == LM_OK && lm_stream_wait(stream) == LM_OK);
  void *memory = lm_mem_reserve(ctx, 1);
  EXPECT(memory && lm_mem_release(ctx, memory) == LM_OK);
  lm_graph_destroy(graph);
  lm_graph_destroy(empty);
  lm_pool_destroy(pool);
  lm_event_destroy(event);
  lm_stream_destroy(other);
}

static void bad_arguments_leave_no_node(void) {
  EXPECT(lm_graph_begin(stream) == LM_OK);
  EXPECT(scale(1, 0, stream) == LM_ERR_ARGUMENT && scale(1, 1, stream) == LM_OK);
  EXPECT(lm_mem_fill(ctx, (void *)(uintptr_t)8, 0, 1, stream) == LM_ERR_ARGUMENT);
  lm_graph *graph = lm_graph_end(stream);
  EXPECT(lm_graph_nodes(graph) == 1);
  lm_graph_destroy(graph);
}

static void abandoned_recording(void) {
  for (int i = 0; i < 20; i++) {
    lm_stream *own = lm_stream_create(ctx, 0);
    lm_pinned *pinned = lm_pinned_create(ctx, 64, 0);
    EXPECT(lm_graph_begin(own) == LM_OK);
    for (int k = 0; k < i; k++) EXPECT(scale(1, 1, own) == LM_OK);
    EXPECT(lm_mem_copy(ctx, x, lm_pinned_data(pinned), 4, own) == LM_OK);
    if (i % 2) lm_pinned_destroy(pinned);
    lm_stream_destroy(own);
    if (i % 2 == 0) lm_pinned_destroy(pinned);
    EXPECT(stats_of(ctx).pinned == 0);
  }
  void *memory = lm_mem_reserve(ctx, 1); /* nothing records any more */
  EXPECT(memory);
  lm_mem_release(ctx, memory);
}

static void graph_keeps_pinned_memory(void) {
  lm_pinned *pinned = lm_pinned_create(ctx, 4096, 0);
  ((float *)lm_pinned_data(pinned))[0] = 42;
  EXPECT(lm_graph_begin(stream) == LM_OK);
  EXPECT(lm_mem_copy(ctx, x, lm_pinned_data(pinned), 4, stream) == LM_OK);
  lm_graph *graph = lm_graph_end(stream);
  lm_pinned_destroy(pinned);
  EXPECT(stats_of(ctx).pinned == 4096);
  gate g = GATE_CLOSED;
  hold(stream, &g);
  x[0] = 0;
  EXPECT(lm_graph_launch(graph, stream) == LM_OK);
  lm_graph_destroy(graph);
  EXPECT(stats_of(ctx).pinned == 4096); /* the launch is still on its way */
  gate_open(&g);
  EXPECT(lm_stream_wait(stream) == LM_OK && x[0] == 42 && stats_of(ctx).pinned == 0);
}

static void failed_stream_skips_graphs(void) {
  lm_stream *own = lm_stream_create(ctx, 0);
  EXPECT(lm_graph_begin(own) == LM_OK && scale(2, 1, own) == LM_OK);
  lm_graph *graph = lm_graph_end(own);
  x[0] = 1;
  call_in(own, fail_here, NULL);
  EXPECT(lm_graph_launch(graph, own) == LM_OK && lm_stream_wait(own) == LM_ERR_DEVICE && x[0] == 1);
  EXPECT(lm_graph_launch(graph, stream) == LM_OK && lm_stream_wait(stream) == LM_OK && x[0] == 2);
  lm_graph_destroy(graph);
  lm_stream_destroy(own);
}

int main(void) {
  ctx = open_device("cpu");
  stream = lm_stream_create(ctx, 0);
  x = lm_mem_reserve(ctx, 4096);
  memset(x, 0, 4096);
  test("lm_graph_launch() replays what was recorded, in order, and counts its kernels", replays);
  test("lm_graph_launch() of 10,000 nodes allocates nothing", large_graph);
  test("lm_graph_destroy() lets launches on any stream finish", runs_elsewhere_and_after_destroy);
  test("lm_graph_begin() refuses everything but kernels, copies and fills", refuses_what_cannot_be_recorded);
  test("lm_graph_end() holds only nodes whose calls succeeded", bad_arguments_leave_no_node);
  test("lm_stream_destroy() drops a recording", abandoned_recording);
  test("lm_graph keeps page-locked memory that its copies use", graph_keeps_pinned_memory);
  test("lm_graph_launch() does nothing on a stream that failed", failed_stream_skips_graphs);
  lm_graph_begin(stream); /* the context may go while its stream records */
  lm_mem_release(ctx, x);
  lm_ctx_destroy(ctx);
  lm_stream_destroy(stream);
  return summary();
}
