/* lora_down.cu: the products of an adapter that read x, s = factor x A^T and dA += ds^T x: bound by reading x once.
 *
 * Few tiles cover such a product, so the blocks of a cluster (sm_90 and later) share the contraction of one and add their
 * sums through each other's shared memory, in one order. */
#include "lora_down.h"

#include "gemm_tensor.cuh"
#include "kernels.h"

enum {
  DOWN_THREADS = 256,
  DOWN_ROWS = 32,          /* of s per block; each warp takes 16 of the steps of a slice */
  DOWN_DEPTH = 128,        /* steps of a slice */
  DA_COLUMNS = 64,         /* of dA per block; four warps across, two along the rows */
  DA_ROWS = 64,            /* of a slice */
  RING_BYTES = 96 * 1024,  /* two blocks on a multiprocessor */
  MOST_CLUSTER = 8,        /* blocks that every device with clusters takes */
  LEAST_STEPS = 2048,      /* of x per block of a cluster, */
  LEAST_ROWS = 512         /* or rows: less does not pay for the cluster's barriers */
};

/* All threads of the cluster; what they wrote to shared memory is seen by the others. */
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* 16 bytes at the shared address `from` of the cluster's block of this rank. */
__device__ __forceinline__ float4 cluster_load(uint32_t from, int rank) {
  float4 v = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .u32 p; mapa.shared::cluster.u32 p, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [p]; }"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from), "r"(rank)
               : "memory");
#endif
  return v;
}

/* What the warps of the cluster's blocks have at `from` and DEPTH - 1 times `stride` bytes on, added in order. */
template <int DEPTH>
__device__ __forceinline__ float4 cluster_sum(uint32_t from, int stride, int blocks) {
  float4 total = {0, 0, 0, 0};
  for (int b = 0; b < blocks; b++)
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const float4 v = cluster_load(from + d * stride, b);
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
  return total;
}

/* Slices [begin, end) through a ring of stages: fetch(slice, stage) copies one, multiply(stage) takes it. Leaves the ring free. */
template <int STAGES, typename Fetch, typename Multiply>
__device__ __forceinline__ void through_ring(int begin, int end, const Fetch &fetch, const Multiply &multiply) {
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
    multiply(stage);
    next = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  lm_copy_wait<0>();
  __syncthreads();
}

/* A warp's 16 x 8 sums to shared memory. */
__device__ __forceinline__ void leave(float *to, int pitch, const float (&sum)[4]) {
  to += (threadIdx.x & 31) / 4 * pitch + (threadIdx.x & 3) * 2;
  *reinterpret_cast<float2 *>(to) = make_float2(sum[0], sum[1]);
  *reinterpret_cast<float2 *>(to + 8 * pitch) = make_float2(sum[2], sum[3]);
}

/* s ------------------------------------------------------------------------------------------------------------------ */

struct down_job {
  const void *x, *a; /* [rows, in], [ranks, in] */
  void *s;           /* [rows, ranks] */
  const int32_t *live;
  int32_t rows, in, ranks, x_pitch, s_pitch;
  int32_t end[2]; /* columns before end[0] take factor[0], those before end[1] factor[1] */
  float factor[3];
};

template <int RANKS_>
struct down_tile {
  static constexpr int RANKS = RANKS_, LEFT = DOWN_ROWS * DOWN_DEPTH * 2, STAGE = LEFT + RANKS * DOWN_DEPTH * 2; /* bytes */
  static constexpr int STAGES = RING_BYTES / STAGE, PITCH = RANKS + 8, SUMS = DOWN_ROWS * PITCH * 4; /* floats, bytes of a warp */
  static_assert(DOWN_THREADS / 32 * SUMS <= RING_BYTES, "the sums leave through the ring");
};

template <typename T, typename C>
__global__ void __launch_bounds__(DOWN_THREADS, 2) down_tiles(const __grid_constant__ down_job job) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int BLOCKS = C::RANKS / 8;
  const int row0 = blockIdx.x * DOWN_ROWS, rank0 = blockIdx.z * C::RANKS, live = lm_live_rows(job.live, job.rows);
  const int splits = gridDim.y, split = blockIdx.y, warp = threadIdx.x >> 5;
  if (row0 >= live) return; /* the whole cluster */
  const int slices = (job.in + DOWN_DEPTH - 1) / DOWN_DEPTH;
  const uint32_t ring = lm_shared_address(shared);
  const lm_matrix x = {job.x, job.x_pitch, 0}, a = {job.a, job.in, 0};
  float sum[2][BLOCKS][4] = {};
  through_ring<C::STAGES>(
      (int)((int64_t)slices * split / splits), (int)((int64_t)slices * (split + 1) / splits),
      [&](int slice, int stage) {
        const uint32_t tile = ring + stage * C::STAGE;
        lm_fetch<T, DOWN_ROWS, DOWN_DEPTH, DOWN_THREADS, false>(tile, x, row0, live, slice * DOWN_DEPTH, job.in);
        lm_fetch<T, C::RANKS, DOWN_DEPTH, DOWN_THREADS, false>(tile + C::LEFT, a, rank0, job.ranks, slice * DOWN_DEPTH, job.in);
      },
      [&](int stage) {
        const uint32_t tile = ring + stage * C::STAGE;
        uint32_t l[2][4], r[4];
#pragma unroll
        for (int i = 0; i < 2; i++) lm_fragment<false, DOWN_DEPTH>(l[i], tile, 16 * i, 16 * warp);
#pragma unroll
        for (int j = 0; j < BLOCKS; j += 2) {
          lm_fragment<false, DOWN_DEPTH>(r, tile + C::LEFT, j * 8, 16 * warp);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            lm_multiply<T>(sum[i][j], l[i], r[0], r[2]);
            lm_multiply<T>(sum[i][j + 1], l[i], r[1], r[3]);
          }
        }
      });
  float *const own = reinterpret_cast<float *>(shared + warp * C::SUMS);
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) leave(own + 16 * i * C::PITCH + j * 8, C::PITCH, sum[i][j]);
  cluster_sync();
  const bool whole = lm_is_aligned(job.s, (int64_t)job.s_pitch * 2, 8);
  for (int i = split * DOWN_THREADS + threadIdx.x; i < DOWN_ROWS * C::RANKS / 4; i += splits * DOWN_THREADS) {
    const int r = i / (C::RANKS / 4), at = i % (C::RANKS / 4) * 4, column = rank0 + at;
    if (row0 + r >= live || column >= job.ranks) continue;
    const float4 v = cluster_sum<DOWN_THREADS / 32>(ring + (r * C::PITCH + at) * 4, C::SUMS, splits);
    float total[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++)
      total[e] *= column + e < job.end[0] ? job.factor[0] : column + e < job.end[1] ? job.factor[1] : job.factor[2];
    const int count = min(4, job.ranks - column);
    lm_store_up_to<4>((T *)job.s + (int64_t)(row0 + r) * job.s_pitch + column, total, count, whole && count == 4);
  }
  cluster_sync(); /* nobody leaves while its sums are read */
}

/* dA ----------------------------------------------------------------------------------------------------------------- */

struct da_job {
  const void *ds, *x; /* [rows, ranks], [rows, in] */
  float *da;          /* [ranks, in] */
  const int32_t *live;
  int32_t rows, in, ranks, ds_pitch, x_pitch;
};

template <int RANKS_>
struct da_tile {
  static constexpr int RANKS = RANKS_, LINE = RANKS == 48 ? 64 : RANKS; /* of ds in shared memory: a power of two */
  static constexpr int RIGHT = DA_ROWS * DA_COLUMNS * 2, STAGE = RIGHT + DA_ROWS * LINE * 2, STAGES = RING_BYTES / STAGE;
  static constexpr int PITCH = DA_COLUMNS + 8, SUMS = RANKS * PITCH * 4;
};

template <typename T, typename C>
__global__ void __launch_bounds__(DOWN_THREADS, 2) da_tiles(const __grid_constant__ da_job job) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int DOWN = C::RANKS / 16;
  const int column0 = blockIdx.x * DA_COLUMNS, rank0 = blockIdx.z * C::RANKS, live = lm_live_rows(job.live, job.rows);
  const int splits = gridDim.y, split = blockIdx.y, slices = (job.rows + DA_ROWS - 1) / DA_ROWS;
  const int column = (threadIdx.x >> 5) % 4 * 16, half = threadIdx.x >> 7;
  const uint32_t ring = lm_shared_address(shared);
  const lm_matrix x = {job.x, job.x_pitch, 0}, ds = {job.ds, job.ds_pitch, 0};
  float sum[DOWN][2][4] = {};
  through_ring<C::STAGES>(
      (int)((int64_t)slices * split / splits), min((int)((int64_t)slices * (split + 1) / splits), (live + DA_ROWS - 1) / DA_ROWS),
      [&](int slice, int stage) {
        const uint32_t tile = ring + stage * C::STAGE;
        const int row = slice * DA_ROWS, ranks = min(job.ranks, rank0 + C::RANKS);
        lm_fetch<T, DA_ROWS, DA_COLUMNS, DOWN_THREADS, false>(tile, x, row, live, column0, job.in);
        lm_fetch<T, DA_ROWS, C::LINE, DOWN_THREADS, false>(tile + C::RIGHT, ds, row, live, rank0, ranks);
      },
      [&](int stage) {
        const uint32_t tile = ring + stage * C::STAGE;
#pragma unroll
        for (int k = 16 * half; k < DA_ROWS; k += 32) {
          uint32_t l[4], r[4];
          lm_fragment<true, DA_COLUMNS>(r, tile, column, k);
#pragma unroll
          for (int i = 0; i < DOWN; i++) {
            lm_fragment<true, C::LINE>(l, tile + C::RIGHT, i * 16, k);
            lm_multiply<T>(sum[i][0], l, r[0], r[2]);
            lm_multiply<T>(sum[i][1], l, r[1], r[3]);
          }
        }
      });
  float *const own = reinterpret_cast<float *>(shared + half * C::SUMS) + column;
#pragma unroll
  for (int i = 0; i < DOWN; i++)
#pragma unroll
    for (int j = 0; j < 2; j++) leave(own + 16 * i * C::PITCH + j * 8, C::PITCH, sum[i][j]);
  cluster_sync();
  for (int i = split * DOWN_THREADS + threadIdx.x; i < C::RANKS * DA_COLUMNS / 4; i += splits * DOWN_THREADS) {
    const int r = i / (DA_COLUMNS / 4), c = i % (DA_COLUMNS / 4) * 4;
    if (rank0 + r >= job.ranks || column0 + c >= job.in) continue;
    float4 *const to = reinterpret_cast<float4 *>(job.da + (int64_t)(rank0 + r) * job.in + column0 + c);
    const float4 before = *to, v = cluster_sum<2>(ring + (r * C::PITCH + c) * 4, C::SUMS, splits);
    *to = make_float4(before.x + v.x, before.y + v.y, before.z + v.z, before.w + v.w);
  }
  cluster_sync();
}

/* Launches ----------------------------------------------------------------------------------------------------------- */

/* extent: of the contraction, of which a block of a cluster takes at least `least`. */
template <auto kernel, typename C, typename Job>
static cudaError_t launch(const lm_cuda *cuda, const Job &job, int64_t tiles, int32_t extent, int32_t least, cudaStream_t stream) {
  (void)&lm_cuda_listed<kernel>::entry;
  const int64_t chunks = lm_ceil_div(job.ranks, C::RANKS);
  unsigned splits = 1; /* doubled while fewer than three quarters of the multiprocessors have a block */
  while (splits < MOST_CLUSTER && 4 * splits * tiles * chunks <= 3 * cuda->sm_count && 2 * (int64_t)splits * least <= extent)
    splits *= 2;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES);
  if (error) return error;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, splits, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)tiles, splits, (unsigned)chunks);
  config.blockDim = DOWN_THREADS;
  config.dynamicSmemBytes = RING_BYTES;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, job);
}

/* Calls launch with the ranks that a block takes, in 16s up to 64, so that as many blocks as needed leave no one nearly idle. */
template <typename Launch>
static cudaError_t by_ranks(int32_t ranks, Launch launch) {
  switch (lm_ceil_div(lm_ceil_div(ranks, lm_ceil_div(ranks, 64)), 16)) {
    case 1: return launch(std::integral_constant<int, 16>());
    case 2: return launch(std::integral_constant<int, 32>());
    case 3: return launch(std::integral_constant<int, 48>());
    default: return launch(std::integral_constant<int, 64>());
  }
}

template <typename T>
static cudaError_t launch_down(const lm_cuda *cuda, const down_job &job, cudaStream_t stream) {
  return by_ranks(job.ranks, [&](auto ranks) {
    using C = down_tile<ranks.value>;
    return launch<down_tiles<T, C>, C>(cuda, job, lm_ceil_div(job.rows, DOWN_ROWS), job.in, LEAST_STEPS, stream);
  });
}

template <typename T>
static cudaError_t launch_da(const lm_cuda *cuda, const da_job &job, cudaStream_t stream) {
  return by_ranks(job.ranks, [&](auto ranks) {
    using C = da_tile<ranks.value>;
    return launch<da_tiles<T, C>, C>(cuda, job, lm_ceil_div(job.in, DA_COLUMNS), job.rows, LEAST_ROWS, stream);
  });
}

/* Whether the device has clusters and this build its code. */
static bool has_clusters(const lm_cuda *cuda) {
  if (cuda->capability < 90 || cuda->shared_max < RING_BYTES) return false;
  cudaFuncAttributes attributes;
  static const bool compiled =
      cudaFuncGetAttributes(&attributes, down_tiles<lm_bf16, down_tile<16>>) == cudaSuccess && attributes.ptxVersion >= 90;
  return compiled;
}

static bool lines_on_16(const void *data, int64_t pitch) { return ((uintptr_t)data | (uint64_t)pitch * 2) % 16 == 0; }

cudaError_t lm_cuda_lora_down_tiles(lm_cuda *cuda, const lm_lora_down_args *args, cudaStream_t stream) {
  const int32_t ranks = args->rank0 + args->rank1 + args->rank2;
  if (args->type == LM_F32 || args->a_type != args->type || args->rows <= LM_FEW_ROWS || !lines_on_16(args->x, args->x_pitch) ||
      !lines_on_16(args->a, args->in) || !has_clusters(cuda))
    return cudaErrorNotSupported;
  const down_job job = {args->x, args->a, args->s, args->live, args->rows, args->in, ranks, args->x_pitch, args->s_pitch,
                        {args->rank0, args->rank0 + args->rank1}, {args->scale0, args->scale1, args->scale2}};
  return args->type == LM_BF16 ? launch_down<lm_bf16>(cuda, job, stream) : launch_down<lm_f16>(cuda, job, stream);
}

cudaError_t lm_cuda_lora_down_gradient(lm_cuda *cuda, const lm_lora_down_backward_args *args, const lm_matrix &ds,
                                       cudaStream_t stream) {
  const int32_t ranks = args->rank0 + args->rank1 + args->rank2;
  if (args->type == LM_F32 || ds.type != args->type || !lines_on_16(args->x, args->x_pitch) || !lines_on_16(ds.data, ds.pitch) ||
      (uintptr_t)args->da % 16 != 0 || args->in % 4 != 0 || !has_clusters(cuda))
    return cudaErrorNotSupported;
  const da_job job = {ds.data, args->x, args->da, args->live, args->rows, args->in, ranks, ds.pitch, args->x_pitch};
  return args->type == LM_BF16 ? launch_da<lm_bf16>(cuda, job, stream) : launch_da<lm_f16>(cuda, job, stream);
}
