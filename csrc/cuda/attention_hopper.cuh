/* attention_hopper.cuh: what the kernels of attention by products of warp groups share: the products of tiles. Rows of a head lie as
 * D / 64 tiles of 64 columns, swizzled as products read them. A warp group owns 64 rows of its left operand. */
#ifndef LM_CUDA_ATTENTION_HOPPER_CUH
#define LM_CUDA_ATTENTION_HOPPER_CUH

#include "attention_hopper.h"
#include "attention_launch.cuh"
#include "attention_tile.cuh"
#include "hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* s [64, COLUMNS] = left [64, D] right [COLUMNS, D]^T; ROWS: of the tiles, of which the operands start at the given address. */
template <int D, int LEFT_ROWS, int RIGHT_ROWS, typename T, int COUNT>
__device__ __forceinline__ void multiply_rows(float (&s)[COUNT], uint32_t left, uint32_t right) {
  lm_group_multiply_first<false>(s, lm_matrix_descriptor(left, 0), lm_matrix_descriptor(right, 0), T{});
#pragma unroll
  for (int d = 16; d < D; d += 16)
    lm_group_multiply<false>(s, lm_matrix_descriptor(left + d / 64 * LEFT_ROWS * 128 + d % 64 * 2, 0),
                             lm_matrix_descriptor(right + d / 64 * RIGHT_ROWS * 128 + d % 64 * 2, 0), T{});
}

/* c [64, D] += weights [64, 8 K] values [8 K, D], which are rows of a tile of ROWS. */
template <int ROWS, typename T, int COUNT, int K>
__device__ __forceinline__ void multiply_weights(float (&c)[COUNT], const lm_weights<1, K> &weights, uint32_t values) {
#pragma unroll
  for (int k = 0; k < K / 2; k++)
    lm_group_multiply<true>(c, weights.x[k][0], lm_matrix_descriptor(values + 16 * k * 128, ROWS * 128), T{});
}

template <int COUNT>
__device__ __forceinline__ void clear(float (&c)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) c[i] = 0;
  lm_hold(c);
}

template <int COUNT>
__device__ __forceinline__ lm_sums<1, COUNT / 4> &as_sums(float (&c)[COUNT]) {
  return reinterpret_cast<lm_sums<1, COUNT / 4> &>(c);
}

/* The 64 columns from 64 `part` on. */
template <int COUNT>
__device__ __forceinline__ float (&part_of(float (&c)[COUNT], int part))[32] {
  return reinterpret_cast<float (&)[32]>(c[32 * part]);
}
#endif

#endif
