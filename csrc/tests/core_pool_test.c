/* The pool's rules, one schedule each. Gates decide what has ended. */
#include "pool_test.h"

#include "../core/pool.h"

static lm_ctx *ctx;
static lm_stream *a, *b;

static lm_pool *pool_with(uint64_t limit) {
  return lm_pool_create(ctx, limit);
}

static void sizes_and_alignment(void) {
  lm_pool *pool = pool_with(0);
  const uint64_t sizes[] = {1, 255, 256, 257, 4096, 100000, 2 * MIB, 2 * MIB + 1, 5 * MIB};
  uint64_t handles[9], requested = 0, current = 0;
  for (int i = 0; i < 9; i++) {
    handles[i] = take(pool, sizes[i], a);
    EXPECT((uintptr_t)at(pool, handles[i]) % 256 == 0);
    EXPECT(lm_mem_fill(ctx, at(pool, handles[i]), i, sizes[i], a) == LM_OK);
    requested += sizes[i];
    current += (sizes[i] + 255) / 256 * 256;
  }
  lm_pool_stats stats = pool_stats_of(pool);
  EXPECT(stats.requested == requested && stats.current == current && stats.peak == current);
  EXPECT(stats.live_blocks == 9 && stats.allocs == 9 && stats.frees == 0 && stats.failures == 0 && stats.limit == 0);
  EXPECT(stats.reserved >= current && stats_of(ctx).reserved == stats.reserved);
  EXPECT(lm_mem_release(ctx, pool->memory) == LM_ERR_ARGUMENT); /* the pool's, not the user's */
  for (int i = 0; i < 9; i++) EXPECT(lm_pool_free(pool, handles[i], a) == LM_OK);
  stats = pool_stats_of(pool);
  EXPECT(stats.current == 0 && stats.requested == 0 && stats.live_blocks == 0 && stats.frees == 9 && stats.peak == current);
  EXPECT(lm_stream_wait(a) == LM_OK && lm_pool_trim(pool) == LM_OK);
  EXPECT(pool_stats_of(pool).reserved == 0 && stats_of(ctx).reserved == 0);
  lm_pool_destroy(pool);
}

static void impossible_sizes(void) {
  lm_pool *pool = pool_with(64 * MIB);
  const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 255, UINT64_MAX / 2, UINT64_C(1) << 47, 64 * MIB + 1};
  for (int i = 0; i < 5; i++) {
    EXPECT(lm_pool_alloc(pool, sizes[i], "big", a) == 0 && failed_with(ctx, LM_ERR_OUT_OF_MEMORY, "requested="));
  }
  EXPECT(lm_pool_alloc(pool, 0, "none", a) == 0 && failed_with(ctx, LM_ERR_ARGUMENT, "bytes is 0"));
  EXPECT(lm_pool_alloc(pool, 1, "none", NULL) == 0 && failed_with(ctx, LM_ERR_ARGUMENT, "stream is NULL"));
  lm_pool_stats stats = pool_stats_of(pool);
  EXPECT(stats.failures == 5 && stats.reserved == 0 && stats.current == 0 && stats.allocs == 0);
  lm_pool *unlimited = pool_with(0);
  EXPECT(lm_pool_alloc(unlimited, UINT64_C(1) << 47, "big", a) == 0);
  EXPECT(failed_with(ctx, LM_ERR_OUT_OF_MEMORY, "the system has no more"));
  lm_pool_destroy(unlimited);
  lm_pool_destroy(pool);
}

static void stale_handles(void) {
  lm_pool *pool = pool_with(0);
  uint64_t first = take(pool, 1000, a);
  void *pointer = at(pool, first);
  EXPECT(lm_pool_free(pool, first, a) == LM_OK);
  EXPECT(lm_pool_free(pool, first, a) == LM_ERR_STALE_HANDLE && failed_with(ctx, LM_ERR_STALE_HANDLE, "lm_pool_free"));
  EXPECT(!lm_pool_pointer(pool, first) && failed_with(ctx, LM_ERR_STALE_HANDLE, "lm_pool_pointer"));
  uint64_t second = take(pool, 1000, a);
  EXPECT(at(pool, second) == pointer && second != first);
  EXPECT(lm_pool_free(pool, first, a) == LM_ERR_STALE_HANDLE && at(pool, second) == pointer);
  const uint64_t wrong[] = {0, 1, UINT64_MAX, second + 1, second ^ (UINT64_C(1) << 40), UINT64_C(1) << 32};
  for (int i = 0; i < 6; i++) EXPECT(lm_pool_free(pool, wrong[i], a) == LM_ERR_STALE_HANDLE);
  EXPECT(lm_pool_free(pool, second, a) == LM_OK);
  EXPECT(pool_stats_of(pool).frees == 2);
  lm_pool_destroy(pool);
}

static void same_stream_reuses_at_once(void) {
  lm_pool *pool = pool_with(0);
  gate g = GATE_CLOSED;
  hold(a, &g);
  uint64_t handle = take(pool, MIB, a);
  void *pointer = at(pool, handle);
  for (int i = 0; i < 100; i++) {
    EXPECT(lm_pool_free(pool, handle, a) == LM_OK);
    handle = take(pool, MIB, a);
    EXPECT(at(pool, handle) == pointer);
  }
  EXPECT(pool_stats_of(pool).reserved == 2 * MIB);
  gate_open(&g);
  lm_pool_destroy(pool);
}

static void own_and_idle_memory_join(void) {
  lm_pool *pool = pool_with(0);
  gate g = GATE_CLOSED;
  take(pool, MIB, a);
  uint64_t part = take(pool, 256 * KIB, a);
  void *pointer = at(pool, part);
  take(pool, 2 * MIB, b); /* the rest of the page is nobody's now */
  hold(a, &g);
  EXPECT(lm_pool_free(pool, part, a) == LM_OK);
  EXPECT(at(pool, take(pool, MIB, a)) == pointer && pool_stats_of(pool).reserved == 4 * MIB);
  EXPECT(lm_stream_query(a) == LM_NOT_READY);
  gate_open(&g);
  lm_pool_destroy(pool);
}

static void other_stream_takes_new_memory_first(void) {
  lm_pool *pool = pool_with(0);
  gate g = GATE_CLOSED;
  uint64_t handle = take(pool, 2 * MIB, a);
  void *pointer = at(pool, handle);
  hold(a, &g);
  EXPECT(lm_pool_free(pool, handle, a) == LM_OK);
  uint64_t other = take(pool, 2 * MIB, b);
  EXPECT(at(pool, other) != pointer && pool_stats_of(pool).reserved == 4 * MIB);
  EXPECT(lm_stream_wait(b) == LM_OK); /* and b does not wait for a */
  gate_open(&g);
  EXPECT(lm_stream_wait(a) == LM_OK);
  uint64_t third = take(pool, 2 * MIB, b); /* that work has ended now */
  EXPECT(at(pool, third) == pointer && pool_stats_of(pool).reserved == 4 * MIB);
  lm_pool_destroy(pool);
}

static void mark_is_that_of_the_free(void) {
  lm_pool *pool = pool_with(0);
  gate g = GATE_CLOSED;
  uint64_t handle = take(pool, 2 * MIB, a);
  void *pointer = at(pool, handle);
  EXPECT(lm_pool_free(pool, handle, a) == LM_OK);
  hold(a, &g); /* after the free: nobody needs to wait for it */
  EXPECT(at(pool, take(pool, 2 * MIB, b)) == pointer);
  gate_open(&g);
  EXPECT(lm_stream_wait(a) == LM_OK);
  lm_pool_destroy(pool);
}

static int32_t note_passed(void *arg, int32_t status) {
  (void)status;
  atomic_store((_Atomic int *)arg, 1);
  return LM_OK;
}

static void at_the_limit_the_stream_waits(void) {
  lm_pool *pool = pool_with(2 * MIB);
  gate g = GATE_CLOSED;
  _Atomic int passed_in_a = 0;
  uint64_t handle = take(pool, 2 * MIB, a);
  uint8_t *pointer = at(pool, handle);
  hold(a, &g);
  EXPECT(lm_mem_fill(ctx, pointer, 1, 2 * MIB, a) == LM_OK);
  call_in(a, note_passed, &passed_in_a);
  EXPECT(lm_pool_free(pool, handle, a) == LM_OK);
  handle = take(pool, MIB, b); /* the host does not wait */
  EXPECT(at(pool, handle) == pointer && !atomic_load(&passed_in_a));
  EXPECT(lm_mem_fill(ctx, pointer, 2, MIB, b) == LM_OK);
  EXPECT(lm_stream_query(b) == LM_NOT_READY);
  gate_open(&g);
  EXPECT(lm_stream_wait(b) == LM_OK && atomic_load(&passed_in_a));
  EXPECT(pointer[0] == 2 && pointer[MIB - 1] == 2 && pointer[MIB] == 1);
  lm_pool_destroy(pool);
}

static void joins_neighbours_of_many_streams(void) {
  lm_pool *pool = pool_with(2 * MIB);
  lm_stream *streams[4] = {a, b, lm_stream_create(ctx, 0), lm_stream_create(ctx, 0)};
  gate g[4] = {GATE_CLOSED, GATE_CLOSED, GATE_CLOSED, GATE_CLOSED};
  uint64_t handles[8];
  for (int i = 0; i < 8; i++) handles[i] = take(pool, 256 * KIB, streams[i % 4]);
  for (int i = 0; i < 4; i++) hold(streams[i], &g[i]);
  for (int i = 0; i < 8; i++) EXPECT(lm_pool_free(pool, handles[i], streams[i % 4]) == LM_OK);
  EXPECT(pool_stats_of(pool).largest_free == 2 * MIB);
  uint64_t whole = take(pool, 2 * MIB - 300 * KIB, b); /* 7 blocks of 4 streams, part of the last */
  EXPECT(lm_mem_fill(ctx, at(pool, whole), 1, 2 * MIB - 300 * KIB, b) == LM_OK);
  EXPECT(pool_stats_of(pool).largest_free == 300 * KIB);
  for (int i = 0; i < 4; i++) {
    EXPECT(lm_stream_query(b) == LM_NOT_READY);
    gate_open(&g[i]);
    if (i != 1) EXPECT(lm_stream_wait(streams[i]) == LM_OK);
  }
  EXPECT(lm_stream_wait(b) == LM_OK);
  EXPECT(lm_pool_alloc(pool, 300 * KIB + 1, "no", b) == 0);
  EXPECT(lm_pool_free(pool, whole, b) == LM_OK);
  lm_stream_destroy(streams[2]);
  lm_stream_destroy(streams[3]);
  EXPECT(at(pool, take(pool, 2 * MIB, a)));
  lm_pool_destroy(pool);
}

static void splits_and_coalesces(void) {
  lm_pool *pool = pool_with(0);
  uint64_t handles[8];
  uint8_t *base = NULL;
  for (int i = 0; i < 8; i++) {
    handles[i] = take(pool, 256 * KIB, a);
    uint8_t *pointer = at(pool, handles[i]);
    if (!base || pointer < base) base = pointer;
  }
  EXPECT(pool_stats_of(pool).reserved == 2 * MIB && pool_stats_of(pool).largest_free == 0);
  const int order[8] = {1, 3, 2, 6, 7, 4, 5, 0}; /* joins to both sides, left, right and none */
  const uint64_t largest[8] = {256, 256, 768, 768, 768, 1024, 1792, 2048};
  const int blocks[8] = {8, 8, 6, 6, 5, 4, 2, 1};
  for (int i = 0; i < 8; i++) {
    EXPECT(lm_pool_free(pool, handles[order[i]], a) == LM_OK);
    EXPECT(pool_stats_of(pool).largest_free == largest[i] * KIB);
    int count = 0;
    for (lm_block *block = pool->zones[LM_SMALL]; block->owner != LM_UNBACKED; block = block->after) count++;
    EXPECT(count == blocks[i]);
  }
  EXPECT(at(pool, take(pool, MIB, a)) == base);
  lm_pool_destroy(pool);
}

static void *open_later(void *arg) {
  usleep(20000);
  gate_open(arg);
  return NULL;
}

/* Mutants: leave out lm_pool_settle_all in find_with_effort, or the wait in it. */
static void moves_pages(void) {
  lm_pool *pool = pool_with(8 * MIB);
  gate g = GATE_CLOSED;
  uint64_t handles[4];
  for (int i = 0; i < 4; i++) handles[i] = take(pool, 2 * MIB, a);
  EXPECT(pool_stats_of(pool).reserved == 8 * MIB);
  hold(a, &g);
  for (int i = 0; i < 4; i++) EXPECT(lm_mem_fill(ctx, at(pool, handles[i]), i, 2 * MIB, a) == LM_OK);
  for (int i = 0; i < 4; i += 2) EXPECT(lm_pool_free(pool, handles[i], a) == LM_OK);
  pthread_t opener;
  pthread_create(&opener, NULL, open_later, &g);
  uint64_t large = take(pool, 4 * MIB, b); /* two pages apart become neighbours once a has passed */
  EXPECT(g.open);
  pthread_join(opener, NULL);
  EXPECT(pool_stats_of(pool).reserved == 8 * MIB && stats_of(ctx).reserved == 8 * MIB);
  EXPECT(lm_mem_fill(ctx, at(pool, large), 9, 4 * MIB, b) == LM_OK && lm_stream_wait(b) == LM_OK);
  for (int i = 1; i < 4; i += 2) EXPECT(((uint8_t *)at(pool, handles[i]))[2 * MIB - 1] == i);
  uint8_t *gone = at(pool, handles[1]);
  EXPECT(lm_mem_fill(ctx, gone - 2 * MIB, 1, MIB, a) == LM_ERR_ARGUMENT); /* no memory there any more */
  EXPECT(lm_mem_fill(ctx, gone + MIB, 1, 2 * MIB, a) == LM_ERR_ARGUMENT);
  lm_pool_destroy(pool);
}

/* Mutant: leave out find_pages in lm_pool_grow. */
static void moves_before_it_grows(void) {
  lm_pool *pool = pool_with(0);
  uint64_t small[64];
  for (int i = 0; i < 64; i++) small[i] = take(pool, 256 * KIB, a);
  EXPECT(pool_stats_of(pool).reserved == 16 * MIB);
  for (int i = 0; i < 64; i++) {
    if (i % 16 != 5) EXPECT(lm_pool_free(pool, small[i], a) == LM_OK); /* four pages have a straggler */
  }
  take(pool, 8 * MIB, a);
  EXPECT(pool_stats_of(pool).reserved == 16 * MIB);
  take(pool, 2 * MIB, a);
  EXPECT(pool_stats_of(pool).reserved == 18 * MIB && stats_of(ctx).reserved == 18 * MIB);
  lm_pool_destroy(pool);
}

/* What a recording names was live then, and is when the graph runs. Mutant: leave out `recordings` in lm_pool_grow. */
static void no_page_leaves_while_a_graph_is_recorded(void) {
  lm_pool *pool = pool_with(0);
  uint64_t large = take(pool, 4 * MIB, a);
  uint8_t *pointer = at(pool, large);
  EXPECT(lm_graph_begin(b) == LM_OK && lm_mem_fill(ctx, pointer, 5, 4 * MIB, b) == LM_OK);
  EXPECT(lm_pool_free(pool, large, a) == LM_OK);
  take(pool, MIB, a);
  EXPECT(pool_stats_of(pool).reserved == 6 * MIB);
  lm_graph *graph = lm_graph_end(b);
  EXPECT(lm_graph_launch(graph, b) == LM_OK && lm_stream_wait(b) == LM_OK && pointer[4 * MIB - 1] == 5);
  lm_graph_destroy(graph);
  lm_pool_destroy(pool);
}

/* Mutant: leave out `settled` in lm_pool_grow. */
static void settles(void) {
  lm_pool *pool = pool_with(0);
  uint64_t calls = 0, small[32];
  for (int step = 0; step < 20; step++) {
    for (int i = 0; i < 32; i++) small[i] = take(pool, 256 * KIB, a);
    for (int i = 0; i < 32; i++) EXPECT(lm_pool_free(pool, small[i], a) == LM_OK);
    EXPECT(lm_pool_free(pool, take(pool, 8 * MIB, a), a) == LM_OK);
    lm_pool_stats stats = pool_stats_of(pool);
    EXPECT(stats.reserved == 8 * MIB || (step > 0 && stats.reserved <= 16 * MIB)); /* pages go to and fro, and then no more */
    if (step == 9) calls = stats.driver_calls;
    if (step > 9) EXPECT(stats.driver_calls == calls);
  }
  lm_pool_destroy(pool);
}

/* A device that cannot map memory page by page. Mutant: leave out `fixed` in lm_zone_of. */
static void fixed_memory(void) {
  lm_ctx *plain = open_device("sim:no_ranges=1");
  EXPECT(!lm_pool_create(plain, 0) && failed_with(plain, LM_ERR_UNSUPPORTED, "give the pool a limit"));
  lm_stream *stream = lm_stream_create(plain, 0);
  lm_pool *pool = lm_pool_create(plain, 3 * MIB);
  EXPECT(pool && pool_stats_of(pool).reserved == 3 * MIB && stats_of(plain).reserved == 3 * MIB);
  for (int i = 0; i < 100; i++) {
    uint64_t one = take(pool, MIB / 2, stream), two = take(pool, 2 * MIB, stream);
    EXPECT(lm_mem_fill(plain, at(pool, two), 1, 2 * MIB, stream) == LM_OK);
    EXPECT(!lm_pool_alloc(pool, MIB, "x", stream) && failed_with(plain, LM_ERR_OUT_OF_MEMORY, "raise the limit"));
    EXPECT(lm_pool_free(pool, one, stream) == LM_OK && lm_pool_free(pool, two, stream) == LM_OK);
  }
  EXPECT(lm_pool_trim(pool) == LM_OK && pool_stats_of(pool).reserved == 3 * MIB && pool_stats_of(pool).retries == 0);
  EXPECT(at(pool, take(pool, 3 * MIB, stream)) && stats_of(plain).driver_allocs == 1);
  EXPECT(lm_stream_wait(stream) == LM_OK);
  lm_pool_destroy(pool);
  EXPECT(stats_of(plain).reserved == 0);
  lm_stream_destroy(stream);
  lm_ctx_destroy(plain);
}

static void trims_idle_pages(void) {
  lm_pool *pool = pool_with(0);
  gate g = GATE_CLOSED;
  uint64_t kept = take(pool, 2 * MIB, a), idle = take(pool, 2 * MIB, a);
  hold(a, &g);
  EXPECT(lm_mem_fill(ctx, at(pool, idle), 1, 2 * MIB, a) == LM_OK && lm_pool_free(pool, idle, a) == LM_OK);
  pthread_t opener;
  pthread_create(&opener, NULL, open_later, &g);
  EXPECT(lm_pool_trim(pool) == LM_OK && g.open);
  pthread_join(opener, NULL);
  EXPECT(pool_stats_of(pool).reserved == 2 * MIB && stats_of(ctx).reserved == 2 * MIB && at(pool, kept));
  lm_pool_destroy(pool);
}

static void small_limits(void) {
  lm_pool *pool = pool_with(10000);
  uint64_t one = take(pool, 5000, a), two = take(pool, 3000, a);
  EXPECT(pool_stats_of(pool).reserved == 2 * MIB); /* a page; the limit is for what is live */
  EXPECT(lm_pool_alloc(pool, 2000, "x", a) == 0 && pool_stats_of(pool).largest_free == 10000 - 8192);
  EXPECT(lm_pool_free(pool, one, a) == LM_OK && lm_pool_free(pool, two, a) == LM_OK);
  EXPECT(pool_stats_of(pool).failures == 1);
  lm_pool_destroy(pool);
}

static void explains_failure(void) {
  lm_pool *pool = pool_with(2 * MIB);
  uint64_t handles[13];
  for (int i = 0; i < 12; i++) {
    char label[80];
    snprintf(label, sizeof label, "layer.%d", i);
    if (i == 5) memset(label, 'z', 79), label[79] = 0;
    handles[i] = lm_pool_alloc(pool, (uint64_t)(i + 1) * 10 * KIB, label, a);
  }
  handles[12] = lm_pool_alloc(pool, 200 * KIB, "layer.11", a);
  EXPECT(lm_pool_free(pool, handles[3], a) == LM_OK);
  EXPECT(lm_pool_alloc(pool, MIB + 512 * KIB, "wanted", a) == 0);
  uint64_t free_bytes = 2 * MIB - pool_stats_of(pool).current, largest = pool_stats_of(pool).largest_free;
  char part[256];
  snprintf(part, sizeof part,
           "lm_pool_alloc: out of memory: requested=1572864 label=\"wanted\" largest_free=%llu total_free=%llu "
           "fragmentation=%.3f",
           (unsigned long long)largest, (unsigned long long)free_bytes, 1.0 - (double)largest / (double)free_bytes);
  EXPECT(failed_with(ctx, LM_ERR_OUT_OF_MEMORY, part));
  EXPECT(failed_with(ctx, LM_ERR_OUT_OF_MEMORY, "limit\nlargest owners:\n  327680 bytes in 2 blocks: layer.11\n"));
  EXPECT(failed_with(ctx, LM_ERR_OUT_OF_MEMORY, "\n  61440 bytes in 1 blocks: zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz\n"));
  char text[LM_ERROR_TEXT_MAX];
  lm_last_error(ctx, text, sizeof text);
  int lines = 0;
  for (const char *c = text; *c; c++) lines += *c == '\n';
  EXPECT(lines == 11 && !strstr(text, "layer.0"));
  lm_pool_destroy(pool);
}

static void destroy_does_not_wait(void) {
  lm_pool *pool = pool_with(0);
  gate g = GATE_CLOSED;
  uint64_t live = take(pool, MIB, a);
  uint8_t *pointer = at(pool, live);
  hold(a, &g);
  EXPECT(lm_mem_fill(ctx, pointer, 1, MIB, a) == LM_OK);
  lm_pool_destroy(pool);
  EXPECT(stats_of(ctx).reserved == 2 * MIB); /* the fill is still to come */
  gate_open(&g);
  EXPECT(lm_stream_wait(a) == LM_OK && stats_of(ctx).reserved == 0);
}

static void outlives_streams(void) {
  lm_pool *pool = pool_with(4 * MIB);
  for (int i = 0; i < 100; i++) {
    lm_stream *stream = lm_stream_create(ctx, 0);
    uint64_t handle = take(pool, 3 * MIB, stream);
    EXPECT(lm_mem_fill(ctx, at(pool, handle), i, 3 * MIB, stream) == LM_OK);
    EXPECT(lm_pool_free(pool, handle, i % 3 ? stream : a) == LM_OK);
    if (i % 3 == 0) EXPECT(lm_stream_wait(stream) == LM_OK);
    lm_stream_destroy(stream);
  }
  EXPECT(pool->owner_count < 20); /* slots of ended streams are used again */
  EXPECT(pool_stats_of(pool).reserved == 4 * MIB);
  lm_pool_destroy(pool);
}

/* Two streams in turn at 95 % of the limit, ten thousand times. */
static void ping_pong(void) {
  lm_pool *pool = pool_with(8 * MIB);
  uint64_t last[2] = {0, 0};
  for (int i = 0; i < 10000; i++) {
    lm_stream *stream = i % 2 ? b : a;
    if (last[i % 2]) EXPECT(lm_pool_free(pool, last[i % 2], stream) == LM_OK);
    last[i % 2] = lm_pool_alloc(pool, (uint64_t)(3 * MIB + (uint64_t)(i % 5) * 200 * KIB), "ping", stream);
    EXPECT(last[i % 2]);
    if (last[i % 2]) EXPECT(lm_mem_fill(ctx, at(pool, last[i % 2]), i, 256, stream) == LM_OK);
  }
  EXPECT(pool_stats_of(pool).failures == 0 && pool_stats_of(pool).reserved <= 8 * MIB);
  lm_pool_destroy(pool);
  EXPECT(lm_stream_wait(a) == LM_OK && lm_stream_wait(b) == LM_OK);
}

static void steady_state_takes_nothing(void) {
  lm_pool *pool = pool_with(0);
  void *first[20];
  lm_stats before = {0};
  for (int step = 0; step < 100; step++) {
    uint64_t handles[20];
    for (int i = 0; i < 20; i++) {
      handles[i] = take(pool, (uint64_t)(i * i * 7919 % 100000 + 1), a);
      if (step == 0) first[i] = at(pool, handles[i]);
      EXPECT(at(pool, handles[i]) == first[i]);
    }
    for (int i = 0; i < 20; i++) EXPECT(lm_pool_free(pool, handles[i], a) == LM_OK);
    if (step == 0) before = stats_of(ctx);
  }
  lm_stats after = stats_of(ctx);
  EXPECT(after.driver_allocs == before.driver_allocs && after.heap_allocs == before.heap_allocs);
  lm_pool_destroy(pool);
}

int main(void) {
  ctx = open_device("cpu");
  a = lm_stream_create(ctx, 0);
  b = lm_stream_create(ctx, 0);
  test("lm_pool_alloc() aligns to 256 bytes and counts exactly", sizes_and_alignment);
  test("lm_pool_alloc() refuses impossible sizes and leaks nothing", impossible_sizes);
  test("lm_pool_free() and lm_pool_pointer() refuse stale and foreign handles", stale_handles);
  test("lm_pool_alloc() reuses a block freed in the same stream at once", same_stream_reuses_at_once);
  test("lm_pool_alloc() joins memory of its stream with memory of nobody", own_and_idle_memory_join);
  test("lm_pool_alloc() takes new memory before it waits for another stream", other_stream_takes_new_memory_first);
  test("lm_pool_free() counts only work before it", mark_is_that_of_the_free);
  test("lm_pool_alloc() at the limit lets the stream wait, not the host", at_the_limit_the_stream_waits);
  test("lm_pool_alloc() joins free neighbours of several streams", joins_neighbours_of_many_streams);
  test("lm_pool_free() joins neighbours on both sides", splits_and_coalesces);
  test("lm_pool_alloc() at the limit moves pages of other streams once they have passed", moves_pages);
  test("lm_pool_alloc() moves its own free pages before it takes more memory", moves_before_it_grows);
  test("lm_pool_alloc() moves no page while a graph is recorded", no_page_leaves_while_a_graph_is_recorded);
  test("lm_pool_alloc() stops moving pages to and fro and takes more memory", settles);
  test("lm_pool_create() takes the whole limit where the device cannot map pages", fixed_memory);
  test("lm_pool_trim() waits for the streams and keeps pages with live blocks", trims_idle_pages);
  test("lm_pool_alloc() uses a limit that is no multiple of 2 MiB", small_limits);
  test("lm_pool_alloc() explains a failure with sizes and the ten largest owners", explains_failure);
  test("lm_pool_destroy() does not wait; memory goes when its streams have passed", destroy_does_not_wait);
  test("lm_pool outlives the streams it was used in", outlives_streams);
  test("lm_pool_alloc() of two streams in turn near the limit never fails", ping_pong);
  test("lm_pool_alloc() in a steady loop gives the same addresses and takes nothing new", steady_state_takes_nothing);
  EXPECT(stats_of(ctx).reserved == 0);
  lm_stream_destroy(a);
  lm_stream_destroy(b);
  lm_ctx_destroy(ctx);
  return summary();
}
