/* simd_512.h: 16 lanes of AVX-512; see simd.h. */
#include <immintrin.h>

#define VW 16
typedef __m512 vf;

LM_INLINE __mmask16 vf_mask(int64_t n) { return (__mmask16)((1u << n) - 1u); }

LM_INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
LM_INLINE vf vf_set(float x) { return _mm512_set1_ps(x); }
LM_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
LM_INLINE vf vf_load_part(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(vf_mask(n), p); }
LM_INLINE void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
LM_INLINE void vf_store_part(float *p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, vf_mask(n), v); }

LM_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
LM_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
LM_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
LM_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
/* 1 / a for a in [1, 2^126]: an estimate and a Newton step, several times faster than a division */
LM_INLINE vf vf_reciprocal(vf a) {
  const __m512 r = _mm512_rcp14_ps(a);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0f)), r, r);
}
LM_INLINE vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
LM_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
LM_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
LM_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
LM_INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LM_INLINE float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }
LM_INLINE float vf_peak(vf a) { return _mm512_reduce_max_ps(a); }

/* a < b ? x : y, lane by lane; y where either is NaN */
LM_INLINE vf vf_if_less(vf a, vf b, vf x, vf y) { return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x); }
/* first n lanes of x, the others of y */
LM_INLINE vf vf_first(int64_t n, vf x, vf y) { return _mm512_mask_mov_ps(y, vf_mask(n), x); }
/* lanes where limit[lane] > key take x, the others y */
LM_INLINE vf vf_if_above(const int32_t *limit, int32_t key, vf x, vf y) {
  return _mm512_mask_mov_ps(y, _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(limit), _mm512_set1_epi32(key)), x);
}
/* 2^k for integral k in [-126, 128]; 128 gives inf */
LM_INLINE vf vf_exp2i(vf k) {
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(k), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}

LM_INLINE vf vf_widen_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
LM_INLINE __m256i vf_narrow_bf16(vf v) {
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(r);
}
LM_INLINE __m256i vf_narrow_f16(vf v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

LM_INLINE vf vf_load_bf16(const uint16_t *p) { return vf_widen_bf16(_mm256_loadu_si256((const __m256i *)p)); }
LM_INLINE vf vf_load_bf16_part(const uint16_t *p, int64_t n) {
  return vf_widen_bf16(_mm256_maskz_loadu_epi16(vf_mask(n), p));
}
LM_INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
LM_INLINE vf vf_load_f16_part(const uint16_t *p, int64_t n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vf_mask(n), p));
}
LM_INLINE void vf_store_bf16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, vf_narrow_bf16(v)); }
LM_INLINE void vf_store_bf16_part(uint16_t *p, vf v, int64_t n) {
  _mm256_mask_storeu_epi16(p, vf_mask(n), vf_narrow_bf16(v));
}
LM_INLINE void vf_store_f16(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, vf_narrow_f16(v)); }
LM_INLINE void vf_store_f16_part(uint16_t *p, vf v, int64_t n) {
  _mm256_mask_storeu_epi16(p, vf_mask(n), vf_narrow_f16(v));
}

/* vf_transpose: rows become columns of the 16 x 16 block. */
LM_INLINE void vf_transpose(vf *r) {
  vf t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) { /* r[4 i + j] holds column 4 q + j of rows 4 i .. 4 i + 3 in its quarter q */
    t[j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    t[8 + j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
    t[12 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_f32x4(t[j], t[4 + j], 0x88);
    r[8 + j] = _mm512_shuffle_f32x4(t[j], t[4 + j], 0xdd);
    r[4 + j] = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0x88);
    r[12 + j] = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0xdd);
  }
}
