/* file_ring.c: the ring: slots, threads, and what a thread does next. */
#define _GNU_SOURCE
#include "file.h"

#include <sched.h>
#include <signal.h>

#define SLOT_BYTES (UINT64_C(8) << 20)
#define SLOTS 8
#define THREADS 8
#define MOST_SLOT_BYTES (UINT64_C(1) << 30)
#define MOST_SLOTS 1024
#define MOST_THREADS 256

/* Whether the calling thread belongs to a ring: then it cannot wait for the threads of one to end. */
static _Thread_local bool on_ring_thread;

static void push_slot(lm_slot_list *list, lm_slot *slot) {
  slot->next = NULL;
  *list->last = slot;
  list->last = &slot->next;
}

static lm_slot *pop_slot(lm_slot_list *list) {
  lm_slot *slot = list->first;
  if (!slot) return NULL;
  list->first = slot->next;
  if (!list->first) list->last = &list->first;
  return slot;
}

/* What a thread does next. */
typedef enum work_kind { WORK_NONE, WORK_JOB, WORK_FINISH, WORK_READ, WORK_FILL, WORK_WRITE } work_kind;

typedef struct work {
  work_kind kind;
  lm_file_request *request;
  lm_piece piece;
} work;

static lm_file_request *unlink_request(lm_file_ring *ring, lm_file_request **link) {
  lm_file_request *request = *link;
  *link = request->next;
  if (!request->next) ring->last = link;
  request->next = NULL;
  return request;
}

static void append(lm_file_ring *ring, lm_file_request *request) {
  request->next = NULL;
  *ring->last = request;
  ring->last = &request->next;
}

/* Requests take turns: the first that can go on gives a piece and goes to the end. When it is a read's turn, slots that are
 * filled are written first, else reads without end would hold them up. Under the mutex. */
static work next_work(lm_file_ring *ring) {
  work next = {WORK_NONE, NULL, {0}};
  for (lm_file_request **link = &ring->first; *link;) {
    lm_file_request *request = *link;
    if (!request->started) request->started = lm_clock_ns();
    next.request = request;
    if (request->kind < LM_TRANSFER_READ) {
      unlink_request(ring, link);
      next.kind = WORK_JOB;
      return next;
    }
    bool reads = request->kind == LM_TRANSFER_READ;
    lm_slot *slot = reads && ring->filled.first ? NULL : ring->free.first;
    int cut = lm_request_stopped(request) ? 0 : lm_piece_cut(request, &next.piece, slot);
    if (cut < 0 && reads && ring->filled.first) break; /* not on to those behind, who would fill more */
    if (cut < 0) {
      link = &request->next;
      continue;
    }
    unlink_request(ring, link);
    if (cut == 0) {
      request->dropped = request->at < request->count;
      request->exhausted = true;
      if (request->in_flight) continue;
      next.kind = WORK_FINISH;
      return next;
    }
    request->in_flight++;
    append(ring, request);
    if (next.piece.slot) {
      pop_slot(&ring->free);
      ring->free_count--;
      slot->piece = next.piece;
    }
    next.kind = reads ? WORK_READ : slot && next.piece.slot ? WORK_FILL : WORK_WRITE;
    return next;
  }
  lm_slot *slot = pop_slot(&ring->filled);
  next.request = slot ? slot->piece.request : NULL;
  if (!slot) return next;
  next.piece = slot->piece;
  next.kind = WORK_WRITE;
  return next;
}

static void run(lm_file_ring *ring, work *next) {
  lm_file_request *request = next->request;
  lm_slot *slot = next->piece.slot;
  if (request->stream_status < 0) {
    lm_request_fail(request, request->stream_status, 0, 0, "work enqueued earlier on the stream failed: %s",
                    lm_status_text(request->stream_status));
  }
  if (next->kind == WORK_JOB) lm_job_run(request);
  if (next->kind == WORK_READ) lm_piece_read(&next->piece);
  if (next->kind == WORK_WRITE) lm_piece_write(&next->piece);
  if (next->kind == WORK_FILL) lm_piece_fill(&next->piece);
  bool finished = next->kind == WORK_JOB || next->kind == WORK_FINISH;
  if (!finished) {
    pthread_mutex_lock(&ring->mutex);
    if (next->kind == WORK_FILL) {
      push_slot(&ring->filled, slot);
    } else {
      if (slot) push_slot(&ring->free, slot), ring->free_count++;
      finished = --request->in_flight == 0 && request->exhausted;
    }
    pthread_cond_signal(&ring->changed);
    pthread_mutex_unlock(&ring->mutex);
  }
  if (finished) lm_request_finish(request);
}

static void ring_free(lm_file_ring *ring) {
  lm_ctx *ctx = ring->ctx;
  for (uint32_t i = 0; ring->slots && i < ring->slot_count; i++) (void)lm_slot_await(ring, &ring->slots[i]);
  for (int i = 0; i < LM_DIRECTIONS; i++) lm_stream_destroy(ring->streams[i]);
  if (ring->memory) lm_memory_give(ctx, ring->memory, ring->slot_bytes * ring->slot_count, LM_RANGE_PINNED);
  lm_heap_release(ring->slots);
  pthread_cond_destroy(&ring->changed);
  pthread_cond_destroy(&ring->ended);
  pthread_mutex_destroy(&ring->copy_mutex);
  pthread_mutex_destroy(&ring->mutex);
  lm_heap_release(ring);
  lm_ctx_unref(ctx);
}

static void *ring_main(void *arg) {
  lm_file_ring *ring = arg;
  on_ring_thread = true;
  pthread_mutex_lock(&ring->mutex);
  for (;;) {
    work next = next_work(ring);
    if (next.kind != WORK_NONE) {
      if (ring->first) pthread_cond_signal(&ring->changed); /* one wakes the next */
      pthread_mutex_unlock(&ring->mutex);
      run(ring, &next);
      pthread_mutex_lock(&ring->mutex);
    } else if (ring->closing) {
      break;
    } else {
      uint64_t begin = lm_clock_ns();
      pthread_cond_wait(&ring->changed, &ring->mutex);
      atomic_fetch_add_explicit(&ring->counters.idle_ns, lm_clock_ns() - begin, memory_order_relaxed);
    }
  }
  bool last = --ring->running == 0, awaited = ring->awaited;
  if (last && awaited) pthread_cond_signal(&ring->ended); /* whoever waits frees the ring */
  pthread_mutex_unlock(&ring->mutex);
  if (last && !awaited) ring_free(ring);
  return NULL;
}

void lm_ring_ref(lm_file_ring *ring) {
  atomic_fetch_add_explicit(&ring->refs, 1, memory_order_relaxed);
}

/* The last reference: nothing is queued or under way. Waits for idle threads only. */
void lm_ring_unref(lm_file_ring *ring) {
  if (atomic_fetch_sub_explicit(&ring->refs, 1, memory_order_acq_rel) != 1) return;
  pthread_mutex_lock(&ring->mutex);
  ring->closing = true;
  ring->awaited = !on_ring_thread;
  pthread_cond_broadcast(&ring->changed);
  while (ring->awaited && ring->running) pthread_cond_wait(&ring->ended, &ring->mutex);
  bool mine = ring->running == 0;
  pthread_mutex_unlock(&ring->mutex);
  if (mine) ring_free(ring);
}

void lm_ring_submit(lm_file_request *request) {
  lm_file_ring *ring = request->ring;
  pthread_mutex_lock(&ring->mutex);
  append(ring, request);
  pthread_cond_signal(&ring->changed);
  pthread_mutex_unlock(&ring->mutex);
}

/* Runs in stream order. */
static int32_t stream_passed(void *arg, int32_t status) {
  lm_file_request *request = arg;
  lm_file_ring *ring = request->ring;
  pthread_mutex_lock(&ring->mutex);
  request->stream_status = status;
  *ring->last = request;
  ring->last = &request->next;
  pthread_cond_signal(&ring->changed);
  pthread_mutex_unlock(&ring->mutex);
  return LM_OK;
}

int32_t lm_ring_submit_after(lm_file_request *request, lm_stream *stream) {
  lm_ctx *ctx = request->ctx;
  if (stream) return ctx->api->stream_call(ctx->backend, stream->handle, stream_passed, request);
  lm_ring_submit(request);
  return LM_OK;
}

/* Cores that this process may use. */
static int32_t core_count(void) {
  cpu_set_t set;
  int cores = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
  return cores < THREADS ? cores : THREADS;
}

/* Signals belong to the threads of the program. The thread is detached: it counts in `running` instead. */
static int start_thread(lm_file_ring *ring) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_t thread;
  ring->running++;
  int failed = pthread_create(&thread, NULL, ring_main, ring);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (failed) ring->running--;
  if (failed) return failed;
  pthread_setname_np(thread, "lm-file");
  pthread_detach(thread);
  return 0;
}

/* Everything that can fail; what was made is given back with the ring. */
static bool ring_fill(lm_file_ring *ring, const char *op) {
  lm_ctx *ctx = ring->ctx;
  ring->slots = lm_heap_alloc(ctx, ring->slot_count * sizeof *ring->slots, op);
  if (!ring->slots) return false;
  ring->memory = lm_memory_take(ctx, ring->slot_bytes * ring->slot_count, LM_RANGE_PINNED, 0, op);
  if (!ring->memory) return false;
  for (uint32_t i = 0; i < ring->slot_count; i++) {
    ring->slots[i].data = ring->memory + i * ring->slot_bytes;
    push_slot(&ring->free, &ring->slots[i]);
  }
  ring->free_count = ring->slot_count;
  for (int i = 0; i < LM_DIRECTIONS; i++) {
    ring->streams[i] = lm_stream_create(ctx, 0);
    if (!ring->streams[i]) return false;
  }
  pthread_mutex_lock(&ring->mutex);
  int failed = 0;
  for (uint32_t i = 0; !failed && i < ring->thread_count; i++) failed = start_thread(ring);
  pthread_mutex_unlock(&ring->mutex);
  if (failed) lm_fail(ctx, LM_ERR_LIMIT, "%s: the system grants no more threads: error %d: ask for fewer", op, failed);
  return !failed;
}

lm_file_ring *lm_file_ring_create(lm_ctx *ctx, uint64_t slot_bytes, int32_t slots, int32_t threads) {
  static const char op[] = "lm_file_ring_create";
  if (!ctx) return NULL;
  if (slot_bytes % LM_BLOCK || slot_bytes > MOST_SLOT_BYTES || slots < 0 || slots > MOST_SLOTS || threads < 0 ||
      threads > MOST_THREADS) {
    lm_fail(ctx, LM_ERR_ARGUMENT,
            "%s: slot_bytes must be a multiple of %d up to 1 GiB, slots up to %d, threads up to %d: slot_bytes=%llu slots=%d "
            "threads=%d", op, (int)LM_BLOCK, MOST_SLOTS, MOST_THREADS, (unsigned long long)slot_bytes, slots, threads);
    return NULL;
  }
  if (atomic_load(&ctx->recordings) > 0) {
    lm_fail(ctx, LM_ERR_STATE, "%s: a stream of this context records a graph: end the recording first", op);
    return NULL;
  }
  lm_file_ring *ring = lm_heap_alloc(ctx, sizeof *ring, op);
  if (!ring) return NULL;
  lm_ctx_ref(ctx);
  ring->ctx = ctx;
  ring->calls = lm_file_calls_of(ctx);
  ring->slot_bytes = slot_bytes ? slot_bytes : SLOT_BYTES;
  ring->slot_count = slots ? (uint32_t)slots : SLOTS;
  ring->thread_count = (uint32_t)(threads ? threads : core_count());
  atomic_store(&ring->refs, 1);
  pthread_mutex_init(&ring->mutex, NULL);
  pthread_mutex_init(&ring->copy_mutex, NULL);
  pthread_cond_init(&ring->changed, NULL);
  pthread_cond_init(&ring->ended, NULL);
  ring->last = &ring->first;
  ring->free.last = &ring->free.first;
  ring->filled.last = &ring->filled.first;
  if (ring_fill(ring, op)) return ring;
  lm_ring_unref(ring);
  return NULL;
}

void lm_file_ring_destroy(lm_file_ring *ring) {
  if (ring) lm_ring_unref(ring);
}

int32_t lm_file_ring_stats_get(lm_file_ring *ring, lm_file_ring_stats *stats) {
  if (!ring) return LM_ERR_ARGUMENT;
  if (!stats) return lm_fail(ring->ctx, LM_ERR_ARGUMENT, "lm_file_ring_stats_get: stats is NULL");
  lm_file_counters *c = &ring->counters;
  pthread_mutex_lock(&ring->mutex);
  uint64_t free_slots = ring->free_count;
  pthread_mutex_unlock(&ring->mutex);
  *stats = (lm_file_ring_stats){
      .slots = ring->slot_count,
      .slot_bytes = ring->slot_bytes,
      .threads = ring->thread_count,
      .free_slots = free_slots,
      .requests = atomic_load(&ring->requests),
      .files = atomic_load(&ring->files),
      .read_direct = atomic_load(&c->read_direct),
      .read_cached = atomic_load(&c->read_cached),
      .read_buffered = atomic_load(&c->read_buffered),
      .write_direct = atomic_load(&c->write_direct),
      .write_buffered = atomic_load(&c->write_buffered),
      .copied = atomic_load(&c->copied),
      .retries = atomic_load(&c->retries),
      .fallbacks = atomic_load(&c->fallbacks),
      .file_seconds = (double)atomic_load(&c->file_ns) * 1e-9,
      .device_seconds = (double)atomic_load(&c->device_ns) * 1e-9,
      .idle_seconds = (double)atomic_load(&c->idle_ns) * 1e-9,
  };
  return LM_OK;
}
