/* pool.c: what the pool does when: the order in which an allocation looks for memory, and the order of a free. */
#define _GNU_SOURCE
#include "pool.h"

#include <stdlib.h>
#include <string.h>

#define GROWTH 8 /* a new segment is at least this part of what is held */
#define SEGMENT_STEP UINT64_C(0x200000) /* 2 MiB, what drivers hand out */

static const char alloc_op[] = "lm_pool_alloc";

lm_pool *lm_pool_create(lm_ctx *ctx, uint64_t limit) {
  static const char op[] = "lm_pool_create";
  if (!ctx) return NULL;
  lm_pool *pool = lm_heap_alloc(ctx, sizeof *pool, op);
  if (!pool) return NULL;
  lm_owner *nobody = lm_heap_alloc(ctx, sizeof *nobody, op);
  if (!nobody || !lm_heap_grow(ctx, &pool->owners, 0, &pool->owner_capacity, sizeof nobody, op)) {
    lm_heap_release(nobody);
    lm_heap_release(pool);
    return NULL;
  }
  pool->owners[0] = nobody;
  pool->owner_count = 1;
  pool->ctx = ctx;
  pool->stats.limit = limit;
  pthread_mutex_init(&pool->mutex, NULL);
  lm_ctx_ref(ctx);
  return pool;
}

/* Rounded up to a multiple of a power of two. */
static uint64_t round_up(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) & ~(unit - 1);
}

/* Takes a segment from the system and gives all of it to the caller. Releases the mutex meanwhile: a driver call may last
 * milliseconds. The bytes are counted before, so that the limit holds for all threads. @return NULL if there is none */
static lm_block *grow(lm_pool *pool, uint32_t owner, uint64_t bytes) {
  uint64_t limit = pool->stats.limit;
  uint64_t room = limit ? limit - pool->stats.reserved : UINT64_MAX;
  /* Large pieces join more of what is freed; the share keeps what is taken in vain in proportion. */
  uint64_t share = round_up(pool->stats.reserved / GROWTH, SEGMENT_STEP);
  const uint64_t sizes[3] = {round_up(bytes > share ? bytes : share, SEGMENT_STEP), round_up(bytes, SEGMENT_STEP),
                             round_up(bytes, LM_PAGE)};
  for (int i = 0; i < 3; i++) {
    uint64_t size = sizes[i];
    if (size > room || (i && size == sizes[i - 1])) continue;
    pool->stats.reserved += size;
    pthread_mutex_unlock(&pool->mutex);
    void *memory = lm_device_memory_reserve(pool->ctx, size, LM_RANGE_POOL, alloc_op);
    pthread_mutex_lock(&pool->mutex);
    lm_block *block = memory ? lm_segment_add(pool, owner, memory, size) : NULL;
    if (memory) pool->stats.driver_calls++;
    if (block) return block;
    pool->stats.reserved -= size;
    room = limit ? limit - pool->stats.reserved : UINT64_MAX;
    if (memory) {
      pool->stats.driver_calls++;
      lm_device_memory_release(pool->ctx, memory, size, LM_RANGE_POOL);
      return NULL;
    }
  }
  return NULL;
}

/* Makes a run usable in the order of `stream` by having it wait for the marks of other streams. The host does not wait. */
static bool follow(lm_pool *pool, uint32_t index, lm_run run) {
  lm_ctx *ctx = pool->ctx;
  lm_stream *stream = pool->owners[index]->stream;
  for (lm_block *block = run.first;; block = block->after) {
    if (block->owner != LM_NOBODY && block->owner != index) {
      lm_stream *other = pool->owners[block->owner]->stream;
      if (ctx->api->stream_follow(ctx->backend, stream->handle, other->handle, block->mark)) return false;
    }
    if (block == run.last) return true;
  }
}

/* Gives segments back that hold no live block, after the streams that used them have passed. Releases the mutex while it
 * waits and while the driver works. @return bytes given back */
static uint64_t give_back_idle(lm_pool *pool) {
  lm_ctx *ctx = pool->ctx;
  uint32_t count = pool->owner_count;
  lm_point *points = lm_heap_alloc(ctx, count * sizeof *points, "lm_pool_trim");
  lm_segment *idle = points ? lm_segments_idle(pool) : NULL;
  for (lm_segment *segment = idle; segment; segment = segment->next) {
    for (lm_block *block = segment->first; block; block = block->after) {
      if (block->owner == LM_NOBODY) continue;
      lm_point *point = &points[block->owner];
      if (!point->stream) {
        point->stream = pool->owners[block->owner]->stream;
        lm_stream_ref(point->stream); /* its slot may be given to another stream while the mutex is released */
      }
      if (block->mark > point->mark) point->mark = block->mark;
    }
  }
  uint64_t bytes = 0, segments = 0;
  if (idle) {
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 0; i < count; i++) {
      if (!points[i].stream) continue;
      lm_point_wait(points[i]);
      lm_stream_unref(points[i].stream);
    }
    for (lm_segment *segment = idle; segment; segment = segment->next) {
      bytes += segment->bytes;
      segments++;
      lm_device_memory_release(ctx, segment->memory, segment->bytes, LM_RANGE_POOL);
    }
    pthread_mutex_lock(&pool->mutex);
    pool->stats.reserved -= bytes;
    pool->stats.driver_calls += segments;
  }
  while (idle) {
    lm_segment *segment = idle;
    idle = segment->next;
    lm_segment_forget(pool, segment);
  }
  lm_heap_release(points);
  return bytes;
}

/* The order in which memory is looked for. @return a block in no list, at least `bytes` long, or NULL */
static lm_block *find(lm_pool *pool, uint32_t owner, uint64_t bytes) {
  /* 1. Freed in this stream, or by now nobody's: usable at once, whichever fits better. */
  lm_block *block = lm_block_take(pool, owner, bytes);
  if (block) return block;
  /* 2. Freed elsewhere and that work has ended. */
  lm_settle(pool, owner);
  block = lm_block_take(pool, owner, bytes);
  if (block) return block;
  /* 3. Both kinds next to each other. */
  lm_run run;
  if (lm_run_find(pool, owner, bytes, &run)) return lm_run_join(pool, run, bytes);
  /* 4. More memory, as long as the limit and the system allow. */
  return grow(pool, owner, bytes);
}

/* Where nothing is at hand. */
static lm_block *find_with_effort(lm_pool *pool, uint32_t owner, uint64_t bytes) {
  /* 5. Freed elsewhere, work still running: this stream waits for it. */
  lm_run run;
  if (lm_run_find(pool, LM_ANYBODY, bytes, &run)) return follow(pool, owner, run) ? lm_run_join(pool, run, bytes) : NULL;
  /* 6. Whole segments that are too small make room for one that is large enough. */
  if (give_back_idle(pool) == 0) return NULL;
  lm_block *block = grow(pool, owner, bytes);
  if (block) return block;
  return lm_run_find(pool, LM_ANYBODY, bytes, &run) && follow(pool, owner, run) ? lm_run_join(pool, run, bytes) : NULL;
}

uint64_t lm_pool_alloc(lm_pool *pool, uint64_t bytes, const char *label, lm_stream *stream) {
  if (!pool) return 0;
  lm_ctx *ctx = pool->ctx;
  if (lm_stream_check(ctx, stream, false, alloc_op)) return 0;
  if (bytes == 0) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "%s: bytes is 0: ask for at least 1", alloc_op);
    return 0;
  }
  pthread_mutex_lock(&pool->mutex);
  uint32_t owner = lm_owner_of(pool, stream);
  lm_block *block = NULL;
  uint64_t size = round_up(bytes, LM_GRANULE) + (ctx->debug ? 2 * LM_ZONE : 0);
  if (owner && bytes <= UINT64_MAX / 2) {
    block = find(pool, owner, size);
    if (!block) {
      block = find_with_effort(pool, owner, size);
      if (block) pool->stats.retries++;
    }
  }
  if (!block) {
    pool->stats.failures++;
    if (owner) lm_pool_report(pool, bytes, label);
    pthread_mutex_unlock(&pool->mutex);
    return 0;
  }
  lm_block_split(pool, block, size);
  block->live = true;
  block->requested = bytes;
  block->since = lm_clock_ms();
  lm_set_label(block->label, label);
  block->zoned = false;
  if (ctx->debug) lm_block_mark_zones(pool, block, stream);
  lm_pool_stats *stats = &pool->stats;
  stats->current += block->bytes;
  if (stats->current > stats->peak) stats->peak = stats->current;
  stats->requested += bytes;
  stats->live_blocks++;
  stats->allocs++;
  uint64_t handle = lm_block_handle(block);
  lm_note(ctx, alloc_op, lm_block_data(block), bytes, stream, label);
  pthread_mutex_unlock(&pool->mutex);
  return handle;
}

static int32_t stale(lm_pool *pool, uint64_t handle, const char *op) {
  return lm_fail(pool->ctx, LM_ERR_STALE_HANDLE, "%s: the block was freed already or never existed: handle=0x%llx", op,
                 (unsigned long long)handle);
}

void *lm_pool_pointer(lm_pool *pool, uint64_t handle) {
  if (!pool) return NULL;
  pthread_mutex_lock(&pool->mutex);
  lm_block *block = lm_block_of(pool, handle);
  void *pointer = block ? lm_block_data(block) : NULL;
  pthread_mutex_unlock(&pool->mutex);
  if (!pointer) stale(pool, handle, "lm_pool_pointer");
  return pointer;
}

int32_t lm_pool_free(lm_pool *pool, uint64_t handle, lm_stream *stream) {
  static const char op[] = "lm_pool_free";
  if (!pool) return LM_ERR_ARGUMENT;
  int32_t status = lm_stream_check(pool->ctx, stream, false, op);
  if (!status && pool->ctx->debug) status = lm_block_before_free(pool, handle, stream);
  if (status) return status;
  pthread_mutex_lock(&pool->mutex);
  lm_block *block = lm_block_of(pool, handle);
  uint32_t owner = block ? lm_owner_of(pool, stream) : 0;
  if (!owner) {
    if (block && block->zoned) lm_block_mark_zones(pool, block, stream); /* poisoned already, and still live */
    pthread_mutex_unlock(&pool->mutex);
    return block ? LM_ERR_OUT_OF_MEMORY : stale(pool, handle, op);
  }
  lm_note(pool->ctx, op, lm_block_data(block), block->requested, stream, block->label);
  pool->stats.current -= block->bytes;
  pool->stats.requested -= block->requested;
  pool->stats.live_blocks--;
  pool->stats.frees++;
  block->live = false;
  if (++block->generation == 0) block->generation = 1;
  block->owner = owner;
  block->mark = lm_stream_mark(stream);
  lm_block_insert(pool, block);
  pthread_mutex_unlock(&pool->mutex);
  return LM_OK;
}

int32_t lm_pool_trim(lm_pool *pool) {
  if (!pool) return LM_ERR_ARGUMENT;
  if (atomic_load(&pool->ctx->recordings) > 0) {
    return lm_fail(pool->ctx, LM_ERR_STATE,
                   "lm_pool_trim: a stream of this context records a graph: end the recording first");
  }
  lm_note(pool->ctx, "lm_pool_trim", pool, 0, NULL, NULL);
  pthread_mutex_lock(&pool->mutex);
  give_back_idle(pool);
  pthread_mutex_unlock(&pool->mutex);
  return LM_OK;
}

int32_t lm_pool_reset_peaks(lm_pool *pool) {
  if (!pool) return LM_ERR_ARGUMENT;
  pthread_mutex_lock(&pool->mutex);
  pool->stats.peak = pool->stats.current;
  pthread_mutex_unlock(&pool->mutex);
  return LM_OK;
}

int32_t lm_pool_stats_get(lm_pool *pool, lm_pool_stats *stats) {
  if (!pool) return LM_ERR_ARGUMENT;
  if (!stats) return lm_fail(pool->ctx, LM_ERR_ARGUMENT, "lm_pool_stats_get: stats is NULL");
  pthread_mutex_lock(&pool->mutex);
  *stats = pool->stats;
  lm_pool_free_bytes(pool, &stats->largest_free, &stats->total_free);
  pthread_mutex_unlock(&pool->mutex);
  stats->fragmentation = stats->total_free ? 1.0 - (double)stats->largest_free / (double)stats->total_free : 0;
  return LM_OK;
}

void lm_pool_destroy(lm_pool *pool) {
  if (!pool) return;
  lm_ctx *ctx = pool->ctx;
  /* Live blocks may be in use anywhere the pool was used, so every stream it knows must pass this moment. */
  lm_point *points = NULL;
  uint32_t capacity = 0, count = 0;
  for (uint32_t i = 1; i < pool->owner_count; i++) {
    lm_stream *stream = pool->owners[i]->stream;
    if (!stream) continue;
    lm_point point = {.stream = stream, .mark = lm_stream_mark(stream)};
    if (!lm_heap_grow(ctx, &points, count, &capacity, sizeof point, "lm_pool_destroy")) {
      lm_point_wait(point);
      continue;
    }
    points[count++] = point;
  }
  for (lm_segment *segment = pool->segments; segment;) {
    lm_segment *next = segment->next;
    for (uint32_t i = 0; i < count; i++) lm_stream_ref(points[i].stream);
    lm_retire(ctx, segment->memory, segment->bytes, LM_RANGE_POOL, points, count);
    lm_heap_release(segment);
    segment = next;
  }
  lm_heap_release(points);
  for (uint32_t i = 0; i < pool->block_count; i++) lm_heap_release(pool->blocks[i]);
  for (uint32_t i = 0; i < pool->owner_count; i++) {
    if (pool->owners[i]->stream) lm_stream_unref(pool->owners[i]->stream);
    lm_heap_release(pool->owners[i]);
  }
  lm_heap_release(pool->blocks);
  lm_heap_release(pool->owners);
  pthread_mutex_destroy(&pool->mutex);
  lm_heap_release(pool);
  lm_ctx_unref(ctx);
}
