/* core_test.h: what the tests of core are written with. One file is one program; its last line is "N passed, N failed". */
#ifndef LM_CORE_TEST_H
#define LM_CORE_TEST_H

#define _GNU_SOURCE

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../core/core.h"

static int tests_passed, tests_failed;
static _Atomic bool test_good;

#define EXPECT(condition)                                                              \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      fprintf(stderr, "  %s:%d: %s\n", __FILE__, __LINE__, #condition);                \
      test_good = false;                                                               \
    }                                                                                  \
  } while (0)

/* Runs one test; the name is a sentence that starts with what is tested. */
static inline void test(const char *name, void (*body)(void)) {
  test_good = true;
  body();
  test_good ? tests_passed++ : tests_failed++;
  printf("%s %s\n", test_good ? "ok    " : "FAILED", name);
  fflush(stdout);
}

static inline int summary(void) {
  printf("%d passed, %d failed\n", tests_passed, tests_failed);
  return tests_failed != 0;
}

static inline lm_ctx *open_device(const char *device) {
  char error[1024];
  lm_ctx *ctx = lm_ctx_open(device, 2, error, sizeof error);
  if (!ctx) fprintf(stderr, "  %s\n", error);
  return ctx;
}

/* The last failure of ctx has this status and its text contains `part`. */
static inline bool failed_with(lm_ctx *ctx, int32_t status, const char *part) {
  char text[LM_ERROR_TEXT_MAX];
  int32_t found = lm_last_error(ctx, text, sizeof text);
  if (found == status && strstr(text, part)) return true;
  fprintf(stderr, "  last error is %d \"%s\", wanted %d with \"%s\"\n", found, text, status, part);
  return false;
}

static inline lm_stats stats_of(lm_ctx *ctx) {
  lm_stats stats = {0};
  lm_ctx_stats(ctx, &stats);
  return stats;
}

static inline lm_pool_stats pool_stats_of(lm_pool *pool) {
  lm_pool_stats stats = {0};
  lm_pool_stats_get(pool, &stats);
  return stats;
}

/* A gate holds a stream up until it is opened: the way to say in which order things happen. */
typedef struct gate {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  bool open, reached, left;
} gate;

#define GATE_CLOSED {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, false, false}

static inline int32_t gate_pass(void *arg, int32_t status) {
  gate *g = arg;
  (void)status;
  pthread_mutex_lock(&g->mutex);
  g->reached = true;
  pthread_cond_broadcast(&g->changed);
  while (!g->open) pthread_cond_wait(&g->changed, &g->mutex);
  g->left = true;
  pthread_cond_broadcast(&g->changed);
  pthread_mutex_unlock(&g->mutex);
  return LM_OK;
}

/* Returns when the stream has gone through, so that the gate may end its life. */
static inline void gate_open(gate *g) {
  pthread_mutex_lock(&g->mutex);
  g->open = true;
  pthread_cond_broadcast(&g->changed);
  while (!g->left) pthread_cond_wait(&g->changed, &g->mutex);
  pthread_mutex_unlock(&g->mutex);
}

static inline void gate_await(gate *g) {
  pthread_mutex_lock(&g->mutex);
  while (!g->reached) pthread_cond_wait(&g->changed, &g->mutex);
  pthread_mutex_unlock(&g->mutex);
}

/* Runs fn(arg) in stream order. */
static inline void call_in(lm_stream *stream, lm_host_fn fn, void *arg) {
  EXPECT(stream->ctx->api->stream_call(stream->ctx->backend, stream->handle, fn, arg) == LM_OK);
}

static inline void hold(lm_stream *stream, gate *g) {
  call_in(stream, gate_pass, g);
}

static inline int32_t fail_here(void *arg, int32_t status) {
  (void)arg;
  (void)status;
  return LM_ERR_DEVICE;
}

#endif
