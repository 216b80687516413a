/* gemm_short.cuh: y = factor l r + bias + residual over a few steps of contraction, as LoRA terms are: bound by writing y.
 *
 * A warp keeps its columns of the right operand in registers and takes 16 rows after the other. Columns are dealt to the
 * fragments so that every lane ends up with 8 neighbouring ones, so sums go from registers to memory in whole words. */
#ifndef LM_CUDA_GEMM_SHORT_CUH
#define LM_CUDA_GEMM_SHORT_CUH

#include "gemm.cuh"
#include "tensor.cuh"

enum { UP_THREADS = 256 };

/* STEPS: 16 steps of the contraction each. SPAN: blocks of 32 columns per warp. */
template <typename T, int FORM, int STEPS, int SPAN, int WARPS_ACROSS>
__global__ void __launch_bounds__(UP_THREADS, 2) up_rows(const __grid_constant__ lm_gemm g, const int32_t run_rows) {
  constexpr int COLUMNS = 32 * SPAN, DOWN = UP_THREADS / 32 / WARPS_ACROSS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, at = lane >> 2, word = lane & 3;
  int stripe = blockIdx.x, index = 0;
  for (;;) {
    const int own = (g.part[index].columns + COLUMNS * WARPS_ACROSS - 1) / (COLUMNS * WARPS_ACROSS);
    if (stripe < own) break;
    stripe -= own, index++;
  }
  const lm_gemm_part &part = g.part[index];
  const int column0 = (stripe * WARPS_ACROSS + warp % WARPS_ACROSS) * COLUMNS, depth = part.depth[0];
  const int last = min(lm_gemm_live(g, g.rows), (int)(blockIdx.y + 1) * run_rows);
  int row0 = blockIdx.y * run_rows + warp / WARPS_ACROSS * 16;
  if (column0 >= part.columns || row0 >= last) return;

  /* right[s][b][j]: columns 8 * (at / 2) + 2 * j + at % 2 of the block, steps 2 * word and, in the second, 8 more. */
  const T *const right = (const T *)part.right[0].data;
  const int pitch = part.right[0].pitch;
  uint32_t r[STEPS][SPAN][4][2];
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int b = 0; b < SPAN; b++) {
      if constexpr (FORM == LM_NT) {
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int column = column0 + 32 * b + 8 * (at >> 1) + 2 * j + (at & 1), k = 16 * s + 8 * h + 2 * word;
            r[s][b][j][h] = column < part.columns && k < depth
                                ? __ldg(reinterpret_cast<const uint32_t *>(right + (int64_t)column * pitch + k)) : 0;
          }
      } else {
        const int column = column0 + 32 * b + 8 * (at >> 1);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int k = 16 * s + 8 * h + 2 * word;
          uint4 low = {0, 0, 0, 0}, high = low;
          if (column < part.columns && k < depth) {
            low = __ldg(reinterpret_cast<const uint4 *>(right + (int64_t)k * pitch + column));
            high = __ldg(reinterpret_cast<const uint4 *>(right + (int64_t)(k + 1) * pitch + column));
          }
          const uint32_t pick = at & 1 ? 0x7632 : 0x5410;
          r[s][b][0][h] = __byte_perm(low.x, high.x, pick);
          r[s][b][1][h] = __byte_perm(low.y, high.y, pick);
          r[s][b][2][h] = __byte_perm(low.z, high.z, pick);
          r[s][b][3][h] = __byte_perm(low.w, high.w, pick);
        }
      }
    }

  const T *const left = (const T *)part.left[0].data;
  const auto fetch = [&](uint32_t(&l)[STEPS][4], int row) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int line = row + at + 8 * (i & 1), k = 16 * s + 8 * (i >> 1) + 2 * word;
        l[s][i] = line < last && k < depth ? __ldg(reinterpret_cast<const uint32_t *>(left + (int64_t)line * part.left[0].pitch + k)) : 0;
      }
  };
  uint32_t l[2][STEPS][4];
  fetch(l[0], row0);
  for (; row0 < last; row0 += 16 * DOWN) {
    fetch(l[1], row0 + 16 * DOWN);
#pragma unroll
    for (int b = 0; b < SPAN; b++) {
      float sum[4][4] = {};
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) lm_multiply<T>(sum[j], l[0][s], r[s][b][j][0], r[s][b][j][1]);
      const int column = column0 + 32 * b + 8 * word;
      if (column < part.columns) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = row0 + at + 8 * half;
          if (row >= last) continue;
          float x[8];
#pragma unroll
          for (int j = 0; j < 4; j++) x[2 * j] = sum[j][2 * half] * part.factor, x[2 * j + 1] = sum[j][2 * half + 1] * part.factor;
          if (part.bias) LM_CUDA_BY_TYPE(g.bias_type, B, lm_add_up_to<8>(x, (const B *)part.bias + column, 8, false));
          if (part.residual) lm_add_up_to<8>(x, (const T *)part.residual + (int64_t)row * g.residual_pitch + column, 8, true);
          lm_store<8>((T *)part.y + (int64_t)row * g.y_pitch + column, x);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) l[0][s][i] = l[1][s][i];
  }
}

#endif
