/* isa_rows.h: elementwise and row-wise routines, compiled once per instruction set. Arithmetic is f32, stored once. */

LM_INLINE void cast_typed(const int32_t x_type, void *y, int32_t y_type, const void *x, int64_t n) {
  switch (y_type) {
    case LM_F32:
      for (int64_t i = 0; i < n; i += VW) vf_put(LM_F32, y, i, n, vf_get(x_type, x, i, n));
      break;
    case LM_BF16:
      for (int64_t i = 0; i < n; i += VW) vf_put(LM_BF16, y, i, n, vf_get(x_type, x, i, n));
      break;
    default:
      for (int64_t i = 0; i < n; i += VW) vf_put(LM_F16, y, i, n, vf_get(x_type, x, i, n));
      break;
  }
}

static void cast(void *y, int32_t y_type, const void *x, int32_t x_type, int64_t n) {
  if (y_type == x_type) memcpy(y, x, (size_t)n * (x_type == LM_F32 ? 4 : 2)); /* keeps the bits, also of NaN */
  else LM_BY_TYPE(x_type, cast_typed(T, y, y_type, x, n));
}

LM_INLINE void scale_typed(const int32_t type, void *y, const void *x, int64_t n, float factor) {
  const vf f = vf_set(factor);
  for (int64_t i = 0; i < n; i += VW) vf_put(type, y, i, n, vf_mul(vf_get(type, x, i, n), f));
}

static void scale(int32_t type, void *y, const void *x, int64_t n, float factor) {
  LM_BY_TYPE(type, scale_typed(T, y, x, n, factor));
}

LM_INLINE void add_typed(const int32_t type, void *y, const void *a, const void *b, int64_t n) {
  for (int64_t i = 0; i < n; i += VW) vf_put(type, y, i, n, vf_add(vf_get(type, a, i, n), vf_get(type, b, i, n)));
}

static void add(int32_t type, void *y, const void *a, const void *b, int64_t n) {
  LM_BY_TYPE(type, add_typed(T, y, a, b, n));
}

/* gu = [g | u], 2 n elements. The halves are addressed from one base because 16-bit storage has no typed pointer here. */
LM_INLINE void glu_forward_typed(const int32_t type, void *h, const void *gu, int64_t n) {
  for (int64_t i = 0; i < n; i += VW) {
    const vf g = vf_get(type, gu, i, n), u = vf_get(type, gu, n + i, 2 * n);
    vf_put(type, h, i, n, vf_mul(vf_mul(g, vf_sigmoid(g)), u));
  }
}

static void glu_forward(int32_t type, void *h, const void *gu, int64_t n) {
  LM_BY_TYPE(type, glu_forward_typed(T, h, gu, n));
}

/* silu'(g) = s (1 + g (1 - s)) with s = sigmoid(g). */
LM_INLINE void glu_backward_typed(const int32_t type, void *dgu, void *h, const void *dh, const void *gu, int64_t n) {
  const vf one = vf_set(1.0f);
  for (int64_t i = 0; i < n; i += VW) {
    const vf g = vf_get(type, gu, i, n), u = vf_get(type, gu, n + i, 2 * n), d = vf_get(type, dh, i, n);
    const vf s = vf_sigmoid(g);
    const vf slope = vf_mul(s, vf_fma(g, vf_sub(one, s), one));
    vf_put(type, dgu, i, n, vf_mul(vf_mul(d, u), slope));
    vf_put(type, dgu, n + i, 2 * n, vf_mul(d, vf_mul(g, s)));
    if (h != 0) vf_put(type, h, i, n, vf_mul(vf_mul(g, s), u));
  }
}

static void glu_backward(int32_t type, void *dgu, void *h, const void *dh, const void *gu, int64_t n) {
  LM_BY_TYPE(type, glu_backward_typed(T, dgu, h, dh, gu, n));
}

/* argmax: lowest index of the largest element; NaN is never larger. */
LM_INLINE int64_t argmax_typed(const int32_t type, const void *x, int64_t n) {
  const vf lowest = vf_set(-INFINITY);
  vf peak = lowest;
  for (int64_t i = 0; i < n; i += VW) peak = vf_max(vf_first(n - i < VW ? n - i : VW, vf_get(type, x, i, n), lowest), peak);
  const float best = vf_peak(peak);
  for (int64_t i = 0; i < n; i += VW) {
    float lane[VW];
    vf_store(lane, vf_get(type, x, i, n));
    for (int64_t j = 0; j < VW && i + j < n; j++)
      if (lane[j] == best) return i + j;
  }
  return 0;
}

static int64_t argmax(int32_t type, const void *x, int64_t n) {
  int64_t index = 0;
  LM_BY_TYPE(type, index = argmax_typed(T, x, n));
  return index;
}

LM_INLINE float dot_typed(const int32_t type, const void *a, const void *b, int64_t n) {
  vf sum = vf_zero();
  for (int64_t i = 0; i < n; i += VW) sum = vf_fma(vf_get(type, a, i, n), vf_get(type, b, i, n), sum);
  return vf_sum(sum);
}

static float dot(int32_t type, const void *a, const void *b, int64_t n) {
  float sum = 0;
  LM_BY_TYPE(type, sum = dot_typed(T, a, b, n));
  return sum;
}

/* sum_squares: f32 within runs of 64 vectors, f64 across them. */
static double sum_squares(const float *g, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += 64 * VW) {
    const int64_t end = n - begin < 64 * VW ? n : begin + 64 * VW;
    vf even = vf_zero(), odd = vf_zero();
    for (int64_t i = begin; i < end; i += 2 * VW) {
      const vf a = vf_get(LM_F32, g, i, end);
      even = vf_fma(a, a, even);
      if (i + VW < end) {
        const vf b = vf_get(LM_F32, g, i + VW, end);
        odd = vf_fma(b, b, odd);
      }
    }
    total += (double)vf_sum(vf_add(even, odd));
  }
  return total;
}

/* inverse_rms: 1 / sqrt(mean(x^2) + eps), the same bits in forward and backward. */
LM_INLINE float inverse_rms(const int32_t type, const void *x, int64_t n, float eps) {
  vf even = vf_zero(), odd = vf_zero(); /* two chains: one would wait for its own latency */
  for (int64_t i = 0; i < n; i += 2 * VW) {
    const vf v = vf_get(type, x, i, n);
    even = vf_fma(v, v, even);
    if (i + VW >= n) break;
    const vf u = vf_get(type, x, i + VW, n);
    odd = vf_fma(u, u, odd);
  }
  return 1.0f / sqrtf(vf_sum(vf_add(even, odd)) / (float)n + eps);
}

LM_INLINE void rms_norm_forward_typed(const int32_t type, void *y, const void *x, const void *w, int32_t w_type, int64_t n,
                                      float eps) {
  const vf inverse = vf_set(inverse_rms(type, x, n, eps));
  for (int64_t i = 0; i < n; i += VW)
    vf_put(type, y, i, n, vf_mul(vf_mul(vf_get(type, x, i, n), inverse), vf_get(w_type, w, i, n)));
}

static void rms_norm_forward(int32_t type, void *y, const void *x, const void *w, int32_t w_type, int64_t n, float eps) {
  LM_BY_TYPE(type, rms_norm_forward_typed(T, y, x, w, w_type, n, eps));
}

/* With x' = x / rms and g = dy * w: dx = (g - x' mean(g x')) / rms + add. */
LM_INLINE void rms_norm_backward_typed(const int32_t type, void *dx, void *y, const void *dy, const void *x, const void *w,
                                       int32_t w_type, const void *add, int64_t n, float eps) {
  const float inverse = inverse_rms(type, x, n, eps);
  vf sum = vf_zero();
  for (int64_t i = 0; i < n; i += VW)
    sum = vf_fma(vf_mul(vf_get(type, dy, i, n), vf_get(w_type, w, i, n)), vf_get(type, x, i, n), sum);
  const vf scale = vf_set(inverse), pull = vf_set(-inverse * inverse * inverse * (vf_sum(sum) / (float)n));
  for (int64_t i = 0; i < n; i += VW) {
    const vf weight = vf_get(w_type, w, i, n), v = vf_get(type, x, i, n);
    const vf g = vf_mul(vf_get(type, dy, i, n), weight);
    vf d = vf_fma(pull, v, vf_mul(g, scale));
    if (add != 0) d = vf_add(d, vf_get(type, add, i, n));
    vf_put(type, dx, i, n, d);
    if (y != 0) vf_put(type, y, i, n, vf_mul(vf_mul(v, scale), weight));
  }
}

static void rms_norm_backward(int32_t type, void *dx, void *y, const void *dy, const void *x, const void *w, int32_t w_type,
                              const void *add, int64_t n, float eps) {
  LM_BY_TYPE(type, rms_norm_backward_typed(T, dx, y, dy, x, w, w_type, add, n, eps));
}

/* rope: one head of 2 half elements, pairs (i, half + i). */
LM_INLINE void rope_typed(const int32_t type, void *y, const void *x, const float *cos, const float *sin, int64_t half,
                          float direction) {
  for (int64_t i = 0; i < half; i += VW) {
    const vf c = vf_get(LM_F32, cos, i, half), s = vf_mul(vf_get(LM_F32, sin, i, half), vf_set(direction));
    const vf a = vf_get(type, x, i, half), b = vf_get(type, x, half + i, 2 * half);
    vf_put(type, y, i, half, vf_sub(vf_mul(a, c), vf_mul(b, s)));
    vf_put(type, y, half + i, 2 * half, vf_fma(b, c, vf_mul(a, s)));
  }
}

static void rope(int32_t type, void *y, const void *x, const float *cos, const float *sin, int64_t half, float direction) {
  LM_BY_TYPE(type, rope_typed(T, y, x, cos, sin, half, direction));
}

/* cross_entropy: loss of one row of logits; with `gradient` the row becomes weight * (softmax - onehot). */
LM_INLINE float cross_entropy_typed(const int32_t type, void *logits, int64_t n, int64_t label, float weight,
                                    int32_t gradient) {
  float target[VW];
  vf_store(target, vf_get(type, logits, label, label + 1));
  const vf lowest = vf_set(-INFINITY);
  vf peak = lowest;
  for (int64_t i = 0; i < n; i += VW)
    peak = vf_max(peak, vf_first(n - i < VW ? n - i : VW, vf_get(type, logits, i, n), lowest));
  const float top = vf_peak(peak);
  const vf shift = vf_set(top);
  vf sum = vf_zero();
  for (int64_t i = 0; i < n; i += VW) {
    const vf e = vf_exp(vf_sub(vf_get(type, logits, i, n), shift));
    sum = vf_add(sum, vf_first(n - i < VW ? n - i : VW, e, vf_zero()));
  }
  const float total = vf_sum(sum);
  if (gradient) {
    const vf factor = vf_set(weight / total);
    for (int64_t i = 0; i < n; i += VW)
      vf_put(type, logits, i, n, vf_mul(factor, vf_exp(vf_sub(vf_get(type, logits, i, n), shift))));
    const float p = expf(target[0] - top) / total;
    vf_put(type, logits, label, label + 1, vf_set(weight * (p - 1.0f)));
  }
  return logf(total) + top - target[0];
}

static float cross_entropy(int32_t type, void *logits, int64_t n, int64_t label, float weight, int32_t gradient) {
  float loss = 0;
  LM_BY_TYPE(type, loss = cross_entropy_typed(T, logits, n, label, weight, gradient));
  return loss;
}

static void adamw(const struct lm_adamw_step *s, int64_t begin, int64_t end) {
  const vf factor = vf_set(s->factor), decay = vf_set(s->decay), rate = vf_set(s->rate), eps = vf_set(s->eps);
  const vf beta1 = vf_set(s->beta1), beta2 = vf_set(s->beta2), rest1 = vf_set(s->rest1), rest2 = vf_set(s->rest2);
  const vf root = vf_set(s->root);
  for (int64_t i = begin; i < end; i += VW) {
    const vf g = vf_mul(vf_get(LM_F32, s->g, i, end), factor);
    const vf m = vf_fma(beta1, vf_get(LM_F32, s->m, i, end), vf_mul(rest1, g));
    const vf v = vf_fma(beta2, vf_get(LM_F32, s->v, i, end), vf_mul(rest2, vf_mul(g, g)));
    const vf p =
        vf_sub(vf_mul(vf_get(LM_F32, s->p, i, end), decay), vf_div(vf_mul(rate, m), vf_fma(vf_sqrt(v), root, eps)));
    vf_put(LM_F32, s->m, i, end, m);
    vf_put(LM_F32, s->v, i, end, v);
    vf_put(LM_F32, s->p, i, end, p);
    vf_put(LM_F32, s->g, i, end, vf_zero());
    if (s->copy != 0) vf_put(s->copy_type, s->copy, i, end, p);
  }
}
