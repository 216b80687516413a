/* optimizer.c: gradient norm and AdamW over flat arenas. */
#include "optimizer.h"

#include <math.h>

#include "../core/step_rule.h"
#include "cpu.h"
#include "kernels.h"

typedef struct norm_job {
  const lm_isa *isa;
  const lm_grad_norm_args *args;
} norm_job;

/* Where squares overflow f32 or an element is not finite: in double precision, or the mark of the first bad element. */
static double careful_squares(const float *g, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t i = begin; i < end; i++) {
    if (!isfinite(g[i])) return lm_rule_mark(i);
    sum += (double)g[i] * (double)g[i];
  }
  return sum;
}

static void norm_block(const void *pointer, int64_t block, float *scratch) {
  const norm_job *j = pointer;
  const int64_t begin = block * LM_NORM_BLOCK, end = lm_min(begin + LM_NORM_BLOCK, j->args->n);
  (void)scratch;
  const double sum = j->isa->sum_squares(j->args->g + begin, end - begin);
  j->args->partial[block] = isfinite(sum) ? sum : careful_squares(j->args->g, begin, end);
}

void lm_cpu_grad_norm(lm_cpu *cpu, const lm_grad_norm_args *args) {
  const norm_job j = {lm_cpu_table(cpu), args};
  const int64_t blocks = lm_ceil_div(args->n, LM_NORM_BLOCK);
  lm_cpu_enter(cpu);
  lm_cpu_parallel(cpu, blocks, norm_block, &j);
  lm_cpu_leave(cpu);
  double sum = 0;
  int64_t bad = -1;
  for (int64_t i = 0; i < blocks; i++) {
    if (args->partial[i] >= 0) sum += args->partial[i];
    else if (bad < 0) bad = lm_rule_marked(args->partial[i]);
  }
  lm_rule_step(args, sum, bad);
}

typedef struct adamw_job {
  const lm_isa *isa;
  lm_adamw_step step;
} adamw_job;

static void adamw_range(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const adamw_job *j = pointer;
  (void)scratch;
  j->isa->adamw(&j->step, begin, end);
}

static void zero_range(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const adamw_job *j = pointer;
  (void)scratch;
  for (int64_t i = begin; i < end; i++) j->step.g[i] = 0;
}

void lm_cpu_adamw(lm_cpu *cpu, const lm_adamw_args *args) {
  const lm_optimizer_control *c = args->control;
  const lm_step_metrics *m = args->metrics;
  const adamw_job j = {lm_cpu_table(cpu),
                       {.p = args->p,
                        .m = args->m,
                        .v = args->v,
                        .g = args->g,
                        .copy = args->copy,
                        .copy_type = args->copy_type,
                        .factor = m->factor,
                        .decay = m->decay,
                        .rate = m->rate,
                        .root = m->root,
                        .eps = (float)c->eps,
                        .beta1 = (float)c->beta1,
                        .beta2 = (float)c->beta2,
                        .rest1 = (float)(1.0 - c->beta1),
                        .rest2 = (float)(1.0 - c->beta2)}};
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, args->n, LM_GRAIN, m->skipped ? zero_range : adamw_range, &j);
  lm_cpu_leave(cpu);
}
