/* optimizer.cu: gradient norm and AdamW over flat arenas, and the sum of losses. Every sum has one order, whatever the device:
 * thread by thread, then through the warp, then over the warps, in double precision from the threads on. */
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

constexpr int NORM_BLOCK = 65536; /* elements of one partial sum, as loramem_kernels.h sizes `partial` */
constexpr int NORM_THREADS = 1024;

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
  const double total = block_sum<NORM_THREADS>(((double)sum[0] + sum[1]) + ((double)sum[2] + sum[3]));
  if (threadIdx.x == 0) a.partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(NORM_THREADS) norm_finish_kernel(const __grid_constant__ lm_grad_norm_args a, int64_t blocks) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += NORM_THREADS) sum += a.partial[i];
  sum = block_sum<NORM_THREADS>(sum);
  if (threadIdx.x != 0) return;
  const double norm = sqrt(sum), limit = (double)a.control->max_norm, factor = limit / (norm + 1e-6);
  a.metrics->grad_norm = norm;
  a.metrics->clip = limit > 0 && !(factor >= 1) ? factor : 1; /* NaN stays visible */
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
  const lm_optimizer_control c = *a.control;
  const float clip = (float)a.metrics->clip, decay = 1.0f - c.learning_rate * c.weight_decay;
  const float rate = c.learning_rate / c.bias_correction1, root = 1.0f / sqrtf(c.bias_correction2);
#pragma unroll
  for (int j = 0; j < LANES; j++) {
    const float d = g[j] * clip;
    m[j] = fmaf(c.beta1, m[j], (1.0f - c.beta1) * d);
    v[j] = fmaf(c.beta2, v[j], (1.0f - c.beta2) * (d * d));
    p[j] = fmaf(p[j], decay, -(rate * m[j] / fmaf(sqrtf(v[j]), root, c.eps)));
    g[j] = 0;
  }
  lm_store<LANES, once>(one.m, m);
  lm_store<LANES, once>(one.v, v);
  lm_store<LANES, once>(one.p, p);
  lm_store<LANES>(one.g, g);
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
  return lm_cuda_launch<norm_finish_kernel>(dim3(1), NORM_THREADS, 0, stream, *args, blocks);
}

cudaError_t lm_cuda_adamw(lm_cuda *, const lm_adamw_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->copy ? args->copy_type : LM_F32, C, return adamw<C>(*args, stream))
}

cudaError_t lm_cuda_loss_sum(lm_cuda *, const lm_loss_sum_args *args, cudaStream_t stream) {
  return lm_cuda_launch<loss_sum_kernel>(dim3(1), LOSS_THREADS, 0, stream, *args);
}
