/* linear_gradient.cu: ds and dB in one read of dy (see linear_gradient.cuh).
 *
 * A block takes a stripe of up to 8192 / RANK columns of one part and a run of rows. Tiles of 64 rows x 128 columns of dy come
 * through a ring of stages, the first of every 64 rows with its rows of s; B of the stripe stays in registers. Of every tile each
 * warp makes 16 columns of dB^T = dy^T s, kept over all rows, and its share of ds = dy B, kept over the stripe. The blocks of a
 * cluster are neighbouring runs and add up their dB. So the sums over stripes (ds) and, where there is more than one, over
 * clusters (dB) remain; a second kernel adds them in order. */
#include "linear_gradient.cuh"

#include "gemm_tensor.cuh"
#include "cluster.cuh"
#include "lora_down.h"

enum { GRADIENT_THREADS = 256, TILE_ROWS = 64, TILE_COLUMNS = 128, ADD_THREADS = 256, MOST_CLUSTER = 8 };

template <int RANK_, int KILOBYTES>
struct gradient_tile {
  static constexpr int RANK = RANK_, TILES = 8192 / RANK / TILE_COLUMNS, COLUMNS = TILES * TILE_COLUMNS;
  static constexpr int S = TILE_ROWS * TILE_COLUMNS * 2, STAGE = S + TILE_ROWS * RANK * 2, KEPT = COLUMNS * RANK * 2; /* bytes */
  static constexpr int STAGES = (KILOBYTES * 1024 - KEPT) / STAGE;
  static constexpr int PITCH = RANK + 8, SUMS = COLUMNS * PITCH * 4, RING = STAGES * STAGE + KEPT;
  static constexpr int SHARED = RING > SUMS ? RING : SUMS;
};

struct gradient_part {
  const void *dy, *b, *s;
  float *db;
  float *ds_sums; /* [stripes][slab rows][rank] */
  float *db_sums; /* [groups][out][rank] */
  float scale;
  int32_t out, rank, stripes, offset; /* offset: first column of ds */
};

struct gradient_job {
  gradient_part part[3];
  const int32_t *live;
  void *ds;
  int32_t rows, first_row, slab_rows, run_rows; /* run_rows: of one block */
  int32_t cluster, groups;                      /* blocks of a cluster; clusters along the rows */
  int32_t dy_pitch, s_pitch, ds_pitch, reserved;
};

/* Live rows of the slab. */
__device__ __forceinline__ int slab_live(const gradient_job &job) {
  return max(0, min(lm_live_rows(job.live, job.rows) - job.first_row, job.slab_rows));
}

template <typename T, typename C>
__global__ void __launch_bounds__(GRADIENT_THREADS, 1) gradient_tiles(const __grid_constant__ gradient_job job) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int RANK = C::RANK, BLOCKS = RANK / 8, SHARE = RANK / 16; /* blocks of 8 ranks; those of a warp's part of ds */
  const int row0 = blockIdx.y * job.run_rows, rows = max(0, min(job.run_rows, slab_live(job) - row0));
  int stripe = blockIdx.x, index = 0;
  while (stripe >= job.part[index].stripes) stripe -= job.part[index++].stripes;
  const gradient_part &part = job.part[index];
  const int column0 = stripe * C::COLUMNS, tiles = min(C::TILES, (part.out - column0 + TILE_COLUMNS - 1) / TILE_COLUMNS);
  const int steps = (rows + TILE_ROWS - 1) / TILE_ROWS * tiles; /* row by row of tiles */
  const uint32_t kept = lm_shared_address(shared), stages = kept + C::KEPT;
  const lm_matrix dy = {part.dy, job.dy_pitch, 0}, s = {part.s, job.s_pitch, 0}, b = {part.b, part.rank, 0};
  const int first = job.first_row + row0, last = first + rows; /* rows of dy and s */

  /* What is fetched next: its rows and tile. */
  int fetch_row = first, fetch_tile = 0, fetched = 0;
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
    float *const sums = part.ds_sums + (int64_t)stripe * job.slab_rows * part.rank;
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
template <typename T>
__global__ void __launch_bounds__(ADD_THREADS, 4) gradient_add(const __grid_constant__ gradient_job job) {
  const int live = slab_live(job);
  int64_t i = ((int64_t)blockIdx.x * ADD_THREADS + threadIdx.x) * 4;
  for (int p = 0; p < 3; p++) {
    const gradient_part &part = job.part[p];
    const int64_t count = (int64_t)job.slab_rows * part.rank;
    if (i >= count) {
      i -= count;
      continue;
    }
    const int row = (int)i / part.rank, column = (int)i % part.rank;
    if (row >= live) return;
    const float4 v = add_in_order(part.ds_sums + i, count, part.stripes);
    const float x[4] = {v.x * part.scale, v.y * part.scale, v.z * part.scale, v.w * part.scale};
    lm_store<4>((T *)job.ds + (int64_t)(job.first_row + row) * job.ds_pitch + part.offset + column, x);
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

template <typename T, typename C>
static cudaError_t launch_slab(const gradient_job &job, int32_t stripes, int32_t runs, int64_t sums, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(gradient_tiles<T, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
  if (!error) error = lm_cuda_launch_clusters<gradient_tiles<T, C>>(job.cluster, dim3(stripes, runs), GRADIENT_THREADS, C::SHARED, stream, job);
  if (error) return error;
  return lm_cuda_launch<gradient_add<T>>((unsigned)lm_ceil_div(sums, 4 * ADD_THREADS), ADD_THREADS, 0, stream, job);
}

enum { LARGE_KB = 214, SMALL_KB = 96 }; /* of shared memory: as deep a ring as the device takes */

template <typename T, int KILOBYTES>
static cudaError_t launch_rank(const gradient_job &job, int32_t rank, int32_t stripes, int32_t runs, int64_t sums,
                               cudaStream_t stream) {
  if (rank == 16) return launch_slab<T, gradient_tile<16, KILOBYTES>>(job, stripes, runs, sums, stream);
  if (rank == 32) return launch_slab<T, gradient_tile<32, KILOBYTES>>(job, stripes, runs, sums, stream);
  return launch_slab<T, gradient_tile<64, KILOBYTES>>(job, stripes, runs, sums, stream);
}

template <typename T>
static cudaError_t launch_size(const lm_cuda *cuda, const gradient_job &job, int32_t rank, int32_t stripes, int32_t runs,
                               int64_t sums, cudaStream_t stream) {
  return cuda->shared_max >= LARGE_KB * 1024 ? launch_rank<T, LARGE_KB>(job, rank, stripes, runs, sums, stream)
                                             : launch_rank<T, SMALL_KB>(job, rank, stripes, runs, sums, stream);
}

cudaError_t lm_cuda_linear_gradient(lm_cuda *cuda, const lm_lora_linear_backward_args *args, const lm_matrix &ds, void *workspace,
                                    uint64_t workspace_bytes, cudaStream_t stream) {
  const int32_t out[3] = {args->out0, args->out1, args->out2}, rank[3] = {args->rank0, args->rank1, args->rank2};
  const float scale[3] = {args->scale0, args->scale1, args->scale2};
  const void *const b[3] = {args->b0, args->b1, args->b2};
  float *const db[3] = {args->db0, args->db1, args->db2};
  if (args->type == LM_F32 || args->a_type != args->type || ds.type != args->type || !workspace ||
      cuda->shared_max < SMALL_KB * 1024)
    return cudaErrorNotSupported;
  gradient_job job = {};
  job.live = args->live;
  job.ds = const_cast<void *>(ds.data);
  job.rows = args->rows;
  job.dy_pitch = args->dy_pitch, job.s_pitch = args->s_pitch, job.ds_pitch = ds.pitch;
  uint64_t places = (uintptr_t)ds.data | (uint64_t)args->dy_pitch * 2 | (uint64_t)args->s_pitch * 2 | (uint64_t)ds.pitch * 2;
  int32_t widest = 16;
  for (const int32_t r : rank) widest = r > 32 ? 64 : r > widest ? 32 : widest;
  int64_t column = 0, offset = 0, db_floats = 0, ds_floats = 0, ranks = 0; /* ds_floats: per row */
  int32_t stripes = 0;
  for (int i = 0; i < 3; i++) {
    gradient_part &p = job.part[i];
    if (rank[i] > 64 || rank[i] % 8 != 0) return cudaErrorNotSupported;
    if (rank[i] > 0) {
      p.dy = lm_cuda_at(args->type, args->dy, column);
      p.b = b[i];
      p.s = lm_cuda_at(args->type, args->s, offset);
      p.db = db[i];
      p.scale = scale[i];
      p.out = out[i];
      p.rank = rank[i];
      p.stripes = (int32_t)lm_ceil_div(out[i], 8192 / widest);
      p.offset = (int32_t)offset;
      places |= (uintptr_t)p.dy | (uintptr_t)p.b | (uintptr_t)p.s;
      stripes += p.stripes;
      ds_floats += (int64_t)p.stripes * rank[i];
      db_floats += (int64_t)out[i] * rank[i];
      ranks += rank[i];
    }
    column += out[i];
    offset += rank[i];
  }
  if (places % 16 != 0) return cudaErrorNotSupported;

  /* As many runs of rows as there are multiprocessors for, the runs of a cluster together. */
  int64_t runs = cuda->sm_count / stripes, slab_rows = 0;
  if (runs > lm_ceil_div(args->rows, TILE_ROWS)) runs = lm_ceil_div(args->rows, TILE_ROWS);
  if (runs < 1) runs = 1;
  job.cluster = 1;
  while (lm_cuda_clusters(cuda) && job.cluster < MOST_CLUSTER && 2 * job.cluster <= runs) job.cluster *= 2;
  for (;; runs = (runs + 1) / 2) {
    while (job.cluster > runs) job.cluster /= 2;
    job.groups = (int32_t)(runs / job.cluster);
    const int64_t floats = (int64_t)(workspace_bytes / 4) - (job.groups > 1 ? job.groups * db_floats : 0);
    slab_rows = floats > 0 ? floats / ds_floats / TILE_ROWS * TILE_ROWS : 0;
    if (slab_rows > args->rows) slab_rows = lm_ceil_div(args->rows, TILE_ROWS) * TILE_ROWS;
    if (slab_rows >= args->rows || slab_rows >= 1024 || runs == 1) break;
  }
  if (slab_rows == 0) return cudaErrorNotSupported;
  runs = job.groups * job.cluster;
  job.run_rows = (int32_t)(lm_ceil_div(lm_ceil_div(slab_rows, runs), TILE_ROWS) * TILE_ROWS);
  float *sums = static_cast<float *>(workspace);
  for (gradient_part &p : job.part) {
    if (p.rank == 0) continue;
    p.ds_sums = sums;
    sums += p.stripes * slab_rows * p.rank;
    p.db_sums = sums;
    sums += job.groups > 1 ? (int64_t)job.groups * p.out * p.rank : 0;
  }
  job.slab_rows = (int32_t)slab_rows;
  const int64_t count = slab_rows * ranks + (job.groups > 1 ? db_floats : 0);
  for (int64_t row = 0; row < args->rows; row += slab_rows) {
    job.first_row = (int32_t)row;
    const cudaError_t error = args->type == LM_BF16 ? launch_size<lm_bf16>(cuda, job, widest, stripes, (int32_t)runs, count, stream)
                                                    : launch_size<lm_f16>(cuda, job, widest, stripes, (int32_t)runs, count, stream);
    if (error) return error;
  }
  return cudaSuccess;
}
