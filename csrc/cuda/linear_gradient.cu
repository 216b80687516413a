/* linear_gradient.cu: ds and dB in one read of dy (see linear_gradient.cuh).
 *
 * A block takes a stripe of up to 8192 / RANK columns of one part and a run of rows. Tiles of 64 rows x 128 columns of dy come
 * through a ring of stages, each with its rows of s; B of the stripe stays. Of every tile each warp makes 16 columns of
 * dB^T = dy^T s, kept over all rows, and its share of ds = dy B, kept over the stripe. So the sums over stripes (ds) and over
 * runs of rows (dB) remain; a second kernel adds them in order. Their traffic is 4 rank / columns + 4 rank / rows of dy's, an
 * eighth to a quarter, against a second read of dy. */
#include "linear_gradient.cuh"

#include "gemm_tensor.cuh"

enum { GRADIENT_THREADS = 256, TILE_ROWS = 64, TILE_COLUMNS = 128, ADD_THREADS = 256 };

template <int RANK_>
struct gradient_tile {
  static constexpr int RANK = RANK_, TILES = 8192 / RANK / TILE_COLUMNS, COLUMNS = TILES * TILE_COLUMNS;
  static constexpr int STAGES = RANK == 16 ? 4 : 3;
  static constexpr int S = TILE_ROWS * TILE_COLUMNS * 2, STAGE = S + TILE_ROWS * RANK * 2, KEPT = COLUMNS * RANK * 2; /* bytes */
  static constexpr int SHARED = STAGES * STAGE + KEPT;
};

struct gradient_part {
  const void *dy, *b, *s;
  float *db;
  float *ds_sums; /* [stripes][slab rows][rank] */
  float *db_sums; /* [runs][out][rank] */
  float scale;
  int32_t out, rank, stripes, offset; /* offset: first column of ds */
};

struct gradient_job {
  gradient_part part[3];
  const int32_t *live;
  void *ds;
  int32_t rows, first_row, slab_rows, run_rows; /* run_rows: of one block */
  int32_t dy_pitch, s_pitch, ds_pitch, reserved;
};

/* Live rows of the slab. */
__device__ __forceinline__ int slab_live(const gradient_job &job) {
  return max(0, min(lm_live_rows(job.live, job.rows) - job.first_row, job.slab_rows));
}

template <typename T, typename C>
__global__ void __launch_bounds__(GRADIENT_THREADS, 2) gradient_tiles(const __grid_constant__ gradient_job job) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int RANK = C::RANK, BLOCKS = RANK / 8, SHARE = RANK / 16; /* blocks of 8 ranks; those of a warp's part of ds */
  const int live = slab_live(job), row0 = blockIdx.y * job.run_rows, rows = min(job.run_rows, live - row0);
  if (rows <= 0) return;
  int stripe = blockIdx.x, index = 0;
  while (stripe >= job.part[index].stripes) stripe -= job.part[index++].stripes;
  const gradient_part &part = job.part[index];
  const int column0 = stripe * C::COLUMNS, tiles = min(C::TILES, (part.out - column0 + TILE_COLUMNS - 1) / TILE_COLUMNS);
  const int steps = (rows + TILE_ROWS - 1) / TILE_ROWS * tiles; /* row by row of tiles */
  const uint32_t kept = lm_shared_address(shared), stages = kept + C::KEPT;
  const lm_matrix dy = {part.dy, job.dy_pitch, 0}, s = {part.s, job.s_pitch, 0}, b = {part.b, part.rank, 0};
  const int first = job.first_row + row0, last = first + rows; /* rows of dy and s */

  const auto fetch = [&](int step, int stage) {
    const uint32_t tile = stages + stage * C::STAGE;
    const int row = first + step / tiles * TILE_ROWS, column = column0 + step % tiles * TILE_COLUMNS;
    lm_fetch<T, TILE_ROWS, TILE_COLUMNS, GRADIENT_THREADS, false>(tile, dy, row, last, column, part.out);
    lm_fetch<T, TILE_ROWS, RANK, GRADIENT_THREADS, false>(tile + C::S, s, row, last, 0, part.rank);
  };

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, ds_row = warp % 4 * 16, ds_half = warp / 4;
  float db[C::TILES][BLOCKS][4] = {};
  lm_fetch<T, C::COLUMNS, RANK, GRADIENT_THREADS, false>(kept, b, column0, part.out, 0, part.rank);
#pragma unroll
  for (int p = 0; p < C::STAGES - 1; p++) {
    if (p < steps) fetch(p, p);
    lm_copy_commit();
  }
  int stage = 0, next = C::STAGES - 1;
  for (int step = 0; step < steps; step += tiles) {
    float ds[SHARE][4] = {};
#pragma unroll
    for (int t = 0; t < C::TILES; t++) {
      if (t >= tiles) break;
      lm_copy_wait<C::STAGES - 2>();
      __syncthreads(); /* the tile is there, and the block has left the stage that is filled now */
      if (step + t + C::STAGES - 1 < steps) fetch(step + t + C::STAGES - 1, next);
      lm_copy_commit();
      const uint32_t tile = stages + stage * C::STAGE, rows_of_s = tile + C::S;
#pragma unroll
      for (int k = 0; k < TILE_ROWS; k += 16) {
        uint32_t x[4], y[4];
        lm_fragment<true, TILE_COLUMNS>(x, tile, warp * 16, k);
#pragma unroll
        for (int j = 0; j < BLOCKS; j += 2) {
          lm_fragment<true, RANK>(y, rows_of_s, j * 8, k);
          lm_multiply<T>(db[t][j], x, y[0], y[2]);
          lm_multiply<T>(db[t][j + 1], x, y[1], y[3]);
        }
      }
#pragma unroll
      for (int k = 0; k < TILE_COLUMNS; k += 16) {
        uint32_t x[4], y[4];
        lm_fragment<false, TILE_COLUMNS>(x, tile, ds_row, k);
        if constexpr (SHARE == 1) {
          lm_fragment<true, RANK>(y, kept, 0, t * TILE_COLUMNS + k);
          lm_multiply<T>(ds[0], x, ds_half ? y[1] : y[0], ds_half ? y[3] : y[2]);
        } else {
#pragma unroll
          for (int j = 0; j < SHARE; j += 2) {
            lm_fragment<true, RANK>(y, kept, (ds_half * SHARE + j) * 8, t * TILE_COLUMNS + k);
            lm_multiply<T>(ds[j], x, y[0], y[2]);
            lm_multiply<T>(ds[j + 1], x, y[1], y[3]);
          }
        }
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
  float *const sums = part.db_sums + (int64_t)blockIdx.y * part.out * part.rank;
#pragma unroll
  for (int t = 0; t < C::TILES; t++)
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
      const int column = j * 8 + (lane & 3) * 2;
      if (column >= part.rank) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = column0 + t * TILE_COLUMNS + warp * 16 + (lane >> 2) + 8 * half;
        if (row < part.out)
          *reinterpret_cast<float2 *>(sums + (int64_t)row * part.rank + column) =
              make_float2(db[t][j][2 * half], db[t][j][2 * half + 1]);
      }
    }
}

__device__ __forceinline__ float4 add_in_order(const float *sums, int64_t stride, int count) {
  float4 total = {0, 0, 0, 0};
#pragma unroll 4
  for (int i = 0; i < count; i++) {
    const float4 v = __ldcg(reinterpret_cast<const float4 *>(sums + i * stride));
    total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
  }
  return total;
}

/* Four sums per thread: first all of ds, then all of dB. Ranks are multiples of 8 here. */
template <typename T>
__global__ void __launch_bounds__(ADD_THREADS, 4) gradient_add(const __grid_constant__ gradient_job job) {
  const int live = slab_live(job), runs = (live + job.run_rows - 1) / job.run_rows;
  int64_t i = ((int64_t)blockIdx.x * ADD_THREADS + threadIdx.x) * 4;
  for (int p = 0; p < 3; p++) {
    const gradient_part &part = job.part[p];
    const int64_t count = (int64_t)job.slab_rows * part.rank;
    if (i >= count) {
      i -= count;
      continue;
    }
    const int row = (int)(i / part.rank), column = (int)(i % part.rank);
    if (row >= live) return;
    const float4 v = add_in_order(part.ds_sums + i, count, part.stripes);
    const float x[4] = {v.x * part.scale, v.y * part.scale, v.z * part.scale, v.w * part.scale};
    lm_store<4>((T *)job.ds + (int64_t)(job.first_row + row) * job.ds_pitch + part.offset + column, x);
    return;
  }
  for (int p = 0; p < 3; p++) {
    const gradient_part &part = job.part[p];
    const int64_t count = (int64_t)part.out * part.rank;
    if (i >= count) {
      i -= count;
      continue;
    }
    const float4 v = add_in_order(part.db_sums + i, count, runs);
    part.db[i] += v.x, part.db[i + 1] += v.y, part.db[i + 2] += v.z, part.db[i + 3] += v.w;
    return;
  }
}

template <typename T, typename C>
static cudaError_t launch_slab(const gradient_job &job, int32_t stripes, int32_t runs, int64_t sums, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(gradient_tiles<T, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
  if (!error) error = lm_cuda_launch<gradient_tiles<T, C>>(dim3(stripes, runs), GRADIENT_THREADS, C::SHARED, stream, job);
  if (error) return error;
  return lm_cuda_launch<gradient_add<T>>((unsigned)lm_ceil_div(sums, 4 * ADD_THREADS), ADD_THREADS, 0, stream, job);
}

template <typename T>
static cudaError_t launch_rank(const gradient_job &job, int32_t rank, int32_t stripes, int32_t runs, int64_t sums,
                               cudaStream_t stream) {
  if (rank == 16) return launch_slab<T, gradient_tile<16>>(job, stripes, runs, sums, stream);
  if (rank == 32) return launch_slab<T, gradient_tile<32>>(job, stripes, runs, sums, stream);
  return launch_slab<T, gradient_tile<64>>(job, stripes, runs, sums, stream);
}

cudaError_t lm_cuda_linear_gradient(lm_cuda *cuda, const lm_lora_linear_backward_args *args, const lm_matrix &ds, void *workspace,
                                    uint64_t workspace_bytes, cudaStream_t stream) {
  const int32_t out[3] = {args->out0, args->out1, args->out2}, rank[3] = {args->rank0, args->rank1, args->rank2};
  const float scale[3] = {args->scale0, args->scale1, args->scale2};
  const void *const b[3] = {args->b0, args->b1, args->b2};
  float *const db[3] = {args->db0, args->db1, args->db2};
  if (args->type == LM_F32 || args->a_type != args->type || ds.type != args->type || !workspace ||
      cuda->shared_max < gradient_tile<16>::SHARED)
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

  /* As many runs of rows as two blocks per multiprocessor can take at once, each of at least two tiles. */
  int64_t runs = 2 * (int64_t)cuda->sm_count / stripes, run_rows = 0, slab_rows = 0;
  if (runs < 1) runs = 1;
  for (;; runs = (runs + 1) / 2) {
    const int64_t floats = (int64_t)(workspace_bytes / 4) - runs * db_floats;
    slab_rows = floats > 0 ? floats / ds_floats / TILE_ROWS * TILE_ROWS : 0;
    if (slab_rows > args->rows) slab_rows = lm_ceil_div(args->rows, TILE_ROWS) * TILE_ROWS;
    if (slab_rows >= args->rows || slab_rows >= 1024 || runs == 1) break;
  }
  if (slab_rows == 0) return cudaErrorNotSupported;
  run_rows = lm_ceil_div(lm_ceil_div(slab_rows, runs), TILE_ROWS) * TILE_ROWS;
  if (run_rows < 2 * TILE_ROWS) run_rows = 2 * TILE_ROWS;
  runs = lm_ceil_div(slab_rows, run_rows);
  float *sums = static_cast<float *>(workspace);
  for (gradient_part &p : job.part) {
    if (p.rank == 0) continue;
    p.ds_sums = sums;
    sums += p.stripes * slab_rows * p.rank;
    p.db_sums = sums;
    sums += runs * p.out * p.rank;
  }
  job.slab_rows = (int32_t)slab_rows;
  job.run_rows = (int32_t)run_rows;
  for (int64_t row = 0; row < args->rows; row += slab_rows) {
    job.first_row = (int32_t)row;
    const cudaError_t error =
        args->type == LM_BF16 ? launch_rank<lm_bf16>(job, widest, stripes, (int32_t)runs, slab_rows * ranks + db_floats, stream)
                              : launch_rank<lm_f16>(job, widest, stripes, (int32_t)runs, slab_rows * ranks + db_floats, stream);
    if (error) return error;
  }
  return cudaSuccess;
}
