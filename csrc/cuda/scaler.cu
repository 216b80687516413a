/* scaler.cu: the gradient scaler over any buffers. */
#include "../core/step_rule.h"
#include "convert.cuh"
#include "kernels.h"

namespace {

constexpr int THREADS = 256;

__global__ void set_kernel(const __grid_constant__ lm_scaler_set_args a) { *a.scaler = lm_rule_scaler_of(&a); }

__global__ void update_kernel(const __grid_constant__ lm_scaler_update_args a) { lm_rule_scaler_update(&a); }

/* y = x * factor, LANES elements a thread; with found, x is looked at first. */
template <int LANES>
__device__ __forceinline__ void scale(float *y, const float *x, float factor, float *found, int64_t n) {
  const int64_t begin = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * LANES;
  if (begin >= n) return;
  float v[LANES];
  if (begin + LANES <= n) {
    lm_load<LANES>(v, x + begin);
  } else {
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] = begin + j < n ? x[begin + j] : 0.0f;
  }
  bool finite = true;
#pragma unroll
  for (int j = 0; j < LANES; j++) {
    finite = finite && isfinite(v[j]);
    v[j] *= factor;
  }
  if (found && !finite) *found = 1; /* several threads may store, but only this one value */
  if (begin + LANES <= n) {
    lm_store<LANES>(y + begin, v);
  } else {
#pragma unroll
    for (int j = 0; j < LANES; j++)
      if (begin + j < n) y[begin + j] = v[j];
  }
}

template <int LANES>
__global__ void __launch_bounds__(THREADS) scale_kernel(const __grid_constant__ lm_scaler_scale_args a) {
  scale<LANES>(a.y, a.x, a.scaler->scale, nullptr, a.n);
}

template <int LANES>
__global__ void __launch_bounds__(THREADS) unscale_kernel(const __grid_constant__ lm_scaler_unscale_args a) {
  scale<LANES>(a.g, a.g, (float)(1.0 / (double)a.scaler->scale), a.found, a.n);
}

bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

dim3 grid(int64_t n, int lanes) { return dim3((unsigned)((n + (int64_t)THREADS * lanes - 1) / ((int64_t)THREADS * lanes))); }

}  // namespace

cudaError_t lm_cuda_scaler_set(lm_cuda *, const lm_scaler_set_args *args, cudaStream_t stream) {
  return lm_cuda_launch<set_kernel>(dim3(1), dim3(1), 0, stream, *args);
}

cudaError_t lm_cuda_scaler_scale(lm_cuda *, const lm_scaler_scale_args *args, cudaStream_t stream) {
  return aligned(args->y) && aligned(args->x) ? lm_cuda_launch<scale_kernel<4>>(grid(args->n, 4), THREADS, 0, stream, *args)
                                              : lm_cuda_launch<scale_kernel<1>>(grid(args->n, 1), THREADS, 0, stream, *args);
}

cudaError_t lm_cuda_scaler_unscale(lm_cuda *, const lm_scaler_unscale_args *args, cudaStream_t stream) {
  return aligned(args->g) ? lm_cuda_launch<unscale_kernel<4>>(grid(args->n, 4), THREADS, 0, stream, *args)
                          : lm_cuda_launch<unscale_kernel<1>>(grid(args->n, 1), THREADS, 0, stream, *args);
}

cudaError_t lm_cuda_scaler_update(lm_cuda *, const lm_scaler_update_args *args, cudaStream_t stream) {
  return lm_cuda_launch<update_kernel>(dim3(1), dim3(1), 0, stream, *args);
}
