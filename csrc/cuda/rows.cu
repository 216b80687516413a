/* rows.cu: kernels that treat every row by itself, without a reduction over floats: copies by index, argmax, the gated unit
 * and the rotation. What is not aligned to 16 bytes goes element by element through the same code with LANES = 1. */
#include "convert.cuh"
#include "kernels.h"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ int32_t clamped(int32_t index, int32_t n) { return index >= 0 && index < n ? index : 0; }

/* Copies by index ------------------------------------------------------------------------------------------------ */

/* y[t] = x[index[t]], or x[t] without an index. */
template <typename Y, typename X>
struct copy_args {
  Y *y;
  const X *x;
  const int32_t *index;
  const int32_t *live;
  int32_t rows, width, source_rows;
  int32_t y_pitch, x_pitch;
};

/* A warp per row, UNROLL accesses in flight. The same type keeps its bits, also those of NaN. */
template <int LANES, typename Y, typename X>
__global__ void __launch_bounds__(THREADS) copy_rows_kernel(const __grid_constant__ copy_args<Y, X> a) {
  constexpr int UNROLL = 4;
  const int32_t row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= lm_live_rows(a.live, a.rows)) return;
  const int32_t source = a.index ? clamped(a.index[row], a.source_rows) : row;
  const X *x = a.x + (int64_t)source * a.x_pitch;
  Y *y = a.y + (int64_t)row * a.y_pitch;
  for (int32_t begin = lane * LANES; begin < a.width; begin += UNROLL * 32 * LANES) {
    lm_pack<X, LANES> pack[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (begin + u * 32 * LANES < a.width) pack[u] = lm_fetch<LANES>(x + begin + u * 32 * LANES);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      if (begin + u * 32 * LANES >= a.width) break;
      if constexpr (std::is_same_v<X, Y>) {
        lm_put(y + begin + u * 32 * LANES, pack[u]);
      } else {
        float v[LANES];
        lm_unpack(v, pack[u]);
        lm_store<LANES>(y + begin + u * 32 * LANES, v);
      }
    }
  }
}

template <typename Y, typename X>
cudaError_t copy_rows(const copy_args<Y, X> &a, cudaStream_t stream) {
  constexpr int LANES = sizeof(X) < sizeof(Y) ? lm_lanes<X> : lm_lanes<Y>;
  const dim3 grid((unsigned)lm_ceil_div(a.rows, WARPS));
  if (a.width % LANES || !lm_aligned(a.y, a.y_pitch, 16) || !lm_aligned(a.x, a.x_pitch, 16))
    return lm_cuda_launch<copy_rows_kernel<1, Y, X>>(grid, THREADS, 0, stream, a);
  return lm_cuda_launch<copy_rows_kernel<LANES, Y, X>>(grid, THREADS, 0, stream, a);
}

template <typename Y, typename X>
cudaError_t embedding(const lm_embedding_forward_args &a, cudaStream_t stream) {
  return copy_rows<Y, X>({static_cast<Y *>(a.y), static_cast<const X *>(a.table), a.ids, a.live, a.rows, a.width, a.vocab,
                          a.y_pitch, a.width},
                         stream);
}

template <typename T>
cudaError_t gather(const lm_gather_rows_args &a, cudaStream_t stream) {
  return copy_rows<T, T>({static_cast<T *>(a.y), static_cast<const T *>(a.x), a.index, a.live, a.rows, a.width, a.source_rows,
                          a.y_pitch, a.x_pitch},
                         stream);
}

/* Argmax --------------------------------------------------------------------------------------------------------- */

struct peak {
  float value;
  int32_t index;
};

/* The larger value, the lower index on ties; NaN never wins. */
__device__ __forceinline__ void take(peak &best, float value, int32_t index) {
  if (value > best.value || (value == best.value && index < best.index)) best = {value, index};
}

__device__ __forceinline__ peak warp_peak(peak best) {
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const float value = __shfl_xor_sync(0xffffffffu, best.value, step);
    const int32_t index = __shfl_xor_sync(0xffffffffu, best.index, step);
    take(best, value, index);
  }
  return best;
}

constexpr int PEAK_THREADS = 1024;

/* A block per row: a row is a vocabulary wide. */
template <int LANES, typename T>
__global__ void __launch_bounds__(PEAK_THREADS) argmax_kernel(const __grid_constant__ lm_argmax_args a) {
  constexpr int UNROLL = 4, STRIDE = PEAK_THREADS * LANES;
  const int32_t row = blockIdx.x;
  if (row >= lm_live_rows(a.live, a.rows)) return;
  const T *x = static_cast<const T *>(a.x) + (int64_t)row * a.x_pitch;
  const int32_t vectors = a.width - a.width % LANES;
  peak best = {-INFINITY, INT32_MAX};
  for (int64_t begin = threadIdx.x * LANES; begin < vectors; begin += UNROLL * STRIDE) {
    lm_pack<T, LANES> pack[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (begin + u * STRIDE < vectors) pack[u] = lm_fetch<LANES>(x + begin + u * STRIDE);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      if (begin + u * STRIDE >= vectors) break;
      float v[LANES];
      lm_unpack(v, pack[u]);
#pragma unroll
      for (int j = 0; j < LANES; j++) take(best, v[j], (int32_t)begin + u * STRIDE + j);
    }
  }
  const int32_t last = vectors + threadIdx.x;
  if (last < a.width) take(best, lm_to_float(x[last]), last);

  __shared__ peak warps[PEAK_THREADS / 32];
  best = warp_peak(best);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = warp_peak(warps[threadIdx.x]);
  if (threadIdx.x == 0) a.out[row] = best.index == INT32_MAX ? 0 : best.index; /* a row of NaN: 0 */
}

template <typename T>
cudaError_t argmax(const lm_argmax_args &a, cudaStream_t stream) {
  if (!lm_aligned(static_cast<const T *>(a.x), a.rows > 1 ? a.x_pitch : 0, 16))
    return lm_cuda_launch<argmax_kernel<1, T>>(dim3(a.rows), PEAK_THREADS, 0, stream, a);
  return lm_cuda_launch<argmax_kernel<lm_lanes<T>, T>>(dim3(a.rows), PEAK_THREADS, 0, stream, a);
}

/* Gated unit and rotation: all rows as one list of items --------------------------------------------------------- */

struct place {
  int32_t row;
  uint32_t item;
};

/* Item u of this thread, of `items` items a row: one 64-bit division per block, one of 32 bits per item. */
template <int UNROLL>
__device__ __forceinline__ place place_of(int u, uint32_t items) {
  const int64_t first = (int64_t)blockIdx.x * (THREADS * UNROLL);
  const int64_t row = first / items;
  const uint32_t item = (uint32_t)(first - row * items) + u * THREADS + threadIdx.x;
  return {(int32_t)(row + item / items), item % items};
}

template <int UNROLL>
dim3 places(int64_t rows, int64_t items) {
  return dim3((unsigned)lm_ceil_div(rows * items, THREADS * UNROLL));
}

/* sigmoid in the accuracy that the result is stored with. */
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-x));
  else return __fdividef(1.0f, 1.0f + __expf(-x));
}

template <int LANES, typename T>
__global__ void __launch_bounds__(THREADS) glu_forward_kernel(const __grid_constant__ lm_glu_forward_args a) {
  constexpr int UNROLL = 2;
  const int32_t live = lm_live_rows(a.live, a.rows);
  lm_pack<T, LANES> gate[UNROLL], up[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const place p = place_of<UNROLL>(u, a.width / LANES);
    if (p.row >= live) break;
    const T *gu = static_cast<const T *>(a.gu) + (int64_t)p.row * a.gu_pitch + p.item * LANES;
    gate[u] = lm_fetch<LANES>(gu);
    up[u] = lm_fetch<LANES>(gu + a.width);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const place p = place_of<UNROLL>(u, a.width / LANES);
    if (p.row >= live) break;
    float g[LANES], v[LANES];
    lm_unpack(g, gate[u]);
    lm_unpack(v, up[u]);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] *= g[j] * sigmoid<T>(g[j]);
    lm_store<LANES>(static_cast<T *>(a.h) + (int64_t)p.row * a.h_pitch + p.item * LANES, v);
  }
}

template <typename T>
cudaError_t glu_forward(const lm_glu_forward_args &a, cudaStream_t stream) {
  constexpr int LANES = lm_lanes<T>;
  if (a.width % LANES || !lm_aligned(static_cast<T *>(a.h), a.h_pitch, 16) ||
      !lm_aligned(static_cast<const T *>(a.gu), a.gu_pitch, 16))
    return lm_cuda_launch<glu_forward_kernel<1, T>>(places<2>(a.rows, a.width), THREADS, 0, stream, a);
  return lm_cuda_launch<glu_forward_kernel<LANES, T>>(places<2>(a.rows, a.width / LANES), THREADS, 0, stream, a);
}

/* silu'(g) = s (1 + g (1 - s)) with s = sigmoid(g). */
template <int LANES, typename T>
__global__ void __launch_bounds__(THREADS) glu_backward_kernel(const __grid_constant__ lm_glu_backward_args a) {
  constexpr int UNROLL = 2;
  const int32_t live = lm_live_rows(a.live, a.rows);
  lm_pack<T, LANES> gate[UNROLL], up[UNROLL], down[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const place p = place_of<UNROLL>(u, a.width / LANES);
    if (p.row >= live) break;
    const T *gu = static_cast<const T *>(a.gu) + (int64_t)p.row * a.gu_pitch + p.item * LANES;
    gate[u] = lm_fetch<LANES>(gu);
    up[u] = lm_fetch<LANES>(gu + a.width);
    down[u] = lm_fetch<LANES>(static_cast<const T *>(a.dh) + (int64_t)p.row * a.dh_pitch + p.item * LANES);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const place p = place_of<UNROLL>(u, a.width / LANES);
    if (p.row >= live) break;
    float g[LANES], v[LANES], d[LANES];
    lm_unpack(g, gate[u]);
    lm_unpack(v, up[u]);
    lm_unpack(d, down[u]);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
      const float s = sigmoid<T>(g[j]), u = v[j], down = d[j];
      v[j] = down * (g[j] * s);
      d[j] = u * (g[j] * s); /* h, as the forward pass computes it */
      g[j] = down * u * (s * fmaf(g[j], 1.0f - s, 1.0f));
    }
    T *dgu = static_cast<T *>(a.dgu) + (int64_t)p.row * a.dgu_pitch + p.item * LANES;
    lm_store<LANES>(dgu, g);
    lm_store<LANES>(dgu + a.width, v);
    if (a.h) lm_store<LANES>(static_cast<T *>(a.h) + (int64_t)p.row * a.h_pitch + p.item * LANES, d);
  }
}

template <typename T>
cudaError_t glu_backward(const lm_glu_backward_args &a, cudaStream_t stream) {
  constexpr int LANES = lm_lanes<T>;
  if (a.width % LANES || !lm_aligned(static_cast<T *>(a.dgu), a.dgu_pitch, 16) ||
      !lm_aligned(static_cast<const T *>(a.dh), a.dh_pitch, 16) || !lm_aligned(static_cast<const T *>(a.gu), a.gu_pitch, 16) ||
      (a.h && !lm_aligned(static_cast<T *>(a.h), a.h_pitch, 16)))
    return lm_cuda_launch<glu_backward_kernel<1, T>>(places<2>(a.rows, a.width), THREADS, 0, stream, a);
  return lm_cuda_launch<glu_backward_kernel<LANES, T>>(places<2>(a.rows, a.width / LANES), THREADS, 0, stream, a);
}

/* An item is LANES pairs at the same place of up to HEADS heads, `groups` heads apart, so that cos and sin are loaded once
 * and neighbouring threads touch neighbouring heads. */
template <int LANES, typename T>
__global__ void __launch_bounds__(THREADS) rope_kernel(const __grid_constant__ lm_rope_args a) {
  constexpr int HEADS = 4;
  const int32_t half = a.head_dim / 2, columns = half / LANES, groups = (a.heads + HEADS - 1) / HEADS;
  const place p = place_of<1>(0, (uint32_t)(columns * groups));
  if (p.row >= lm_live_rows(a.live, a.rows)) return;
  const int32_t column = p.item % columns * LANES, group = p.item / columns;
  const T *x = static_cast<const T *>(a.x) + (int64_t)p.row * a.x_pitch + column;
  T *y = static_cast<T *>(a.y) + (int64_t)p.row * a.y_pitch + column;
  lm_pack<T, LANES> left[HEADS], right[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const int32_t head = group + h * groups;
    if (head >= a.heads) break;
    left[h] = lm_fetch<LANES>(x + head * a.head_dim);
    right[h] = lm_fetch<LANES>(x + head * a.head_dim + half);
  }
  const int64_t angle = (int64_t)clamped(a.positions[p.row], a.position_count) * half + column;
  float c[LANES], s[LANES];
  lm_load<LANES>(c, a.cos + angle);
  lm_load<LANES>(s, a.sin + angle);
#pragma unroll
  for (int j = 0; j < LANES; j++) s[j] *= (float)a.direction;
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const int32_t head = group + h * groups;
    if (head >= a.heads) break;
    float l[LANES], r[LANES];
    lm_unpack(l, left[h]);
    lm_unpack(r, right[h]);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
      const float turned = fmaf(l[j], c[j], -(r[j] * s[j]));
      r[j] = fmaf(r[j], c[j], l[j] * s[j]);
      l[j] = turned;
    }
    lm_store<LANES>(y + head * a.head_dim, l);
    lm_store<LANES>(y + head * a.head_dim + half, r);
  }
}

template <typename T>
cudaError_t rope(const lm_rope_args &a, cudaStream_t stream) {
  constexpr int LANES = lm_lanes<T>;
  T *y = static_cast<T *>(a.y);
  const T *x = static_cast<const T *>(a.x);
  const int32_t half = a.head_dim / 2, groups = (a.heads + 3) / 4, rotated = a.heads * a.head_dim;
  const bool vectors = half % LANES == 0 && lm_aligned(y, a.y_pitch, 16) && lm_aligned(x, a.x_pitch, 16) &&
                       lm_aligned(a.cos, half, 16) && lm_aligned(a.sin, half, 16);
  cudaError_t error =
      vectors ? lm_cuda_launch<rope_kernel<LANES, T>>(places<1>(a.rows, half / LANES * groups), THREADS, 0, stream, a)
              : lm_cuda_launch<rope_kernel<1, T>>(places<1>(a.rows, half * groups), THREADS, 0, stream, a);
  if (error || y == x || rotated == a.width) return error;
  return copy_rows<T, T>({y + rotated, x + rotated, nullptr, a.live, a.rows, a.width - rotated, a.rows, a.y_pitch, a.x_pitch},
                         stream);
}

}  // namespace

cudaError_t lm_cuda_embedding_forward(lm_cuda *, const lm_embedding_forward_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, Y, LM_CUDA_BY_TYPE(args->table_type, X, return embedding<Y, X>(*args, stream)))
}

cudaError_t lm_cuda_gather_rows(lm_cuda *, const lm_gather_rows_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return gather<T>(*args, stream))
}

cudaError_t lm_cuda_argmax(lm_cuda *, const lm_argmax_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return argmax<T>(*args, stream))
}

cudaError_t lm_cuda_glu_forward(lm_cuda *, const lm_glu_forward_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return glu_forward<T>(*args, stream))
}

cudaError_t lm_cuda_glu_backward(lm_cuda *, const lm_glu_backward_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return glu_backward<T>(*args, stream))
}

cudaError_t lm_cuda_rope(lm_cuda *, const lm_rope_args *args, cudaStream_t stream) {
  LM_CUDA_BY_TYPE(args->type, T, return rope<T>(*args, stream))
}
