/* simd.h: vectors of f32 for one instruction set, chosen by the file that includes it:
 *   LM_SIMD_512  AVX-512 F, BW, DQ, VL      LM_SIMD_256  AVX2, FMA, F16C      neither: 4 lanes of portable C
 * vf is a vector of VW floats. A "part" call touches only the first n < VW elements; loads fill the rest with 0. */
#ifndef LM_CPU_SIMD_H
#define LM_CPU_SIMD_H

#include <stdint.h>
#include <string.h>

#include "loramem.h"

#define LM_INLINE static inline __attribute__((always_inline))

#if defined(LM_SIMD_512)
#include "simd_512.h"
#elif defined(LM_SIMD_256)
#include "simd_256.h"
#else
#include "simd_portable.h"
#endif

/* vf_get: elements [i, i + VW) of an array of n, converted to f32; those past the end are 0. */
LM_INLINE vf vf_get(int32_t type, const void *x, int64_t i, int64_t n) {
  if (type == LM_F32) {
    const float *p = (const float *)x + i;
    return n - i >= VW ? vf_load(p) : vf_load_part(p, n - i);
  }
  const uint16_t *p = (const uint16_t *)x + i;
  if (type == LM_BF16) return n - i >= VW ? vf_load_bf16(p) : vf_load_bf16_part(p, n - i);
  return n - i >= VW ? vf_load_f16(p) : vf_load_f16_part(p, n - i);
}

/* vf_put: the store that matches vf_get, rounding to nearest even. */
LM_INLINE void vf_put(int32_t type, void *y, int64_t i, int64_t n, vf v) {
  if (type == LM_F32) {
    float *p = (float *)y + i;
    if (n - i >= VW) vf_store(p, v);
    else vf_store_part(p, v, n - i);
    return;
  }
  uint16_t *p = (uint16_t *)y + i;
  if (type == LM_BF16) {
    if (n - i >= VW) vf_store_bf16(p, v);
    else vf_store_bf16_part(p, v, n - i);
  } else {
    if (n - i >= VW) vf_store_f16(p, v);
    else vf_store_f16_part(p, v, n - i);
  }
}

/* LM_BY_TYPE: run `call` with T as a compile-time constant, so that vf_get and vf_put fold to one instruction sequence. */
#define LM_BY_TYPE(type, call)     \
  switch (type) {                  \
    case LM_F32: {                 \
      enum { T = LM_F32 };         \
      call;                        \
    } break;                       \
    case LM_BF16: {                \
      enum { T = LM_BF16 };        \
      call;                        \
    } break;                       \
    default: {                     \
      enum { T = LM_F16 };         \
      call;                        \
    } break;                       \
  }

/* vf_exp: e^x to about 1 ulp. 0 below -87.3 (no subnormals), inf above 88.4, NaN stays NaN.
 * x = k ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial fitted to the relative error (3e-9). */
LM_INLINE vf vf_exp(vf x) {
  const vf low = vf_set(-87.3f);
  const vf bounded = vf_min(vf_max(x, low), vf_set(89.0f)); /* NaN becomes a bound: it only picks k */
  const vf k = vf_round(vf_mul(bounded, vf_set(1.44269504f)));
  vf r = vf_fma(k, vf_set(-0.693359375f), x);
  r = vf_fma(k, vf_set(2.12194440e-4f), r);
  vf p = vf_set(0x1.6a23cep-10f);
  p = vf_fma(p, r, vf_set(0x1.123a2p-7f));
  p = vf_fma(p, r, vf_set(0x1.5558f2p-5f));
  p = vf_fma(p, r, vf_set(0x1.555492p-3f));
  p = vf_fma(p, r, vf_set(0x1.fffffcp-2f));
  p = vf_fma(vf_mul(p, r), r, vf_add(r, vf_set(1.0f)));
  return vf_if_less(x, low, vf_zero(), vf_mul(p, vf_exp2i(k)));
}

/* vf_sigmoid: 1 / (1 + e^-x), at least e^-87: the bound keeps the denominator where vf_reciprocal is good to about 1 ulp. */
LM_INLINE vf vf_sigmoid(vf x) {
  return vf_reciprocal(vf_add(vf_set(1.0f), vf_exp(vf_min(vf_set(87.0f), vf_sub(vf_zero(), x)))));
}

/* vf_tanh: to about 2 ulp, NaN stays NaN. Near 0 an odd polynomial, fitted to the relative error (5e-9); else by the
 * exponential, whose argument is bounded where the result has long been 1. */
LM_INLINE vf vf_tanh(vf x) {
  const vf size = vf_max(x, vf_sub(vf_zero(), x)), z = vf_mul(x, x), one = vf_set(1.0f);
  vf p = vf_set(-0x1.75e1ccp-8f);
  p = vf_fma(p, z, vf_set(0x1.52269ap-6f));
  p = vf_fma(p, z, vf_set(-0x1.b83c5ap-5f));
  p = vf_fma(p, z, vf_set(0x1.110726p-3f));
  p = vf_fma(p, z, vf_set(-0x1.555532p-2f));
  const vf small = vf_fma(vf_mul(x, z), p, x);
  const vf grown = vf_exp(vf_min(vf_set(20.0f), vf_add(size, size)));
  const vf large = vf_sub(one, vf_mul(vf_set(2.0f), vf_reciprocal(vf_add(one, grown))));
  return vf_if_less(size, vf_set(0.625f), small, vf_if_less(x, vf_zero(), vf_sub(vf_zero(), large), large));
}

#endif
