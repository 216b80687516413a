/* isa_attention.h: what attention does to a tile of scores, compiled once per instruction set. Hidden elements of the
 * tiles of scores may hold anything: they are replaced before the exponential (e^-1000 is an exact 0) and in the
 * gradients. */

#define LM_HIDDEN (-1000.0f)

/* tile_at: vector i of a row of a C tile that spans several panels. */
LM_INLINE const float *tile_at(const float *row, int64_t i) { return row + i / NR * (LM_ROWS * NR) + i % NR; }

/* cap_scores: s = cap tanh(s / cap) in a C tile of scores. */
static void cap_scores(float *s, int64_t rows, int64_t columns, float cap) {
  const vf high = vf_set(cap), inverse = vf_set(1.0f / cap);
  for (int64_t r = 0; r < rows; r++, s += NR)
    for (int64_t i = 0; i < columns; i += VW) {
      float *at = s + (tile_at(s, i) - s);
      vf_store(at, vf_mul(high, vf_tanh(vf_mul(vf_load(at), inverse))));
    }
}

/* cap_grad: ds *= 1 - tanh^2, the slope of cap_scores, where s / cap is that tanh. ds: A tile; s: C tile of capped scores. Hidden
 * elements of ds are 0 and stay so, whatever is in s: the maximum of NaN and 0 is 0. */
static void cap_grad(float *ds, const float *s, int64_t rows, int64_t columns, float cap) {
  const vf inverse = vf_set(1.0f / cap);
  for (int64_t r = 0; r < rows; r++, ds += LM_PITCH, s += NR)
    for (int64_t i = 0; i < columns; i += VW) {
      const vf tangent = vf_mul(vf_load(tile_at(s, i)), inverse);
      const vf slope = vf_max(vf_sub(vf_set(1.0f), vf_mul(tangent, tangent)), vf_zero());
      vf_store(ds + i, vf_mul(vf_load(ds + i), slope));
    }
}

/* softmax: one step of the running softmax. s: C tile of scores; p: A tile of weights relative to the new peak. Row r sees
 * the first visible[r] of the keys. peak, sum [rows] updated; shrink [rows]: factor for what was summed before. */
static void softmax(float *p, const float *s, const int32_t *visible, int64_t rows, int64_t keys, float *peak, float *sum,
                    float *shrink) {
  for (int64_t r = 0; r < rows; r++, p += LM_PITCH, s += NR) {
    const int64_t seen = visible[r] < keys ? visible[r] : keys;
    int64_t i = 0;
    shrink[r] = 1.0f;
    if (seen > 0) {
      vf high = vf_set(peak[r]);
      for (i = 0; i < seen; i += VW) {
        const vf score = vf_load(tile_at(s, i));
        high = vf_max(seen - i >= VW ? score : vf_first(seen - i, score, high), high);
      }
      const float top = vf_peak(high);
      vf total = vf_zero();
      for (i = 0; i < seen; i += VW) {
        vf score = vf_sub(vf_load(tile_at(s, i)), vf_set(top));
        if (seen - i < VW) score = vf_first(seen - i, score, vf_set(LM_HIDDEN));
        const vf weight = vf_exp(score);
        vf_store(p + i, weight);
        total = vf_add(total, weight);
      }
      shrink[r] = peak[r] == -INFINITY ? 0 : expf(peak[r] - top);
      sum[r] = sum[r] * shrink[r] + vf_sum(total);
      peak[r] = top;
    }
    for (; i < keys; i += VW) vf_store(p + i, vf_zero());
  }
}

/* shrink_c: rows of one panel of a C tile times shrink[row]. */
static void shrink_c(float *c, const float *shrink, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++, c += NR) {
    const vf factor = vf_set(shrink[r]);
    vf_store(c, vf_mul(vf_load(c), factor));
    if (columns > VW) vf_store(c + VW, vf_mul(vf_load(c + VW), factor));
  }
}

/* attention_grad: ds = p (dp - delta), p = e^(s - lse), for query rows. s, dp: C tiles; ds: A tile; lse, delta [rows]. */
static void attention_grad(float *ds, const float *s, const float *dp, const float *lse, const float *delta,
                           const int32_t *visible, int64_t rows, int64_t keys) {
  for (int64_t r = 0; r < rows; r++, ds += LM_PITCH, s += NR, dp += NR) {
    const vf shift = vf_set(lse[r]), base = vf_set(delta[r]);
    const int64_t seen = visible[r] < keys ? visible[r] : keys;
    int64_t i = 0;
    for (; i < seen; i += VW) {
      vf score = vf_sub(vf_load(tile_at(s, i)), shift);
      if (seen - i < VW) score = vf_first(seen - i, score, vf_set(LM_HIDDEN));
      const vf grad = vf_mul(vf_exp(score), vf_sub(vf_load(tile_at(dp, i)), base));
      vf_store(ds + i, seen - i >= VW ? grad : vf_first(seen - i, grad, vf_zero()));
    }
    for (; i < keys; i += VW) vf_store(ds + i, vf_zero());
  }
}

/* attention_grad_t: the same for key rows: s, dp are transposed C tiles, p and ds transposed A tiles. lse, delta and
 * visible are per query, that is per lane, padded to whole panels with visible = 0. */
static void attention_grad_t(float *p, float *ds, const float *s, const float *dp, const float *lse, const float *delta,
                             const int32_t *visible, int64_t keys, int64_t rows) {
  for (int64_t j = 0; j < keys; j++, p += LM_PITCH, ds += LM_PITCH, s += NR, dp += NR) {
    for (int64_t i = 0; i < rows; i += VW) {
      const vf score = vf_sub(vf_load(tile_at(s, i)), vf_load(lse + i));
      const vf weight = vf_exp(vf_if_above(visible + i, (int32_t)j, score, vf_set(LM_HIDDEN)));
      const vf grad = vf_mul(weight, vf_sub(vf_load(tile_at(dp, i)), vf_load(delta + i)));
      vf_store(p + i, weight);
      vf_store(ds + i, vf_if_above(visible + i, (int32_t)j, grad, vf_zero()));
    }
  }
}
