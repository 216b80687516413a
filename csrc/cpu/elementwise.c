/* elementwise.c: kernels over flat arrays. */
#include "cpu.h"
#include "kernels.h"

typedef struct job {
  const lm_isa *isa;
  const void *args;
} job;

static void scale_range(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_scale_args *a = j->args;
  (void)scratch;
  j->isa->scale(a->type, lm_at_mut(a->type, a->y, begin), lm_at(a->type, a->x, begin), end - begin, a->factor);
}

void lm_cpu_scale(lm_cpu *cpu, const lm_scale_args *args) {
  const job j = {lm_cpu_table(cpu), args};
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, args->n, LM_GRAIN, scale_range, &j);
  lm_cpu_leave(cpu);
}

static void add_range(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_add_args *a = j->args;
  (void)scratch;
  j->isa->add(a->type, lm_at_mut(a->type, a->y, begin), lm_at(a->type, a->a, begin), lm_at(a->type, a->b, begin),
              end - begin);
}

void lm_cpu_add(lm_cpu *cpu, const lm_add_args *args) {
  const job j = {lm_cpu_table(cpu), args};
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, args->n, LM_GRAIN, add_range, &j);
  lm_cpu_leave(cpu);
}

static void cast_range(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_cast_args *a = j->args;
  (void)scratch;
  j->isa->cast(lm_at_mut(a->y_type, a->y, begin), a->y_type, lm_at(a->type, a->x, begin), a->type, end - begin);
}

void lm_cpu_cast(lm_cpu *cpu, const lm_cast_args *args) {
  const job j = {lm_cpu_table(cpu), args};
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, args->n, LM_GRAIN, cast_range, &j);
  lm_cpu_leave(cpu);
}
