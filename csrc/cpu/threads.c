/* threads.c: the worker pool.
 *
 * A parallel region is published in one 64-bit word, the ticket: generation << 32 | next task. Threads take tasks by
 * compare-and-swap on it, the caller among them. Nobody waits for workers that hold no task: on a busy machine, or in a
 * forked child that has none, the caller simply does more of the work. Workers look for the next region for a while,
 * because regions follow each other within microseconds, then sleep.
 *
 * A late worker may therefore look at the fields of a region while the next one is being written. The ticket is closed
 * before that (next task = CLOSED), and fields are stored with release and loaded with acquire: who sees a new field finds
 * the old ticket closed, so a task is only ever taken with the fields of its own region. */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cpu.h"

enum { MAX_THREADS = 256, LINE = 64, SPIN_NS = 80000 };
#define CLOSED UINT32_MAX

struct lm_cpu {
  /* the region; every field is atomic because a late worker may read it while the next region is published */
  _Alignas(LINE) _Atomic uint64_t ticket;
  _Atomic(lm_task_fn) fn;
  _Atomic(const void *) arg;
  _Atomic uint32_t tasks;
  _Alignas(LINE) _Atomic uint32_t done;
  /* sleep */
  _Alignas(LINE) _Atomic int32_t sleepers;
  _Atomic int32_t stop;
  pthread_mutex_t sleep_lock;
  pthread_cond_t wake;
  /* fixed after creation */
  pthread_mutex_t call_lock;
  const lm_isa *isa;
  float *memory; /* shared scratch, then one part per thread */
  uint64_t memory_bytes;
  pid_t process;
  int32_t threads;
  struct lm_worker {
    lm_cpu *cpu;
    float *scratch;
    pthread_t thread;
  } workers[MAX_THREADS]; /* [0] is the caller */
};

static inline void pause_core(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* work: run tasks of one generation until none is left. */
static void work(lm_cpu *cpu, uint64_t generation, float *scratch) {
  const lm_task_fn fn = atomic_load_explicit(&cpu->fn, memory_order_acquire);
  const void *arg = atomic_load_explicit(&cpu->arg, memory_order_acquire);
  const uint32_t tasks = atomic_load_explicit(&cpu->tasks, memory_order_acquire);
  uint64_t ticket = atomic_load_explicit(&cpu->ticket, memory_order_acquire);
  for (;;) {
    const uint32_t task = (uint32_t)ticket;
    if (ticket >> 32 != generation || task >= tasks) return;
    if (!atomic_compare_exchange_weak_explicit(&cpu->ticket, &ticket, ticket + 1, memory_order_acq_rel,
                                               memory_order_acquire))
      continue;
    fn(arg, task, scratch);
    atomic_fetch_add_explicit(&cpu->done, 1, memory_order_release);
    ticket = atomic_load_explicit(&cpu->ticket, memory_order_acquire);
  }
}

/* next_generation: wait until another region than `seen` is published: spin, then sleep. */
static uint64_t next_generation(lm_cpu *cpu, uint64_t seen) {
  const int64_t until = now_ns() + SPIN_NS;
  do {
    for (int i = 0; i < 64; i++) {
      const uint64_t generation = atomic_load_explicit(&cpu->ticket, memory_order_acquire) >> 32;
      if (generation != seen) return generation;
      pause_core();
    }
  } while (now_ns() < until);
  uint64_t generation = seen;
  pthread_mutex_lock(&cpu->sleep_lock);
  atomic_fetch_add(&cpu->sleepers, 1); /* before the look at the ticket: lm_cpu_parallel does the two in the other order */
  while (!atomic_load(&cpu->stop) && (generation = atomic_load(&cpu->ticket) >> 32) == seen)
    pthread_cond_wait(&cpu->wake, &cpu->sleep_lock);
  atomic_fetch_sub(&cpu->sleepers, 1);
  pthread_mutex_unlock(&cpu->sleep_lock);
  return generation;
}

static void *worker_main(void *pointer) {
  struct lm_worker *worker = pointer;
  uint64_t generation = 0;
  while (!atomic_load(&worker->cpu->stop)) {
    generation = next_generation(worker->cpu, generation);
    work(worker->cpu, generation, worker->scratch);
  }
  return NULL;
}

lm_cpu *lm_cpu_create(int32_t threads) {
  if (threads <= 0) threads = lm_cpu_available();
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  lm_cpu *cpu = aligned_alloc(LINE, (sizeof(lm_cpu) + LINE - 1) / LINE * LINE);
  if (cpu == NULL) return NULL;
  memset(cpu, 0, sizeof *cpu);
  cpu->memory_bytes = sizeof(float) * (LM_SHARED_FLOATS + (uint64_t)threads * LM_THREAD_FLOATS);
  cpu->memory = mmap(NULL, cpu->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (cpu->memory == MAP_FAILED) {
    free(cpu);
    return NULL;
  }
  madvise(cpu->memory, cpu->memory_bytes, MADV_HUGEPAGE); /* fewer TLB misses; a refusal costs only speed */
  memset(cpu->memory, 0, cpu->memory_bytes);              /* touched now: a step must not change the process's memory */
  cpu->isa = lm_isa_choose();
  cpu->process = getpid();
  pthread_mutex_init(&cpu->sleep_lock, NULL);
  pthread_mutex_init(&cpu->call_lock, NULL);
  pthread_cond_init(&cpu->wake, NULL);

  sigset_t all, before; /* signals stay with the host's own threads */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (cpu->threads = 0; cpu->threads < threads; cpu->threads++) {
    struct lm_worker *worker = &cpu->workers[cpu->threads];
    worker->cpu = cpu;
    worker->scratch = cpu->memory + LM_SHARED_FLOATS + (int64_t)cpu->threads * LM_THREAD_FLOATS;
    if (cpu->threads > 0 && pthread_create(&worker->thread, NULL, worker_main, worker) != 0) break;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return cpu;
}

void lm_cpu_destroy(lm_cpu *cpu) {
  if (cpu == NULL) return;
  if (cpu->process == getpid()) {
    pthread_mutex_lock(&cpu->sleep_lock);
    atomic_store(&cpu->stop, 1);
    pthread_cond_broadcast(&cpu->wake);
    pthread_mutex_unlock(&cpu->sleep_lock);
    for (int32_t i = 1; i < cpu->threads; i++) pthread_join(cpu->workers[i].thread, NULL);
    pthread_cond_destroy(&cpu->wake);
    pthread_mutex_destroy(&cpu->call_lock);
    pthread_mutex_destroy(&cpu->sleep_lock);
  }
  munmap(cpu->memory, cpu->memory_bytes);
  free(cpu);
}

int32_t lm_cpu_threads(const lm_cpu *cpu) { return cpu->threads; }
const char *lm_cpu_isa(const lm_cpu *cpu) { return cpu->isa->name; }
uint64_t lm_cpu_scratch_bytes(const lm_cpu *cpu) { return cpu->memory_bytes; }
const lm_isa *lm_cpu_table(const lm_cpu *cpu) { return cpu->isa; }
float *lm_cpu_shared(const lm_cpu *cpu) { return cpu->memory; }

void lm_cpu_enter(lm_cpu *cpu) { pthread_mutex_lock(&cpu->call_lock); }
void lm_cpu_leave(lm_cpu *cpu) { pthread_mutex_unlock(&cpu->call_lock); }

void lm_cpu_parallel(lm_cpu *cpu, int64_t tasks, lm_task_fn fn, const void *arg) {
  float *scratch = cpu->workers[0].scratch;
  if (cpu->threads == 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; task++) fn(arg, task, scratch);
    return;
  }
  const uint64_t last = atomic_load_explicit(&cpu->ticket, memory_order_relaxed) >> 32, generation = (uint32_t)(last + 1);
  atomic_store_explicit(&cpu->ticket, last << 32 | CLOSED, memory_order_release);
  atomic_store_explicit(&cpu->fn, fn, memory_order_release);
  atomic_store_explicit(&cpu->arg, arg, memory_order_release);
  atomic_store_explicit(&cpu->tasks, (uint32_t)tasks, memory_order_release);
  atomic_store_explicit(&cpu->done, 0, memory_order_relaxed);
  atomic_store(&cpu->ticket, generation << 32);
  if (atomic_load(&cpu->sleepers) > 0 && cpu->process == getpid()) { /* a forked child copied the count, not the sleepers */
    pthread_mutex_lock(&cpu->sleep_lock);
    pthread_cond_broadcast(&cpu->wake);
    pthread_mutex_unlock(&cpu->sleep_lock);
  }
  work(cpu, generation, scratch);
  for (int spins = 0; atomic_load_explicit(&cpu->done, memory_order_acquire) != (uint32_t)tasks; spins++) {
    if (spins < 2000) pause_core();
    else sched_yield(); /* more threads than cores: let the one that holds a task run */
  }
}

typedef struct range_job {
  lm_range_fn fn;
  const void *arg;
  int64_t n;
  int64_t shares;
} range_job;

static void range_task(const void *pointer, int64_t task, float *scratch) {
  const range_job *job = pointer;
  job->fn(job->arg, job->n * task / job->shares, job->n * (task + 1) / job->shares, scratch);
}

void lm_cpu_ranges(lm_cpu *cpu, int64_t n, int64_t grain, lm_range_fn fn, const void *arg) {
  if (n <= 0) return;
  const int64_t shares = lm_min(lm_max(n / lm_max(grain, 1), 1), 4 * (int64_t)cpu->threads);
  const range_job job = {fn, arg, n, shares};
  lm_cpu_parallel(cpu, shares, range_task, &job);
}
