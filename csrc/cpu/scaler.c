/* scaler.c: the gradient scaler over any buffers. */
#include <math.h>

#include "../core/step_rule.h"
#include "cpu.h"
#include "kernels.h"

typedef struct scaler_job {
  const lm_isa *isa;
  float *y;
  const float *x;
  float factor;
  float *found; /* NULL = do not look */
} scaler_job;

static void scale_range(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const scaler_job *j = pointer;
  (void)scratch;
  if (j->found) {
    int finite = 1;
    for (int64_t i = begin; i < end; i++) finite &= isfinite(j->x[i]) != 0;
    /* Several threads may store, but only this one value. */
    if (!finite) __atomic_store_n((uint32_t *)(void *)j->found, UINT32_C(0x3f800000), __ATOMIC_RELAXED);
  }
  j->isa->scale(LM_F32, j->y + begin, j->x + begin, end - begin, j->factor);
}

static void run(lm_cpu *cpu, scaler_job j, int64_t n) {
  j.isa = lm_cpu_table(cpu);
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, n, LM_GRAIN, scale_range, &j);
  lm_cpu_leave(cpu);
}

void lm_cpu_scaler_set(lm_cpu *cpu, const lm_scaler_set_args *args) {
  (void)cpu;
  *args->scaler = lm_rule_scaler_of(args);
}

void lm_cpu_scaler_scale(lm_cpu *cpu, const lm_scaler_scale_args *args) {
  run(cpu, (scaler_job){.y = args->y, .x = args->x, .factor = args->scaler->scale}, args->n);
}

void lm_cpu_scaler_unscale(lm_cpu *cpu, const lm_scaler_unscale_args *args) {
  const float inverse = (float)(1.0 / (double)args->scaler->scale);
  run(cpu, (scaler_job){.y = args->g, .x = args->g, .factor = inverse, .found = args->found}, args->n);
}

void lm_cpu_scaler_update(lm_cpu *cpu, const lm_scaler_update_args *args) {
  (void)cpu;
  lm_rule_scaler_update(args);
}
