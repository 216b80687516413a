/* threads.h: the CPU device: worker threads, scratch memory and the chosen instruction set. */
#ifndef LM_CPU_THREADS_H
#define LM_CPU_THREADS_H

#include <stdint.h>

typedef struct lm_cpu lm_cpu;

/* lm_cpu_create: start the workers and reserve all scratch memory that kernels will ever use.
 *   threads  threads that compute, the caller's included; 0 = lm_cpu_available()
 * @return an owned device, or NULL (out of memory). If the system grants fewer threads, the device has fewer. */
lm_cpu *lm_cpu_create(int32_t threads);

/* lm_cpu_destroy: stop the workers. NULL is a no-op. No kernel may be running. In a forked child, which has no workers, it
 * only frees memory. */
void lm_cpu_destroy(lm_cpu *cpu);

/* lm_cpu_threads: threads that compute, the caller's included. */
int32_t lm_cpu_threads(const lm_cpu *cpu);

/* lm_cpu_isa: "avx512", "avx2" or "scalar". The environment variable LORAMEM_ISA lowers it when the device is created. */
const char *lm_cpu_isa(const lm_cpu *cpu);

/* lm_cpu_scratch_bytes: memory reserved and touched by lm_cpu_create; it never grows. */
uint64_t lm_cpu_scratch_bytes(const lm_cpu *cpu);

/* lm_cpu_available: cores that this process may use: the affinity mask, one per physical core, limited by the cgroup's
 * CPU quota. At least 1. */
int32_t lm_cpu_available(void);

/* A task of a parallel region. `scratch` belongs to the thread that runs the task, LM_THREAD_FLOATS long. */
typedef void (*lm_task_fn)(const void *arg, int64_t task, float *scratch);

/* A share [begin, end) of a range. */
typedef void (*lm_range_fn)(const void *arg, int64_t begin, int64_t end, float *scratch);

/* lm_cpu_enter, lm_cpu_leave: around each kernel; streams that share the device take turns kernel by kernel. */
void lm_cpu_enter(lm_cpu *cpu);
void lm_cpu_leave(lm_cpu *cpu);

/* lm_cpu_parallel: run fn(arg, 0 .. tasks - 1), return when all have ended. Between enter and leave only.
 * Which thread runs a task is not fixed, so a task must own what it writes. Costs 1-3 us. */
void lm_cpu_parallel(lm_cpu *cpu, int64_t tasks, lm_task_fn fn, const void *arg);

/* lm_cpu_ranges: cut [0, n) into even shares of at least `grain` and run them; a single share wakes nobody. */
void lm_cpu_ranges(lm_cpu *cpu, int64_t n, int64_t grain, lm_range_fn fn, const void *arg);

#endif
