/* loss.c: cross entropy of a linear layer over the labelled rows, chunk by chunk, and the sum of losses.
 * The products read and write rows through label_rows, so the `gathered` workspace is not needed here. */
#include "gemm.h"
#include "kernels.h"

typedef struct loss_job {
  const lm_isa *isa;
  const lm_linear_cross_entropy_args *args;
  int64_t first; /* labelled row of the chunk */
  float weight;
} loss_job;

static void loss_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const loss_job *j = pointer;
  const lm_linear_cross_entropy_args *a = j->args;
  (void)scratch;
  for (int64_t i = begin; i < end; i++) {
    const int32_t id = a->label_ids[j->first + i], label = id >= 0 && id < a->vocab ? id : 0;
    a->loss[j->first + i] = j->isa->cross_entropy(a->type, lm_at_mut(a->type, a->logits, i * a->vocab), a->vocab, label,
                                                  j->weight, a->dx != NULL);
  }
}

void lm_cpu_linear_cross_entropy(lm_cpu *cpu, const lm_linear_cross_entropy_args *args) {
  const int64_t first = (int64_t)args->chunk * args->chunk_rows;
  const int64_t labelled = lm_max(0, lm_min(args->batch->labelled, args->rows));
  const int64_t rows = lm_min(labelled - first, args->chunk_rows);
  if (rows <= 0) return;
  const int32_t *index = args->label_rows + first;
  for (int64_t i = 0; i < rows; i++)
    if (index[i] < 0 || index[i] >= args->rows) return; /* rather than write outside */
  lm_gemm logits = {.rows = rows,
                    .planned_rows = args->chunk_rows,
                    .y_pitch = args->vocab,
                    .left_index = index,
                    .y_type = args->type,
                    .transposed = 1};
  logits.part[0] = (lm_gemm_part){.columns = args->vocab,
                                  .depth = {args->width, 0},
                                  .left = {{args->x, args->x_pitch, args->type}},
                                  .right = {{args->w, args->w_pitch, args->w_type}},
                                  .y = args->logits,
                                  .factor = 1.0f};
  const float scale = args->scaler != NULL ? args->scaler->scale : 1.0f;
  const loss_job j = {lm_cpu_table(cpu), args, first, args->batch->loss_weight * scale};
  lm_cpu_enter(cpu);
  lm_gemm_run(cpu, &logits);
  lm_cpu_ranges(cpu, rows, lm_grain_rows(8 * (int64_t)args->vocab), loss_rows, &j);
  if (args->dx != NULL) {
    lm_gemm back = {
        .rows = rows, .planned_rows = args->chunk_rows, .y_pitch = args->dx_pitch, .y_index = index, .y_type = args->type};
    back.part[0] = (lm_gemm_part){.columns = args->width,
                                  .depth = {args->vocab, 0},
                                  .left = {{args->logits, args->vocab, args->type}},
                                  .right = {{args->w, args->w_pitch, args->w_type}},
                                  .y = args->dx,
                                  .factor = 1.0f};
    lm_gemm_run(cpu, &back);
  }
  lm_cpu_leave(cpu);
}

void lm_cpu_loss_sum(lm_cpu *cpu, const lm_loss_sum_args *args) {
  (void)cpu;
  const int64_t labelled = lm_max(0, lm_min(args->batch->labelled, args->rows));
  double sum = 0;
  for (int64_t i = 0; i < labelled; i++) sum += (double)args->loss[i];
  args->metrics->loss_sum += sum;
}
