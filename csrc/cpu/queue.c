/* queue.c: a stream of the CPU backend: a ring of commands and the thread that runs them in order.
 *
 * Positions count commands since the start. `tail` is the next to be written, `done` the number that have ended; both
 * only grow, so a mark is a value of `tail`, and it is passed once `done` has reached it. Writers share a mutex, which
 * also guards sleeping: the thread declares that it sleeps under the mutex, so a writer signals only when it must, and
 * enqueueing costs two uncontended atomic operations and a copy of the arguments. Nothing is allocated after creation. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "backend.h"

#define RING 4096u        /* commands; 1 MiB per stream */
#define SPIN_TURNS 1024   /* 10 to 50 us, the gap between two calls from JavaScript is less */
#define YIELD_TURNS 64    /* then the other side may be on this very core, waiting for it */
#define NEVER UINT64_MAX

struct lm_backend_stream {
  lm_cpu_backend *backend;
  lm_backend_stream *previous, *next; /* under backend->mutex */
  _Atomic int32_t refs; /* core's handle, the thread, events, and commands of other streams that wait for this one */

  pthread_mutex_t mutex;
  pthread_cond_t work;     /* the thread sleeps here */
  pthread_cond_t progress; /* those who wait for `done` sleep here */
  lm_command *ring;
  lm_backend_graph *recording;
  uint64_t free_until; /* positions below may be written: a value of done + RING seen earlier */
  bool sleeping;
  bool closing;

  _Alignas(64) _Atomic uint64_t tail;
  _Alignas(64) _Atomic uint64_t done;
  _Atomic uint64_t wake_at; /* signal `progress` when done gets here */
  _Atomic int32_t status;   /* first failure; stays */
};

static inline void pause_briefly(int turn) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
  if (turn % YIELD_TURNS == 1) sched_yield();
}

void lm_queue_ref(lm_backend_stream *queue) {
  atomic_fetch_add_explicit(&queue->refs, 1, memory_order_relaxed);
}

/* backend->mutex keeps a queue on the list until its last reference is gone, see lm_queue_drain. */
static bool drop_ref(lm_backend_stream *queue) {
  if (atomic_fetch_sub_explicit(&queue->refs, 1, memory_order_acq_rel) != 1) return false;
  if (queue->previous) queue->previous->next = queue->next;
  else queue->backend->streams = queue->next;
  if (queue->next) queue->next->previous = queue->previous;
  return true;
}

static void queue_free(lm_backend_stream *queue) {
  lm_host host = queue->backend->host;
  pthread_cond_destroy(&queue->progress);
  pthread_cond_destroy(&queue->work);
  pthread_mutex_destroy(&queue->mutex);
  host.release(queue->ring);
  host.release(queue);
}

void lm_queue_unref(lm_backend_stream *queue) {
  lm_cpu_backend *backend = queue->backend;
  pthread_mutex_lock(&backend->mutex);
  bool last = drop_ref(queue);
  pthread_mutex_unlock(&backend->mutex);
  if (last) queue_free(queue);
}

/* The thread: waits for commands. @return the new tail, or `done` if the queue closes. */
static uint64_t next_commands(lm_backend_stream *queue, uint64_t done) {
  uint64_t tail = atomic_load_explicit(&queue->tail, memory_order_acquire);
  for (int turn = queue->backend->spin ? SPIN_TURNS : 0; tail == done && turn > 0; turn--) {
    pause_briefly(turn);
    tail = atomic_load_explicit(&queue->tail, memory_order_acquire);
  }
  if (tail != done) return tail;
  pthread_mutex_lock(&queue->mutex);
  for (;;) {
    tail = atomic_load_explicit(&queue->tail, memory_order_relaxed);
    if (tail != done || queue->closing) break;
    queue->sleeping = true;
    pthread_cond_wait(&queue->work, &queue->mutex);
    queue->sleeping = false;
  }
  pthread_mutex_unlock(&queue->mutex);
  return tail;
}

static void *queue_main(void *arg) {
  lm_backend_stream *queue = arg;
  lm_cpu_backend *backend = queue->backend;
  uint64_t done = 0;
  for (uint64_t tail; (tail = next_commands(queue, done)) != done;) {
    while (done != tail) {
      int32_t status = atomic_load_explicit(&queue->status, memory_order_relaxed);
      int32_t after = lm_command_run(backend, &queue->ring[done % RING], status);
      if (after != status) atomic_store(&queue->status, after);
      /* Sequentially consistent with lm_queue_wait: either it sees this or we see its wish. */
      atomic_store(&queue->done, ++done);
      if (done < atomic_load(&queue->wake_at)) continue;
      pthread_mutex_lock(&queue->mutex);
      atomic_store(&queue->wake_at, NEVER);
      pthread_cond_broadcast(&queue->progress);
      pthread_mutex_unlock(&queue->mutex);
    }
  }
  backend->host.release(queue->ring);
  queue->ring = NULL;
  lm_queue_unref(queue);
  /* The backend may be freed as soon as the mutex is released with `running` lowered. */
  pthread_mutex_lock(&backend->mutex);
  backend->running--;
  pthread_cond_signal(&backend->ended);
  pthread_mutex_unlock(&backend->mutex);
  return NULL;
}

lm_backend_stream *lm_queue_create(lm_cpu_backend *backend) {
  const lm_host *host = &backend->host;
  lm_backend_stream *queue = host->alloc(host->owner, sizeof *queue);
  lm_command *ring = queue ? host->alloc(host->owner, RING * sizeof *ring) : NULL;
  if (!ring) {
    host->release(queue);
    host->fail(host->owner, LM_ERR_OUT_OF_MEMORY, "lm_stream_create: out of host memory: %zu bytes of heap",
               RING * sizeof *ring);
    return NULL;
  }
  memset(ring, 0xff, RING * sizeof *ring); /* touched here, not in the first step */
  queue->backend = backend;
  queue->ring = ring;
  queue->free_until = RING;
  atomic_store(&queue->refs, 2);
  atomic_store(&queue->wake_at, NEVER);
  pthread_mutex_init(&queue->mutex, NULL);
  pthread_cond_init(&queue->work, NULL);
  pthread_cond_init(&queue->progress, NULL);

  pthread_mutex_lock(&backend->mutex);
  queue->next = backend->streams;
  if (queue->next) queue->next->previous = queue;
  backend->streams = queue;
  backend->running++;
  pthread_mutex_unlock(&backend->mutex);

  /* Signals belong to the threads of the program. The thread is detached: it counts in `running` instead. */
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_t thread;
  int failed = pthread_create(&thread, NULL, queue_main, queue);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (!failed) {
    pthread_setname_np(thread, "lm-stream");
    pthread_detach(thread);
    return queue;
  }
  host->fail(host->owner, LM_ERR_LIMIT, "lm_stream_create: the system grants no more threads: error %d", failed);
  pthread_mutex_lock(&backend->mutex);
  backend->running--;
  atomic_store(&queue->refs, 1);
  drop_ref(queue);
  pthread_mutex_unlock(&backend->mutex);
  queue_free(queue);
  return NULL;
}

void lm_queue_close(lm_backend_stream *queue) {
  pthread_mutex_lock(&queue->mutex);
  queue->closing = true;
  pthread_cond_signal(&queue->work);
  pthread_mutex_unlock(&queue->mutex);
}

/* Waits until `done` reaches mark. Under queue->mutex, which it releases meanwhile. */
static void wait_locked(lm_backend_stream *queue, uint64_t mark) {
  while (atomic_load(&queue->done) < mark) {
    if (mark < atomic_load(&queue->wake_at)) atomic_store(&queue->wake_at, mark);
    if (atomic_load(&queue->done) >= mark) break;
    pthread_cond_wait(&queue->progress, &queue->mutex);
  }
}

uint64_t lm_queue_push(lm_backend_stream *queue, int32_t kind, int32_t value, const void *as, uint32_t bytes) {
  pthread_mutex_lock(&queue->mutex);
  uint64_t tail = atomic_load_explicit(&queue->tail, memory_order_relaxed);
  lm_command *command;
  bool record = queue->recording && kind <= LM_COMMAND_FILL;
  if (record) {
    command = lm_cpu_graph_append(queue->recording);
  } else {
    while (tail == queue->free_until) {
      queue->free_until = atomic_load_explicit(&queue->done, memory_order_acquire) + RING;
      if (tail != queue->free_until) break;
      /* Full. Half the ring is awaited, so that writer and thread do not wake each other for every command. */
      wait_locked(queue, tail - RING / 2);
      tail = atomic_load_explicit(&queue->tail, memory_order_relaxed);
    }
    command = &queue->ring[tail % RING];
  }
  if (command) {
    command->kind = kind;
    command->value = value;
    memcpy(&command->as, as, bytes);
  }
  if (!record) atomic_store_explicit(&queue->tail, ++tail, memory_order_release);
  bool wake = queue->sleeping && !record;
  if (wake) queue->sleeping = false;
  pthread_mutex_unlock(&queue->mutex);
  if (wake) pthread_cond_signal(&queue->work);
  return command ? tail : LM_NO_MARK;
}

uint64_t lm_queue_mark(lm_backend_stream *queue) {
  return atomic_load_explicit(&queue->tail, memory_order_relaxed);
}

int32_t lm_queue_query(lm_backend_stream *queue, uint64_t mark) {
  if (atomic_load_explicit(&queue->done, memory_order_acquire) < mark) return LM_NOT_READY;
  return atomic_load_explicit(&queue->status, memory_order_relaxed);
}

int32_t lm_queue_wait(lm_backend_stream *queue, uint64_t mark) {
  for (int turn = queue->backend->spin ? SPIN_TURNS : 0; turn > 0; turn--) {
    int32_t status = lm_queue_query(queue, mark);
    if (status != LM_NOT_READY) return status;
    pause_briefly(turn);
  }
  pthread_mutex_lock(&queue->mutex);
  wait_locked(queue, mark);
  pthread_mutex_unlock(&queue->mutex);
  return atomic_load(&queue->status);
}

int32_t lm_queue_follow(lm_backend_stream *queue, lm_backend_stream *other, uint64_t mark) {
  if (queue == other || lm_queue_query(other, mark) == LM_OK) return LM_OK;
  lm_command command = {.as.follow = {.other = other, .mark = mark}};
  lm_queue_ref(other);
  lm_queue_push(queue, LM_COMMAND_FOLLOW, 0, &command.as, sizeof command.as.follow);
  return LM_OK;
}

lm_backend_graph *lm_queue_recording(lm_backend_stream *queue, lm_backend_graph *graph) {
  pthread_mutex_lock(&queue->mutex);
  lm_backend_graph *previous = queue->recording;
  queue->recording = graph;
  pthread_mutex_unlock(&queue->mutex);
  return previous;
}

int32_t lm_queue_drain(lm_cpu_backend *backend) {
  int32_t status = LM_OK;
  pthread_mutex_lock(&backend->mutex);
  for (lm_backend_stream *queue = backend->streams; queue;) {
    lm_queue_ref(queue); /* keeps it on the list while the mutex is released */
    pthread_mutex_unlock(&backend->mutex);
    int32_t one = lm_queue_wait(queue, lm_queue_mark(queue));
    if (status == LM_OK) status = one;
    pthread_mutex_lock(&backend->mutex);
    lm_backend_stream *next = queue->next;
    if (drop_ref(queue)) queue_free(queue);
    queue = next;
  }
  pthread_mutex_unlock(&backend->mutex);
  return status;
}
