/* optimizer.h: one AdamW update with its factors worked out once. */
#ifndef LM_CPU_OPTIMIZER_H
#define LM_CPU_OPTIMIZER_H

#include <stdint.h>

/* p = p * decay - rate * m / (sqrt(v) * root + eps), with m and v updated from factor * g first. */
typedef struct lm_adamw_step {
  float *p, *m, *v, *g;
  void *copy;
  int32_t copy_type;
  float factor, decay, rate, root; /* of lm_step_metrics */
  float eps, beta1, beta2;
  float rest1, rest2; /* 1 - beta, rounded once: 1 - 0.999f is off by 1e-5 of itself */
} lm_adamw_step;

#endif
