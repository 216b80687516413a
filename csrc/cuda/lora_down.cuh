/* lora_down.cuh: the products of an adapter that read x, s = factor x A^T and dA += ds^T x: bound by reading x once. */
#ifndef LM_CUDA_LORA_DOWN_CUH
#define LM_CUDA_LORA_DOWN_CUH

#include "cluster.cuh"
#include "gemm_tensor.cuh"

enum { DOWN_THREADS = 256, RUN_ROWS = 64 };

struct down_job {
  const void *x, *a; /* [rows, in], [ranks, in] */
  void *s;           /* [rows, ranks] */
  const int32_t *live;
  int32_t rows, in, ranks, x_pitch, s_pitch;
  int32_t end[2];    /* columns before end[0] take factor[0], those before end[1] factor[1] */
  float factor[3];
};

/* ROWS x RANKS of s per block, each warp 32 rows and every DEEP-th 16 steps. */
template <int RANKS_, int ROWS_, int STAGES_, int BLOCKS_>
struct down_tile {
  static constexpr int RANKS = RANKS_, ROWS = ROWS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr int DEPTH = ROWS == 32 ? 128 : 64, DOWN = ROWS / 32, DEEP = DOWN_THREADS / 32 / DOWN;
  static constexpr int LEFT = ROWS * DEPTH * 2, STAGE = LEFT + RANKS * DEPTH * 2, PITCH = RANKS + 8; /* bytes, floats */
  static constexpr int RING = STAGES * STAGE, SUMS = DEEP * ROWS * PITCH * 4, SHARED = RING > SUMS ? RING : SUMS;
};

/* Blocks of a cluster share the steps of one tile. */
template <typename T, typename C>
__global__ void __launch_bounds__(DOWN_THREADS, C::BLOCKS) down_tiles(const __grid_constant__ down_job job) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int DEPTH = C::DEPTH, STAGES = C::STAGES, BLOCKS = C::RANKS / 8;
  const int row0 = blockIdx.x * C::ROWS, rank0 = blockIdx.z * C::RANKS, live = lm_live_rows(job.live, job.rows);
  const int splits = gridDim.y, split = blockIdx.y;
  if (row0 >= live) return; /* the whole cluster */
  const int slices = (job.in + DEPTH - 1) / DEPTH;
  const int begin = (int)((int64_t)slices * split / splits), end = (int)((int64_t)slices * (split + 1) / splits);
  const uint32_t stages = lm_shared_address(shared);
  const lm_matrix x = {job.x, job.x_pitch, 0}, a = {job.a, job.in, 0};
  const auto fetch = [&](int slice, int stage) {
    const uint32_t tile = stages + stage * C::STAGE;
    lm_fetch<T, C::ROWS, DEPTH, DOWN_THREADS, false>(tile, x, row0, live, slice * DEPTH, job.in);
    lm_fetch<T, C::RANKS, DEPTH, DOWN_THREADS, false>(tile + C::LEFT, a, rank0, job.ranks, slice * DEPTH, job.in);
  };
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = warp % C::DOWN * 32, deep = warp / C::DOWN;
  float sum[2][BLOCKS][4] = {};
#pragma unroll
  for (int p = 0; p < STAGES - 1; p++) {
    if (begin + p < end) fetch(begin + p, p);
    lm_copy_commit();
  }
  int stage = 0, next = STAGES - 1;
  for (int slice = begin; slice < end; slice++) {
    lm_copy_wait<STAGES - 2>();
    __syncthreads(); /* the slice is there, and the block has left the stage that is filled now */
    if (slice + STAGES - 1 < end) fetch(slice + STAGES - 1, next);
    lm_copy_commit();
    const uint32_t tile = stages + stage * C::STAGE;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16 * C::DEEP) {
      uint32_t l[2][4], r[4];
#pragma unroll
      for (int i = 0; i < 2; i++) lm_fragment<false, DEPTH>(l[i], tile, row + 16 * i, k + 16 * deep);
#pragma unroll
      for (int j = 0; j < BLOCKS; j += 2) {
        lm_fragment<false, DEPTH>(r, tile + C::LEFT, j * 8, k + 16 * deep);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          lm_multiply<T>(sum[i][j], l[i], r[0], r[2]);
          lm_multiply<T>(sum[i][j + 1], l[i], r[1], r[3]);
        }
      }
    }
    next = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  lm_copy_wait<0>();
  __syncthreads();
  float *const own = reinterpret_cast<float *>(shared) + (deep * C::ROWS + row) * C::PITCH;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
      float *const to = own + (16 * i + (lane >> 2)) * C::PITCH + j * 8 + (lane & 3) * 2;
      *reinterpret_cast<float2 *>(to) = make_float2(sum[i][j][0], sum[i][j][1]);
      *reinterpret_cast<float2 *>(to + 8 * C::PITCH) = make_float2(sum[i][j][2], sum[i][j][3]);
    }
  lm_cluster_sync();
  const bool whole = lm_is_aligned(job.s, (int64_t)job.s_pitch * 2, 8);
  for (int i = split * DOWN_THREADS + threadIdx.x; i < C::ROWS * C::RANKS / 4; i += splits * DOWN_THREADS) {
    const int r = i / (C::RANKS / 4), at = i % (C::RANKS / 4) * 4, column = rank0 + at;
    if (row0 + r >= live || column >= job.ranks) continue;
    float total[4] = {};
    for (int b = 0; b < splits; b++)
#pragma unroll
      for (int d = 0; d < C::DEEP; d++) {
        const float4 v = lm_cluster_load(stages + ((d * C::ROWS + r) * C::PITCH + at) * 4, b);
        total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
      }
#pragma unroll
    for (int e = 0; e < 4; e++)
      total[e] *= column + e < job.end[0] ? job.factor[0] : column + e < job.end[1] ? job.factor[1] : job.factor[2];
    const int count = min(4, job.ranks - column);
    lm_store_up_to<4>((T *)job.s + (int64_t)(row0 + r) * job.s_pitch + column, total, count, whole && count == 4);
  }
  lm_cluster_sync(); /* nobody leaves while its sums are read */
}

/* dA ----------------------------------------------------------------------------------------------------------------- */

struct da_job {
  const void *ds, *x; /* [rows, ranks], [rows, in] */
  float *da;          /* [ranks, in] */
  const int32_t *live;
  int32_t rows, in, ranks, ds_pitch, x_pitch;
};

/* RANKS x COLUMNS of dA per cluster; its blocks share the rows, 64 at a time. */
template <int RANKS_, int COLUMNS_, int STAGES_, int BLOCKS_>
struct da_tile {
  static constexpr int RANKS = RANKS_, COLUMNS = COLUMNS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr int WIDTH = COLUMNS >= 128 ? COLUMNS / 8 : 16, ACROSS = COLUMNS / WIDTH, DEEP = DOWN_THREADS / 32 / ACROSS;
  static constexpr int LINE = RANKS == 48 ? 64 : RANKS; /* of ds: a power of two */
  static constexpr int RIGHT = RUN_ROWS * COLUMNS * 2, STAGE = RIGHT + RUN_ROWS * LINE * 2, PITCH = COLUMNS + 8;
  static constexpr int RING = STAGES * STAGE, SUMS = DEEP * RANKS * PITCH * 4, SHARED = RING > SUMS ? RING : SUMS;
};

template <typename T, typename C>
__global__ void __launch_bounds__(DOWN_THREADS, C::BLOCKS) da_tiles(const __grid_constant__ da_job job) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int STAGES = C::STAGES, DOWN = C::RANKS / 16, ACROSS = C::WIDTH / 16;
  const int column0 = blockIdx.x * C::COLUMNS, rank0 = blockIdx.z * C::RANKS, live = lm_live_rows(job.live, job.rows);
  const int splits = gridDim.y, split = blockIdx.y;
  const int slices = (job.rows + RUN_ROWS - 1) / RUN_ROWS, begin = (int)((int64_t)slices * split / splits);
  const int end = min((int)((int64_t)slices * (split + 1) / splits), (live + RUN_ROWS - 1) / RUN_ROWS);
  const uint32_t stages = lm_shared_address(shared);
  const lm_matrix x = {job.x, job.x_pitch, 0}, ds = {job.ds, job.ds_pitch, 0};
  const auto fetch = [&](int slice, int stage) {
    const uint32_t tile = stages + stage * C::STAGE;
    lm_fetch<T, RUN_ROWS, C::COLUMNS, DOWN_THREADS, false>(tile, x, slice * RUN_ROWS, live, column0, job.in);
    lm_fetch<T, RUN_ROWS, C::LINE, DOWN_THREADS, false>(tile + C::RIGHT, ds, slice * RUN_ROWS, live, rank0, min(job.ranks, rank0 + C::RANKS));
  };
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = warp % C::ACROSS * C::WIDTH, deep = warp / C::ACROSS;
  float sum[DOWN][ACROSS * 2][4] = {};
#pragma unroll
  for (int p = 0; p < STAGES - 1; p++) {
    if (begin + p < end) fetch(begin + p, p);
    lm_copy_commit();
  }
  int stage = 0, next = STAGES - 1;
  for (int slice = begin; slice < end; slice++) {
    lm_copy_wait<STAGES - 2>();
    __syncthreads();
    if (slice + STAGES - 1 < end) fetch(slice + STAGES - 1, next);
    lm_copy_commit();
    const uint32_t tile = stages + stage * C::STAGE;
#pragma unroll
    for (int k = 0; k < RUN_ROWS; k += 16 * C::DEEP) {
      uint32_t l[DOWN][4], r[4];
#pragma unroll
      for (int i = 0; i < DOWN; i++) lm_fragment<true, C::LINE>(l[i], tile + C::RIGHT, i * 16, k + 16 * deep);
#pragma unroll
      for (int j = 0; j < ACROSS; j++) {
        lm_fragment<true, C::COLUMNS>(r, tile, column + j * 16, k + 16 * deep);
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
          lm_multiply<T>(sum[i][2 * j], l[i], r[0], r[2]);
          lm_multiply<T>(sum[i][2 * j + 1], l[i], r[1], r[3]);
        }
      }
    }
    next = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  lm_copy_wait<0>();
  __syncthreads();
  float *const own = reinterpret_cast<float *>(shared) + deep * C::RANKS * C::PITCH + column;
#pragma unroll
  for (int i = 0; i < DOWN; i++)
#pragma unroll
    for (int j = 0; j < ACROSS * 2; j++) {
      float *const to = own + (16 * i + (lane >> 2)) * C::PITCH + j * 8 + (lane & 3) * 2;
      *reinterpret_cast<float2 *>(to) = make_float2(sum[i][j][0], sum[i][j][1]);
      *reinterpret_cast<float2 *>(to + 8 * C::PITCH) = make_float2(sum[i][j][2], sum[i][j][3]);
    }
  lm_cluster_sync();
  for (int i = split * DOWN_THREADS + threadIdx.x; i < C::RANKS * C::COLUMNS / 4; i += splits * DOWN_THREADS) {
    const int r = i / (C::COLUMNS / 4), c = i % (C::COLUMNS / 4) * 4;
    if (rank0 + r >= job.ranks || column0 + c >= job.in) continue;
    float4 *const to = reinterpret_cast<float4 *>(job.da + (int64_t)(rank0 + r) * job.in + column0 + c), before = *to;
    float4 total = {0, 0, 0, 0};
    for (int b = 0; b < splits; b++)
#pragma unroll
      for (int d = 0; d < C::DEEP; d++) {
        const float4 v = lm_cluster_load(stages + ((d * C::RANKS + r) * C::PITCH + c) * 4, b);
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
    *to = make_float4(before.x + total.x, before.y + total.y, before.z + total.z, before.w + total.w);
  }
  lm_cluster_sync();
}

#endif
