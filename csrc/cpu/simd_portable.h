/* simd_portable.h: 4 lanes in the vector extensions of GCC and Clang (SSE2, NEON or plain scalars); see simd.h. */
#include <math.h>

#define VW 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

LM_INLINE vf vf_zero(void) { return (vf){0, 0, 0, 0}; }
LM_INLINE vf vf_set(float x) { return (vf){x, x, x, x}; }
LM_INLINE vf vf_load(const float *p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
LM_INLINE vf vf_load_part(const float *p, int64_t n) {
  vf v = {0, 0, 0, 0};
  memcpy(&v, p, (size_t)n * 4);
  return v;
}
LM_INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
LM_INLINE void vf_store_part(float *p, vf v, int64_t n) { memcpy(p, &v, (size_t)n * 4); }

LM_INLINE vf vf_pick(vi mask, vf x, vf y) { return (vf)((mask & (vi)x) | (~mask & (vi)y)); }

LM_INLINE vf vf_add(vf a, vf b) { return a + b; }
LM_INLINE vf vf_sub(vf a, vf b) { return a - b; }
LM_INLINE vf vf_mul(vf a, vf b) { return a * b; }
LM_INLINE vf vf_div(vf a, vf b) { return a / b; }
LM_INLINE vf vf_reciprocal(vf a) { return 1.0f / a; }
LM_INLINE vf vf_sqrt(vf a) { return (vf){sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
LM_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; } /* two roundings: no fused form in the baseline */
LM_INLINE vf vf_max(vf a, vf b) { return vf_pick(a > b, a, b); }
LM_INLINE vf vf_min(vf a, vf b) { return vf_pick(a < b, a, b); }
LM_INLINE vf vf_round(vf a) { return (a + 12582912.0f) - 12582912.0f; } /* |a| < 2^22 */
LM_INLINE float vf_sum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
LM_INLINE float vf_peak(vf a) {
  const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
  return x > y ? x : y;
}

/* a < b ? x : y, lane by lane; y where either is NaN */
LM_INLINE vf vf_if_less(vf a, vf b, vf x, vf y) { return vf_pick(a < b, x, y); }
/* first n lanes of x, the others of y */
LM_INLINE vf vf_first(int64_t n, vf x, vf y) { return vf_pick((vi){0, 1, 2, 3} < (int32_t)n, x, y); }
/* lanes where limit[lane] > key take x, the others y */
LM_INLINE vf vf_if_above(const int32_t *limit, int32_t key, vf x, vf y) {
  vi l;
  memcpy(&l, limit, sizeof l);
  return vf_pick(l > key, x, y);
}
/* 2^k for integral k in [-126, 128]; 128 gives inf */
LM_INLINE vf vf_exp2i(vf k) { return (vf)((__builtin_convertvector(k, vi) + 127) << 23); }

LM_INLINE float lm_f32_from_f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  uint32_t bits;
  if (exponent == 0) { /* zero or subnormal: fraction * 2^-24 is exact in f32 */
    const float f = (float)fraction * 0x1p-24f;
    memcpy(&bits, &f, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
LM_INLINE uint16_t lm_f16_from_f32(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);  /* NaN */
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds past the largest f16 */
  if (bits < 0x38800000) {                                  /* subnormal: adding 0.5 aligns the last bit to 2^-24 */
    memcpy(&f, &bits, 4);
    f += 0.5f;
    memcpy(&bits, &f, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | ((bits >> 13) - (112 << 10)));
}
LM_INLINE uint16_t lm_bf16_from_f32(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

LM_INLINE vf vf_load_bf16_part(const uint16_t *p, int64_t n) {
  vi v = {0, 0, 0, 0};
  for (int64_t i = 0; i < n; i++) v[i] = (int32_t)((uint32_t)p[i] << 16);
  return (vf)v;
}
LM_INLINE vf vf_load_f16_part(const uint16_t *p, int64_t n) {
  vf v = {0, 0, 0, 0};
  for (int64_t i = 0; i < n; i++) v[i] = lm_f32_from_f16(p[i]);
  return v;
}
LM_INLINE void vf_store_bf16_part(uint16_t *p, vf v, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] = lm_bf16_from_f32(v[i]);
}
LM_INLINE void vf_store_f16_part(uint16_t *p, vf v, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] = lm_f16_from_f32(v[i]);
}
LM_INLINE vf vf_load_bf16(const uint16_t *p) { return vf_load_bf16_part(p, VW); }
LM_INLINE vf vf_load_f16(const uint16_t *p) { return vf_load_f16_part(p, VW); }
LM_INLINE void vf_store_bf16(uint16_t *p, vf v) { vf_store_bf16_part(p, v, VW); }
LM_INLINE void vf_store_f16(uint16_t *p, vf v) { vf_store_f16_part(p, v, VW); }

/* vf_transpose: rows become columns of the 4 x 4 block. */
LM_INLINE void vf_transpose(vf *r) {
  const vf a = r[0], b = r[1], c = r[2], d = r[3];
  r[0] = (vf){a[0], b[0], c[0], d[0]};
  r[1] = (vf){a[1], b[1], c[1], d[1]};
  r[2] = (vf){a[2], b[2], c[2], d[2]};
  r[3] = (vf){a[3], b[3], c[3], d[3]};
}
