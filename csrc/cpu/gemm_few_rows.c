/* gemm_few_rows.c: products with at most LM_FEW_ROWS rows. Memory bandwidth decides: the right operand is read once,
 * straight from storage, as dot products along its rows. Only the left rows are widened, into shared scratch. */
#include "gemm.h"

enum { COLUMNS = 32 }; /* of one task */

typedef struct few_job {
  const lm_gemm *g;
  const lm_isa *isa;
  const float *left[3][2]; /* [rows][depth] */
  int64_t tasks[3];
} few_job;

static void few_task(const void *pointer, int64_t task, float *scratch) {
  const few_job *j = pointer;
  const lm_gemm *g = j->g;
  int32_t i = 0;
  for (; task >= j->tasks[i]; i++) task -= j->tasks[i];
  const lm_gemm_part *part = &g->part[i];
  const int64_t column = task * COLUMNS, columns = lm_min(COLUMNS, part->columns - column);
  float *sum = scratch, *term = sum + LM_FEW_ROWS * COLUMNS, *extra = term + LM_FEW_ROWS * COLUMNS;
  for (int32_t o = 0; o < 2; o++) {
    const lm_matrix *w = &part->right[o];
    if (part->depth[o] == 0) continue;
    j->isa->dots(o == 0 ? sum : term, COLUMNS, j->left[i][o], part->depth[o], g->rows,
                 lm_at(w->type, w->data, column * w->pitch), w->type, w->pitch, columns, part->depth[o]);
  }
  for (int64_t r = 0; r < g->rows; r++) {
    float *y = sum + r * COLUMNS;
    if (part->factor != 1.0f) j->isa->scale(LM_F32, y, y, columns, part->factor);
    if (part->depth[1] > 0) j->isa->add(LM_F32, y, y, term + r * COLUMNS, columns);
    if (part->bias != NULL) {
      j->isa->cast(extra, LM_F32, lm_at(g->bias_type, part->bias, column), g->bias_type, columns);
      j->isa->add(LM_F32, y, y, extra, columns);
    }
    if (part->residual != NULL) {
      j->isa->cast(extra, LM_F32, lm_at(g->y_type, part->residual, r * g->residual_pitch + column), g->y_type, columns);
      j->isa->add(LM_F32, y, y, extra, columns);
    }
    const int64_t target = g->y_index != NULL ? g->y_index[r] : r;
    j->isa->cast(lm_at_mut(g->y_type, part->y, target * g->y_pitch + column), g->y_type, y, LM_F32, columns);
  }
}

int32_t lm_gemm_few_rows(lm_cpu *cpu, const lm_gemm *g) {
  int64_t depth = 0;
  for (int32_t i = 0; i < 3; i++) depth += g->part[i].depth[0] + g->part[i].depth[1];
  if (depth * g->planned_rows > LM_SHARED_FLOATS) return 0;
  few_job j = {.g = g, .isa = lm_cpu_table(cpu)};
  float *next = lm_cpu_shared(cpu);
  int64_t tasks = 0;
  for (int32_t i = 0; i < 3; i++) {
    const lm_gemm_part *part = &g->part[i];
    j.tasks[i] = lm_ceil_div(part->columns, COLUMNS);
    tasks += j.tasks[i];
    for (int32_t o = 0; o < 2 && part->columns > 0; o++) {
      const lm_matrix *x = &part->left[o];
      j.left[i][o] = next;
      for (int64_t r = 0; r < g->rows && part->depth[o] > 0; r++, next += part->depth[o]) {
        const int64_t source = o == 0 && g->left_index != NULL ? g->left_index[r] : r;
        j.isa->cast(next, LM_F32, lm_at(x->type, x->data, source * x->pitch), x->type, part->depth[o]);
      }
    }
  }
  lm_cpu_parallel(cpu, tasks, few_task, &j);
  return 1;
}
