/* simd_256.h: 8 lanes of AVX2 with FMA and F16C; see simd.h. */
#include <immintrin.h>

#define VW 8
typedef __m256 vf;

LM_INLINE __m256i vf_mask(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

LM_INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
LM_INLINE vf vf_set(float x) { return _mm256_set1_ps(x); }
LM_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
LM_INLINE vf vf_load_part(const float *p, int64_t n) { return _mm256_maskload_ps(p, vf_mask(n)); }
LM_INLINE void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
LM_INLINE void vf_store_part(float *p, vf v, int64_t n) { _mm256_maskstore_ps(p, vf_mask(n), v); }

LM_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
LM_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
LM_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
LM_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
/* 1 / a for a in [1, 2^126]: an estimate and two Newton steps, faster than a division */
LM_INLINE vf vf_reciprocal(vf a) {
  const __m256 one = _mm256_set1_ps(1.0f);
  __m256 r = _mm256_rcp_ps(a);
  r = _mm256_fmadd_ps(_mm256_fnmadd_ps(a, r, one), r, r);
  return _mm256_fmadd_ps(_mm256_fnmadd_ps(a, r, one), r, r);
}
LM_INLINE vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }
LM_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
LM_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
LM_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
LM_INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LM_INLINE float vf_sum(vf a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
LM_INLINE float vf_peak(vf a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* a < b ? x : y, lane by lane; y where either is NaN */
LM_INLINE vf vf_if_less(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
/* first n lanes of x, the others of y */
LM_INLINE vf vf_first(int64_t n, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(vf_mask(n))); }
/* lanes where limit[lane] > key take x, the others y */
LM_INLINE vf vf_if_above(const int32_t *limit, int32_t key, vf x, vf y) {
  const __m256i above = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)limit), _mm256_set1_epi32(key));
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(above));
}
/* 2^k for integral k in [-126, 128]; 128 gives inf */
LM_INLINE vf vf_exp2i(vf k) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}

LM_INLINE vf vf_widen_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
LM_INLINE __m128i vf_narrow_bf16(vf v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
LM_INLINE __m128i vf_narrow_f16(vf v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LM_INLINE __m128i vf_half_part(const uint16_t *p, int64_t n) {
  uint16_t h[VW] = {0};
  memcpy(h, p, (size_t)n * 2);
  return _mm_loadu_si128((const __m128i *)h);
}
LM_INLINE void vf_put_part(uint16_t *p, __m128i v, int64_t n) {
  uint16_t h[VW];
  _mm_storeu_si128((__m128i *)h, v);
  memcpy(p, h, (size_t)n * 2);
}

LM_INLINE vf vf_load_bf16(const uint16_t *p) { return vf_widen_bf16(_mm_loadu_si128((const __m128i *)p)); }
LM_INLINE vf vf_load_bf16_part(const uint16_t *p, int64_t n) { return vf_widen_bf16(vf_half_part(p, n)); }
LM_INLINE vf vf_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
LM_INLINE vf vf_load_f16_part(const uint16_t *p, int64_t n) { return _mm256_cvtph_ps(vf_half_part(p, n)); }
LM_INLINE void vf_store_bf16(uint16_t *p, vf v) { _mm_storeu_si128((__m128i *)p, vf_narrow_bf16(v)); }
LM_INLINE void vf_store_bf16_part(uint16_t *p, vf v, int64_t n) { vf_put_part(p, vf_narrow_bf16(v), n); }
LM_INLINE void vf_store_f16(uint16_t *p, vf v) { _mm_storeu_si128((__m128i *)p, vf_narrow_f16(v)); }
LM_INLINE void vf_store_f16_part(uint16_t *p, vf v, int64_t n) { vf_put_part(p, vf_narrow_f16(v), n); }

/* vf_transpose: rows become columns of the 8 x 8 block. */
LM_INLINE void vf_transpose(vf *r) {
  vf t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    t[j] = _mm256_permute2f128_ps(r[j], r[4 + j], 0x20);
    t[4 + j] = _mm256_permute2f128_ps(r[j], r[4 + j], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = t[i];
}
