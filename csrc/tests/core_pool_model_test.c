/* The pool against a model: random allocations and frees from 8 threads over 4 streams.
 *   core_pool_model_test [operations]    default 100000
 * The model keeps who owns which bytes, so a block handed out twice shows at once. Every block is filled in stream order
 * and looked at in stream order just before it is freed, so a block handed to another stream too early shows as well. */
#include "core_test.h"

#define THREADS 8
#define STREAMS 4
#define ROUNDS 10
#define LIVE_MAX 24
#define LIMIT (UINT64_C(24) << 20)

static lm_ctx *ctx;
static lm_pool *pool;
static lm_stream *streams[STREAMS];
static int operations = 100000;

typedef struct held {
  uint64_t handle;
  uint8_t *pointer;
  uint64_t bytes;
  int stream;
  uint8_t tag;
} held;

/* The model */
static pthread_mutex_t model_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
  const uint8_t *begin;
  uint64_t bytes;
} owned[THREADS * LIVE_MAX];
static int owned_count;
static lm_pool_stats model;

static uint64_t granules(uint64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

static void model_take(const uint8_t *begin, uint64_t bytes) {
  uint64_t size = granules(bytes);
  pthread_mutex_lock(&model_mutex);
  for (int i = 0; i < owned_count; i++) {
    EXPECT(begin + size <= owned[i].begin || owned[i].begin + owned[i].bytes <= begin);
  }
  owned[owned_count].begin = begin;
  owned[owned_count++].bytes = size;
  model.current += size;
  if (model.current > model.peak) model.peak = model.current;
  model.requested += bytes;
  model.live_blocks++;
  model.allocs++;
  pthread_mutex_unlock(&model_mutex);
}

static void model_give(const uint8_t *begin, uint64_t bytes) {
  pthread_mutex_lock(&model_mutex);
  int i = 0;
  while (i < owned_count && owned[i].begin != begin) i++;
  EXPECT(i < owned_count && owned[i].bytes == granules(bytes));
  owned[i] = owned[--owned_count];
  model.current -= granules(bytes);
  model.requested -= bytes;
  model.live_blocks--;
  model.frees++;
  pthread_mutex_unlock(&model_mutex);
}

static void expect_stats(bool peak_too) {
  lm_pool_stats stats = pool_stats_of(pool);
  EXPECT(stats.current == model.current && stats.requested == model.requested);
  EXPECT(stats.live_blocks == model.live_blocks && stats.allocs == model.allocs && stats.frees == model.frees);
  EXPECT(stats.failures == model.failures && stats.limit == LIMIT);
  EXPECT(stats.reserved <= LIMIT && stats.reserved >= stats.current && stats.reserved == stats_of(ctx).reserved);
  EXPECT(stats.largest_free <= stats.reserved - stats.current);
  if (peak_too) EXPECT(stats.peak == model.peak);
}

/* One thread's work */
typedef struct worker {
  uint64_t random;
  held live[LIVE_MAX];
  int count;
  lm_event *event;
} worker;

static uint64_t next(worker *w) {
  w->random ^= w->random << 13;
  w->random ^= w->random >> 7;
  w->random ^= w->random << 17;
  return w->random;
}

static int32_t look(void *arg, int32_t status) {
  held *h = arg;
  EXPECT(status == LM_OK);
  EXPECT(h->pointer[0] == h->tag && h->pointer[h->bytes / 2] == h->tag && h->pointer[h->bytes - 1] == h->tag);
  free(h);
  return LM_OK;
}

static void allocate(worker *w) {
  static const uint64_t scales[] = {300, 3000, 30000, 300000, 1500000};
  held h = {.stream = (int)(next(w) % STREAMS), .tag = (uint8_t)next(w)};
  h.bytes = 1 + next(w) % scales[next(w) % 5];
  h.handle = lm_pool_alloc(pool, h.bytes, next(w) % 2 ? "odd" : "even", streams[h.stream]);
  if (!h.handle) {
    pthread_mutex_lock(&model_mutex);
    model.failures++;
    pthread_mutex_unlock(&model_mutex);
    return;
  }
  h.pointer = lm_pool_pointer(pool, h.handle);
  EXPECT(h.pointer);
  model_take(h.pointer, h.bytes);
  EXPECT(lm_mem_fill(ctx, h.pointer, h.tag, h.bytes, streams[h.stream]) == LM_OK);
  w->live[w->count++] = h;
}

static void give(worker *w) {
  int at = (int)(next(w) % (uint64_t)w->count);
  held h = w->live[at];
  w->live[at] = w->live[--w->count];
  held *seen = malloc(sizeof *seen);
  *seen = h;
  call_in(streams[h.stream], look, seen);
  int in = next(w) % 4 ? h.stream : (int)(next(w) % STREAMS);
  if (in != h.stream) {
    EXPECT(lm_event_record(w->event, streams[h.stream]) == LM_OK);
    EXPECT(lm_stream_wait_event(streams[in], w->event) == LM_OK);
  }
  model_give(h.pointer, h.bytes);
  EXPECT(lm_pool_free(pool, h.handle, streams[in]) == LM_OK);
  if (next(w) % 8 == 0) EXPECT(lm_pool_free(pool, h.handle, streams[in]) == LM_ERR_STALE_HANDLE);
}

static void operate(worker *w, int count, bool check) {
  for (int i = 0; i < count; i++) {
    if (w->count < LIVE_MAX && (w->count == 0 || next(w) % 2)) allocate(w);
    else give(w);
    if (next(w) % 997 == 0) EXPECT(lm_pool_trim(pool) == LM_OK);
    if (check) expect_stats(true);
  }
}

static worker workers[THREADS];

static void *work(void *arg) {
  operate(arg, operations / THREADS / ROUNDS, false);
  return NULL;
}

static void empty(worker *w) {
  while (w->count) give(w);
}

static void prepare(void) {
  memset(&model, 0, sizeof model);
  owned_count = 0;
  pool = lm_pool_create(ctx, LIMIT);
  for (int i = 0; i < STREAMS; i++) streams[i] = lm_stream_create(ctx, 0);
  for (int i = 0; i < THREADS; i++) {
    workers[i] = (worker){.random = 0x9e3779b97f4a7c15u * (uint64_t)(i + 1), .event = lm_event_create(ctx)};
  }
}

static void finish(void) {
  for (int i = 0; i < THREADS; i++) empty(&workers[i]);
  expect_stats(false);
  EXPECT(model.live_blocks == 0 && model.current == 0);
  uint64_t whole = lm_pool_alloc(pool, LIMIT, "whole", streams[0]); /* nothing is lost to fragments for good */
  EXPECT(whole && lm_pool_free(pool, whole, streams[0]) == LM_OK);
  lm_pool_destroy(pool);
  for (int i = 0; i < THREADS; i++) lm_event_destroy(workers[i].event);
  for (int i = 0; i < STREAMS; i++) EXPECT(lm_stream_wait(streams[i]) == LM_OK);
  EXPECT(stats_of(ctx).reserved == 0);
  for (int i = 0; i < STREAMS; i++) lm_stream_destroy(streams[i]);
}

static void many_threads(void) {
  prepare();
  for (int round = 0; round < ROUNDS; round++) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, &workers[i]);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    expect_stats(false);
  }
  finish();
}

static void one_thread(void) {
  prepare();
  operate(&workers[0], operations / 10, true);
  finish();
}

int main(int argc, char **argv) {
  if (argc > 1) operations = atoi(argv[1]);
  ctx = open_device("sim:delays=0/20/0/100");
  test("lm_pool keeps exact statistics after every operation of one thread", one_thread);
  test("lm_pool never overlaps blocks nor breaks stream order under 8 threads", many_threads);
  lm_ctx_destroy(ctx);
  return summary();
}
