/* linear_backward.cu: gradients of a linear group:
 *   1  ds_i = scale_i dy_i B_i and dB_i += dy_i^T s_i, in one read of dy where linear_gradient.cu can
 *   2  dx = [dy | ds] [W ; A], written once
 *   3  dA += ds^T x
 * The last is lm_lora_down_backward, which the caller may ask for later. */
#include "gemm_choice.h"
#include "kernels.h"
#include "linear_gradient.cuh"
#include "lora_down.h"

/* ds as it is stored: if the tensor cores read it again, in 16 bits; those are half the width of the fp32 rows that the caller
 * planned, so lines may be padded to whole 16-byte words. */
static lm_matrix ds_matrix(const float *ds, int32_t ranks, int32_t type, int32_t a_type) {
  if (type == LM_F32 || a_type != type) return {ds, ranks, LM_F32};
  const int32_t padded = (ranks + 7) / 8 * 8;
  return {ds, padded <= 2 * ranks ? padded : ranks, type};
}

/* What the products of a group share. */
struct backward_group {
  const lm_lora_linear_backward_args *args;
  int32_t out[3], rank[3], ranks;
  float scale[3];
  const void *b[3];
  float *db[3];
  lm_matrix ds; /* [T, R] */
  void *workspace;
};

static cudaError_t multiply(lm_cuda *cuda, const backward_group &k, const lm_gemm &g, cudaStream_t stream) {
  return lm_cuda_gemm(cuda, &g, k.workspace, cuda->workspace_bytes, stream);
}

static lm_gemm product_of(const backward_group &k, lm_form form, int32_t rows, int32_t y_pitch, int32_t y_type) {
  lm_gemm g = {};
  g.live = k.args->live;
  g.form = form;
  g.rows = rows;
  g.y_pitch = g.residual_pitch = y_pitch;
  g.y_type = y_type;
  return g;
}

static cudaError_t ds_product(lm_cuda *cuda, const backward_group &k, cudaStream_t stream) {
  const lm_lora_linear_backward_args *a = k.args;
  lm_gemm g = product_of(k, LM_NN, a->rows, k.ds.pitch, k.ds.type);
  int64_t column = 0, offset = 0;
  for (int i = 0; i < 3; i++) {
    if (k.rank[i] > 0) {
      lm_gemm_part &p = g.part[i];
      p.columns = k.rank[i];
      p.depth[0] = k.out[i];
      p.factor = k.scale[i];
      p.left[0] = {lm_cuda_at(a->type, a->dy, column), a->dy_pitch, a->type};
      p.right[0] = {k.b[i], k.rank[i], a->a_type};
      p.y = lm_cuda_at(k.ds.type, k.ds.data, offset);
    }
    column += k.out[i];
    offset += k.rank[i];
  }
  return multiply(cuda, k, g, stream);
}

static cudaError_t db_products(lm_cuda *cuda, const backward_group &k, cudaStream_t stream) {
  const lm_lora_linear_backward_args *a = k.args;
  int64_t column = 0, offset = 0;
  for (int i = 0; i < 3; i++) {
    if (k.rank[i] > 0) {
      lm_gemm g = product_of(k, LM_TN, k.out[i], k.rank[i], LM_F32);
      lm_gemm_part &p = g.part[0];
      p.columns = k.rank[i];
      p.depth[0] = a->rows;
      p.factor = 1.0f;
      p.left[0] = {lm_cuda_at(a->type, a->dy, column), a->dy_pitch, a->type};
      p.right[0] = {lm_cuda_at(a->type, a->s, offset), a->s_pitch, a->type};
      p.residual = p.y = k.db[i];
      const cudaError_t error = multiply(cuda, k, g, stream);
      if (error) return error;
    }
    column += k.out[i];
    offset += k.rank[i];
  }
  return cudaSuccess;
}

static cudaError_t dx_product(lm_cuda *cuda, const backward_group &k, cudaStream_t stream) {
  const lm_lora_linear_backward_args *a = k.args;
  lm_gemm g = product_of(k, LM_NN, a->rows, a->dx_pitch, a->type);
  lm_gemm_part &p = g.part[0];
  p.columns = a->in;
  p.depth[0] = a->out;
  p.factor = 1.0f;
  p.left[0] = {a->dy, a->dy_pitch, a->type};
  p.right[0] = {a->w, a->w_pitch, a->w_type};
  if (k.ranks > 0) {
    p.depth[1] = k.ranks;
    p.left[1] = k.ds;
    p.right[1] = {a->a, a->in, a->a_type};
  }
  p.y = a->dx;
  if (k.ranks == 0) return multiply(cuda, k, g, stream);

  /* With the library: dx = ds A first, so that the base product reads dx once. */
  lm_gemm base = g, term = g;
  base.part[0].depth[1] = 0;
  base.part[0].residual = a->dx;
  lm_gemm_part &t = term.part[0];
  t.depth[0] = k.ranks;
  t.depth[1] = 0;
  t.left[0] = t.left[1], t.right[0] = t.right[1];
  lm_cuda_gemm_time(cuda, &g, &term, &base, k.ranks, k.workspace, cuda->workspace_bytes, stream);
  if (!lm_cuda_gemm_library_pays(cuda, &base, k.ranks))
    return lm_cuda_gemm_own(cuda, &g, k.workspace, cuda->workspace_bytes, stream);
  const cudaError_t error = lm_cuda_gemm_own(cuda, &term, k.workspace, cuda->workspace_bytes, stream);
  return error ? error : lm_cuda_gemm_library(cuda, &base, k.workspace, cuda->workspace_bytes, stream);
}

cudaError_t lm_cuda_lora_down_backward(lm_cuda *cuda, const lm_lora_down_backward_args *a, cudaStream_t stream) {
  const int32_t ranks = a->rank0 + a->rank1 + a->rank2;
  const lm_matrix ds = ds_matrix(a->ds, ranks, a->type, a->a_type);
  const cudaError_t error = lm_cuda_lora_down_gradient(cuda, a, ds, stream);
  if (error != cudaErrorNotSupported) return error;
  lm_gemm g = {};
  g.live = a->live;
  g.form = LM_TN;
  g.rows = ranks;
  g.y_pitch = g.residual_pitch = a->in;
  g.y_type = LM_F32;
  lm_gemm_part &p = g.part[0];
  p.columns = a->in;
  p.depth[0] = a->rows;
  p.factor = 1.0f;
  p.left[0] = ds;
  p.right[0] = {a->x, a->x_pitch, a->type};
  p.residual = p.y = a->da;
  return lm_cuda_gemm(cuda, &g, lm_cuda_workspace(cuda, stream), cuda->workspace_bytes, stream);
}

cudaError_t lm_cuda_lora_linear_backward(lm_cuda *cuda, const lm_lora_linear_backward_args *args, cudaStream_t stream) {
  backward_group k = {args,
                      {args->out0, args->out1, args->out2},
                      {args->rank0, args->rank1, args->rank2},
                      args->rank0 + args->rank1 + args->rank2,
                      {args->scale0, args->scale1, args->scale2},
                      {args->b0, args->b1, args->b2},
                      {args->db0, args->db1, args->db2},
                      ds_matrix(args->ds, args->rank0 + args->rank1 + args->rank2, args->type, args->a_type),
                      lm_cuda_workspace(cuda, stream)};
  cudaError_t error = cudaSuccess;
  if (k.ranks > 0) {
    error = lm_cuda_linear_gradient(cuda, args, k.ds, k.workspace, cuda->workspace_bytes, stream);
    if (error == cudaErrorNotSupported) {
      error = ds_product(cuda, k, stream);
      if (!error) error = db_products(cuda, k, stream);
    }
  }
  if (!error && args->dx) error = dx_product(cuda, k, stream);
  if (error || !args->da) return error;
  const lm_lora_down_backward_args down = {sizeof down, args->type, args->da, args->ds, args->x, args->live, args->rows, args->in,
                                           args->x_pitch, args->a_type, args->rank0, args->rank1, args->rank2, 0};
  return lm_cuda_lora_down_backward(cuda, &down, stream);
}
