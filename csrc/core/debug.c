/* debug.c: debug mode: the ring of operations and the look at red zones. */
#define _GNU_SOURCE
#include <string.h>
#include <time.h>

#include "core.h"

#define OPERATIONS 4096u
#define STAGING LM_PAGE

typedef struct operation {
  uint64_t at; /* microseconds */
  const char *op;
  uintptr_t address;
  uint64_t bytes;
  uint32_t stream; /* 0 = none */
  char label[LM_LABEL_MAX];
} operation;

struct lm_debug {
  pthread_mutex_t mutex; /* after every other */
  uint64_t opened;       /* microseconds */
  uint64_t count;        /* operations so far; the last OPERATIONS of them are kept */
  operation ring[OPERATIONS];

  pthread_mutex_t look_mutex; /* one look at a time; no other lock is taken while it is held */
  lm_backend_stream *stream;  /* for looks that belong to no stream; made by the first */
  uint8_t *staging;           /* page-locked */
};

static uint64_t clock_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

int32_t lm_debug_enable(lm_ctx *ctx) {
  static const char op[] = "lm_debug_enable";
  if (!ctx) return LM_ERR_ARGUMENT;
  if (ctx->debug) return LM_OK;
  if (ctx->stats.driver_allocs) return lm_fail(ctx, LM_ERR_STATE, "%s: the context has taken memory already: call it first", op);
  lm_debug *debug = lm_heap_alloc(ctx, sizeof *debug, op);
  if (!debug) return LM_ERR_OUT_OF_MEMORY;
  debug->staging = ctx->api->pinned_reserve(ctx->backend, STAGING, 0);
  if (!debug->staging) {
    lm_heap_release(debug);
    return ctx->error_status;
  }
  pthread_mutex_init(&debug->mutex, NULL);
  pthread_mutex_init(&debug->look_mutex, NULL);
  debug->opened = clock_us();
  ctx->debug = debug;
  return LM_OK;
}

void lm_debug_close(lm_ctx *ctx) {
  lm_debug *debug = ctx->debug;
  if (!debug) return;
  ctx->debug = NULL;
  if (debug->stream) {
    ctx->api->stream_close(ctx->backend, debug->stream);
    ctx->api->stream_free(ctx->backend, debug->stream);
  }
  ctx->api->pinned_release(ctx->backend, debug->staging, STAGING);
  pthread_mutex_destroy(&debug->mutex);
  pthread_mutex_destroy(&debug->look_mutex);
  lm_heap_release(debug);
}

void lm_debug_note(lm_ctx *ctx, const char *op, const void *address, uint64_t bytes, const lm_stream *stream,
                   const char *label) {
  lm_debug *debug = ctx->debug;
  uint64_t at = clock_us();
  pthread_mutex_lock(&debug->mutex);
  operation *one = &debug->ring[debug->count++ % OPERATIONS];
  *one = (operation){.at = at, .op = op, .address = (uintptr_t)address, .bytes = bytes};
  one->stream = stream ? stream->number : 0;
  lm_set_label(one->label, label);
  pthread_mutex_unlock(&debug->mutex);
}

void lm_debug_write(lm_ctx *ctx, lm_text *text) {
  typedef unsigned long long ull;
  lm_debug *debug = ctx->debug;
  lm_text_add(text, "[");
  if (debug) {
    pthread_mutex_lock(&debug->mutex);
    uint64_t first = debug->count > OPERATIONS ? debug->count - OPERATIONS : 0;
    for (uint64_t i = first; i < debug->count; i++) {
      const operation *one = &debug->ring[i % OPERATIONS];
      lm_text_add(text, "%s{\"number\":%llu,\"timeMs\":%.3f,\"op\":\"%s\",\"address\":%llu,\"bytes\":%llu,\"stream\":%u",
                  i > first ? "," : "", (ull)(i + 1), (double)(one->at - debug->opened) / 1000, one->op, (ull)one->address,
                  (ull)one->bytes, one->stream);
      if (one->label[0]) lm_text_add(text, ",\"label\":"), lm_text_string(text, one->label);
      lm_text_add(text, "}");
    }
    pthread_mutex_unlock(&debug->mutex);
  }
  lm_text_add(text, "]");
}

/* Index of the first byte that differs, or `bytes`. */
static uint64_t first_damage(const uint8_t *zone, uint64_t bytes) {
  uint64_t i = 0;
  while (i < bytes && zone[i] == LM_ZONE_BYTE) i++;
  return i;
}

int32_t lm_zones_check(lm_ctx *ctx, const char *op, const uint8_t *start, uint64_t bytes, uint64_t requested,
                       const char *label, lm_stream *stream) {
  lm_debug *debug = ctx->debug;
  const lm_backend_api *api = ctx->api;
  uint64_t after = bytes - LM_ZONE - requested; /* at least LM_ZONE, less than two of them */
  int32_t status = LM_OK;
  pthread_mutex_lock(&debug->look_mutex);
  if (!stream && !debug->stream) debug->stream = api->stream_create(ctx->backend, 0);
  lm_backend_stream *handle = stream ? stream->handle : debug->stream;
  if (!handle) {
    pthread_mutex_unlock(&debug->look_mutex);
    return ctx->error_status;
  }
  memset(debug->staging, LM_ZONE_BYTE, 3 * LM_ZONE); /* what is not copied looks intact */
  if (!api->copy(ctx->backend, handle, debug->staging, start, LM_ZONE)) {
    (void)api->copy(ctx->backend, handle, debug->staging + LM_ZONE, start + LM_ZONE + requested, after);
  }
  (void)api->stream_wait(ctx->backend, handle, api->stream_mark(ctx->backend, handle));
  uint64_t front = first_damage(debug->staging, LM_ZONE), back = first_damage(debug->staging + LM_ZONE, after);
  pthread_mutex_unlock(&debug->look_mutex);
  if (front < LM_ZONE) {
    status = lm_fail(ctx, LM_ERR_CORRUPT, "%s: memory before a block was written: label=\"%s\" bytes=%llu offset=-%llu: "
                     "look for what writes there", op, label, (unsigned long long)requested,
                     (unsigned long long)(LM_ZONE - front));
  } else if (back < after) {
    status = lm_fail(ctx, LM_ERR_CORRUPT, "%s: memory behind a block was written: label=\"%s\" bytes=%llu offset=%llu: "
                     "look for what writes there", op, label, (unsigned long long)requested,
                     (unsigned long long)(requested + back));
  }
  return status;
}
