/* context.c: opening and closing a device, its last error and its counters. */
#define _GNU_SOURCE
#include "file.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_THREADS 1024

static int32_t fail_text(lm_ctx *ctx, int32_t status, const char *format, va_list values) {
  pthread_mutex_lock(&ctx->error_mutex);
  ctx->error_status = status;
  ctx->errors++;
  vsnprintf(ctx->error_text, sizeof ctx->error_text, format, values);
  pthread_mutex_unlock(&ctx->error_mutex);
  return status;
}

int32_t lm_fail(lm_ctx *ctx, int32_t status, const char *format, ...) {
  va_list values;
  va_start(values, format);
  fail_text(ctx, status, format, values);
  va_end(values);
  return status;
}

uint64_t lm_error_count(lm_ctx *ctx) {
  pthread_mutex_lock(&ctx->error_mutex);
  const uint64_t count = ctx->errors;
  pthread_mutex_unlock(&ctx->error_mutex);
  return count;
}

static int32_t host_fail(void *owner, int32_t status, const char *format, ...) {
  va_list values;
  va_start(values, format);
  fail_text(owner, status, format, values);
  va_end(values);
  return status;
}

const char *lm_status_text(int32_t status) {
#define LM_STATUS_TEXT(symbol, value, text) \
  case value:                               \
    return text;
  switch (status) { LM_STATUS_MAP(LM_STATUS_TEXT) }
  return "unknown status";
}

static void *host_alloc(void *owner, uint64_t bytes) {
  lm_ctx *ctx = owner;
  uint64_t count = atomic_fetch_add_explicit(&ctx->heap_allocs, 1, memory_order_relaxed) + 1;
  if (count == ctx->heap_fail_at) return NULL;
  return calloc(1, bytes);
}

void *lm_heap_alloc(lm_ctx *ctx, uint64_t bytes, const char *op) {
  void *memory = host_alloc(ctx, bytes);
  if (!memory) {
    lm_fail(ctx, LM_ERR_OUT_OF_MEMORY, "%s: out of host memory: %llu bytes of heap", op, (unsigned long long)bytes);
  }
  return memory;
}

void lm_heap_release(void *memory) {
  free(memory);
}

bool lm_heap_grow(lm_ctx *ctx, void *array, uint32_t count, uint32_t *capacity, uint64_t element, const char *op) {
  if (count < *capacity) return true;
  uint32_t larger = *capacity ? *capacity * 2 : 8;
  void *grown = lm_heap_alloc(ctx, larger * element, op);
  if (!grown) return false;
  void *old;
  memcpy(&old, array, sizeof old);
  if (old) memcpy(grown, old, count * element);
  lm_heap_release(old);
  memcpy(array, &grown, sizeof grown);
  *capacity = larger;
  return true;
}

void lm_set_label(char label[LM_LABEL_MAX], const char *text) {
  size_t length = text ? strnlen(text, LM_LABEL_MAX - 1) : 0;
  if (length) memcpy(label, text, length);
  label[length] = 0;
}

static void copy_text(void *buf, uint64_t cap, const char *text) {
  if (!buf || !cap) return;
  uint64_t length = strlen(text);
  if (length >= cap) length = cap - 1;
  memcpy(buf, text, length);
  ((char *)buf)[length] = 0;
}

static void ctx_free(lm_ctx *ctx) {
  if (ctx->backend) {
    lm_retired_sweep(ctx, true);
    lm_debug_close(ctx);
    ctx->api->close(ctx->backend);
  }
  if (ctx->notifier) lm_notifier_close(ctx->notifier);
  lm_heap_release(ctx->ranges);
  pthread_mutex_destroy(&ctx->mutex);
  pthread_mutex_destroy(&ctx->error_mutex);
  free(ctx);
}

void lm_ctx_ref(lm_ctx *ctx) {
  atomic_fetch_add_explicit(&ctx->refs, 1, memory_order_relaxed);
}

void lm_ctx_unref(lm_ctx *ctx) {
  if (atomic_fetch_sub_explicit(&ctx->refs, 1, memory_order_acq_rel) == 1) ctx_free(ctx);
}

lm_ctx *lm_ctx_open(const char *device, int32_t threads, void *error, uint64_t cap) {
  copy_text(error, cap, "");
  lm_ctx *ctx = calloc(1, sizeof *ctx);
  if (!ctx) {
    copy_text(error, cap, "lm_ctx_open: out of host memory");
    return NULL;
  }
  atomic_store(&ctx->refs, 1);
  pthread_mutex_init(&ctx->mutex, NULL);
  pthread_mutex_init(&ctx->error_mutex, NULL);
  ctx->opened = lm_clock_ms();
  ctx->host = (lm_host){.owner = ctx, .fail = host_fail, .alloc = host_alloc, .release = lm_heap_release,
                        .file_calls = &lm_system_calls};

  int32_t status;
  if (!device) {
    status = lm_fail(ctx, LM_ERR_ARGUMENT, "lm_ctx_open: device is NULL: give a name such as \"cpu\"");
  } else if (threads < 0 || threads > MAX_THREADS) {
    status = lm_fail(ctx, LM_ERR_ARGUMENT, "lm_ctx_open: threads is out of range: threads=%d: use 0 to %d", threads,
                     MAX_THREADS);
  } else {
    status = lm_device_open(ctx, device, threads);
  }
  if (status == LM_OK) return ctx;
  copy_text(error, cap, ctx->error_text);
  ctx_free(ctx);
  return NULL;
}

void lm_ctx_destroy(lm_ctx *ctx) {
  if (!ctx) return;
  (void)ctx->api->synchronize(ctx->backend);
  lm_retired_sweep(ctx, false);
  lm_ctx_unref(ctx);
}

int32_t lm_last_error(lm_ctx *ctx, void *buf, uint64_t cap) {
  if (!ctx) {
    copy_text(buf, cap, "context is NULL");
    return LM_ERR_ARGUMENT;
  }
  pthread_mutex_lock(&ctx->error_mutex);
  copy_text(buf, cap, ctx->error_text);
  int32_t status = ctx->error_status;
  pthread_mutex_unlock(&ctx->error_mutex);
  return status;
}

int32_t lm_ctx_info(lm_ctx *ctx, void *buf, uint64_t cap) {
  if (!ctx) return LM_ERR_ARGUMENT;
  return ctx->api->info(ctx->backend, buf, buf ? cap : 0);
}

int32_t lm_ctx_memory_stats(lm_ctx *ctx, int32_t memory_class, lm_memory_stats *stats) {
  if (!ctx) return LM_ERR_ARGUMENT;
  if (!stats || memory_class < 0 || memory_class >= LM_CLASS_COUNT) {
    return lm_fail(ctx, LM_ERR_ARGUMENT, "lm_ctx_memory_stats: stats is NULL or no such class: memory_class=%d",
                   memory_class);
  }
  lm_retired_sweep(ctx, false);
  pthread_mutex_lock(&ctx->mutex);
  *stats = ctx->classes[memory_class];
  pthread_mutex_unlock(&ctx->mutex);
  return LM_OK;
}

int32_t lm_ctx_reset_peaks(lm_ctx *ctx) {
  if (!ctx) return LM_ERR_ARGUMENT;
  lm_retired_sweep(ctx, false);
  pthread_mutex_lock(&ctx->mutex);
  ctx->stats.reserved_peak = ctx->stats.reserved;
  ctx->stats.pinned_peak = ctx->stats.pinned;
  for (int i = 0; i < LM_CLASS_COUNT; i++) ctx->classes[i].peak = ctx->classes[i].current;
  pthread_mutex_unlock(&ctx->mutex);
  return LM_OK;
}

int32_t lm_ctx_stats(lm_ctx *ctx, lm_stats *stats) {
  if (!ctx) return LM_ERR_ARGUMENT;
  if (!stats) return lm_fail(ctx, LM_ERR_ARGUMENT, "lm_ctx_stats: stats is NULL");
  lm_retired_sweep(ctx, false);
  pthread_mutex_lock(&ctx->mutex);
  *stats = ctx->stats;
  pthread_mutex_unlock(&ctx->mutex);
  stats->heap_allocs = atomic_load_explicit(&ctx->heap_allocs, memory_order_relaxed);
  stats->kernel_launches = atomic_load_explicit(&ctx->kernel_launches, memory_order_relaxed);
  return LM_OK;
}
