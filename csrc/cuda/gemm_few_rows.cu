/* gemm_few_rows.cu: y = x W^T for a few rows, as in decoding: bound by reading W once, so a warp takes two rows of W, every
 * lane 16 bytes of them at a time, and keeps the sums of all rows of x. */
#include "gemm.cuh"

enum { FEW_WARPS = 8, FEW_COLUMNS = 2 };

template <typename W, int ROWS>
__global__ void __launch_bounds__(FEW_WARPS * 32, 2) few_rows_product(const __grid_constant__ lm_gemm g) {
  const int rows = lm_gemm_live(g, g.rows), lane = threadIdx.x & 31;
  int column = ((int)blockIdx.x * FEW_WARPS + (int)(threadIdx.x >> 5)) * FEW_COLUMNS, index = 0;
  /* Parts are counted in whole groups of columns, so that a warp never crosses a border. */
  while (index < 3) {
    const int width = (g.part[index].columns + FEW_COLUMNS - 1) / FEW_COLUMNS * FEW_COLUMNS;
    if (column < width) break;
    column -= width;
    index++;
  }
  if (index == 3) return;
  const lm_gemm_part &part = g.part[index];
  float sum[ROWS][FEW_COLUMNS] = {};
  for (int i = 0; i < 2; i++) {
    const int depth = part.depth[i];
    if (depth == 0) continue;
    const lm_matrix &l = part.left[i], &r = part.right[i];
    const bool x_whole = lm_is_aligned(l.data, (int64_t)l.pitch * (l.type == LM_F32 ? 4 : 2), 16);
    const bool w_whole = lm_is_aligned(r.data, (int64_t)r.pitch * sizeof(W), 16);
#pragma unroll 2
    for (int k = lane * 8; k < depth; k += 256) {
      const int count = min(8, depth - k);
      float w[FEW_COLUMNS][8] = {};
#pragma unroll
      for (int c = 0; c < FEW_COLUMNS; c++)
        if (column + c < part.columns)
          lm_add_up_to<8>(w[c], (const W *)r.data + (int64_t)(column + c) * r.pitch + k, count, w_whole && count == 8);
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        if (row >= rows) continue;
        float x[8] = {};
        LM_CUDA_BY_TYPE(l.type, X, lm_add_up_to<8>(x, (const X *)l.data + (int64_t)row * l.pitch + k, count,
                                                   x_whole && count == 8));
#pragma unroll
        for (int c = 0; c < FEW_COLUMNS; c++)
#pragma unroll
          for (int e = 0; e < 8; e++) sum[row][c] = fmaf(x[e], w[c][e], sum[row][c]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
      const float total = lm_warp_sum(sum[row][c]);
      if (lane != 0 || row >= rows || column + c >= part.columns) continue;
      float x = total * part.factor;
      const int at = column + c;
      if (part.bias) LM_CUDA_BY_TYPE(g.bias_type, B, x += lm_to_float(((const B *)part.bias)[at]));
      LM_CUDA_BY_TYPE(g.y_type, Y, {
        if (part.residual) x += lm_to_float(((const Y *)part.residual)[(int64_t)row * g.residual_pitch + at]);
        ((Y *)part.y)[(int64_t)(g.y_index ? g.y_index[row] : row) * g.y_pitch + at] = lm_from_float<Y>(x);
      });
    }
  }
}

template <typename W>
static cudaError_t launch_rows(const lm_gemm *g, cudaStream_t stream) {
  int64_t groups = 0;
  for (const lm_gemm_part &p : g->part) groups += lm_ceil_div(p.columns, FEW_COLUMNS);
  const dim3 grid((unsigned)lm_ceil_div(groups, FEW_WARPS));
  if (g->rows == 1) return lm_cuda_launch<few_rows_product<W, 1>>(grid, FEW_WARPS * 32, 0, stream, *g);
  return lm_cuda_launch<few_rows_product<W, LM_FEW_ROWS>>(grid, FEW_WARPS * 32, 0, stream, *g);
}

cudaError_t lm_cuda_gemm_few_rows(lm_cuda *cuda, const lm_gemm *g, cudaStream_t stream) {
  (void)cuda;
  int32_t type = LM_F32;
  for (const lm_gemm_part &p : g->part)
    if (p.columns > 0) type = p.right[0].type;
  LM_CUDA_BY_TYPE(type, W, return launch_rows<W>(g, stream));
}
