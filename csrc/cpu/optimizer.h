/* optimizer.h: one AdamW update with its factors worked out once. */
#ifndef LM_CPU_OPTIMIZER_H
#define LM_CPU_OPTIMIZER_H

#include <stdint.h>

/* p = p * decay - rate * m / (sqrt(v) * root + eps), with m and v updated from clip * g first. */
typedef struct lm_adamw_step {
  float *p, *m, *v, *g;
  void *copy;
  int32_t copy_type;
  float clip;
  float decay; /* 1 - learning_rate * weight_decay */
  float rate;  /* learning_rate / bias_correction1 */
  float root;  /* 1 / sqrt(bias_correction2) */
  float eps, beta1, beta2;
} lm_adamw_step;

#endif
