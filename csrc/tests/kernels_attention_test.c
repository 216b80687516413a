/* kernels_attention_test.c: attention forward, backward and cached against double precision. */
#include "kernels_test.h"

typedef struct shape {
  int32_t heads, kv_heads, head_dim, documents;
  int32_t length[8]; /* of the documents; 0 = empty */
  int32_t tail;      /* rows that belong to none */
  int32_t gap;
  double shift; /* added to each scaled score */
  int32_t window;
  double softcap;
} shape;

static const shape shapes[] = {
    {1, 1, 1, 1, {1}, 0, 0, 0, 0, 0},
    {2, 1, 8, 3, {1, 0, 3}, 2, 3, 0, 0, 0},
    {4, 2, 32, 5, {0, 63, 1, 0, 64}, 0, 0, 0, 0, 0},
    {3, 3, 33, 3, {65, 2, 30}, 5, 1, 0, 0, 0},
    {7, 1, 16, 2, {127, 20}, 0, 0, 0, 0, 0},
    {4, 1, 80, 3, {129, 5, 0}, 7, 0, 0, 0, 0},
    {2, 2, 256, 2, {70, 66}, 0, 8, 0, 0, 0},
    {10, 1, 20, 1, {90}, 1, 0, 0, 0, 0},
    {2, 1, 24, 2, {129, 64}, 0, 0, -120, 0, 0},
    {2, 1, 24, 2, {129, 64}, 0, 0, 80, 0, 0},
    /* windows and caps. One key to the left or right in the walk of any kernel fails here, and so does a gradient without the
     * slope of the cap. */
    {2, 1, 16, 6, {1, 63, 64, 65, 127, 129}, 3, 0, 0, 1, 0},
    {4, 2, 32, 6, {1, 63, 64, 65, 127, 129}, 0, 4, 0, 7, 0},
    {2, 1, 40, 6, {1, 63, 64, 65, 127, 129}, 0, 0, 0, 64, 0},
    {3, 1, 33, 6, {129, 127, 65, 64, 63, 1}, 1, 1, 0, 65, 0},
    {2, 2, 64, 2, {129, 340}, 0, 0, 0, 200, 0},
    {7, 1, 16, 3, {300, 1, 257}, 2, 0, 0, 64, 2},
    {4, 2, 80, 3, {65, 0, 129}, 2, 0, 0, 7, 0.5},
    {2, 1, 256, 2, {1, 66}, 0, 0, 0, 1, 30},
    {2, 1, 24, 2, {63, 127}, 0, 3, 0, 0, 1},
    {2, 1, 24, 2, {129, 64}, 0, 0, -120, 65, 50},
    {2, 1, 20, 1, {290}, 0, 0, 80, 200, 50},
    {2, 1, 8, 2, {150, 3}, 0, 0, 0, 150, 0}, /* as long as the document: nothing is hidden */
};

typedef struct problem {
  matrix q, k, v, go; /* q, k, v share one pitch */
  int32_t offset[9];
  int32_t rows, inside; /* inside = last offset */
  float scale;
  double *o, *lse, *dq, *dk, *dv;
} problem;

static double *zeros(int64_t n) { return calloc((size_t)n, sizeof(double)); }

/* A head of q gets one large element that meets a constant of k: all its scores shift by s->shift. */
static void shift_scores(const shape *s, problem *p) {
  const double size = sqrt(fabs(s->shift) / (double)p->scale);
  for (int64_t t = 0; t < p->inside; t++) {
    for (int64_t h = 0; h < s->heads; h++)
      put(p->q.type, p->q.data, t * p->q.pitch + h * s->head_dim, copysign(size, s->shift));
    for (int64_t h = 0; h < s->kv_heads; h++) put(p->k.type, p->k.data, t * p->k.pitch + h * s->head_dim, size);
  }
}

/* The first key that row t of a document sees. */
static int64_t first_key(const shape *s, int64_t begin, int64_t t) {
  return s->window > 0 && t - s->window + 1 > begin ? t - s->window + 1 : begin;
}

/* reference: forward and backward of one query head, row by row. */
static void reference_head(const shape *s, problem *p, int64_t h) {
  const int64_t D = s->head_dim, kv = h / (s->heads / s->kv_heads), Q = s->heads * D, K = s->kv_heads * D;
  double *w = zeros(p->rows), *slope = zeros(p->rows);
  for (int32_t d = 0; d < s->documents; d++)
    for (int64_t t = p->offset[d]; t < p->offset[d + 1]; t++) {
      const int64_t first = first_key(s, p->offset[d], t);
      double top = -INFINITY, sum = 0, delta = 0;
      for (int64_t j = first; j <= t; j++) {
        w[j] = 0;
        for (int64_t i = 0; i < D; i++) w[j] += at(&p->q, t, h * D + i) * at(&p->k, j, kv * D + i) * (double)p->scale;
        const double tangent = s->softcap > 0 ? tanh(w[j] / s->softcap) : 0;
        slope[j] = 1 - tangent * tangent;
        if (s->softcap > 0) w[j] = s->softcap * tangent;
        top = fmax(top, w[j]);
      }
      for (int64_t j = first; j <= t; j++) sum += exp(w[j] - top);
      p->lse[h * p->rows + t] = top + log(sum);
      for (int64_t j = first; j <= t; j++) {
        w[j] = exp(w[j] - top) / sum;
        for (int64_t i = 0; i < D; i++) p->o[t * Q + h * D + i] += w[j] * at(&p->v, j, kv * D + i);
      }
      for (int64_t i = 0; i < D; i++) delta += p->o[t * Q + h * D + i] * at(&p->go, t, h * D + i);
      for (int64_t j = first; j <= t; j++) {
        double dp = 0;
        for (int64_t i = 0; i < D; i++) {
          dp += at(&p->go, t, h * D + i) * at(&p->v, j, kv * D + i);
          p->dv[j * K + kv * D + i] += w[j] * at(&p->go, t, h * D + i);
        }
        const double ds = w[j] * (dp - delta) * slope[j] * (double)p->scale;
        for (int64_t i = 0; i < D; i++) {
          p->dq[t * Q + h * D + i] += ds * at(&p->k, j, kv * D + i);
          p->dk[j * K + kv * D + i] += ds * at(&p->q, t, h * D + i);
        }
      }
    }
  free(w), free(slope);
}

static problem problem_make(const shape *s, int32_t type) {
  problem p = {.scale = (float)(1 / sqrt(s->head_dim))};
  for (int i = 0; i < s->documents; i++) p.offset[i + 1] = p.offset[i] + s->length[i];
  p.inside = p.offset[s->documents];
  p.rows = p.inside + s->tail;
  const int64_t Q = s->heads * s->head_dim, K = s->kv_heads * s->head_dim, pitch = Q + s->gap;
  p.q = matrix_random(type, p.rows, Q, pitch, p.inside, 1);
  p.k = matrix_random(type, p.rows, K, pitch, p.inside, 1);
  p.v = matrix_random(type, p.rows, K, pitch, p.inside, 1);
  p.go = matrix_random(type, p.rows, Q, Q + s->gap, p.inside, 1);
  if (s->shift != 0) shift_scores(s, &p);
  p.o = zeros(p.rows * Q), p.dq = zeros(p.rows * Q), p.dk = zeros(p.rows * K), p.dv = zeros(p.rows * K);
  p.lse = zeros(p.rows * s->heads);
  for (int64_t h = 0; h < s->heads; h++) reference_head(s, &p, h);
  return p;
}

static void problem_free(problem *p) {
  free(p->q.data), free(p->k.data), free(p->v.data), free(p->go.data);
  free(p->o), free(p->lse), free(p->dq), free(p->dk), free(p->dv);
}

/* lse is [heads][rows]; only the rows of documents are written. */
static void check_lse(const shape *s, const problem *p, const matrix *lse, int d) {
  double worst = 0;
  int outside = 1;
  for (int64_t h = 0; h < s->heads; h++)
    for (int64_t t = 0; t < p->rows; t++) {
      const double error = fabs(at(lse, h, t) - p->lse[h * p->rows + t]) / (1e-5 * (1 + fabs(s->shift)));
      if (t >= p->inside) outside &= memcmp((char *)lse->data + (h * p->rows + t) * 4, "\x5a\x5a\x5a\x5a", 4) == 0;
      else if (!(error <= worst)) worst = isnan(error) ? (double)INFINITY : error;
    }
  CHECK(worst <= 1, "attention_forward lse %d %s x%d: %g", (int)(s - shapes), NAME(d), worst);
  CHECK(outside, "attention_forward lse %d %s x%d wrote outside", (int)(s - shapes), NAME(d));
}

static void test_attention(const shape *s, int32_t type) {
  problem p = problem_make(s, type);
  const int64_t Q = s->heads * s->head_dim, K = s->kv_heads * s->head_dim;
  const double tolerance = 2e-5 * (1 + fabs(s->shift));     /* rounding of large scores */
  matrix exact = matrix_empty(type, p.rows, Q, Q + s->gap); /* backward gets the exact o and lse, rounded to storage */
  for (int64_t t = 0; t < p.inside; t++)
    for (int64_t c = 0; c < Q; c++) put(type, exact.data, t * exact.pitch + c, p.o[t * Q + c]);
  matrix first[4] = {0};
  for (int d = 0; d < device_count; d++) {
    matrix got[4] = {matrix_empty(type, p.rows, Q, Q + s->gap), matrix_empty(type, p.rows, Q, Q + 2 * s->gap),
                     matrix_empty(type, p.rows, K, Q + 2 * s->gap), matrix_empty(type, p.rows, K, Q + 2 * s->gap)};
    matrix lse = matrix_empty(LM_F32, s->heads, p.rows, p.rows), delta = matrix_empty(LM_F32, s->heads, p.rows, p.rows);
    const lm_attention_forward_args forward = {sizeof forward,
                                               type,
                                               got[0].data,
                                               lse.data,
                                               p.q.data,
                                               p.k.data,
                                               p.v.data,
                                               p.offset,
                                               p.rows,
                                               s->documents,
                                               s->heads,
                                               s->kv_heads,
                                               s->head_dim,
                                               (int32_t)p.q.pitch,
                                               (int32_t)got[0].pitch,
                                               p.scale,
                                               s->window,
                                               (float)s->softcap};
    lm_cpu_attention_forward(devices[d], &forward);
    check_lse(s, &p, &lse, d);
    for (int64_t h = 0; h < s->heads; h++)
      for (int64_t t = 0; t < p.inside; t++) put(LM_F32, lse.data, h * p.rows + t, p.lse[h * p.rows + t]);
    const lm_attention_backward_args backward = {sizeof backward,
                                                 type,
                                                 got[1].data,
                                                 got[2].data,
                                                 got[3].data,
                                                 delta.data,
                                                 p.go.data,
                                                 exact.data,
                                                 lse.data,
                                                 p.q.data,
                                                 p.k.data,
                                                 p.v.data,
                                                 p.offset,
                                                 p.rows,
                                                 s->documents,
                                                 s->heads,
                                                 s->kv_heads,
                                                 s->head_dim,
                                                 (int32_t)p.q.pitch,
                                                 (int32_t)got[1].pitch,
                                                 (int32_t)exact.pitch,
                                                 p.scale,
                                                 s->window,
                                                 (float)s->softcap,
                                                 0,
                                                 NULL,
                                                 0};
    lm_cpu_attention_backward(devices[d], &backward);
    const char *const names[4] = {"o", "dq", "dk", "dv"};
    const double *const want[4] = {p.o, p.dq, p.dk, p.dv};
    for (int i = 0; i < 4; i++) {
      /* delta is computed from the rounded o: its error, times the operands, adds to dq and dk */
      const double rounding = i == 1 || i == 2 ? type_step(type) * (20 + fabs(s->shift)) : 0;
      const double error = distance(&got[i], want[i], p.inside, tolerance + rounding);
      CHECK(error <= 1, "attention %d %s %s %s x%d: %g", (int)(s - shapes), names[i], type_names[type], NAME(d), error);
      CHECK(untouched(&got[i], p.inside), "attention %d %s %s x%d wrote outside", (int)(s - shapes), names[i], NAME(d));
      if (first_of_level(d)) {
        free(first[i].data);
        first[i] = got[i];
      } else {
        CHECK(same_rows(&first[i], &got[i], p.inside), "attention %s %s x%d: other bits", names[i], NAME(d));
        free(got[i].data);
      }
    }
    free(lse.data), free(delta.data);
  }
  for (int i = 0; i < 4; i++) free(first[i].data);
  free(exact.data);
  problem_free(&p);
}

/* One document fed to the cache in pieces gives the rows of the whole; rows beyond live and capacity stay out. */
static void test_cached(const shape *s, int32_t type) {
  shape one = *s;
  one.documents = 1;
  one.tail = 0;
  one.length[0] = s->length[0] > 0 ? s->length[0] : s->length[1];
  problem p = problem_make(&one, type);
  const int64_t Q = s->heads * s->head_dim, K = s->kv_heads * s->head_dim, size = (int64_t)type_size(type);
  const int32_t capacity = p.rows + 3;
  for (int d = 0; d < device_count; d++) {
    matrix o = matrix_empty(type, p.rows, Q, Q + s->gap);
    matrix k = matrix_random(type, capacity, K, K, 0, 1), v = matrix_random(type, capacity, K, K, 0, 1); /* all NaN */
    int32_t past = 0;
    for (int piece = 0; past < p.rows; piece++) {
      const int32_t rows = piece == 0 ? (p.rows + 1) / 2 : piece < 4 ? 1 : p.rows - past, left = p.rows - past;
      const int32_t live = rows < left ? rows : left;
      const lm_attention_cached_forward_args args = {sizeof args,
                                                     type,
                                                     (char *)o.data + past * o.pitch * size,
                                                     k.data,
                                                     v.data,
                                                     (char *)p.q.data + past * p.q.pitch * size,
                                                     (char *)p.k.data + past * p.q.pitch * size,
                                                     (char *)p.v.data + past * p.q.pitch * size,
                                                     &past,
                                                     &live,
                                                     rows + 2,
                                                     capacity,
                                                     s->heads,
                                                     s->kv_heads,
                                                     s->head_dim,
                                                     (int32_t)p.q.pitch,
                                                     (int32_t)o.pitch,
                                                     p.scale,
                                                     s->window,
                                                     (float)s->softcap};
      lm_cpu_attention_cached_forward(devices[d], &args);
      past += live;
    }
    const double error = distance(&o, p.o, p.rows, 2e-5 * (1 + fabs(s->shift)));
    CHECK(error <= 1, "attention_cached_forward %d %s %s x%d: %g", (int)(s - shapes), type_names[type], NAME(d), error);
    CHECK(untouched(&o, p.rows), "attention_cached_forward %s x%d wrote outside", NAME(d));
    int kept = 1;
    for (int64_t r = 0; r < capacity; r++)
      for (int64_t c = 0; c < K; c++)
        kept &= r < p.rows ? at(&k, r, c) == at(&p.k, r, c) && at(&v, r, c) == at(&p.v, r, c)
                           : isnan(at(&k, r, c)) && isnan(at(&v, r, c));
    CHECK(kept, "attention_cached_forward %d %s x%d: the cache", (int)(s - shapes), NAME(d));
    /* Blocks of keys that lie before the window of all rows are not even read: NaN there changes nothing. */
    const int64_t unread = (p.rows - (s->window > 0 ? s->window : p.rows)) / 64 * 64;
    for (int64_t r = 0; r < unread; r++)
      for (int64_t c = 0; c < K; c++) put(type, k.data, r * K + c, (double)NAN), put(type, v.data, r * K + c, (double)NAN);
    if (unread > 0) {
      const int32_t before = p.rows - 1, single = 1;
      matrix again = matrix_empty(type, 1, Q, Q);
      const lm_attention_cached_forward_args args = {sizeof args,
                                                     type,
                                                     again.data,
                                                     k.data,
                                                     v.data,
                                                     (char *)p.q.data + before * p.q.pitch * size,
                                                     (char *)p.k.data + before * p.q.pitch * size,
                                                     (char *)p.v.data + before * p.q.pitch * size,
                                                     &before,
                                                     &single,
                                                     1,
                                                     capacity,
                                                     s->heads,
                                                     s->kv_heads,
                                                     s->head_dim,
                                                     (int32_t)p.q.pitch,
                                                     (int32_t)Q,
                                                     p.scale,
                                                     s->window,
                                                     (float)s->softcap};
      lm_cpu_attention_cached_forward(devices[d], &args);
      const double off = distance(&again, p.o + before * Q, 1, 2e-5 * (1 + fabs(s->shift)));
      CHECK(off <= 1, "attention_cached_forward %d %s x%d: read before the window", (int)(s - shapes), NAME(d));
      free(again.data);
    }
    const int32_t full = capacity - 1, two = 2; /* one row fits, the other is dropped */
    matrix last = matrix_empty(type, 2, Q, Q);
    const lm_attention_cached_forward_args over = {
        sizeof over, type, last.data, k.data,   v.data,      p.q.data,    p.k.data,           p.v.data,   &full,
        &two,        2,    capacity,  s->heads, s->kv_heads, s->head_dim, (int32_t)p.q.pitch, (int32_t)Q, p.scale,
        s->window,   (float)s->softcap};
    lm_cpu_attention_cached_forward(devices[d], &over);
    CHECK(untouched(&last, 1), "attention_cached_forward %s x%d: beyond the capacity", NAME(d));
    free(last.data), free(o.data), free(k.data), free(v.data);
  }
  problem_free(&p);
}

int main(void) {
  open_devices();
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int t = 0; t < 3; t++) {
      test_attention(&shapes[i], all_types[t]);
      test_cached(&shapes[i], all_types[t]);
    }
  close_devices();
  return report();
}
