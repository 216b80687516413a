/* kernels_threads_test.c: the worker pool, and kernels called from several threads at once. */
#include "kernels_test.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct tally {
  atomic_int *count;
  atomic_int outside;
} tally;

static void count_task(const void *arg, int64_t task, float *scratch) {
  const tally *t = arg;
  scratch[0] = (float)task; /* every thread has scratch of its own: the sanitizer would see two writers */
  atomic_fetch_add(&t->count[task], 1);
}

static void count_range(const void *arg, int64_t begin, int64_t end, float *scratch) {
  for (int64_t i = begin; i < end; i++) count_task(arg, i, scratch);
}

static int all_once(tally *t, int64_t n) {
  int right = 1;
  for (int64_t i = 0; i < n; i++) right &= atomic_exchange(&t->count[i], 0) == 1;
  return right;
}

static void test_every_task_once(lm_cpu *cpu) {
  static atomic_int count[1000];
  tally t = {.count = count};
  int right = 1;
  for (int round = 0; round < 2000; round++) {
    const int64_t tasks = round % 37;
    lm_cpu_enter(cpu);
    lm_cpu_parallel(cpu, tasks, count_task, &t);
    lm_cpu_leave(cpu);
    right &= all_once(&t, tasks);
    if (round % 500 == 0) usleep(2000); /* let the workers fall asleep */
  }
  CHECK(right, "lm_cpu_parallel x%d: a task ran twice or never", (int)lm_cpu_threads(cpu));
  for (int64_t n = 0; n <= 1000; n += 125) {
    lm_cpu_enter(cpu);
    lm_cpu_ranges(cpu, n, 7, count_range, &t);
    lm_cpu_leave(cpu);
    CHECK(all_once(&t, n), "lm_cpu_ranges x%d %d", (int)lm_cpu_threads(cpu), (int)n);
  }
}

typedef struct caller {
  pthread_t thread;
  lm_cpu *cpu;
  const matrix *x, *w;
  matrix y;
} caller;

static void multiply_once(caller *c) {
  const lm_lora_linear_forward_args args = {.size = sizeof args,
                                            .y = c->y.data,
                                            .x = c->x->data,
                                            .w = c->w->data,
                                            .rows = (int32_t)c->x->rows,
                                            .in = (int32_t)c->x->width,
                                            .out = (int32_t)c->w->rows,
                                            .y_pitch = (int32_t)c->y.pitch,
                                            .x_pitch = (int32_t)c->x->pitch,
                                            .w_pitch = (int32_t)c->w->pitch,
                                            .out0 = (int32_t)c->w->rows};
  lm_cpu_lora_linear_forward(c->cpu, &args);
}

static void *multiply_often(void *pointer) {
  for (int i = 0; i < 20; i++) multiply_once(pointer);
  return NULL;
}

/* Two streams share the device and its scratch. */
static void test_two_callers(lm_cpu *cpu) {
  const matrix x = matrix_random(LM_F32, 200, 90, 90, 200, 1), w = matrix_random(LM_F32, 70, 90, 90, 70, 1);
  const matrix u = matrix_random(LM_F32, 70, 90, 90, 70, 1);
  caller alone[2] = {{.cpu = cpu, .x = &x, .w = &w}, {.cpu = cpu, .x = &x, .w = &u}}, both[2];
  for (int i = 0; i < 2; i++) {
    alone[i].y = matrix_empty(LM_F32, 200, 70, 70);
    multiply_once(&alone[i]);
    both[i] = alone[i];
    both[i].y = matrix_empty(LM_F32, 200, 70, 70);
  }
  for (int i = 0; i < 2; i++) pthread_create(&both[i].thread, NULL, multiply_often, &both[i]);
  for (int i = 0; i < 2; i++) pthread_join(both[i].thread, NULL);
  for (int i = 0; i < 2; i++) {
    CHECK(same_rows(&alone[i].y, &both[i].y, 200), "two callers x%d disturb each other", (int)lm_cpu_threads(cpu));
    free(alone[i].y.data), free(both[i].y.data);
  }
  free(x.data), free(w.data), free(u.data);
}

#ifndef __SANITIZE_THREAD__ /* the thread sanitizer does not follow a fork with threads */
/* A forked child has no workers: kernels still run, and destroying does not wait for them. */
static void test_fork(void) {
  lm_cpu *cpu = lm_cpu_create(3);
  usleep(2000);
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    static atomic_int count[50];
    tally t = {.count = count};
    alarm(20);
    lm_cpu_enter(cpu);
    lm_cpu_parallel(cpu, 50, count_task, &t);
    lm_cpu_leave(cpu);
    lm_cpu_destroy(cpu);
    _exit(all_once(&t, 50) ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0, "a forked child: status %d", status);
  lm_cpu_destroy(cpu);
}
#else
static void test_fork(void) {}
#endif

int main(void) {
  CHECK(lm_cpu_available() >= 1, "lm_cpu_available: %d", (int)lm_cpu_available());
  for (int threads = 1; threads <= 4; threads++) {
    lm_cpu *cpu = lm_cpu_create(threads);
    CHECK(lm_cpu_threads(cpu) == threads, "lm_cpu_threads: %d for %d", (int)lm_cpu_threads(cpu), threads);
    CHECK(lm_cpu_scratch_bytes(cpu) > 0, "lm_cpu_scratch_bytes");
    test_every_task_once(cpu);
    test_two_callers(cpu);
    lm_cpu_destroy(cpu);
  }
  for (int i = 0; i < 20; i++) lm_cpu_destroy(lm_cpu_create(1 + i % 4));
  lm_cpu_destroy(NULL);
  test_fork();
  lm_cpu *all = lm_cpu_create(0);
  CHECK(lm_cpu_threads(all) == lm_cpu_available(), "lm_cpu_create(0): %d threads", (int)lm_cpu_threads(all));
  lm_cpu_destroy(all);
  return report();
}
