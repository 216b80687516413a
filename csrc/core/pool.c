/* pool.c: what the pool does when: the order in which an allocation looks for memory, and the order of a free. */
#define _GNU_SOURCE
#include "pool.h"

#include <stdlib.h>
#include <string.h>

static const char alloc_op[] = "lm_pool_alloc";

/* Takes the addresses. A device that cannot map memory page by page gives the whole limit at once. */
static bool open_memory(lm_pool *pool, const char *op) {
  lm_ctx *ctx = pool->ctx;
  uint64_t limit = pool->stats.limit;
  pool->memory = lm_paged_reserve(ctx, &pool->bytes, op);
  if (!pool->memory && lm_last_error(ctx, NULL, 0) == LM_ERR_UNSUPPORTED) {
    if (!limit) {
      lm_fail(ctx, LM_ERR_UNSUPPORTED,
              "%s: the device cannot map memory page by page: give the pool a limit, which is then taken at once", op);
      return false;
    }
    pool->fixed = true;
    pool->bytes = (limit + LM_GRANULE - 1) & ~(LM_GRANULE - 1);
    pool->memory = lm_device_memory_reserve(ctx, pool->bytes, LM_RANGE_POOL, op);
  }
  if (!pool->memory) return false;
  uint64_t bytes = pool->fixed ? pool->bytes : pool->bytes / LM_ZONES;
  for (uint8_t zone = pool->fixed ? LM_LARGE : LM_SMALL; zone < LM_ZONES; zone++) {
    lm_block *block = lm_block_add(pool, zone, pool->memory + (pool->fixed ? 0 : zone * bytes), bytes);
    if (!block) return false;
    if (!pool->fixed) block->owner = LM_UNBACKED;
    pool->zones[zone] = block;
    lm_block_list(pool, block);
  }
  if (pool->fixed) {
    pool->stats.reserved = bytes;
    pool->stats.driver_calls = 1;
  }
  return true;
}

/* All of a pool but its memory. */
static void pool_drop(lm_pool *pool) {
  for (uint32_t i = 0; i < pool->block_count; i++) lm_heap_release(pool->blocks[i]);
  for (uint32_t i = 0; i < pool->owner_count; i++) {
    if (pool->owners[i]->stream) lm_stream_unref(pool->owners[i]->stream);
    lm_heap_release(pool->owners[i]);
  }
  lm_heap_release(pool->blocks);
  lm_heap_release(pool->owners);
  pthread_mutex_destroy(&pool->mutex);
  lm_heap_release(pool);
}

lm_pool *lm_pool_create(lm_ctx *ctx, uint64_t limit) {
  static const char op[] = "lm_pool_create";
  if (!ctx) return NULL;
  if (limit > UINT64_MAX / 2) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "%s: limit is out of range: limit=%llu: use 0 for none", op, (unsigned long long)limit);
    return NULL;
  }
  lm_pool *pool = lm_heap_alloc(ctx, sizeof *pool, op);
  if (!pool) return NULL;
  pthread_mutex_init(&pool->mutex, NULL);
  pool->ctx = ctx;
  pool->stats.limit = limit;
  lm_owner *nobody = lm_heap_alloc(ctx, sizeof *nobody, op);
  bool good = nobody && lm_heap_grow(ctx, &pool->owners, 0, &pool->owner_capacity, sizeof nobody, op);
  if (good) pool->owners[pool->owner_count++] = nobody;
  else lm_heap_release(nobody);
  if (good && open_memory(pool, op)) {
    lm_ctx_ref(ctx);
    return pool;
  }
  if (pool->memory) lm_device_memory_release(ctx, pool->memory, pool->bytes, LM_RANGE_POOL);
  pool_drop(pool);
  return NULL;
}

/* Rounded up to a multiple of a power of two. */
static uint64_t round_up(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) & ~(unit - 1);
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

/* The order in which memory is looked for. @return a block in no list, at least `bytes` long, or NULL */
static lm_block *find(lm_pool *pool, uint32_t owner, uint8_t zone, uint64_t bytes) {
  /* 1. Freed in this stream, or by now nobody's: usable at once, whichever fits better. */
  lm_block *block = bytes <= LM_TINY_MAX ? lm_block_take_rest(pool, owner, bytes) : NULL;
  if (!block) block = lm_block_take(pool, owner, zone, bytes);
  if (block) return block;
  /* 2. Freed elsewhere and that work has ended. */
  lm_settle(pool, owner);
  block = lm_block_take(pool, owner, zone, bytes);
  if (block) return block;
  /* 3. Both kinds next to each other. */
  lm_run run;
  if (lm_run_find(pool, zone, owner, bytes, &run)) block = lm_run_join(pool, run, bytes);
  /* 4. Room with memory from elsewhere in the pool, or more of it, as long as the limit and the system allow. The host waits
   * for this stream where it was the last to use that memory: steps of one kind settle, and then none of this happens. */
  return block ? block : lm_pool_grow(pool, owner, zone, bytes);
}

/* Memory that other streams may still use, or that lies among blocks of the other size: this stream waits for them. */
static lm_block *find_anywhere(lm_pool *pool, uint32_t owner, uint8_t zone, uint64_t bytes) {
  const struct {
    uint8_t zone;
    uint32_t from;
  } places[] = {{!zone, owner}, {zone, LM_ANYBODY}, {!zone, LM_ANYBODY}};
  for (int i = 0; i < 3; i++) {
    lm_run run;
    if (!lm_run_find(pool, places[i].zone, places[i].from, bytes, &run)) continue;
    return follow(pool, owner, run) ? lm_run_join(pool, run, bytes) : NULL;
  }
  return NULL;
}

/* Where nothing is at hand. */
static lm_block *find_with_effort(lm_pool *pool, uint32_t owner, uint8_t zone, uint64_t bytes) {
  /* 5. The stream waits. */
  lm_block *block = find_anywhere(pool, owner, zone, bytes);
  if (block) return block;
  /* 6. The host waits for all that was freed, and looks again. */
  lm_pool_settle_all(pool);
  block = find(pool, owner, zone, bytes);
  return block ? block : find_anywhere(pool, owner, zone, bytes);
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
  uint64_t limit = pool->stats.limit;
  if (owner && bytes <= UINT64_MAX / 2 && (!limit || size <= limit - pool->stats.current)) {
    uint8_t zone = lm_zone_of(pool, size);
    block = find(pool, owner, zone, size);
    if (!block) {
      block = find_with_effort(pool, owner, zone, size);
      if (block) pool->stats.retries++;
    }
  }
  if (!block) {
    pool->stats.failures++;
    if (owner) lm_pool_report(pool, bytes, label);
    pthread_mutex_unlock(&pool->mutex);
    return 0;
  }
  (void)lm_block_split(pool, block, size); /* without heap memory it is used as it is */
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
  lm_pool_shrink(pool);
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
  for (uint32_t i = 0; i < count; i++) lm_stream_ref(points[i].stream);
  lm_retire(ctx, pool->memory, pool->bytes, LM_RANGE_POOL, points, count);
  lm_heap_release(points);
  pool_drop(pool);
  lm_ctx_unref(ctx);
}
