/* pinned_pool.c: page-locked buffers that are used again.
 *
 * Locking pages costs a driver call of milliseconds, so a buffer that comes back is kept, whole, in a list by size. It may
 * come back while a copy still uses it; then it waits in the list until its marks have passed. Buffers are never split: the
 * users are rings of a few sizes. References: one of the user's handle, one of every buffer that is out. */
#include "core.h"

#include <string.h>

#define MOST_LOCKED (UINT64_C(2) << 30)
#define FLAG_WRITE_COMBINED 1
#define FLAG_LOCKED_ONLY 2

struct lm_pinned_pool {
  lm_ctx *ctx;
  pthread_mutex_t mutex; /* before ctx->mutex */
  uint32_t refs;         /* under the mutex */
  bool closed;
  lm_pinned **idle; /* sorted by bytes; some still used by a copy */
  uint32_t idle_count, idle_capacity;
  lm_pinned_pool_stats stats;
};

static const char acquire_op[] = "lm_pinned_pool_acquire";

lm_pinned_pool *lm_pinned_pool_create(lm_ctx *ctx, uint64_t limit) {
  if (!ctx) return NULL;
  lm_pinned_pool *pool = lm_heap_alloc(ctx, sizeof *pool, "lm_pinned_pool_create");
  if (!pool) return NULL;
  if (!limit) {
    limit = lm_host_memory_available() / 4;
    if (limit > MOST_LOCKED) limit = MOST_LOCKED;
  }
  pool->ctx = ctx;
  pool->refs = 1;
  pool->stats.limit = limit;
  pthread_mutex_init(&pool->mutex, NULL);
  lm_ctx_ref(ctx);
  return pool;
}

/* Drops one reference and the mutex. */
static void pool_unref(lm_pinned_pool *pool) {
  lm_ctx *ctx = pool->ctx;
  bool last = --pool->refs == 0;
  pthread_mutex_unlock(&pool->mutex);
  if (!last) return;
  lm_heap_release(pool->idle);
  pthread_mutex_destroy(&pool->mutex);
  lm_heap_release(pool);
  lm_ctx_unref(ctx);
}

/* Whether no copy uses an idle buffer any more. */
static bool at_rest(lm_pinned *pinned) {
  while (pinned->use_count) {
    lm_point *last = &pinned->uses[pinned->use_count - 1];
    if (!lm_point_passed(*last)) return false;
    lm_stream_unref(last->stream);
    pinned->use_count--;
  }
  return true;
}

/* First idle buffer of at least this size. */
static uint32_t idle_index(const lm_pinned_pool *pool, uint64_t bytes) {
  uint32_t low = 0, high = pool->idle_count;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (pool->idle[middle]->bytes < bytes) low = middle + 1;
    else high = middle;
  }
  return low;
}

static lm_pinned *idle_remove(lm_pinned_pool *pool, uint32_t index) {
  lm_pinned *pinned = pool->idle[index];
  pool->idle_count--;
  memmove(&pool->idle[index], &pool->idle[index + 1], (pool->idle_count - index) * sizeof *pool->idle);
  return pinned;
}

/* The smallest idle buffer that fits, is not larger than `most`, and is at rest. */
static lm_pinned *take_idle(lm_pinned_pool *pool, uint64_t bytes, uint64_t most, int32_t flags) {
  for (uint32_t i = idle_index(pool, bytes); i < pool->idle_count && pool->idle[i]->bytes <= most; i++) {
    if (pool->idle[i]->flags == flags && at_rest(pool->idle[i])) return idle_remove(pool, i);
  }
  return NULL;
}

/* Unlocks memory; under the mutex, which it releases meanwhile. */
static void unlock(lm_pinned_pool *pool, lm_pinned *pinned) {
  uint64_t bytes = pinned->bytes;
  pthread_mutex_unlock(&pool->mutex);
  lm_pinned_retire(pinned);
  pthread_mutex_lock(&pool->mutex);
  pool->stats.locked -= bytes;
  pool->stats.driver_calls++;
}

/* Unlocks idle buffers, largest first, until `bytes` more may be locked. @return whether they may */
static bool make_room(lm_pinned_pool *pool, uint64_t bytes) {
  lm_pinned_pool_stats *stats = &pool->stats;
  for (uint32_t i = pool->idle_count; i-- > 0 && bytes > stats->limit - stats->locked;) {
    if (i >= pool->idle_count) i = pool->idle_count - 1; /* another thread took some while the mutex was released */
    if (pool->idle_count && at_rest(pool->idle[i])) unlock(pool, idle_remove(pool, i));
    if (!pool->idle_count) break;
  }
  return bytes <= stats->limit - stats->locked;
}

/* Locks new memory, counted before, so that the limit holds for all threads. Releases the mutex meanwhile. */
static lm_pinned *lock_new(lm_pinned_pool *pool, uint64_t bytes, int32_t flags) {
  lm_pinned_pool_stats *stats = &pool->stats;
  if (bytes > stats->limit - stats->locked) return NULL;
  stats->locked += bytes;
  pthread_mutex_unlock(&pool->mutex);
  lm_pinned *pinned = lm_pinned_new(pool->ctx, bytes, LM_RANGE_PINNED, flags, acquire_op);
  pthread_mutex_lock(&pool->mutex);
  if (!pinned) stats->locked -= bytes;
  else stats->driver_calls++;
  if (stats->locked > stats->locked_peak) stats->locked_peak = stats->locked;
  return pinned;
}

/* The order in which a buffer is looked for; under the mutex. */
static lm_pinned *find(lm_pinned_pool *pool, uint64_t bytes, int32_t flags, bool *reused) {
  int32_t kind = flags & FLAG_WRITE_COMBINED;
  *reused = true;
  lm_pinned *pinned = take_idle(pool, bytes, bytes * 2, kind);
  if (pinned) return pinned;
  *reused = false;
  pinned = lock_new(pool, bytes, kind);
  if (pinned) return pinned;
  *reused = true;
  pinned = take_idle(pool, bytes, UINT64_MAX, kind);
  if (pinned) return pinned;
  *reused = false;
  bool full = bytes > pool->stats.limit - pool->stats.locked; /* else the system has refused already */
  pinned = full && bytes <= pool->stats.limit && make_room(pool, bytes) ? lock_new(pool, bytes, kind) : NULL;
  if (pinned || (flags & FLAG_LOCKED_ONLY)) return pinned;
  pthread_mutex_unlock(&pool->mutex);
  pinned = lm_pinned_new(pool->ctx, bytes, LM_RANGE_PAGEABLE, 0, acquire_op);
  pthread_mutex_lock(&pool->mutex);
  return pinned;
}

static void report(lm_pinned_pool *pool, uint64_t bytes) {
  typedef unsigned long long ull;
  lm_fail(pool->ctx, LM_ERR_PINNED,
          "%s: no page-locked host memory: requested=%llu locked=%llu limit=%llu in_use=%llu: give buffers back, raise the "
          "limit, or accept pageable memory",
          acquire_op, (ull)bytes, (ull)pool->stats.locked, (ull)pool->stats.limit, (ull)pool->stats.current);
}

/* Makes a buffer the user's; under the mutex. @return false with the failure reported */
static bool hand_out(lm_pinned_pool *pool, lm_pinned *pinned, uint64_t bytes, bool reused) {
  lm_ctx *ctx = pool->ctx;
  if (reused && ctx->debug) memset(pinned->data, LM_POISON, pinned->bytes);
  lm_range range = {.begin = pinned->data, .bytes = pinned->bytes, .kind = pinned->kind, .pinned = pinned};
  pthread_mutex_lock(&ctx->mutex);
  bool added = lm_range_add(ctx, range, acquire_op);
  pthread_mutex_unlock(&ctx->mutex);
  if (!added) return false;
  atomic_store(&pinned->refs, 1);
  pinned->pool = pool;
  pinned->requested = bytes;
  pool->refs++;
  lm_pinned_pool_stats *stats = &pool->stats;
  stats->current += pinned->bytes;
  if (stats->current > stats->peak) stats->peak = stats->current;
  stats->requested += bytes;
  stats->count++;
  stats->acquires++;
  stats->reuses += reused;
  if (pinned->kind == LM_RANGE_PAGEABLE) {
    stats->pageable += pinned->bytes;
    stats->fallbacks++;
  }
  lm_ctx_ref(ctx);
  return true;
}

lm_pinned *lm_pinned_pool_acquire(lm_pinned_pool *pool, uint64_t bytes, int32_t flags) {
  if (!pool) return NULL;
  lm_ctx *ctx = pool->ctx;
  if (bytes == 0 || bytes > UINT64_MAX / 4 || (flags & ~3)) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "%s: bytes must be at least 1 and flags from 0 to 3: bytes=%llu flags=%d", acquire_op,
            (unsigned long long)bytes, flags);
    return NULL;
  }
  if (atomic_load(&ctx->recordings) > 0) {
    lm_fail(ctx, LM_ERR_STATE, "%s: a stream of this context records a graph: end the recording first", acquire_op);
    return NULL;
  }
  bool reused;
  pthread_mutex_lock(&pool->mutex);
  lm_pinned *pinned = find(pool, (bytes + LM_PAGE - 1) & ~(LM_PAGE - 1), flags, &reused);
  if (pinned && !hand_out(pool, pinned, bytes, reused)) {
    bool locked = pinned->kind == LM_RANGE_PINNED;
    if (locked) {
      unlock(pool, pinned);
    } else {
      lm_pinned_retire(pinned);
    }
    pinned = NULL;
    pool->stats.failures++;
  } else if (!pinned) {
    pool->stats.failures++;
    if (flags & FLAG_LOCKED_ONLY) report(pool, bytes);
  }
  pthread_mutex_unlock(&pool->mutex);
  if (pinned) lm_note(ctx, acquire_op, pinned->data, bytes, NULL, NULL);
  return pinned;
}

void lm_pinned_return(lm_pinned *pinned) {
  lm_pinned_pool *pool = pinned->pool;
  pinned->pool = NULL;
  pthread_mutex_lock(&pool->mutex);
  lm_pinned_pool_stats *stats = &pool->stats;
  stats->current -= pinned->bytes;
  stats->requested -= pinned->requested;
  stats->count--;
  stats->releases++;
  if (pinned->kind == LM_RANGE_PAGEABLE) {
    stats->pageable -= pinned->bytes;
    lm_pinned_retire(pinned);
  } else if (pool->closed || !lm_heap_grow(pool->ctx, &pool->idle, pool->idle_count, &pool->idle_capacity,
                                           sizeof pinned, "lm_pinned_destroy")) {
    unlock(pool, pinned);
  } else {
    uint32_t index = idle_index(pool, pinned->bytes);
    memmove(&pool->idle[index + 1], &pool->idle[index], (pool->idle_count - index) * sizeof pinned);
    pool->idle[index] = pinned;
    pool->idle_count++;
  }
  pool_unref(pool);
}

/* Unlocks what is idle; what a copy still uses only with `all`. Under the mutex. */
static void clear(lm_pinned_pool *pool, bool all) {
  for (uint32_t i = 0; i < pool->idle_count;) {
    if (all || at_rest(pool->idle[i])) {
      unlock(pool, idle_remove(pool, i));
      i = 0; /* the mutex was released */
    } else {
      i++;
    }
  }
}

int32_t lm_pinned_pool_trim(lm_pinned_pool *pool) {
  if (!pool) return LM_ERR_ARGUMENT;
  pthread_mutex_lock(&pool->mutex);
  clear(pool, false);
  pthread_mutex_unlock(&pool->mutex);
  return LM_OK;
}

int32_t lm_pinned_pool_stats_get(lm_pinned_pool *pool, lm_pinned_pool_stats *stats) {
  if (!pool) return LM_ERR_ARGUMENT;
  if (!stats) return lm_fail(pool->ctx, LM_ERR_ARGUMENT, "lm_pinned_pool_stats_get: stats is NULL");
  pthread_mutex_lock(&pool->mutex);
  *stats = pool->stats;
  pthread_mutex_unlock(&pool->mutex);
  return LM_OK;
}

void lm_pinned_pool_destroy(lm_pinned_pool *pool) {
  if (!pool) return;
  pthread_mutex_lock(&pool->mutex);
  pool->closed = true;
  clear(pool, true);
  pool_unref(pool);
}
