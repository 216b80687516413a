/* linear.cu: linear groups with LoRA, forward (backward: linear_backward.cu). */
#include "gemm_choice.h"
#include "kernels.h"

cudaError_t lm_cuda_lora_down(lm_cuda *cuda, const lm_lora_down_args *args, cudaStream_t stream) {
  const int32_t rank[3] = {args->rank0, args->rank1, args->rank2};
  const float scale[3] = {args->scale0, args->scale1, args->scale2};
  lm_gemm g = {};
  g.live = args->live;
  g.form = LM_NT;
  g.rows = args->rows;
  g.y_pitch = args->s_pitch;
  g.y_type = args->type;
  int64_t offset = 0;
  int32_t used = 0;
  for (int32_t i = 0; i < 3; i++) {
    if (rank[i] == 0) continue;
    lm_gemm_part *part = &g.part[used];
    if (used > 0 && part[-1].factor == scale[i]) { /* one wider product reads x once */
      part[-1].columns += rank[i];
    } else {
      part->columns = rank[i];
      part->depth[0] = args->in;
      part->factor = scale[i];
      part->left[0] = {args->x, args->x_pitch, args->type};
      part->right[0] = {lm_cuda_at(args->a_type, args->a, offset * args->in), args->in, args->a_type};
      part->y = lm_cuda_at(args->type, args->s, offset);
      used++;
    }
    offset += rank[i];
  }
  return lm_cuda_gemm(cuda, &g, lm_cuda_workspace(cuda, stream), cuda->workspace_bytes, stream);
}

cudaError_t lm_cuda_lora_linear_forward(lm_cuda *cuda, const lm_lora_linear_forward_args *args, cudaStream_t stream) {
  const int32_t out[3] = {args->out0, args->out1, args->out2}, rank[3] = {args->rank0, args->rank1, args->rank2};
  const void *b[3] = {args->b0, args->b1, args->b2};
  lm_gemm g = {};
  g.live = args->live;
  g.form = LM_NT;
  g.rows = args->rows;
  g.y_pitch = args->y_pitch;
  g.residual_pitch = args->residual_pitch;
  g.y_type = args->type;
  g.bias_type = args->bias_type;
  const bool plain = rank[0] + rank[1] + rank[2] == 0; /* no adapter: one part, so that tiles cross the borders */
  int64_t column = 0, offset = 0;
  for (int32_t i = 0; i < (plain ? 1 : 3); i++) {
    lm_gemm_part *part = &g.part[i];
    part->columns = plain ? args->out : out[i];
    part->depth[0] = args->in;
    part->factor = 1.0f;
    part->left[0] = {args->x, args->x_pitch, args->type};
    part->right[0] = {lm_cuda_at(args->w_type, args->w, column * args->w_pitch), args->w_pitch, args->w_type};
    if (rank[i] > 0) {
      part->depth[1] = rank[i];
      part->left[1] = {lm_cuda_at(args->type, args->s, offset), args->s_pitch, args->type};
      part->right[1] = {b[i], rank[i], args->b_type};
    }
    if (args->bias) part->bias = lm_cuda_at(args->bias_type, args->bias, column);
    if (args->residual) part->residual = lm_cuda_at(args->type, args->residual, column);
    part->y = lm_cuda_at(args->type, args->y, column);
    column += out[i];
    offset += rank[i];
  }
  void *const workspace = lm_cuda_workspace(cuda, stream);
  if (plain) return lm_cuda_gemm(cuda, &g, workspace, cuda->workspace_bytes, stream);
  /* The residual lies on the grid of its type, often with steps wider than all of s B^T: added to it alone, that would round
   * away, again and again in the same direction. Everything is one sum, which the library cannot make. */
  if (args->residual) return lm_cuda_gemm_own(cuda, &g, workspace, cuda->workspace_bytes, stream);

  /* With the library: y = s B^T + bias first, so that the base product reads y once and nothing else twice. */
  lm_gemm base = g, term = g;
  base.part[0].columns = args->out;
  base.part[0].depth[1] = base.part[1].columns = base.part[2].columns = 0;
  base.part[0].bias = nullptr;
  base.part[0].residual = args->y;
  base.residual_pitch = args->y_pitch;
  for (lm_gemm_part &p : term.part) {
    p.depth[0] = p.depth[1];
    p.left[0] = p.left[1], p.right[0] = p.right[1];
    p.depth[1] = 0;
  }
  lm_cuda_gemm_time(cuda, &g, &term, &base, (int32_t)offset, workspace, cuda->workspace_bytes, stream);
  if (!lm_cuda_gemm_library_pays(cuda, &base, (int32_t)offset))
    return lm_cuda_gemm_own(cuda, &g, workspace, cuda->workspace_bytes, stream);
  const cudaError_t error = lm_cuda_gemm_own(cuda, &term, workspace, cuda->workspace_bytes, stream);
  return error ? error : lm_cuda_gemm_library(cuda, &base, workspace, cuda->workspace_bytes, stream);
}
