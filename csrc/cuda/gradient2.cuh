/* gradient2.cuh: variant under test. */
#ifndef GRADIENT2
#define GRADIENT2
#include "cluster.cuh"
#include "gemm_tensor.cuh"
namespace g2 {
enum { GRADIENT_THREADS = 256, TILE_ROWS = 64, TILE_COLUMNS = 128, ADD_THREADS = 256 };

template <int RANK_, int TILES_, int STAGES_, int BLOCKS_>
struct gradient_tile {
  static constexpr int RANK = RANK_, TILES = TILES_, COLUMNS = TILES * TILE_COLUMNS, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr int S = TILE_ROWS * TILE_COLUMNS * 2, STAGE = S + TILE_ROWS * RANK * 2, KEPT = COLUMNS * RANK * 2; /* bytes */
  static constexpr int PITCH = RANK + 8, SUMS = COLUMNS * PITCH * 4, RING = STAGES * STAGE + KEPT;
  static constexpr int SHARED = RING > SUMS ? RING : SUMS;
};

struct gradient_part {
  const void *dy, *b, *s;
  float *db;
  float *ds_sums; /* [stripes][rows][rank] */
  float *db_sums; /* [groups][out][rank] */
  float scale;
  int32_t out, rank, stripes, offset; /* offset: first column of ds */
};

struct gradient_job {
  gradient_part part[3];
  const int32_t *live;
  void *ds;
  int32_t rows, run_rows, cluster, groups;
  int32_t dy_pitch, s_pitch, ds_pitch, reserved;
};

template <typename T, typename C>
__global__ void __launch_bounds__(GRADIENT_THREADS, C::BLOCKS) gradient_tiles(const __grid_constant__ gradient_job job) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int RANK = C::RANK, BLOCKS = RANK / 8, SHARE = RANK / 16; /* blocks of 8 ranks; those of a warp's part of ds */
  const int live = lm_live_rows(job.live, job.rows), row0 = blockIdx.y * job.run_rows, rows = max(0, min(job.run_rows, live - row0));
  int stripe = blockIdx.x, index = 0;
  while (stripe >= job.part[index].stripes) stripe -= job.part[index++].stripes;
  const gradient_part &part = job.part[index];
  const int column0 = stripe * C::COLUMNS, tiles = min(C::TILES, (part.out - column0 + TILE_COLUMNS - 1) / TILE_COLUMNS);
  const int steps = (rows + TILE_ROWS - 1) / TILE_ROWS * tiles; /* row by row of tiles */
  const uint32_t kept = lm_shared_address(shared), stages = kept + C::KEPT;
  const lm_matrix dy = {part.dy, job.dy_pitch, 0}, s = {part.s, job.s_pitch, 0}, b = {part.b, part.rank, 0};
  const int last = row0 + rows;

  /* What is fetched next: its rows and tile. */
  int fetch_row = row0, fetch_tile = 0, fetched = 0;
  const auto fetch = [&](int stage) {
    if (fetched < steps) {
      const uint32_t tile = stages + stage * C::STAGE;
      lm_fetch<T, TILE_ROWS, TILE_COLUMNS, GRADIENT_THREADS, false>(tile, dy, fetch_row, last, column0 + fetch_tile * TILE_COLUMNS, part.out);
      if (fetch_tile == 0) lm_fetch<T, TILE_ROWS, RANK, GRADIENT_THREADS, false>(tile + C::S, s, fetch_row, last, 0, part.rank);
      if (++fetch_tile == tiles) fetch_tile = 0, fetch_row += TILE_ROWS;
      fetched++;
    }
    lm_copy_commit();
  };

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, ds_row = warp % 4 * 16, ds_half = warp / 4;
  float db[C::TILES][BLOCKS][4] = {};
  lm_fetch<T, C::COLUMNS, RANK, GRADIENT_THREADS, false>(kept, b, column0, part.out, 0, part.rank);
  lm_copy_commit();
#pragma unroll
  for (int p = 0; p < C::STAGES - 1; p++) fetch(p);
  lm_copy_wait<C::STAGES - 1>();
  __syncthreads();
  /* B of the stripe stays in registers: words of 16 steps and 8 ranks. */
  uint32_t kept_b[C::TILES][TILE_COLUMNS / 16][SHARE == 0 ? 1 : SHARE][2];
#pragma unroll
  for (int t = 0; t < C::TILES; t++)
#pragma unroll
    for (int k = 0; k < TILE_COLUMNS / 16; k++) {
      uint32_t y[4];
      if constexpr (SHARE == 1) {
        lm_fragment<true, RANK>(y, kept, 0, t * TILE_COLUMNS + k * 16);
        kept_b[t][k][0][0] = ds_half ? y[1] : y[0], kept_b[t][k][0][1] = ds_half ? y[3] : y[2];
      } else {
#pragma unroll
        for (int j = 0; j < SHARE; j += 2) {
          lm_fragment<true, RANK>(y, kept, (ds_half * SHARE + j) * 8, t * TILE_COLUMNS + k * 16);
          kept_b[t][k][j][0] = y[0], kept_b[t][k][j][1] = y[2];
          kept_b[t][k][j + 1][0] = y[1], kept_b[t][k][j + 1][1] = y[3];
        }
      }
    }
  int stage = 0, next = C::STAGES - 1;
  for (int step = 0; step < steps; step += tiles) {
    float ds[SHARE][4] = {};
    uint32_t y[TILE_ROWS / 16][BLOCKS / 2][4];
#pragma unroll
    for (int t = 0; t < C::TILES; t++) {
      if (t >= tiles) break;
      lm_copy_wait<C::STAGES - 2>();
      __syncthreads(); /* the tile is there, and the block has left the stage that is filled now */
      fetch(next);
      const uint32_t tile = stages + stage * C::STAGE, rows_of_s = tile + C::S;
#pragma unroll
      for (int k = 0; k < TILE_ROWS / 16; k++) {
        uint32_t x[4];
        lm_fragment<true, TILE_COLUMNS>(x, tile, warp * 16, k * 16);
#pragma unroll
        for (int j = 0; j < BLOCKS / 2; j++) {
          if (t == 0) lm_fragment<true, RANK>(y[k][j], rows_of_s, j * 16, k * 16);
          lm_multiply<T>(db[t][2 * j], x, y[k][j][0], y[k][j][2]);
          lm_multiply<T>(db[t][2 * j + 1], x, y[k][j][1], y[k][j][3]);
        }
      }
#pragma unroll
      for (int k = 0; k < TILE_COLUMNS / 16; k++) {
        uint32_t x[4];
        lm_fragment<false, TILE_COLUMNS>(x, tile, ds_row, k * 16);
#pragma unroll
        for (int j = 0; j < SHARE; j++) lm_multiply<T>(ds[j], x, kept_b[t][k][j][0], kept_b[t][k][j][1]);
      }
      next = stage;
      stage = stage + 1 == C::STAGES ? 0 : stage + 1;
    }
    float *const sums = part.ds_sums + (int64_t)stripe * job.rows * part.rank;
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
      const int column = (ds_half * SHARE + j) * 8 + (lane & 3) * 2;
      if (column >= part.rank) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = step / tiles * TILE_ROWS + ds_row + (lane >> 2) + 8 * half;
        if (row < rows)
          *reinterpret_cast<float2 *>(sums + (int64_t)(row0 + row) * part.rank + column) =
              make_float2(ds[j][2 * half], ds[j][2 * half + 1]);
      }
    }
  }
  lm_copy_wait<0>();
  __syncthreads();
  float *const own = reinterpret_cast<float *>(shared);
#pragma unroll
  for (int t = 0; t < C::TILES; t++)
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
      float *const to = own + (t * TILE_COLUMNS + warp * 16 + (lane >> 2)) * C::PITCH + j * 8 + (lane & 3) * 2;
      *reinterpret_cast<float2 *>(to) = make_float2(db[t][j][0], db[t][j][1]);
      *reinterpret_cast<float2 *>(to + 8 * C::PITCH) = make_float2(db[t][j][2], db[t][j][3]);
    }
  lm_cluster_sync();
  const int cluster = job.cluster, group = blockIdx.y / cluster;
  for (int i = blockIdx.y % cluster * GRADIENT_THREADS + threadIdx.x; i < C::COLUMNS * RANK / 4; i += cluster * GRADIENT_THREADS) {
    const int row = i / (RANK / 4), column = i % (RANK / 4) * 4;
    if (column0 + row >= part.out || column >= part.rank) continue;
    const int64_t at = (int64_t)(column0 + row) * part.rank + column;
    float4 total = {0, 0, 0, 0};
    for (int c = 0; c < cluster; c++) {
      const float4 v = lm_cluster_load(kept + (row * C::PITCH + column) * 4, c);
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
    if (job.groups > 1) {
      *reinterpret_cast<float4 *>(part.db_sums + (int64_t)group * part.out * part.rank + at) = total;
    } else {
      float *const to = part.db + at;
      to[0] += total.x, to[1] += total.y, to[2] += total.z, to[3] += total.w;
    }
  }
  lm_cluster_sync();
}

__device__ __forceinline__ float4 add_in_order(const float *sums, int64_t stride, int count) {
  float4 total = {0, 0, 0, 0};
#pragma unroll 8
  for (int i = 0; i < count; i++) {
    const float4 v = __ldcg(reinterpret_cast<const float4 *>(sums + i * stride));
    total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
  }
  return total;
}

/* Four sums per thread: first all of ds, then all of dB. Ranks are multiples of 8 here. */
template <typename T, bool WAIT>
__global__ void __launch_bounds__(ADD_THREADS, 4) gradient_add(const __grid_constant__ gradient_job job) {
#if __CUDA_ARCH__ >= 900
  if (WAIT) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int live = lm_live_rows(job.live, job.rows);
  int64_t i = ((int64_t)blockIdx.x * ADD_THREADS + threadIdx.x) * 4;
  for (int p = 0; p < 3; p++) {
    const gradient_part &part = job.part[p];
    const int64_t count = (int64_t)job.rows * part.rank;
    if (i >= count) {
      i -= count;
      continue;
    }
    const int row = (int)i / part.rank, column = (int)i % part.rank;
    if (row >= live) return;
    const float4 v = add_in_order(part.ds_sums + i, count, part.stripes);
    const float x[4] = {v.x * part.scale, v.y * part.scale, v.z * part.scale, v.w * part.scale};
    lm_store<4>((T *)job.ds + (int64_t)row * job.ds_pitch + part.offset + column, x);
    return;
  }
  if (job.groups == 1) return;
  for (int p = 0; p < 3; p++) {
    const gradient_part &part = job.part[p];
    const int64_t count = (int64_t)part.out * part.rank;
    if (i >= count) {
      i -= count;
      continue;
    }
    const float4 v = add_in_order(part.db_sums + i, count, job.groups);
    part.db[i] += v.x, part.db[i + 1] += v.y, part.db[i + 2] += v.z, part.db[i + 3] += v.w;
    return;
  }
}
}  // namespace g2
#endif
