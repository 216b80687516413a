/* cpu.h: what the kernels see of the CPU device. */
#ifndef LM_CPU_H
#define LM_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "loramem.h"
#include "threads.h"

/* Scratch, reserved once. The thread's part holds the tiles of the largest user (attention backward at head size 256); the
 * shared part holds packed weights, and larger matrices pass through it block by block. */
#define LM_THREAD_FLOATS (288 * 1024)
#define LM_SHARED_FLOATS (2 * 1024 * 1024)

/* Elements of a row-wise kernel below which a share is not worth another thread. */
#define LM_GRAIN 16384

const lm_isa *lm_cpu_table(const lm_cpu *cpu);
float *lm_cpu_shared(const lm_cpu *cpu);

/* lm_isa_choose: the best table that this machine and LORAMEM_ISA allow. */
const lm_isa *lm_isa_choose(void);

static inline int64_t lm_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t lm_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t lm_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* lm_at: element `index` of an array of activations. */
static inline const void *lm_at(int32_t type, const void *base, int64_t index) {
  return (const char *)base + index * (type == LM_F32 ? 4 : 2);
}
static inline void *lm_at_mut(int32_t type, void *base, int64_t index) {
  return (char *)base + index * (type == LM_F32 ? 4 : 2);
}

/* lm_live_rows: rows that hold data. */
static inline int32_t lm_live_rows(const int32_t *live, int32_t rows) {
  if (live == NULL || *live >= rows) return rows;
  return *live < 0 ? 0 : *live;
}

/* lm_grain_rows: rows that make a share of LM_GRAIN elements. */
static inline int64_t lm_grain_rows(int64_t width) { return lm_max(1, LM_GRAIN / lm_max(1, width)); }

#endif
