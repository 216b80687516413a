/* Page-locked buffers: they live until the copies that use them have ended, and no longer. */
#include "core_test.h"

static lm_ctx *ctx;

static void destroy_waits_for_copies(void) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  uint8_t *device = lm_mem_reserve(ctx, 4096);
  gate g = GATE_CLOSED;
  lm_pinned *source = lm_pinned_create(ctx, 4096, 1), *target = lm_pinned_create(ctx, 4096, 0);
  memset(lm_pinned_data(source), 7, 4096);
  hold(stream, &g);
  EXPECT(lm_mem_copy(ctx, device, lm_pinned_data(source), 4096, stream) == LM_OK);
  lm_pinned_destroy(source); /* does not wait: the gate is closed */
  EXPECT(stats_of(ctx).pinned == 8192);
  lm_pinned_destroy(target); /* never used: goes at once */
  EXPECT(stats_of(ctx).pinned == 4096);
  gate_open(&g);
  EXPECT(lm_stream_wait(stream) == LM_OK);
  EXPECT(device[0] == 7 && device[4095] == 7);
  EXPECT(stats_of(ctx).pinned == 0);
  lm_mem_release(ctx, device);
  lm_stream_destroy(stream);
}

static void only_users_count(void) {
  lm_stream *busy = lm_stream_create(ctx, 0), *user = lm_stream_create(ctx, 0);
  uint8_t *device = lm_mem_reserve(ctx, 4096);
  gate g = GATE_CLOSED;
  lm_pinned *pinned = lm_pinned_create(ctx, 100, 0);
  hold(busy, &g);
  EXPECT(lm_mem_copy(ctx, device, (uint8_t *)lm_pinned_data(pinned) + 50, 50, user) == LM_OK);
  EXPECT(lm_stream_wait(user) == LM_OK);
  lm_pinned_destroy(pinned);
  EXPECT(stats_of(ctx).pinned == 0);
  gate_open(&g);
  lm_stream_destroy(busy);
  lm_stream_destroy(user);
  lm_mem_release(ctx, device);
}

static void survives_its_streams(void) {
  uint8_t *device = lm_mem_reserve(ctx, 4096);
  lm_pinned *pinned = lm_pinned_create(ctx, 4096, 0);
  memset(lm_pinned_data(pinned), 3, 4096);
  gate g = GATE_CLOSED;
  for (int i = 0; i < 40; i++) {
    lm_stream *stream = lm_stream_create(ctx, 0);
    if (i == 20) hold(stream, &g);
    EXPECT(lm_mem_copy(ctx, device + i, lm_pinned_data(pinned), 1, stream) == LM_OK);
    if (i != 20) EXPECT(lm_stream_wait(stream) == LM_OK);
    lm_stream_destroy(stream);
  }
  EXPECT(pinned->use_count == 2); /* streams that ended are forgotten: the held one and the last are left */
  lm_pinned_destroy(pinned);
  EXPECT(stats_of(ctx).pinned == 4096);
  gate_open(&g);
  EXPECT(lm_mem_release(ctx, device) == LM_OK); /* waits for all */
  EXPECT(stats_of(ctx).pinned == 0);
}

static void destroyed_buffer_is_no_target(void) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  uint8_t *device = lm_mem_reserve(ctx, 4096);
  lm_pinned *pinned = lm_pinned_create(ctx, 4096, 0);
  void *data = lm_pinned_data(pinned);
  gate g = GATE_CLOSED;
  hold(stream, &g);
  EXPECT(lm_mem_copy(ctx, data, device, 4096, stream) == LM_OK);
  lm_pinned_destroy(pinned);
  EXPECT(lm_mem_copy(ctx, data, device, 4096, stream) == LM_ERR_ARGUMENT);
  gate_open(&g);
  lm_stream_destroy(stream);
  lm_mem_release(ctx, device);
}

static void context_end_gives_back(void) {
  lm_ctx *own = open_device("cpu");
  lm_stream *stream = lm_stream_create(own, 0);
  lm_pinned *a = lm_pinned_create(own, 4096, 0), *b = lm_pinned_create(own, 4096, 0);
  for (int i = 0; i < 100; i++) EXPECT(lm_mem_copy(own, lm_pinned_data(a), lm_pinned_data(b), 4096, stream) == LM_OK);
  lm_pinned_destroy(a);
  lm_pinned_destroy(b);
  lm_stream_destroy(stream);
  lm_ctx_destroy(own); /* leaks and late writes would show under a sanitizer */
}

static void *churn(void *arg) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  uint8_t *device = arg;
  for (int i = 0; i < 300; i++) {
    lm_pinned *pinned = lm_pinned_create(ctx, 8192, 0);
    uint8_t *data = lm_pinned_data(pinned);
    memset(data, i, 8192);
    EXPECT(lm_mem_copy(ctx, device, data, 8192, stream) == LM_OK);
    lm_pinned_destroy(pinned);
    if (i % 50 == 49) EXPECT(lm_stream_wait(stream) == LM_OK && device[8191] == (uint8_t)i);
  }
  lm_stream_destroy(stream);
  return NULL;
}

static void threads_churn(void) {
  pthread_t threads[4];
  uint8_t *device[4];
  for (int i = 0; i < 4; i++) device[i] = lm_mem_reserve(ctx, 8192);
  for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, churn, device[i]);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < 4; i++) EXPECT(lm_mem_release(ctx, device[i]) == LM_OK);
  lm_stats stats = stats_of(ctx);
  EXPECT(stats.pinned == 0 && stats.reserved == 0 && stats.driver_allocs == stats.driver_frees);
}

int main(void) {
  ctx = open_device("cpu");
  test("lm_pinned_destroy() keeps the pages until copies have ended", destroy_waits_for_copies);
  test("lm_pinned_destroy() does not wait for streams that never used the buffer", only_users_count);
  test("lm_pinned_destroy() counts copies of streams destroyed before", survives_its_streams);
  test("lm_mem_copy() refuses a destroyed buffer", destroyed_buffer_is_no_target);
  test("lm_ctx_destroy() gives destroyed buffers back", context_end_gives_back);
  test("lm_pinned_create() and lm_pinned_destroy() work from several threads", threads_churn);
  lm_ctx_destroy(ctx);
  return summary();
}
