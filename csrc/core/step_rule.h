/* step_rule.h: what is decided about an optimizer step, compiled into every backend so that all of them decide alike: one
 * thread runs it in device memory. See lm_grad_norm in loramem_training.h. */
#ifndef LM_STEP_RULE_H
#define LM_STEP_RULE_H

#include <float.h>
#include <math.h>

#include "../include/loramem.h"

#ifdef __CUDACC__
#define LM_RULE static __device__ __forceinline__
#else
#define LM_RULE static inline
#endif

/* Elements of one partial sum of a norm, as loramem_training.h sizes `partial`. */
enum { LM_NORM_BLOCK = 65536 };

/* A partial sum of squares is never negative: a negative one says which element of the gradient is not finite. */
LM_RULE double lm_rule_mark(int64_t element) { return -1.0 - (double)element; }
LM_RULE int64_t lm_rule_marked(double partial) { return (int64_t)(-1.0 - partial); }

/* Rate of the step after t updates; src/api/train/schedule.ts is the same formula. */
LM_RULE double lm_rule_learning_rate(const lm_optimizer_control *c, int64_t t) {
  const double pi = 3.14159265358979323846;
  const double warmup = c->warmup_steps > 0 ? fmin(1.0, (double)(t + 1) / (double)c->warmup_steps) : 1.0;
  const double progress = fmin(1.0, (double)t / fmax(1.0, (double)c->total_steps));
  const double fall = c->schedule == LM_SCHEDULE_COSINE   ? 0.5 * (1.0 + cos(pi * progress))
                      : c->schedule == LM_SCHEDULE_LINEAR ? 1.0 - progress
                                                          : 1.0;
  return c->learning_rate * warmup * fall;
}

/* One step of a scaler. A scale that would overflow is not adopted: gradients would be infinite for ever. */
LM_RULE void lm_rule_scaler(lm_scaler *s, int found) {
  if (found) {
    s->scale = fmaxf(s->scale * s->backoff_factor, s->min_scale);
    s->growth_tracker = 0;
  } else if (++s->growth_tracker >= s->growth_interval) {
    float grown = s->scale * s->growth_factor;
    if (s->max_scale > 0) grown = fminf(grown, fmaxf(s->scale, s->max_scale));
    if (grown <= FLT_MAX) s->scale = grown;
    s->growth_tracker = 0;
  }
}

LM_RULE lm_scaler lm_rule_scaler_of(const lm_scaler_set_args *a) {
  const lm_scaler s = {a->scale, a->growth_tracker, a->growth_factor, a->backoff_factor,
                       a->growth_interval, a->min_scale, a->max_scale, 0};
  return s;
}

LM_RULE void lm_rule_scaler_update(const lm_scaler_update_args *a) {
  int found = 0;
  for (int32_t i = 0; i < a->count; i++) {
    found |= a->found[i] != 0; /* NaN counts */
    a->found[i] = 0;
  }
  if (a->new_scale != 0) a->scaler->scale = a->new_scale;
  else lm_rule_scaler(a->scaler, found);
}

/* The whole decision.   squares  sum of the squares of g;  bad  first element that is not finite, -1 = none */
LM_RULE void lm_rule_step(const lm_grad_norm_args *a, double squares, int64_t bad) {
  const lm_optimizer_control *c = a->control;
  lm_step_metrics *m = a->metrics;
  const float scale = a->scaler ? a->scaler->scale : 1.0f;
  const double norm = bad < 0 ? sqrt(squares) / (double)scale : (double)NAN, wanted = c->max_norm / (norm + 1e-6);
  const double clip = c->max_norm > 0 && !(wanted >= 1) ? wanted : 1.0; /* NaN stays visible */
  const double factor = clip / (double)scale;
  /* Also where the scale is so small that 1 / scale is infinite, and where a square would be infinite in the second moment. */
  const int skipped = bad >= 0 || (a->found && *a->found != 0) || !(norm * clip <= 0x1p63) || !(factor <= (double)FLT_MAX);
  m->grad_norm = norm;
  m->clip = clip;
  m->learning_rate = lm_rule_learning_rate(c, a->state->step);
  m->bad_element = bad;
  m->loss_scale = scale;
  m->skipped = skipped;
  m->factor = (float)factor;
  if (skipped) a->state->skipped++;
  else a->state->step++;
  const double t = (double)a->state->step;
  m->step = a->state->step;
  m->decay = (float)(1.0 - m->learning_rate * c->weight_decay);
  m->rate = (float)(m->learning_rate / (1.0 - pow(c->beta1, t)));
  m->root = (float)(1.0 / sqrt(1.0 - pow(c->beta2, t)));
  if (a->scaler) lm_rule_scaler(a->scaler, skipped);
}

#endif
