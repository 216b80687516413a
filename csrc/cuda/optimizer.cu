/* optimizer.cu: gradient norm and AdamW over flat arenas, and the sum of losses. Every sum has one order, whatever the device:
 * thread by thread, then through the warp, then over the warps, in double precision from the threads on. */
#include <limits.h>

#include "../core/step_rule.h"
#include "convert.cuh"
#include "kernels.h"

namespace {

/* Sum over a block of THREADS; valid in thread 0. */
template <int THREADS>
__device__ __forceinline__ double block_sum(double sum) {
  __shared__ double partial[THREADS / 32];
  sum = lm_warp_sum(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return 0;
  return lm_warp_sum(threadIdx.x < THREADS / 32 ? partial[threadIdx.x] : 0.0);
}

/* Gradient norm -------------------------------------------------------------------------------------------------- */

constexpr int NORM_BLOCK = LM_NORM_BLOCK;
constexpr int NORM_THREADS = 1024;
constexpr int FINISH_THREADS = 256;

/* Where squares overflow f32 or an element is not finite: the whole block once more in double precision, or the mark of its
 * first bad element. Valid in thread 0. */
__device__ __noinline__ double careful_squares(const float *g, int count, int64_t begin) {
  __shared__ int first;
  if (threadIdx.x == 0) first = INT_MAX;
  __syncthreads();
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += NORM_THREADS) {
    if (isfinite(g[i])) sum += (double)g[i] * (double)g[i];
    else atomicMin(&first, i);
  }
  sum = block_sum<NORM_THREADS>(sum); /* its barrier also lies between the writes of first and this read */
  return first == INT_MAX ? sum : lm_rule_mark(begin + first);
}

/* A block per partial sum: 64 elements a thread in f32, then f64. */
template <int LANES>
__global__ void __launch_bounds__(NORM_THREADS) norm_kernel(const __grid_constant__ lm_grad_norm_args a) {
  constexpr int UNROLL = 4, STRIDE = NORM_THREADS * LANES;
  const float *g = a.g + (int64_t)blockIdx.x * NORM_BLOCK;
  const int count = (int)min((int64_t)NORM_BLOCK, a.n - (int64_t)blockIdx.x * NORM_BLOCK), vectors = count - count % LANES;
  float sum[UNROLL] = {};
  for (int begin = threadIdx.x * LANES; begin < vectors; begin += UNROLL * STRIDE) {
    lm_pack<float, LANES> pack[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (begin + u * STRIDE < vectors) pack[u] = lm_fetch<LANES>(g + begin + u * STRIDE);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      if (begin + u * STRIDE >= vectors) break;
      float v[LANES];
      lm_unpack(v, pack[u]);
#pragma unroll
      for (int j = 0; j < LANES; j++) sum[u] = fmaf(v[j], v[j], sum[u]);
    }
  }
  const int last = vectors + threadIdx.x;
  if (last < count) sum[0] = fmaf(g[last], g[last], sum[0]);
  const double own = ((double)sum[0] + sum[1]) + ((double)sum[2] + sum[3]);
  const bool careful = __syncthreads_or(!isfinite(own));
  const double total = careful ? careful_squares(g, count, (int64_t)blockIdx.x * NORM_BLOCK) : block_sum<NORM_THREADS>(own);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(FINISH_THREADS)
    norm_finish_kernel(const __grid_constant__ lm_grad_norm_args a, int64_t blocks) {
  __shared__ unsigned long long bad;
  if (threadIdx.x == 0) bad = ULLONG_MAX;
  __syncthreads();
  double sum = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += FINISH_THREADS) {
    const double partial = a.partial[i];
    if (partial >= 0) sum += partial;
    else atomicMin(&bad, (unsigned long long)lm_rule_marked(partial));
  }
  sum = block_sum<FINISH_THREADS>(sum);
  if (threadIdx.x == 0) lm_rule_step(&a, sum, bad == ULLONG_MAX ? -1 : (int64_t)bad);
}

/* AdamW ---------------------------------------------------------------------------------------------------------- */

constexpr int ADAMW_THREADS = 256;

/* p = p * decay - rate * m / (sqrt(v) * root + eps). m and v are touched once a step and pass the caches by; g and the copy
 * are what the next micro-batch reads first. */
template <int LANES, typename C>
__global__ void __launch_bounds__(ADAMW_THREADS) adamw_kernel(const __grid_constant__ lm_adamw_args a) {
  constexpr lm_cache once = lm_cache::Stream;
  const int64_t begin = ((int64_t)blockIdx.x * ADAMW_THREADS + threadIdx.x) * LANES;
  if (begin >= a.n) return;
  lm_adamw_args one = a;
  one.p += begin, one.m += begin, one.v += begin, one.g += begin;
  float p[LANES], m[LANES], v[LANES], g[LANES];
  lm_load<LANES>(g, one.g);
  lm_load<LANES, once>(m, one.m);
  lm_load<LANES, once>(v, one.v);
  lm_load<LANES, once>(p, one.p);
  const bool skipped = a.metrics->skipped != 0;
  const lm_optimizer_control *c = a.control;
  const float factor = a.metrics->factor, decay = a.metrics->decay, rate = a.metrics->rate, root = a.metrics->root;
  const float beta1 = (float)c->beta1, beta2 = (float)c->beta2, eps = (float)c->eps;
  const float rest1 = (float)(1.0 - c->beta1), rest2 = (float)(1.0 - c->beta2);
#pragma unroll
  for (int j = 0; j < LANES; j++) {
    const float d = g[j] * factor;
    m[j] = fmaf(beta1, m[j], rest1 * d);
    v[j] = fmaf(beta2, v[j], rest2 * (d * d));
    p[j] = fmaf(p[j], decay, -(rate * m[j] / fmaf(sqrtf(v[j]), root, eps)));
    g[j] = 0;
  }
  lm_store<LANES>(one.g, g);
  if (skipped) return;
  lm_store<LANES, once>(one.m, m);
  lm_store<LANES, once>(one.v, v);
  lm_store<LANES, once>(one.p, p);
  if (a.copy) lm_store<LANES>(static_cast<C *>(a.copy) + begin, p);
}

bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename C>
cudaError_t adamw(const lm_adamw_args &a, cudaStream_t stream) {
  const int64_t whole = aligned(a.p) && aligned(a.m) && aligned(a.v) && aligned(a.g) && aligned(a.copy) ? a.n - a.n % 4 : 0;
  lm_adamw_args part = a;
  if (whole) {
    part.n = whole;
    const dim3 grid((unsigned)lm_ceil_div(whole / 4, ADAMW_THREADS));
    const cudaError_t error = lm_cuda_launch<adamw_kernel<4, C>>(grid, ADAMW_THREADS, 0, stream, part);
    if (error || whole == a.n) return error;
    part.p += whole, part.m += whole, part.v += whole, part.g += whole;
    if (a.copy) part.copy = static_cast<C *>(a.copy) + whole;
    part.n = a.n - whole;
  }
  return lm_cuda_launch<adamw_kernel<1, C>>(dim3((unsigned)lm_ceil_div(part.n, ADAMW_THREADS)), ADAMW_THREADS, 0, stream, part);
}

/* Losses --------------------------------------------------------------------------------------------------------- */

constexpr int LOSS_THREADS = 1024;

__global__ void __launch_bounds__(LOSS_THREADS) loss_sum_kernel(const __grid_constant__ lm_loss_sum_args a) {
  const int32_t labelled = min(a.batch->labelled, a.rows);
  double sum = 0;
  for (int32_t i = threadIdx.x; i < labelled; i += LOSS_THREADS) sum += (double)a.loss[i];
  sum = block_sum<LOSS_THREADS>(sum);
  if (threadIdx.x == 0) a.metrics->loss_sum += sum;
}

}  // namespace

cudaError_t lm_cuda_grad_norm(lm_cuda *, const lm_grad_norm_args *args, cudaStream_t stream) {
  const int64_t blocks = lm_ceil_div(args->n, NORM_BLOCK);
  const dim3 grid((unsigned)blocks);
  const cudaError_t error = aligned(args->g) ? lm_cuda_launch<norm_kernel<4>>(grid, NORM_THREADS, 0, stream, *args)
                                             : lm_cuda_launch<norm_kernel<1>>(grid, NORM_THREADS, 0, stream, *args);
  if (error) return error;
  return lm_cuda_launch<norm_finish_kernel>(dim3(1), FINISH_THREADS, 0, stream, *args, blocks);
}

cudaError_t lm_cuda_adamw(lm_cuda *, const lm_adamw_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->copy ? args->copy_type : LM_F32, C, return adamw<C>(*args, stream))
}

cudaError_t lm_cuda_loss_sum(lm_cuda *, const lm_loss_sum_args *args, cudaStream_t stream) {
  return lm_cuda_launch<loss_sum_kernel>(dim3(1), LOSS_THREADS, 0, stream, *args);
}
