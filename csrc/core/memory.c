/* memory.c: reservations, and copies and fills inside them. */
#include "core.h"

#include <string.h>

typedef unsigned long long ull;

/* Index of the first range that ends past the pointer. */
static uint32_t range_index(lm_ctx *ctx, const uint8_t *pointer) {
  uint32_t low = 0, high = ctx->range_count;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    lm_range *range = &ctx->ranges[middle];
    if (range->begin + range->bytes <= pointer) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

lm_range *lm_range_find(lm_ctx *ctx, const void *pointer, uint64_t bytes) {
  uint32_t index = range_index(ctx, pointer);
  if (index == ctx->range_count) return NULL;
  lm_range *range = &ctx->ranges[index];
  uintptr_t start = (uintptr_t)pointer, begin = (uintptr_t)range->begin;
  if (start < begin || bytes > range->bytes - (start - begin)) return NULL;
  return range;
}

bool lm_range_add(lm_ctx *ctx, lm_range range, const char *op) {
  if (!lm_heap_grow(ctx, &ctx->ranges, ctx->range_count, &ctx->range_capacity, sizeof range, op)) return false;
  uint32_t index = range_index(ctx, range.begin);
  memmove(&ctx->ranges[index + 1], &ctx->ranges[index], (ctx->range_count - index) * sizeof range);
  ctx->ranges[index] = range;
  ctx->range_count++;
  return true;
}

void lm_range_remove(lm_ctx *ctx, const void *begin) {
  uint32_t index = range_index(ctx, begin);
  ctx->range_count--;
  memmove(&ctx->ranges[index], &ctx->ranges[index + 1], (ctx->range_count - index) * sizeof *ctx->ranges);
}

void *lm_device_memory_reserve(lm_ctx *ctx, uint64_t bytes, int32_t kind, const char *op) {
  void *memory = ctx->api->mem_reserve(ctx->backend, bytes);
  if (!memory) return NULL;
  pthread_mutex_lock(&ctx->mutex);
  bool added = lm_range_add(ctx, (lm_range){.begin = memory, .bytes = bytes, .kind = kind}, op);
  if (added) {
    ctx->stats.driver_allocs++;
    ctx->stats.reserved += bytes;
    if (ctx->stats.reserved > ctx->stats.reserved_peak) ctx->stats.reserved_peak = ctx->stats.reserved;
  }
  pthread_mutex_unlock(&ctx->mutex);
  if (added) return memory;
  ctx->api->mem_release(ctx->backend, memory, bytes);
  return NULL;
}

void lm_device_memory_release(lm_ctx *ctx, void *memory, uint64_t bytes) {
  /* The range goes first: as soon as the memory is back, another thread may be given the same addresses. */
  pthread_mutex_lock(&ctx->mutex);
  lm_range_remove(ctx, memory);
  ctx->stats.driver_frees++;
  ctx->stats.reserved -= bytes;
  pthread_mutex_unlock(&ctx->mutex);
  ctx->api->mem_release(ctx->backend, memory, bytes);
}

void *lm_mem_reserve(lm_ctx *ctx, uint64_t bytes) {
  static const char op[] = "lm_mem_reserve";
  if (!ctx) return NULL;
  if (bytes == 0) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "%s: bytes is 0: ask for at least 1", op);
    return NULL;
  }
  if (atomic_load(&ctx->recordings) > 0) {
    lm_fail(ctx, LM_ERR_STATE, "%s: a stream of this context records a graph: end the recording first", op);
    return NULL;
  }
  lm_retired_sweep(ctx, false);
  void *memory = lm_device_memory_reserve(ctx, bytes, LM_RANGE_RESERVED, op);
  if (memory) lm_ctx_ref(ctx);
  return memory;
}

int32_t lm_mem_release(lm_ctx *ctx, void *memory) {
  if (!memory) return LM_OK;
  if (!ctx) return LM_ERR_ARGUMENT;
  pthread_mutex_lock(&ctx->mutex);
  lm_range *range = lm_range_find(ctx, memory, 1);
  uint64_t bytes = range && range->begin == memory && range->kind == LM_RANGE_RESERVED ? range->bytes : 0;
  pthread_mutex_unlock(&ctx->mutex);
  if (!bytes) {
    return lm_fail(ctx, LM_ERR_ARGUMENT, "lm_mem_release: not a reservation of this context: memory=%p", memory);
  }
  int32_t status = ctx->api->synchronize(ctx->backend);
  lm_device_memory_release(ctx, memory, bytes);
  lm_retired_sweep(ctx, false);
  lm_ctx_unref(ctx);
  return status;
}

/* Checks one side of a copy or fill and notes the use of a page-locked buffer. Under ctx->mutex. */
static int32_t touch(lm_ctx *ctx, const char *op, const char *name, const void *pointer, uint64_t bytes,
                     lm_stream *stream) {
  lm_range *range = lm_range_find(ctx, pointer, bytes);
  if (!range) {
    return lm_fail(ctx, LM_ERR_ARGUMENT,
                   "%s: %s is not inside device memory or page-locked memory of this context: %s=%p bytes=%llu", op, name,
                   name, pointer, (ull)bytes);
  }
  if (!range->pinned) return LM_OK;
  bool recording = atomic_load(&stream->recording);
  bool noted = recording ? lm_pinned_record(range->pinned, stream) : lm_pinned_use(range->pinned, stream);
  return noted ? LM_OK : LM_ERR_OUT_OF_MEMORY;
}

int32_t lm_mem_copy(lm_ctx *ctx, void *dst, const void *src, uint64_t bytes, lm_stream *stream) {
  static const char op[] = "lm_mem_copy";
  int32_t status = lm_stream_check(ctx, stream, true, op);
  if (status || bytes == 0) return status;
  pthread_mutex_lock(&ctx->mutex);
  status = touch(ctx, op, "dst", dst, bytes, stream);
  if (!status) status = touch(ctx, op, "src", src, bytes, stream);
  pthread_mutex_unlock(&ctx->mutex);
  if (!status) status = ctx->api->copy(ctx->backend, stream->handle, dst, src, bytes);
  if (!status && atomic_load(&stream->recording)) atomic_fetch_add(&stream->nodes, 1);
  return status;
}

int32_t lm_mem_fill(lm_ctx *ctx, void *dst, int32_t value, uint64_t bytes, lm_stream *stream) {
  static const char op[] = "lm_mem_fill";
  int32_t status = lm_stream_check(ctx, stream, true, op);
  if (status || bytes == 0) return status;
  pthread_mutex_lock(&ctx->mutex);
  status = touch(ctx, op, "dst", dst, bytes, stream);
  pthread_mutex_unlock(&ctx->mutex);
  if (!status) status = ctx->api->fill(ctx->backend, stream->handle, dst, value, bytes);
  if (!status && atomic_load(&stream->recording)) atomic_fetch_add(&stream->nodes, 1);
  return status;
}
