/* rows.c: kernels that treat every row by itself. */
#include "cpu.h"
#include "kernels.h"

typedef struct job {
  const lm_isa *isa;
  const void *args;
} job;

/* run: rows [0, live) in shares of about LM_GRAIN elements. */
static void run(lm_cpu *cpu, const void *args, const int32_t *live, int32_t rows, int64_t width, lm_range_fn fn) {
  const job j = {lm_cpu_table(cpu), args};
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, lm_live_rows(live, rows), lm_grain_rows(width), fn, &j);
  lm_cpu_leave(cpu);
}

/* An index outside [0, n) reads row 0. */
static int64_t clamped(int32_t index, int32_t n) { return index >= 0 && index < n ? index : 0; }

static void embedding_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_embedding_forward_args *a = j->args;
  (void)scratch;
  for (int64_t t = begin; t < end; t++)
    j->isa->cast(lm_at_mut(a->type, a->y, t * a->y_pitch), a->type,
                 lm_at(a->table_type, a->table, clamped(a->ids[t], a->vocab) * a->width), a->table_type, a->width);
}

void lm_cpu_embedding_forward(lm_cpu *cpu, const lm_embedding_forward_args *args) {
  run(cpu, args, args->live, args->rows, args->width, embedding_rows);
}

static void gather_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_gather_rows_args *a = j->args;
  (void)scratch;
  for (int64_t i = begin; i < end; i++)
    j->isa->cast(lm_at_mut(a->type, a->y, i * a->y_pitch), a->type,
                 lm_at(a->type, a->x, clamped(a->index[i], a->source_rows) * a->x_pitch), a->type, a->width);
}

void lm_cpu_gather_rows(lm_cpu *cpu, const lm_gather_rows_args *args) {
  run(cpu, args, args->live, args->rows, args->width, gather_rows);
}

static void argmax_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_argmax_args *a = j->args;
  (void)scratch;
  for (int64_t t = begin; t < end; t++)
    a->out[t] = (int32_t)j->isa->argmax(a->type, lm_at(a->type, a->x, t * a->x_pitch), a->width);
}

void lm_cpu_argmax(lm_cpu *cpu, const lm_argmax_args *args) {
  run(cpu, args, args->live, args->rows, args->width, argmax_rows);
}

static void rms_norm_forward_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_rms_norm_forward_args *a = j->args;
  (void)scratch;
  for (int64_t t = begin; t < end; t++)
    j->isa->rms_norm_forward(a->type, lm_at_mut(a->type, a->y, t * a->y_pitch), lm_at(a->type, a->x, t * a->x_pitch),
                             a->weight, a->weight_type, a->width, a->eps);
}

void lm_cpu_rms_norm_forward(lm_cpu *cpu, const lm_rms_norm_forward_args *args) {
  run(cpu, args, args->live, args->rows, args->width, rms_norm_forward_rows);
}

static void rms_norm_backward_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_rms_norm_backward_args *a = j->args;
  (void)scratch;
  for (int64_t t = begin; t < end; t++)
    j->isa->rms_norm_backward(a->type, lm_at_mut(a->type, a->dx, t * a->dx_pitch),
                              a->y != NULL ? lm_at_mut(a->type, a->y, t * a->y_pitch) : NULL, lm_at(a->type, a->dy, t * a->dy_pitch),
                              lm_at(a->type, a->x, t * a->x_pitch), a->weight, a->weight_type,
                              a->add != NULL ? lm_at(a->type, a->add, t * a->add_pitch) : NULL, a->width, a->eps);
}

void lm_cpu_rms_norm_backward(lm_cpu *cpu, const lm_rms_norm_backward_args *args) {
  run(cpu, args, args->live, args->rows, args->width, rms_norm_backward_rows);
}

static void glu_forward_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_glu_forward_args *a = j->args;
  (void)scratch;
  for (int64_t t = begin; t < end; t++)
    j->isa->glu_forward(a->type, lm_at_mut(a->type, a->h, t * a->h_pitch), lm_at(a->type, a->gu, t * a->gu_pitch),
                        a->width);
}

void lm_cpu_glu_forward(lm_cpu *cpu, const lm_glu_forward_args *args) {
  run(cpu, args, args->live, args->rows, 4 * (int64_t)args->width, glu_forward_rows);
}

static void glu_backward_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_glu_backward_args *a = j->args;
  (void)scratch;
  for (int64_t t = begin; t < end; t++)
    j->isa->glu_backward(a->type, lm_at_mut(a->type, a->dgu, t * a->dgu_pitch),
                         a->h != NULL ? lm_at_mut(a->type, a->h, t * a->h_pitch) : NULL, lm_at(a->type, a->dh, t * a->dh_pitch),
                         lm_at(a->type, a->gu, t * a->gu_pitch), a->width);
}

void lm_cpu_glu_backward(lm_cpu *cpu, const lm_glu_backward_args *args) {
  run(cpu, args, args->live, args->rows, 4 * (int64_t)args->width, glu_backward_rows);
}

static void rope_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const job *j = pointer;
  const lm_rope_args *a = j->args;
  const int64_t half = a->head_dim / 2, rotated = (int64_t)a->heads * a->head_dim;
  (void)scratch;
  for (int64_t t = begin; t < end; t++) {
    const int64_t position = clamped(a->positions[t], a->position_count);
    const void *x = lm_at(a->type, a->x, t * a->x_pitch);
    void *y = lm_at_mut(a->type, a->y, t * a->y_pitch);
    for (int64_t i = 0; i < rotated; i += a->head_dim)
      j->isa->rope(a->type, lm_at_mut(a->type, y, i), lm_at(a->type, x, i), a->cos + position * half,
                   a->sin + position * half, half, (float)a->direction);
    if (x != y && rotated < a->width)
      j->isa->cast(lm_at_mut(a->type, y, rotated), a->type, lm_at(a->type, x, rotated), a->type, a->width - rotated);
  }
}

void lm_cpu_rope(lm_cpu *cpu, const lm_rope_args *args) { run(cpu, args, args->live, args->rows, args->width, rope_rows); }
