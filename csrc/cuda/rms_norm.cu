/* rms_norm.cu: RMSNorm forward and backward. A row is read once and held in registers by 32 to 512 threads, the fewest that
 * need no more than four accesses of 16 bytes each; several rows share a block. Rows that are not aligned, or wider than 512
 * threads hold, are read again from the caches for the second pass. */
#include "convert.cuh"
#include "kernels.h"

namespace {

constexpr int MAX_THREADS = 512;
constexpr int MIN_BLOCK = 256;

/* Sums over the threads of a row: `threads` of them, a power of two from 32 to 512, at a multiple of it. Every thread of the
 * block takes part, also those of rows that are not live. All threads of a row get the same bits. */
__device__ __forceinline__ float2 row_sum(float2 sum, int threads) {
  __shared__ float2 partial[MAX_THREADS / 32];
  sum = {lm_warp_sum(sum.x), lm_warp_sum(sum.y)};
  if (threads == 32) return sum;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = threads / 32;
  if (lane == 0) partial[warp] = sum;
  __syncthreads();
  sum = lane < warps ? partial[warp / warps * warps + lane] : make_float2(0, 0);
  return {lm_warp_sum(sum.x), lm_warp_sum(sum.y)};
}

__device__ __forceinline__ float inverse_rms(float square_sum, int width, float eps) {
  return rsqrtf(square_sum / (float)width + eps);
}

/* N weights from element i on; the type is the same for the whole grid. */
template <int N>
__device__ __forceinline__ void load_weight(float (&w)[N], const void *weight, int32_t type, int32_t i) {
  LM_CUDA_BY_TYPE(type, W, lm_load<N>(w, static_cast<const W *>(weight) + i))
}

/* Rows in registers: vector v of a thread is element (v * threads + its number) * LANES of the row. ---------------- */

template <int VECTORS, typename T>
__global__ void __launch_bounds__(MAX_THREADS) forward_kernel(const __grid_constant__ lm_rms_norm_forward_args a, int threads) {
  constexpr int LANES = lm_lanes<T>;
  const int32_t row = blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads;
  const int32_t first = threadIdx.x % threads * LANES, stride = threads * LANES;
  const bool live = row < lm_live_rows(a.live, a.rows);
  const T *x = static_cast<const T *>(a.x) + (int64_t)row * a.x_pitch;
  lm_pack<T, LANES> pack[VECTORS];
  float sum = 0;
#pragma unroll
  for (int v = 0; v < VECTORS; v++)
    if (live && first + v * stride < a.width) pack[v] = lm_fetch<LANES>(x + first + v * stride);
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (!live || first + v * stride >= a.width) break;
    float e[LANES];
    lm_unpack(e, pack[v]);
#pragma unroll
    for (int j = 0; j < LANES; j++) sum = fmaf(e[j], e[j], sum);
  }
  const float inverse = inverse_rms(row_sum({sum, 0}, threads).x, a.width, a.eps);
  if (!live) return;
  T *y = static_cast<T *>(a.y) + (int64_t)row * a.y_pitch;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int32_t i = first + v * stride;
    if (i >= a.width) break;
    float e[LANES], w[LANES];
    lm_unpack(e, pack[v]);
    load_weight(w, a.weight, a.weight_type, i);
#pragma unroll
    for (int j = 0; j < LANES; j++) e[j] = e[j] * inverse * w[j];
    lm_store<LANES>(y + i, e);
  }
}

/* With g = dy * w: dx = (g - x mean(g x) / rms^2) / rms + add. */
template <int VECTORS, typename T>
__global__ void __launch_bounds__(MAX_THREADS) backward_kernel(const __grid_constant__ lm_rms_norm_backward_args a, int threads) {
  constexpr int LANES = lm_lanes<T>;
  const int32_t row = blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads;
  const int32_t first = threadIdx.x % threads * LANES, stride = threads * LANES;
  const bool live = row < lm_live_rows(a.live, a.rows);
  const T *x = static_cast<const T *>(a.x) + (int64_t)row * a.x_pitch;
  const T *dy = static_cast<const T *>(a.dy) + (int64_t)row * a.dy_pitch;
  const T *add = static_cast<const T *>(a.add) + (int64_t)row * a.add_pitch;
  lm_pack<T, LANES> xs[VECTORS], dys[VECTORS], adds[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int32_t i = first + v * stride;
    if (!live || i >= a.width) break;
    xs[v] = lm_fetch<LANES>(x + i);
    dys[v] = lm_fetch<LANES>(dy + i);
    if (a.add) adds[v] = lm_fetch<LANES>(add + i);
  }
  float2 sum = {0, 0};
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int32_t i = first + v * stride;
    if (!live || i >= a.width) break;
    float e[LANES], d[LANES], w[LANES];
    lm_unpack(e, xs[v]);
    lm_unpack(d, dys[v]);
    load_weight(w, a.weight, a.weight_type, i);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
      sum.x = fmaf(e[j], e[j], sum.x);
      sum.y = fmaf(d[j] * w[j], e[j], sum.y);
    }
  }
  sum = row_sum(sum, threads);
  const float inverse = inverse_rms(sum.x, a.width, a.eps);
  const float pull = -inverse * inverse * inverse * (sum.y / (float)a.width);
  if (!live) return;
  T *dx = static_cast<T *>(a.dx) + (int64_t)row * a.dx_pitch;
  T *y = static_cast<T *>(a.y) + (int64_t)row * a.y_pitch;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int32_t i = first + v * stride;
    if (i >= a.width) break;
    float e[LANES], d[LANES], w[LANES];
    lm_unpack(e, xs[v]);
    lm_unpack(d, dys[v]);
    load_weight(w, a.weight, a.weight_type, i);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
      d[j] = fmaf(pull, e[j], d[j] * w[j] * inverse);
      e[j] = e[j] * inverse * w[j];
    }
    if (a.y) lm_store<LANES>(y + i, e);
    if (a.add) {
      lm_unpack(e, adds[v]);
#pragma unroll
      for (int j = 0; j < LANES; j++) d[j] += e[j];
    }
    lm_store<LANES>(dx + i, d);
  }
}

/* Any width, pitch and alignment: a block per row, an element per thread and turn. --------------------------------- */

constexpr int ANY_THREADS = 512;

template <typename T>
__global__ void __launch_bounds__(ANY_THREADS) forward_any_kernel(const __grid_constant__ lm_rms_norm_forward_args a) {
  const int32_t row = blockIdx.x;
  if (row >= lm_live_rows(a.live, a.rows)) return;
  const T *x = static_cast<const T *>(a.x) + (int64_t)row * a.x_pitch;
  T *y = static_cast<T *>(a.y) + (int64_t)row * a.y_pitch;
  float sum = 0;
  for (int32_t i = threadIdx.x; i < a.width; i += ANY_THREADS) sum = fmaf(lm_to_float(x[i]), lm_to_float(x[i]), sum);
  const float inverse = inverse_rms(row_sum({sum, 0}, ANY_THREADS).x, a.width, a.eps);
  for (int32_t i = threadIdx.x; i < a.width; i += ANY_THREADS) {
    float w[1];
    load_weight(w, a.weight, a.weight_type, i);
    y[i] = lm_from_float<T>(lm_to_float(x[i]) * inverse * w[0]);
  }
}

template <typename T>
__global__ void __launch_bounds__(ANY_THREADS) backward_any_kernel(const __grid_constant__ lm_rms_norm_backward_args a) {
  const int32_t row = blockIdx.x;
  if (row >= lm_live_rows(a.live, a.rows)) return;
  const T *x = static_cast<const T *>(a.x) + (int64_t)row * a.x_pitch;
  const T *dy = static_cast<const T *>(a.dy) + (int64_t)row * a.dy_pitch;
  const T *add = static_cast<const T *>(a.add) + (int64_t)row * a.add_pitch;
  T *dx = static_cast<T *>(a.dx) + (int64_t)row * a.dx_pitch;
  float2 sum = {0, 0};
  for (int32_t i = threadIdx.x; i < a.width; i += ANY_THREADS) {
    float w[1];
    load_weight(w, a.weight, a.weight_type, i);
    const float e = lm_to_float(x[i]);
    sum.x = fmaf(e, e, sum.x);
    sum.y = fmaf(lm_to_float(dy[i]) * w[0], e, sum.y);
  }
  sum = row_sum(sum, ANY_THREADS);
  const float inverse = inverse_rms(sum.x, a.width, a.eps);
  const float pull = -inverse * inverse * inverse * (sum.y / (float)a.width);
  for (int32_t i = threadIdx.x; i < a.width; i += ANY_THREADS) {
    float w[1];
    load_weight(w, a.weight, a.weight_type, i);
    const float e = lm_to_float(x[i]), d = fmaf(pull, e, lm_to_float(dy[i]) * w[0] * inverse);
    const T result = lm_from_float<T>(a.add ? d + lm_to_float(add[i]) : d); /* before y, which may lie over add */
    if (a.y) static_cast<T *>(a.y)[(int64_t)row * a.y_pitch + i] = lm_from_float<T>(e * inverse * w[0]);
    dx[i] = result;
  }
}

/* Launches ------------------------------------------------------------------------------------------------------- */

/* How a row of `vectors` accesses is spread: threads per row, and accesses per thread (1, 2, 4 or 8). */
struct shape {
  int threads, vectors;
};

shape shape_of(int32_t vectors) {
  shape s = {32, 1};
  while (s.threads < MAX_THREADS && (int64_t)s.threads * 4 < vectors) s.threads *= 2;
  while (s.threads * s.vectors < vectors) s.vectors *= 2;
  return s;
}

bool aligned_weight(const void *weight) { return reinterpret_cast<uintptr_t>(weight) % 16 == 0; }

/* Calls launch with the number of accesses per thread as a constant. */
template <typename Launch>
cudaError_t by_vectors(int vectors, Launch launch) {
  switch (vectors) {
    case 1: return launch(std::integral_constant<int, 1>());
    case 2: return launch(std::integral_constant<int, 2>());
    case 4: return launch(std::integral_constant<int, 4>());
    default: return launch(std::integral_constant<int, 8>());
  }
}

template <typename T>
cudaError_t forward(const lm_rms_norm_forward_args &a, cudaStream_t stream) {
  constexpr int LANES = lm_lanes<T>;
  if (a.width % LANES || a.width > 8 * MAX_THREADS * LANES || !lm_aligned(static_cast<T *>(a.y), a.y_pitch, 16) ||
      !lm_aligned(static_cast<const T *>(a.x), a.x_pitch, 16) || !aligned_weight(a.weight))
    return lm_cuda_launch<forward_any_kernel<T>>(dim3(a.rows), ANY_THREADS, 0, stream, a);
  const shape s = shape_of(a.width / LANES);
  const int block = s.threads < MIN_BLOCK ? MIN_BLOCK : s.threads;
  const dim3 grid((unsigned)lm_ceil_div(a.rows, block / s.threads));
  return by_vectors(s.vectors, [&](auto vectors) {
    return lm_cuda_launch<forward_kernel<vectors.value, T>>(grid, block, 0, stream, a, s.threads);
  });
}

template <typename T>
cudaError_t backward(const lm_rms_norm_backward_args &a, cudaStream_t stream) {
  constexpr int LANES = lm_lanes<T>;
  if (a.width % LANES || a.width > 8 * MAX_THREADS * LANES || !lm_aligned(static_cast<T *>(a.dx), a.dx_pitch, 16) ||
      !lm_aligned(static_cast<const T *>(a.dy), a.dy_pitch, 16) || !lm_aligned(static_cast<const T *>(a.x), a.x_pitch, 16) ||
      (a.add && !lm_aligned(static_cast<const T *>(a.add), a.add_pitch, 16)) ||
      (a.y && !lm_aligned(static_cast<T *>(a.y), a.y_pitch, 16)) || !aligned_weight(a.weight))
    return lm_cuda_launch<backward_any_kernel<T>>(dim3(a.rows), ANY_THREADS, 0, stream, a);
  const shape s = shape_of(a.width / LANES);
  const int block = s.threads < MIN_BLOCK ? MIN_BLOCK : s.threads;
  const dim3 grid((unsigned)lm_ceil_div(a.rows, block / s.threads));
  return by_vectors(s.vectors, [&](auto vectors) {
    return lm_cuda_launch<backward_kernel<vectors.value, T>>(grid, block, 0, stream, a, s.threads);
  });
}

}  // namespace

cudaError_t lm_cuda_rms_norm_forward(lm_cuda *, const lm_rms_norm_forward_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return forward<T>(*args, stream))
}

cudaError_t lm_cuda_rms_norm_backward(lm_cuda *, const lm_rms_norm_backward_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return backward<T>(*args, stream))
}
