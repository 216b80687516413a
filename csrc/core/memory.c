/* memory.c: reservations, and copies and fills inside them. */
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
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
  return !range->pages || lm_paged_held(range, start - begin, bytes) ? range : NULL;
}

bool lm_range_add(lm_ctx *ctx, lm_range range, const char *op) {
  if (!lm_heap_grow(ctx, &ctx->ranges, ctx->range_count, &ctx->range_capacity, sizeof range, op)) return false;
  uint32_t index = range_index(ctx, range.begin);
  memmove(&ctx->ranges[index + 1], &ctx->ranges[index], (ctx->range_count - index) * sizeof range);
  range.since = lm_clock_ms();
  ctx->ranges[index] = range;
  ctx->range_count++;
  return true;
}

void lm_range_remove(lm_ctx *ctx, const void *begin) {
  uint32_t index = range_index(ctx, begin);
  ctx->range_count--;
  memmove(&ctx->ranges[index], &ctx->ranges[index + 1], (ctx->range_count - index) * sizeof *ctx->ranges);
}

static lm_memory_stats *class_of(lm_ctx *ctx, int32_t kind) {
  switch (kind) {
    case LM_RANGE_PINNED:
      return &ctx->classes[LM_MEMORY_PINNED];
    case LM_RANGE_PAGEABLE:
      return &ctx->classes[LM_MEMORY_PAGEABLE];
    case LM_RANGE_MANAGED:
      return &ctx->classes[LM_MEMORY_MANAGED];
    default:
      return &ctx->classes[LM_MEMORY_DEVICE];
  }
}

static uint64_t in_pages(uint64_t bytes) {
  return (bytes + LM_PAGE - 1) & ~(LM_PAGE - 1);
}

static void raise_to(uint64_t *peak, uint64_t value) {
  if (value > *peak) *peak = value;
}

void lm_count_taken(lm_ctx *ctx, int32_t kind, uint64_t pieces, uint64_t bytes) {
  lm_memory_stats *one = class_of(ctx, kind);
  one->allocs += pieces;
  one->count += pieces;
  one->requested += bytes;
  one->current += in_pages(bytes);
  raise_to(&one->peak, one->current);
  if (kind == LM_RANGE_PAGEABLE) return;
  ctx->stats.driver_allocs += pieces;
  if (kind == LM_RANGE_PINNED) {
    ctx->stats.pinned += bytes;
    raise_to(&ctx->stats.pinned_peak, ctx->stats.pinned);
  } else if (kind != LM_RANGE_MANAGED) {
    ctx->stats.reserved += bytes;
    raise_to(&ctx->stats.reserved_peak, ctx->stats.reserved);
  }
}

void lm_count_given(lm_ctx *ctx, int32_t kind, uint64_t pieces, uint64_t bytes) {
  lm_memory_stats *one = class_of(ctx, kind);
  one->frees += pieces;
  one->count -= pieces;
  one->requested -= bytes;
  one->current -= in_pages(bytes);
  if (kind == LM_RANGE_PAGEABLE) return;
  ctx->stats.driver_frees += pieces;
  if (kind == LM_RANGE_PINNED) ctx->stats.pinned -= bytes;
  else if (kind != LM_RANGE_MANAGED) ctx->stats.reserved -= bytes;
}

/* Ordinary host memory, only as much as there is. */
static void *pageable_take(lm_ctx *ctx, uint64_t bytes, const char *op) {
  uint64_t available = lm_host_memory_available();
  void *memory = bytes < available ? aligned_alloc(LM_PAGE, in_pages(bytes)) : NULL;
  if (memory) return memset(memory, 0, in_pages(bytes));
  lm_fail(ctx, LM_ERR_OUT_OF_MEMORY, "%s: out of host memory: requested=%llu available=%llu: ask for less", op, (ull)bytes,
          (ull)available);
  return NULL;
}

void *lm_memory_take(lm_ctx *ctx, uint64_t bytes, int32_t kind, int32_t flags, const char *op) {
  void *memory;
  if (kind == LM_RANGE_PINNED) memory = ctx->api->pinned_reserve(ctx->backend, bytes, flags);
  else if (kind == LM_RANGE_PAGEABLE) memory = pageable_take(ctx, bytes, op);
  else if (kind == LM_RANGE_MANAGED) memory = ctx->api->managed_reserve(ctx->backend, bytes);
  else memory = ctx->api->mem_reserve(ctx->backend, bytes);
  pthread_mutex_lock(&ctx->mutex);
  if (memory) lm_count_taken(ctx, kind, 1, bytes);
  else class_of(ctx, kind)->failures++;
  pthread_mutex_unlock(&ctx->mutex);
  return memory;
}

void lm_memory_give(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t kind) {
  /* Counted first: as soon as the memory is back, another thread may take it. */
  pthread_mutex_lock(&ctx->mutex);
  lm_count_given(ctx, kind, 1, bytes);
  pthread_mutex_unlock(&ctx->mutex);
  if (kind == LM_RANGE_PINNED) ctx->api->pinned_release(ctx->backend, memory, bytes);
  else if (kind == LM_RANGE_PAGEABLE) free(memory);
  else if (kind == LM_RANGE_MANAGED) ctx->api->managed_release(ctx->backend, memory, bytes);
  else ctx->api->mem_release(ctx->backend, memory, bytes);
}

void *lm_device_memory_reserve(lm_ctx *ctx, uint64_t bytes, int32_t kind, const char *op) {
  void *memory = lm_memory_take(ctx, bytes, kind, 0, op);
  if (!memory) return NULL;
  pthread_mutex_lock(&ctx->mutex);
  bool added = lm_range_add(ctx, (lm_range){.begin = memory, .bytes = bytes, .kind = kind}, op);
  pthread_mutex_unlock(&ctx->mutex);
  if (added) return memory;
  lm_memory_give(ctx, memory, bytes, kind);
  return NULL;
}

void lm_device_memory_release(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t kind) {
  /* The range goes first: as soon as the memory is back, another thread may be given the same addresses. */
  pthread_mutex_lock(&ctx->mutex);
  bool paged = ctx->ranges[range_index(ctx, memory)].pages != NULL;
  if (!paged) lm_range_remove(ctx, memory);
  pthread_mutex_unlock(&ctx->mutex);
  if (paged) lm_paged_release(ctx, memory);
  else lm_memory_give(ctx, memory, bytes, kind);
}

/* A reservation of its own, of device or managed memory. It keeps the context. */
static void *reserve(lm_ctx *ctx, uint64_t bytes, int32_t kind, const char *op) {
  if (bytes == 0) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "%s: bytes is 0: ask for at least 1", op);
    return NULL;
  }
  if (atomic_load(&ctx->recordings) > 0) {
    lm_fail(ctx, LM_ERR_STATE, "%s: a stream of this context records a graph: end the recording first", op);
    return NULL;
  }
  lm_retired_sweep(ctx, false);
  void *memory = lm_device_memory_reserve(ctx, bytes, kind, op);
  if (memory) lm_ctx_ref(ctx);
  if (memory) lm_note(ctx, op, memory, bytes, NULL, NULL);
  return memory;
}

static int32_t release(lm_ctx *ctx, void *memory, int32_t kind, const char *op) {
  if (!memory) return LM_OK;
  if (!ctx) return LM_ERR_ARGUMENT;
  pthread_mutex_lock(&ctx->mutex);
  lm_range *range = lm_range_find(ctx, memory, 1);
  uint64_t bytes = range && range->begin == memory && range->kind == kind ? range->bytes : 0;
  pthread_mutex_unlock(&ctx->mutex);
  if (!bytes) return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: not a reservation of this context: memory=%p", op, memory);
  int32_t status = ctx->api->synchronize(ctx->backend);
  lm_note(ctx, op, memory, bytes, NULL, NULL);
  lm_device_memory_release(ctx, memory, bytes, kind);
  lm_retired_sweep(ctx, false);
  lm_ctx_unref(ctx);
  return status;
}

void *lm_mem_reserve(lm_ctx *ctx, uint64_t bytes) {
  return ctx ? reserve(ctx, bytes, LM_RANGE_RESERVED, "lm_mem_reserve") : NULL;
}

int32_t lm_mem_release(lm_ctx *ctx, void *memory) {
  return release(ctx, memory, LM_RANGE_RESERVED, "lm_mem_release");
}

int32_t lm_mem_label(lm_ctx *ctx, void *memory, const char *label) {
  if (!ctx) return LM_ERR_ARGUMENT;
  pthread_mutex_lock(&ctx->mutex);
  lm_range *range = memory ? lm_range_find(ctx, memory, 1) : NULL;
  bool found = range && range->begin == memory && range->kind != LM_RANGE_POOL;
  if (found) lm_set_label(range->label, label);
  pthread_mutex_unlock(&ctx->mutex);
  return found ? LM_OK : lm_fail(ctx, LM_ERR_ARGUMENT, "lm_mem_label: no memory of this context starts there: memory=%p", memory);
}

static bool managed_supported(lm_ctx *ctx, const char *op) {
  if (ctx->api->managed_reserve) return true;
  lm_fail(ctx, LM_ERR_UNSUPPORTED, "%s: this device has no managed memory: use device memory and copies", op);
  return false;
}

void *lm_managed_reserve(lm_ctx *ctx, uint64_t bytes) {
  static const char op[] = "lm_managed_reserve";
  return ctx && managed_supported(ctx, op) ? reserve(ctx, bytes, LM_RANGE_MANAGED, op) : NULL;
}

int32_t lm_managed_release(lm_ctx *ctx, void *memory) {
  return release(ctx, memory, LM_RANGE_MANAGED, "lm_managed_release");
}

static int32_t check_managed(lm_ctx *ctx, const void *memory, uint64_t bytes, const char *op) {
  pthread_mutex_lock(&ctx->mutex);
  lm_range *range = memory ? lm_range_find(ctx, memory, bytes) : NULL;
  bool inside = range && range->kind == LM_RANGE_MANAGED;
  pthread_mutex_unlock(&ctx->mutex);
  if (inside) return LM_OK;
  return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: not inside managed memory of this context: memory=%p bytes=%llu", op, memory,
                 (ull)bytes);
}

int32_t lm_managed_advise(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t advice) {
  static const char op[] = "lm_managed_advise";
  if (!ctx) return LM_ERR_ARGUMENT;
  if (advice < LM_ADVISE_READ_MOSTLY || advice > LM_UNADVISE_ACCESSED_BY) {
    return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: no such advice: advice=%d", op, advice);
  }
  int32_t status = check_managed(ctx, memory, bytes, op);
  return status ? status : ctx->api->managed_advise(ctx->backend, memory, bytes, advice);
}

int32_t lm_managed_prefetch(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t to_host, lm_stream *stream) {
  static const char op[] = "lm_managed_prefetch";
  int32_t status = lm_stream_check(ctx, stream, false, op);
  if (!status && (to_host & ~1)) {
    status = lm_fail(ctx, LM_ERR_ARGUMENT, "%s: to_host must be 0 or 1: to_host=%d", op, to_host);
  }
  if (!status) status = check_managed(ctx, memory, bytes, op);
  if (status) return status;
  lm_note(ctx, op, memory, bytes, stream, NULL);
  return ctx->api->managed_prefetch(ctx->backend, stream->handle, memory, bytes, to_host);
}

/* Checks one side of a copy or fill and notes the use of a host buffer. Under ctx->mutex.
 *   pageable  set if the memory is not page-locked */
static int32_t touch(lm_ctx *ctx, const char *op, const char *name, const void *pointer, uint64_t bytes,
                     lm_stream *stream, bool *pageable) {
  lm_range *range = lm_range_find(ctx, pointer, bytes);
  if (!range) {
    return lm_fail(ctx, LM_ERR_ARGUMENT,
                   "%s: %s is not inside device memory or page-locked memory of this context: %s=%p bytes=%llu", op, name,
                   name, pointer, (ull)bytes);
  }
  if (!range->pinned) return LM_OK;
  bool recording = atomic_load(&stream->recording);
  if (range->kind == LM_RANGE_PAGEABLE) {
    if (recording) {
      return lm_fail(ctx, LM_ERR_STATE, "%s: %s is pageable memory: only page-locked memory can be recorded: %s=%p", op, name,
                     name, pointer);
    }
    *pageable = true;
  }
  bool noted = recording ? lm_pinned_record(range->pinned, stream) : lm_pinned_use(range->pinned, stream);
  return noted ? LM_OK : LM_ERR_OUT_OF_MEMORY;
}

/* After a copy or fill was handed to the backend. */
static int32_t enqueued(lm_ctx *ctx, const char *op, lm_stream *stream, bool pageable) {
  if (atomic_load(&stream->recording)) atomic_fetch_add(&stream->nodes, 1);
  if (!pageable) return LM_OK;
  int32_t status = ctx->api->stream_wait(ctx->backend, stream->handle, lm_stream_mark(stream));
  if (status >= 0) return LM_OK;
  return lm_fail(ctx, status, "%s: work on the stream failed: %s (%d)", op, lm_status_text(status), status);
}

int32_t lm_mem_copy(lm_ctx *ctx, void *dst, const void *src, uint64_t bytes, lm_stream *stream) {
  static const char op[] = "lm_mem_copy";
  int32_t status = lm_stream_check(ctx, stream, true, op);
  if (status || bytes == 0) return status;
  bool pageable = false;
  pthread_mutex_lock(&ctx->mutex);
  status = touch(ctx, op, "dst", dst, bytes, stream, &pageable);
  if (!status) status = touch(ctx, op, "src", src, bytes, stream, &pageable);
  pthread_mutex_unlock(&ctx->mutex);
  if (!status) status = ctx->api->copy(ctx->backend, stream->handle, dst, src, bytes);
  if (status) return status;
  lm_note(ctx, op, dst, bytes, stream, NULL);
  return enqueued(ctx, op, stream, pageable);
}

int32_t lm_mem_fill(lm_ctx *ctx, void *dst, int32_t value, uint64_t bytes, lm_stream *stream) {
  static const char op[] = "lm_mem_fill";
  int32_t status = lm_stream_check(ctx, stream, true, op);
  if (status || bytes == 0) return status;
  bool pageable = false;
  pthread_mutex_lock(&ctx->mutex);
  status = touch(ctx, op, "dst", dst, bytes, stream, &pageable);
  pthread_mutex_unlock(&ctx->mutex);
  if (!status) status = ctx->api->fill(ctx->backend, stream->handle, dst, value, bytes);
  if (status) return status;
  lm_note(ctx, op, dst, bytes, stream, NULL);
  return enqueued(ctx, op, stream, pageable);
}
