/* optimizer.c: gradient norm and AdamW over flat arenas. */
#include "optimizer.h"

#include <math.h>

#include "cpu.h"
#include "kernels.h"

enum { NORM_BLOCK = 65536 }; /* elements of one partial sum, as loramem_kernels.h sizes `partial` */

typedef struct norm_job {
  const lm_isa *isa;
  const lm_grad_norm_args *args;
} norm_job;

static void norm_block(const void *pointer, int64_t block, float *scratch) {
  const norm_job *j = pointer;
  const int64_t begin = block * NORM_BLOCK;
  (void)scratch;
  j->args->partial[block] = j->isa->sum_squares(j->args->g + begin, lm_min(NORM_BLOCK, j->args->n - begin));
}

void lm_cpu_grad_norm(lm_cpu *cpu, const lm_grad_norm_args *args) {
  const norm_job j = {lm_cpu_table(cpu), args};
  const int64_t blocks = lm_ceil_div(args->n, NORM_BLOCK);
  lm_cpu_enter(cpu);
  lm_cpu_parallel(cpu, blocks, norm_block, &j);
  lm_cpu_leave(cpu);
  double sum = 0;
  for (int64_t i = 0; i < blocks; i++) sum += args->partial[i];
  const double norm = sqrt(sum), limit = (double)args->control->max_norm;
  args->metrics->grad_norm = norm;
  args->metrics->clip = 1;
  if (limit > 0 && !(limit / (norm + 1e-6) >= 1)) args->metrics->clip = limit / (norm + 1e-6); /* NaN stays visible */
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

void lm_cpu_adamw(lm_cpu *cpu, const lm_adamw_args *args) {
  const lm_optimizer_control *c = args->control;
  const adamw_job j = {lm_cpu_table(cpu),
                       {.p = args->p,
                        .m = args->m,
                        .v = args->v,
                        .g = args->g,
                        .copy = args->copy,
                        .copy_type = args->copy_type,
                        .clip = (float)args->metrics->clip,
                        .decay = 1.0f - c->learning_rate * c->weight_decay,
                        .rate = c->learning_rate / c->bias_correction1,
                        .root = 1.0f / sqrtf(c->bias_correction2),
                        .eps = c->eps,
                        .beta1 = c->beta1,
                        .beta2 = c->beta2}};
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, args->n, LM_GRAIN, adamw_range, &j);
  lm_cpu_leave(cpu);
}
