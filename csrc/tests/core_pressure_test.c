/* Pools under pressure from many threads: limits hold, counters stay exact, nothing is handed out twice. */
#include "core_test.h"

#define THREADS 16
#define ROUNDS 200
#define PAGE 4096
#define MIB (UINT64_C(1) << 20)

static lm_ctx *ctx;
static lm_pool *pool;
static lm_pinned_pool *pinned_pool;
static uint8_t *target;
static _Atomic uint64_t taken, refused, over;

static void note_limit(uint64_t held, uint64_t limit) {
  if (held > limit) atomic_fetch_add(&over, 1);
}

/* Mutant: count `reserved` in lm_pool_grow after commit() instead of before. */
static void *pool_churn(void *arg) {
  uint64_t random = (uintptr_t)arg * 2654435761u + 1;
  lm_stream *stream = lm_stream_create(ctx, 0);
  for (int i = 0; i < ROUNDS; i++) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    uint64_t bytes = 1 + (random >> 33) % (3 * MIB);
    uint64_t handle = lm_pool_alloc(pool, bytes, "churn", stream);
    note_limit(pool_stats_of(pool).reserved, 16 * MIB);
    if (handle) {
      atomic_fetch_add(&taken, 1);
      uint8_t *data = lm_pool_pointer(pool, handle);
      uint8_t tag = (uint8_t)(random >> 20);
      EXPECT(lm_mem_fill(ctx, data, tag, bytes, stream) == LM_OK && lm_stream_wait(stream) == LM_OK);
      EXPECT(data[0] == tag && data[bytes - 1] == tag); /* nobody else writes here */
      EXPECT(lm_pool_free(pool, handle, stream) == LM_OK);
    } else {
      atomic_fetch_add(&refused, 1);
    }
    if (i % 16 == 0) EXPECT(lm_pool_trim(pool) == LM_OK);
  }
  lm_stream_destroy(stream);
  return NULL;
}

static void run_threads(void *(*body)(void *), int count) {
  pthread_t threads[THREADS];
  atomic_store(&taken, 0);
  atomic_store(&refused, 0);
  atomic_store(&over, 0);
  for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, body, (void *)(uintptr_t)i);
  for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static void pool_limit(const char *device, int threads) {
  ctx = open_device(device);
  pool = lm_pool_create(ctx, 16 * MIB);
  run_threads(pool_churn, threads);
  lm_pool_stats stats = pool_stats_of(pool);
  EXPECT(atomic_load(&over) == 0);
  EXPECT(stats.current == 0 && stats.live_blocks == 0 && stats.requested == 0);
  EXPECT(stats.allocs == taken && stats.frees == taken && stats.failures == refused);
  EXPECT(stats.reserved == stats_of(ctx).reserved);
  lm_pool_destroy(pool);
  lm_stats all = stats_of(ctx);
  EXPECT(all.reserved == 0 && all.driver_allocs == all.driver_frees);
  lm_ctx_destroy(ctx);
}

static void limit_holds(void) {
  pool_limit("cpu", 16);
}

/* The same with a driver that is late, so that addresses come back before the pool has noted that they went. */
static void late_driver(void) {
  pool_limit("sim:driver_delay=300", 8);
}

/* Mutant: leave out at_rest() in take_idle(), or the mutex in lm_pinned_return(). */
static void *pinned_churn(void *arg) {
  uint64_t random = (uintptr_t)arg * 2654435761u + 1;
  lm_stream *stream = lm_stream_create(ctx, 0);
  uint8_t *mine = target + (uintptr_t)arg * 16 * PAGE;
  for (int i = 0; i < ROUNDS; i++) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    uint64_t bytes = 1 + (random >> 33) % (16 * PAGE);
    lm_pinned *buffer = lm_pinned_pool_acquire(pinned_pool, bytes, (int32_t)(random >> 60 & 2));
    if (!buffer) {
      atomic_fetch_add(&refused, 1);
      continue;
    }
    atomic_fetch_add(&taken, 1);
    uint8_t tag = (uint8_t)(random >> 20);
    memset(lm_pinned_data(buffer), tag, bytes);
    EXPECT(lm_mem_copy(ctx, mine, lm_pinned_data(buffer), bytes, stream) == LM_OK);
    lm_pinned_destroy(buffer); /* the copy is still to come */
    lm_pinned_pool_stats stats;
    EXPECT(lm_pinned_pool_stats_get(pinned_pool, &stats) == LM_OK);
    note_limit(stats.locked, stats.limit);
    if (i % 8 == 0) {
      EXPECT(lm_stream_wait(stream) == LM_OK);
      EXPECT(mine[0] == tag && mine[bytes / 2] == tag && mine[bytes - 1] == tag);
    }
    if (i % 32 == 0) EXPECT(lm_pinned_pool_trim(pinned_pool) == LM_OK);
  }
  lm_stream_destroy(stream);
  return NULL;
}

static void pinned_limit_holds(void) {
  ctx = open_device("sim:delays=0/50/100");
  EXPECT(lm_debug_enable(ctx) == LM_OK);
  target = lm_mem_reserve(ctx, 16 * PAGE * THREADS);
  pinned_pool = lm_pinned_pool_create(ctx, 40 * PAGE);
  run_threads(pinned_churn, 8);
  lm_pinned_pool_stats stats;
  EXPECT(lm_pinned_pool_stats_get(pinned_pool, &stats) == LM_OK);
  EXPECT(atomic_load(&over) == 0 && stats.locked_peak <= stats.limit);
  EXPECT(stats.current == 0 && stats.requested == 0 && stats.pageable == 0 && stats.count == 0);
  EXPECT(stats.acquires == taken && stats.releases == taken && stats.failures == refused);
  lm_pinned_pool_destroy(pinned_pool);
  EXPECT(lm_mem_release(ctx, target) == LM_OK);
  lm_stats all = stats_of(ctx);
  EXPECT(all.pinned == 0 && all.driver_allocs == all.driver_frees);
  lm_ctx_destroy(ctx);
}

/* Red zones are looked at while other threads work in the same pool. */
static void *debug_churn(void *arg) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  for (int i = 0; i < ROUNDS; i++) {
    uint64_t handle = lm_pool_alloc(pool, 1 + (uint64_t)i * 37, "debug", stream);
    EXPECT(handle && lm_mem_fill(ctx, lm_pool_pointer(pool, handle), i, 1 + (uint64_t)i * 37, stream) == LM_OK);
    if (i % 20 == 0) EXPECT(lm_pool_check(pool) == LM_OK);
    EXPECT(lm_pool_free(pool, handle, stream) == LM_OK);
  }
  lm_stream_destroy(stream);
  return arg;
}

static void debug_threads(void) {
  ctx = open_device("cpu");
  EXPECT(lm_range_push(ctx, "nobody looks") == 0);
  EXPECT(lm_debug_enable(ctx) == LM_OK && lm_debug_enable(ctx) == LM_OK);
  EXPECT(lm_range_push(ctx, "outer") == 1 && lm_range_pop(ctx) == LM_OK);
  EXPECT(lm_range_push(ctx, NULL) == LM_ERR_ARGUMENT && failed_with(ctx, LM_ERR_ARGUMENT, "name is NULL"));
  EXPECT(lm_range_push(NULL, "x") == LM_ERR_ARGUMENT && lm_range_pop(NULL) == LM_ERR_ARGUMENT);
  pool = lm_pool_create(ctx, 0);
  run_threads(debug_churn, 4);
  EXPECT(pool_stats_of(pool).current == 0);
  lm_pool_destroy(pool);
  lm_ctx_destroy(ctx);
  ctx = open_device("cpu");
  void *memory = lm_mem_reserve(ctx, 1);
  EXPECT(lm_debug_enable(ctx) == LM_ERR_STATE && failed_with(ctx, LM_ERR_STATE, "call it first"));
  EXPECT(lm_mem_release(ctx, memory) == LM_OK);
  lm_ctx_destroy(ctx);
}

/* Mutant: call fn before settle() in notifier_main. */
static _Atomic int unsettled;

static void ask(uint64_t tag, int32_t status) {
  (void)status;
  gate *g = (gate *)(uintptr_t)tag;
  pthread_mutex_lock(&g->mutex);
  g->reached = true;
  pthread_cond_broadcast(&g->changed);
  pthread_mutex_unlock(&g->mutex);
}

#define ASKED 2000
static gate gates[ASKED]; /* each outlives its callback */
static lm_stream *asked;

static void ask_stream(uint64_t tag, int32_t status) {
  if (lm_stream_query(asked) == LM_NOT_READY) atomic_fetch_add(&unsettled, 1);
  ask(tag, status);
}

static void callback_finds_the_end(void) {
  ctx = open_device("cpu");
  asked = lm_stream_create(ctx, 0);
  for (int i = 0; i < ASKED; i++) {
    pthread_mutex_init(&gates[i].mutex, NULL);
    pthread_cond_init(&gates[i].changed, NULL);
    EXPECT(lm_stream_on_done(asked, ask_stream, (uint64_t)(uintptr_t)&gates[i]) == LM_OK);
    gate_await(&gates[i]);
  }
  EXPECT(atomic_load(&unsettled) == 0);
  lm_stream_destroy(asked);
  lm_ctx_destroy(ctx);
}

int main(void) {
  test("lm_pool never holds more than its limit under 16 threads, and counts exactly", limit_holds);
  test("lm_pool counts exactly while the driver is late", late_driver);
  test("lm_pinned_pool never locks more than its limit nor hands out what a copy uses", pinned_limit_holds);
  test("lm_pool_check() finds nothing where several threads work in the pool", debug_threads);
  test("lm_stream_on_done() calls when the stream has ended, as its query says", callback_finds_the_end);
  return summary();
}
