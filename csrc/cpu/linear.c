/* linear.c: linear groups with LoRA, forward (backward: linear_backward.c). */
#include "gemm.h"
#include "kernels.h"

void lm_cpu_lora_down(lm_cpu *cpu, const lm_lora_down_args *args) {
  const int32_t rank[3] = {args->rank0, args->rank1, args->rank2};
  const float scale[3] = {args->scale0, args->scale1, args->scale2};
  lm_gemm g = {.rows = lm_live_rows(args->live, args->rows),
               .planned_rows = args->rows,
               .y_pitch = args->s_pitch,
               .y_type = args->type,
               .transposed = 1};
  int64_t offset = 0;
  int32_t used = 0;
  for (int32_t i = 0; i < 3; i++) {
    if (rank[i] == 0) continue;
    lm_gemm_part *part = &g.part[used];
    if (used > 0 && part[-1].factor == scale[i]) { /* one wider product fills the vectors better */
      part[-1].columns += rank[i];
    } else {
      part->columns = rank[i];
      part->depth[0] = args->in;
      part->left[0] = (lm_matrix){args->x, args->x_pitch, args->type};
      part->right[0] = (lm_matrix){lm_at(args->a_type, args->a, offset * args->in), args->in, args->a_type};
      part->y = lm_at_mut(args->type, args->s, offset);
      part->factor = scale[i];
      used++;
    }
    offset += rank[i];
  }
  lm_cpu_enter(cpu);
  lm_gemm_run(cpu, &g);
  lm_cpu_leave(cpu);
}

void lm_cpu_lora_linear_forward(lm_cpu *cpu, const lm_lora_linear_forward_args *args) {
  const int32_t out[3] = {args->out0, args->out1, args->out2}, rank[3] = {args->rank0, args->rank1, args->rank2};
  const void *b[3] = {args->b0, args->b1, args->b2};
  lm_gemm g = {.rows = lm_live_rows(args->live, args->rows),
               .planned_rows = args->rows,
               .y_pitch = args->y_pitch,
               .residual_pitch = args->residual_pitch,
               .y_type = args->type,
               .bias_type = args->bias_type,
               .transposed = 1};
  const int32_t plain = rank[0] + rank[1] + rank[2] == 0; /* no adapter: one part, so that panels cross the borders */
  int64_t column = 0, offset = 0;
  for (int32_t i = 0; i < (plain ? 1 : 3); i++) {
    lm_gemm_part *part = &g.part[i];
    part->columns = plain ? args->out : out[i];
    part->factor = 1.0f;
    part->depth[0] = args->in;
    part->left[0] = (lm_matrix){args->x, args->x_pitch, args->type};
    part->right[0] = (lm_matrix){lm_at(args->w_type, args->w, column * args->w_pitch), args->w_pitch, args->w_type};
    if (rank[i] > 0) {
      part->depth[1] = rank[i];
      part->left[1] = (lm_matrix){lm_at(args->type, args->s, offset), args->s_pitch, args->type};
      part->right[1] = (lm_matrix){b[i], rank[i], args->b_type};
    }
    if (args->bias != NULL) part->bias = lm_at(args->bias_type, args->bias, column);
    if (args->residual != NULL) part->residual = lm_at(args->type, args->residual, column);
    part->y = lm_at_mut(args->type, args->y, column);
    column += out[i];
    offset += rank[i];
  }
  lm_cpu_enter(cpu);
  lm_gemm_run(cpu, &g);
  lm_cpu_leave(cpu);
}
