/* lora_down.cu: launches of lora_down.cuh. */
#include "lora_down.h"

#include "kernels.h"
#include "lora_down.cuh"

enum { MOST_CLUSTER = 8 }; /* blocks that every device with clusters takes */

/* Blocks that share the work of one tile: a power of two, so that all of them run at once, each with at least two slices. */
static int32_t splits_of(const lm_cuda *cuda, int64_t tiles, int64_t blocks, int64_t slices) {
  int32_t splits = 1;
  while (splits < MOST_CLUSTER && 2 * splits * tiles <= blocks * cuda->sm_count && 4 * splits <= slices) splits *= 2;
  return splits;
}

template <typename T, typename C>
static cudaError_t launch_down(const lm_cuda *cuda, const down_job &job, cudaStream_t stream) {
  if (cuda->shared_max < C::SHARED) return cudaErrorNotSupported;
  const cudaError_t error = cudaFuncSetAttribute(down_tiles<T, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
  if (error) return error;
  const unsigned tiles = (unsigned)lm_ceil_div(job.rows, C::ROWS), chunks = (unsigned)lm_ceil_div(job.ranks, C::RANKS);
  const unsigned splits = (unsigned)splits_of(cuda, (int64_t)tiles * chunks, C::BLOCKS, lm_ceil_div(job.in, C::DEPTH));
  return lm_cuda_launch_clusters<down_tiles<T, C>>(splits, dim3(tiles, splits, chunks), DOWN_THREADS, C::SHARED, stream, job);
}

template <typename T, typename C>
static cudaError_t launch_da(const lm_cuda *cuda, const da_job &job, cudaStream_t stream) {
  if (cuda->shared_max < C::SHARED) return cudaErrorNotSupported;
  const cudaError_t error = cudaFuncSetAttribute(da_tiles<T, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
  if (error) return error;
  const unsigned tiles = (unsigned)lm_ceil_div(job.in, C::COLUMNS), chunks = (unsigned)lm_ceil_div(job.ranks, C::RANKS);
  const unsigned splits = (unsigned)splits_of(cuda, (int64_t)tiles * chunks, C::BLOCKS, lm_ceil_div(job.rows, RUN_ROWS));
  return lm_cuda_launch_clusters<da_tiles<T, C>>(splits, dim3(tiles, splits, chunks), DOWN_THREADS, C::SHARED, stream, job);
}

/* The ranks that a block takes: a multiple of 16 up to 64, so that as many blocks as needed leave no one nearly idle. */
static int32_t chunk_of(int32_t ranks) { return (int32_t)lm_ceil_div(lm_ceil_div(ranks, lm_ceil_div(ranks, 64)), 16); }

template <typename T>
static cudaError_t down_by_ranks(const lm_cuda *cuda, const down_job &job, cudaStream_t stream) {
  switch (chunk_of(job.ranks)) {
    case 1: return launch_down<T, down_tile<16, 64, 8, 2>>(cuda, job, stream);
    case 2: return launch_down<T, down_tile<32, 64, 8, 2>>(cuda, job, stream);
    case 3: return launch_down<T, down_tile<48, 64, 7, 2>>(cuda, job, stream);
    default: return launch_down<T, down_tile<64, 64, 6, 2>>(cuda, job, stream);
  }
}

template <typename T>
static cudaError_t da_by_ranks(const lm_cuda *cuda, const da_job &job, cudaStream_t stream) {
  switch (chunk_of(job.ranks)) {
    case 1: return launch_da<T, da_tile<16, 128, 5, 2>>(cuda, job, stream);
    case 2: return launch_da<T, da_tile<32, 128, 4, 2>>(cuda, job, stream);
    case 3: return launch_da<T, da_tile<48, 128, 4, 2>>(cuda, job, stream);
    default: return launch_da<T, da_tile<64, 128, 4, 2>>(cuda, job, stream);
  }
}

bool lm_cuda_clusters(const lm_cuda *cuda) {
  if (cuda->capability < 90) return false;
  cudaFuncAttributes attributes;
  static const bool compiled = cudaFuncGetAttributes(&attributes, down_tiles<lm_bf16, down_tile<16, 64, 8, 2>>) == cudaSuccess &&
                               attributes.ptxVersion >= 90;
  return compiled;
}

static bool lines_on_16(const void *data, int64_t pitch) { return ((uintptr_t)data | (uint64_t)pitch * 2) % 16 == 0; }

cudaError_t lm_cuda_lora_down_tiles(lm_cuda *cuda, const lm_lora_down_args *args, cudaStream_t stream) {
  const int32_t ranks = args->rank0 + args->rank1 + args->rank2;
  if (args->type == LM_F32 || args->a_type != args->type || args->rows <= LM_FEW_ROWS || !lines_on_16(args->x, args->x_pitch) ||
      !lines_on_16(args->a, args->in) || !lm_cuda_clusters(cuda))
    return cudaErrorNotSupported;
  const down_job job = {args->x, args->a, args->s, args->live, args->rows, args->in, ranks, args->x_pitch, args->s_pitch,
                        {args->rank0, args->rank0 + args->rank1}, {args->scale0, args->scale1, args->scale2}};
  return args->type == LM_BF16 ? down_by_ranks<lm_bf16>(cuda, job, stream) : down_by_ranks<lm_f16>(cuda, job, stream);
}

cudaError_t lm_cuda_lora_down_gradient(lm_cuda *cuda, const lm_lora_down_backward_args *args, const lm_matrix &ds, cudaStream_t stream) {
  if (args->type == LM_F32 || ds.type != args->type || !lines_on_16(args->x, args->x_pitch) || !lines_on_16(ds.data, ds.pitch) ||
      (uintptr_t)args->da % 16 != 0 || args->in % 4 != 0 || !lm_cuda_clusters(cuda))
    return cudaErrorNotSupported;
  const da_job job = {ds.data, args->x, args->da, args->live, args->rows, args->in, args->rank0 + args->rank1 + args->rank2, ds.pitch,
                      args->x_pitch};
  return args->type == LM_BF16 ? da_by_ranks<lm_bf16>(cuda, job, stream) : da_by_ranks<lm_f16>(cuda, job, stream);
}
