/* convert.cuh: storage types (f32, bf16, f16) to and from float, in accesses of up to 16 bytes. */
#ifndef LM_CUDA_CONVERT_CUH
#define LM_CUDA_CONVERT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../include/loramem.h"

typedef __nv_bfloat16 lm_bf16;
typedef __half lm_f16;

/* LM_CUDA_BY_TYPE(type, T, statements): runs the statements with T the C++ type of an LM_F32, LM_BF16 or LM_F16. */
#define LM_CUDA_BY_TYPE(code, T, ...)  \
  switch (code) {                      \
    case LM_BF16: {                    \
      using T = lm_bf16;               \
      __VA_ARGS__;                     \
    } break;                           \
    case LM_F16: {                     \
      using T = lm_f16;                \
      __VA_ARGS__;                     \
    } break;                           \
    default: {                         \
      using T = float;                 \
      __VA_ARGS__;                     \
    }                                  \
  }

/* Elements of T in 16 bytes. */
template <typename T>
constexpr int lm_lanes = 16 / int(sizeof(T));

__host__ __device__ constexpr int64_t lm_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* lm_live_rows: rows that hold data. */
__device__ __forceinline__ int32_t lm_live_rows(const int32_t *live, int32_t rows) {
  return live ? max(0, min(*live, rows)) : rows;
}

__device__ __forceinline__ float lm_to_float(float x) { return x; }
__device__ __forceinline__ float lm_to_float(lm_bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float lm_to_float(lm_f16 x) { return __half2float(x); }

/* lm_from_float: rounded to nearest even; f16 overflows to infinity. */
template <typename T>
__device__ __forceinline__ T lm_from_float(float x);
template <>
__device__ __forceinline__ float lm_from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ lm_bf16 lm_from_float<lm_bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ lm_f16 lm_from_float<lm_f16>(float x) { return __float2half_rn(x); }

/* Two 16-bit elements in one word, the first in the low half. */
template <typename T>
__device__ __forceinline__ uint32_t lm_pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t lm_pack2<lm_bf16>(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&pair);
}
template <>
__device__ __forceinline__ uint32_t lm_pack2<lm_f16>(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&pair);
}

template <typename T>
__device__ __forceinline__ float2 lm_unpack2(uint32_t word);
template <>
__device__ __forceinline__ float2 lm_unpack2<lm_bf16>(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 lm_unpack2<lm_f16>(uint32_t word) {
  return __half22float2(*reinterpret_cast<__half2 *>(&word));
}

/* How an access treats the caches. Default keeps what is read again soon; Stream is for data that one kernel touches once. */
enum class lm_cache { Default, Stream };

template <lm_cache cache, typename Word>
__device__ __forceinline__ Word lm_load_word(const Word *p) {
  if constexpr (cache == lm_cache::Stream) return __ldcs(p);
  else return *p;
}
template <lm_cache cache, typename Word>
__device__ __forceinline__ void lm_store_word(Word *p, Word word) {
  if constexpr (cache == lm_cache::Stream) __stcs(p, word);
  else *p = word;
}

/* lm_pack<T, N>: N elements as they are stored. Held between load and use it takes half the registers that floats would. */
template <typename T, int N>
struct lm_pack {
  static constexpr int words = N * int(sizeof(T)) / 4;
  static_assert(words == 1 || words == 2 || words % 4 == 0, "an access has 4, 8 or a multiple of 16 bytes");
  uint32_t word[words];
};
template <>
struct lm_pack<float, 1> {
  float element;
};
template <>
struct lm_pack<lm_bf16, 1> {
  lm_bf16 element;
};
template <>
struct lm_pack<lm_f16, 1> {
  lm_f16 element;
};

/* lm_fetch<N>(p): N elements at p, which is aligned to all of them, at most to 16 bytes. */
template <int N, lm_cache cache = lm_cache::Default, typename T>
__device__ __forceinline__ lm_pack<T, N> lm_fetch(const T *p) {
  lm_pack<T, N> pack;
  if constexpr (N == 1) {
    pack.element = *p;
  } else if constexpr (pack.words == 1) {
    pack.word[0] = lm_load_word<cache>(reinterpret_cast<const uint32_t *>(p));
  } else if constexpr (pack.words == 2) {
    const uint2 v = lm_load_word<cache>(reinterpret_cast<const uint2 *>(p));
    pack.word[0] = v.x, pack.word[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < pack.words; i += 4) {
      const uint4 v = lm_load_word<cache>(reinterpret_cast<const uint4 *>(p) + i / 4);
      pack.word[i] = v.x, pack.word[i + 1] = v.y, pack.word[i + 2] = v.z, pack.word[i + 3] = v.w;
    }
  }
  return pack;
}

/* lm_put(p, pack): the reverse of lm_fetch, bit for bit. */
template <lm_cache cache = lm_cache::Default, typename T, int N>
__device__ __forceinline__ void lm_put(T *p, const lm_pack<T, N> &pack) {
  if constexpr (N == 1) {
    *p = pack.element;
  } else if constexpr (pack.words == 1) {
    lm_store_word<cache>(reinterpret_cast<uint32_t *>(p), pack.word[0]);
  } else if constexpr (pack.words == 2) {
    lm_store_word<cache>(reinterpret_cast<uint2 *>(p), make_uint2(pack.word[0], pack.word[1]));
  } else {
#pragma unroll
    for (int i = 0; i < pack.words; i += 4)
      lm_store_word<cache>(reinterpret_cast<uint4 *>(p) + i / 4,
                           make_uint4(pack.word[i], pack.word[i + 1], pack.word[i + 2], pack.word[i + 3]));
  }
}

template <typename T, int N>
__device__ __forceinline__ void lm_unpack(float (&x)[N], const lm_pack<T, N> &pack) {
  if constexpr (N == 1) {
    x[0] = lm_to_float(pack.element);
  } else {
#pragma unroll
    for (int i = 0; i < pack.words; i++) {
      if constexpr (sizeof(T) == 4) {
        x[i] = __uint_as_float(pack.word[i]);
      } else {
        const float2 v = lm_unpack2<T>(pack.word[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
      }
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ lm_pack<T, N> lm_packed(const float (&x)[N]) {
  lm_pack<T, N> pack;
  if constexpr (N == 1) {
    pack.element = lm_from_float<T>(x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < pack.words; i++) {
      if constexpr (sizeof(T) == 4) pack.word[i] = __float_as_uint(x[i]);
      else pack.word[i] = lm_pack2<T>(x[2 * i], x[2 * i + 1]);
    }
  }
  return pack;
}

/* lm_load<N>(x, p), lm_store<N>(p, x): N elements at p to and from floats, p aligned as in lm_fetch. */
template <int N, lm_cache cache = lm_cache::Default, typename T>
__device__ __forceinline__ void lm_load(float (&x)[N], const T *p) {
  lm_unpack(x, lm_fetch<N, cache>(p));
}
template <int N, lm_cache cache = lm_cache::Default, typename T>
__device__ __forceinline__ void lm_store(T *p, const float (&x)[N]) {
  lm_put<cache>(p, lm_packed<T>(x));
}

/* lm_aligned: whether rows of pitch elements that start at p can be accessed `bytes` at a time; bytes is a power of two. */
template <typename T>
inline bool lm_aligned(const T *p, int64_t pitch, int bytes) {
  return (reinterpret_cast<uintptr_t>(p) | (uint64_t)(pitch * (int64_t)sizeof(T))) % (unsigned)bytes == 0;
}

/* Sums over a warp: every lane gets the same bits, in the same order each time. */
__device__ __forceinline__ float lm_warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ double lm_warp_sum(double x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float lm_warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

#endif
