/* elementwise.cu: kernels over flat arrays. A thread holds UNROLL accesses of 16 bytes of every input in flight; what is
 * left over at the end, and arrays that are not aligned to 16 bytes, go element by element. */
#include "convert.cuh"
#include "kernels.h"

namespace {

constexpr int THREADS = 256;
constexpr int UNROLL = 4;

/* Vector u of this thread, of `whole` vectors. All loads of a thread come before its first store. */
__device__ __forceinline__ int64_t vector_index(int u) {
  return (int64_t)blockIdx.x * (THREADS * UNROLL) + u * THREADS + threadIdx.x;
}

/* The element behind the last whole vector that this thread of the first block takes; n if none. */
template <int LANES>
__device__ __forceinline__ int64_t left_over(int64_t n) {
  const int64_t i = n - n % LANES + threadIdx.x;
  return blockIdx.x == 0 && i < n ? i : n;
}

template <int LANES, typename T>
__global__ void __launch_bounds__(THREADS) scale_kernel(const __grid_constant__ lm_scale_args a) {
  T *y = static_cast<T *>(a.y);
  const T *x = static_cast<const T *>(a.x);
  const int64_t whole = a.n / LANES, last = left_over<LANES>(a.n);
  lm_pack<T, LANES> pack[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (vector_index(u) < whole) pack[u] = lm_fetch<LANES>(x + vector_index(u) * LANES);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (vector_index(u) >= whole) break;
    float v[LANES];
    lm_unpack(v, pack[u]);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] *= a.factor;
    lm_store<LANES>(y + vector_index(u) * LANES, v);
  }
  if (last < a.n) y[last] = lm_from_float<T>(lm_to_float(x[last]) * a.factor);
}

template <int LANES, typename T>
__global__ void __launch_bounds__(THREADS) add_kernel(const __grid_constant__ lm_add_args args) {
  T *y = static_cast<T *>(args.y);
  const T *a = static_cast<const T *>(args.a), *b = static_cast<const T *>(args.b);
  const int64_t whole = args.n / LANES, last = left_over<LANES>(args.n);
  lm_pack<T, LANES> left[UNROLL], right[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (vector_index(u) >= whole) break;
    left[u] = lm_fetch<LANES>(a + vector_index(u) * LANES);
    right[u] = lm_fetch<LANES>(b + vector_index(u) * LANES);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (vector_index(u) >= whole) break;
    float v[LANES], w[LANES];
    lm_unpack(v, left[u]);
    lm_unpack(w, right[u]);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] += w[j];
    lm_store<LANES>(y + vector_index(u) * LANES, v);
  }
  if (last < args.n) y[last] = lm_from_float<T>(lm_to_float(a[last]) + lm_to_float(b[last]));
}

template <int LANES, typename Y, typename X>
__global__ void __launch_bounds__(THREADS) cast_kernel(const __grid_constant__ lm_cast_args a) {
  Y *y = static_cast<Y *>(a.y);
  const X *x = static_cast<const X *>(a.x);
  const int64_t whole = a.n / LANES, last = left_over<LANES>(a.n);
  lm_pack<X, LANES> pack[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (vector_index(u) < whole) pack[u] = lm_fetch<LANES>(x + vector_index(u) * LANES);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (vector_index(u) >= whole) break;
    float v[LANES];
    lm_unpack(v, pack[u]);
    lm_store<LANES>(y + vector_index(u) * LANES, v);
  }
  if (last < a.n) y[last] = lm_from_float<Y>(lm_to_float(x[last]));
}

dim3 tiles(int64_t n, int lanes) {
  return dim3((unsigned)lm_ceil_div(lm_ceil_div(n, lanes), THREADS * UNROLL));
}

bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename T>
cudaError_t scale(const lm_scale_args &a, cudaStream_t stream) {
  if (!aligned(a.y) || !aligned(a.x)) return lm_cuda_launch<scale_kernel<1, T>>(tiles(a.n, 1), THREADS, 0, stream, a);
  return lm_cuda_launch<scale_kernel<lm_lanes<T>, T>>(tiles(a.n, lm_lanes<T>), THREADS, 0, stream, a);
}

template <typename T>
cudaError_t add(const lm_add_args &a, cudaStream_t stream) {
  if (!aligned(a.y) || !aligned(a.a) || !aligned(a.b))
    return lm_cuda_launch<add_kernel<1, T>>(tiles(a.n, 1), THREADS, 0, stream, a);
  return lm_cuda_launch<add_kernel<lm_lanes<T>, T>>(tiles(a.n, lm_lanes<T>), THREADS, 0, stream, a);
}

/* Between two types, one of them has 16 bits: eight elements make 16 bytes there. The same type keeps its bits, also those
 * of NaN. */
template <typename Y, typename X>
cudaError_t cast(const lm_cast_args &a, cudaStream_t stream) {
  if constexpr (std::is_same_v<X, Y>) {
    if (a.y == a.x) return cudaSuccess;
    return cudaMemcpyAsync(a.y, a.x, (size_t)a.n * sizeof(X), cudaMemcpyDeviceToDevice, stream);
  } else {
    if (!aligned(a.y) || !aligned(a.x)) return lm_cuda_launch<cast_kernel<1, Y, X>>(tiles(a.n, 1), THREADS, 0, stream, a);
    return lm_cuda_launch<cast_kernel<8, Y, X>>(tiles(a.n, 8), THREADS, 0, stream, a);
  }
}

}  // namespace

cudaError_t lm_cuda_scale(lm_cuda *, const lm_scale_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return scale<T>(*args, stream))
}

cudaError_t lm_cuda_add(lm_cuda *, const lm_add_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return add<T>(*args, stream))
}

cudaError_t lm_cuda_cast(lm_cuda *, const lm_cast_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, X, LM_CUDA_BY_TYPE(args->y_type, Y, return cast<Y, X>(*args, stream)))
}
