/* kernels_linear_test.c: lora_down, lora_linear forward and backward against double precision. */
#include "kernels_test.h"

typedef struct shape {
  int32_t rows, live, in, out[3], rank[3];
  float scale[3];
  int32_t gap;     /* pitch beyond the width */
  int32_t options; /* 1 bias, 2 residual, 4 y is the residual, 8 no dx */
} shape;

static const shape shapes[] = {
    {1, 1, 1, {1, 0, 0}, {0, 0, 0}, {0, 0, 0}, 0, 0},           {1, 1, 1, {1, 0, 0}, {1, 0, 0}, {2, 0, 0}, 0, 1},
    {1, 1, 70, {33, 0, 0}, {5, 0, 0}, {2, 0, 0}, 3, 3},         {3, 2, 129, {16, 7, 40}, {4, 0, 20}, {2, 0, 0.5f}, 1, 5},
    {8, 5, 64, {65, 1, 31}, {0, 16, 1}, {1, 2, 3}, 2, 2},       {9, 9, 31, {32, 32, 0}, {16, 16, 0}, {2, 2, 0}, 0, 0},
    {63, 63, 48, {48, 24, 24}, {16, 16, 16}, {2, 2, 2}, 0, 1},  {64, 40, 17, {100, 0, 0}, {0, 0, 0}, {0, 0, 0}, 5, 3},
    {65, 65, 330, {5, 64, 3}, {3, 8, 20}, {1, 0.25f, 2}, 1, 2}, {127, 100, 96, {64, 64, 0}, {8, 0, 0}, {2, 0, 0}, 0, 4},
    {129, 129, 700, {40, 0, 0}, {16, 0, 0}, {2, 0, 0}, 4, 3},   {300, 257, 64, {96, 32, 33}, {17, 9, 2}, {2, 2, 1}, 0, 7},
    {260, 259, 33, {20, 0, 0}, {40, 0, 0}, {2, 0, 0}, 1, 8},
};

static int32_t total(const int32_t v[3]) { return v[0] + v[1] + v[2]; }

/* part_of: which part a column belongs to, and its place there. */
static int part_of(const int32_t size[3], int64_t *column) {
  int part = 0;
  while (*column >= size[part]) *column -= size[part++];
  return part;
}

static void test_down(const shape *s, int32_t type, int32_t a_type) {
  const int32_t ranks = total(s->rank);
  if (ranks == 0) return;
  const matrix x = matrix_random(type, s->rows, s->in, s->in + s->gap, s->live, 1);
  const matrix a = matrix_random(a_type, ranks, s->in, s->in, ranks, 1 / sqrt(s->in));
  double *want = malloc(sizeof(double) * (size_t)(s->live * ranks));
  for (int64_t t = 0; t < s->live; t++)
    for (int64_t r = 0; r < ranks; r++) {
      int64_t place = r;
      double sum = 0;
      for (int64_t k = 0; k < s->in; k++) sum += at(&x, t, k) * at(&a, r, k);
      want[t * ranks + r] = sum * (double)s->scale[part_of(s->rank, &place)];
    }
  matrix first = {0};
  for (int d = 0; d < device_count; d++) {
    const matrix y = matrix_empty(type, s->rows, ranks, ranks + s->gap);
    const lm_lora_down_args args = {sizeof args, type,       y.data,           x.data,           a.data,      &s->live,
                                    s->rows,     s->in,      (int32_t)y.pitch, (int32_t)x.pitch, a_type,      s->rank[0],
                                    s->rank[1],  s->rank[2], s->scale[0],      s->scale[1],      s->scale[2], 0};
    lm_cpu_lora_down(devices[d], &args);
    const double error = distance(&y, want, s->live, 1e-5);
    CHECK(error <= 1, "lora_down %s %s %s x%d: %g", type_names[type], type_names[a_type], NAME(d), error);
    CHECK(untouched(&y, s->live), "lora_down %s x%d wrote outside", NAME(d));
    if (first_of_level(d)) {
      free(first.data);
      first = y;
    } else {
      CHECK(same_rows(&first, &y, s->live), "lora_down %s x%d: other bits", NAME(d));
      free(y.data);
    }
  }
  free(first.data), free(x.data), free(a.data), free(want);
}

typedef struct adapters {
  matrix s, a, b[3];
} adapters;

static adapters adapters_random(const shape *h, int32_t type, int32_t a_type) {
  const int32_t ranks = total(h->rank);
  adapters l = {0};
  if (ranks > 0) {
    l.s = matrix_random(type, h->rows, ranks, ranks + h->gap, h->live, 1);
    l.a = matrix_random(a_type, ranks, h->in, h->in, ranks, 1);
  }
  for (int i = 0; i < 3; i++)
    if (h->rank[i] > 0) l.b[i] = matrix_random(a_type, h->out[i], h->rank[i], h->rank[i], h->out[i], 0.3);
  return l;
}

static void adapters_free(adapters *l) {
  free(l->s.data), free(l->a.data);
  for (int i = 0; i < 3; i++) free(l->b[i].data);
}

static int32_t rank_offset(const shape *s, int part) {
  return part == 0 ? 0 : part == 1 ? s->rank[0] : s->rank[0] + s->rank[1];
}

static void test_forward(const shape *h, int32_t type, int32_t w_type) {
  const int32_t out = total(h->out), bias_type = (type + 1) % 3;
  const matrix x = matrix_random(type, h->rows, h->in, h->in + h->gap, h->live, 1);
  const matrix w = matrix_random(w_type, out, h->in, h->in + h->gap, out, 1 / sqrt(h->in));
  const matrix bias = matrix_random(bias_type, 1, out, out, 1, 1);
  const matrix residual = matrix_random(type, h->rows, out, out + h->gap, h->live, 1);
  adapters l = adapters_random(h, type, w_type);
  double *want = malloc(sizeof(double) * (size_t)(h->live * out));
  for (int64_t t = 0; t < h->live; t++)
    for (int64_t n = 0; n < out; n++) {
      double sum = 0;
      for (int64_t k = 0; k < h->in; k++) sum += at(&x, t, k) * at(&w, n, k);
      int64_t place = n;
      const int part = part_of(h->out, &place);
      for (int64_t r = 0; r < h->rank[part]; r++) sum += at(&l.s, t, rank_offset(h, part) + r) * at(&l.b[part], place, r);
      if (h->options & 1) sum += at(&bias, 0, n);
      if (h->options & 6) sum += at(&residual, t, n);
      want[t * out + n] = sum;
    }
  matrix first = {0};
  for (int d = 0; d < device_count; d++) {
    const int in_place = (h->options & 4) != 0;
    const matrix y = in_place ? matrix_copy(&residual) : matrix_empty(type, h->rows, out, out + h->gap);
    const lm_lora_linear_forward_args args = {sizeof args,
                                              type,
                                              y.data,
                                              x.data,
                                              w.data,
                                              h->options & 1 ? bias.data : NULL,
                                              in_place         ? y.data
                                              : h->options & 2 ? residual.data
                                                               : NULL,
                                              l.s.data,
                                              l.b[0].data,
                                              l.b[1].data,
                                              l.b[2].data,
                                              &h->live,
                                              h->rows,
                                              h->in,
                                              out,
                                              (int32_t)y.pitch,
                                              (int32_t)x.pitch,
                                              (int32_t)w.pitch,
                                              (int32_t)residual.pitch,
                                              (int32_t)l.s.pitch,
                                              w_type,
                                              bias_type,
                                              w_type,
                                              h->out[0],
                                              h->out[1],
                                              h->out[2],
                                              h->rank[0],
                                              h->rank[1],
                                              h->rank[2],
                                              0};
    lm_cpu_lora_linear_forward(devices[d], &args);
    const double error = distance(&y, want, h->live, 2e-5);
    CHECK(error <= 1, "lora_linear_forward %d %s %s %s x%d: %g", (int)(h - shapes), type_names[type], type_names[w_type],
          NAME(d), error);
    if (!in_place) CHECK(untouched(&y, h->live), "lora_linear_forward %s x%d wrote outside", NAME(d));
    if (first_of_level(d)) {
      free(first.data);
      first = y;
      const int32_t fewer = h->live / 2; /* the same rows under a smaller live keep their bits */
      const matrix part = in_place ? matrix_copy(&residual) : matrix_empty(type, h->rows, out, out + h->gap);
      lm_lora_linear_forward_args small = args;
      small.live = &fewer;
      small.y = part.data;
      if (in_place) small.residual = part.data;
      lm_cpu_lora_linear_forward(devices[d], &small);
      CHECK(same_rows(&y, &part, fewer), "lora_linear_forward %s x%d: other bits under a smaller live", NAME(d));
      free(part.data);
    } else {
      CHECK(same_rows(&first, &y, h->live), "lora_linear_forward %s x%d: other bits", NAME(d));
      free(y.data);
    }
  }
  adapters_free(&l);
  free(first.data), free(x.data), free(w.data), free(bias.data), free(residual.data), free(want);
}

static double *sums_from(const matrix *start) {
  double *sum = malloc(sizeof(double) * (size_t)(start->rows * start->width));
  for (int64_t i = 0; i < start->rows * start->width; i++) sum[i] = get(LM_F32, start->data, i);
  return sum;
}

static void test_backward(const shape *h, int32_t type, int32_t w_type) {
  const int32_t out = total(h->out), ranks = total(h->rank), with_dx = !(h->options & 8);
  const matrix x = matrix_random(type, h->rows, h->in, h->in + h->gap, h->live, 1);
  const matrix dy = matrix_random(type, h->rows, out, out + h->gap, h->live, 1);
  const matrix w = matrix_random(w_type, out, h->in, h->in + h->gap, out, 1 / sqrt(out));
  adapters l = adapters_random(h, type, w_type);
  matrix da = {0}, db[3] = {0};
  double *want_dx = malloc(sizeof(double) * (size_t)(h->live * h->in)),
         *ds = calloc((size_t)(h->live * ranks + 1), sizeof(double));
  double *want_da = NULL, *want_db[3] = {0};
  if (ranks > 0) {
    da = matrix_random(LM_F32, ranks, h->in, h->in, ranks, 1); /* accumulated into */
    want_da = sums_from(&da);
  }
  for (int i = 0; i < 3; i++) {
    if (h->rank[i] == 0) continue;
    db[i] = matrix_random(LM_F32, h->out[i], h->rank[i], h->rank[i], h->out[i], 1);
    want_db[i] = sums_from(&db[i]);
  }
  for (int64_t t = 0; t < h->live; t++) {
    for (int64_t n = 0; n < out; n++) {
      int64_t place = n;
      const int part = part_of(h->out, &place);
      for (int64_t r = 0; r < h->rank[part]; r++) {
        const int64_t column = rank_offset(h, part) + r;
        ds[t * ranks + column] += (double)h->scale[part] * at(&dy, t, n) * at(&l.b[part], place, r);
        want_db[part][place * h->rank[part] + r] += at(&dy, t, n) * at(&l.s, t, column);
      }
    }
    for (int64_t k = 0; k < h->in; k++) {
      double sum = 0;
      for (int64_t n = 0; n < out; n++) sum += at(&dy, t, n) * at(&w, n, k);
      for (int64_t r = 0; r < ranks; r++) {
        sum += ds[t * ranks + r] * at(&l.a, r, k);
        want_da[r * h->in + k] += ds[t * ranks + r] * at(&x, t, k);
      }
      want_dx[t * h->in + k] = sum;
    }
  }
  matrix first[5] = {0};
  for (int d = 0; d < device_count; d++) {
    matrix got[5] = {matrix_empty(type, h->rows, h->in, h->in + h->gap)};
    matrix work = {0};
    if (ranks > 0) {
      work = matrix_empty(LM_F32, h->rows, ranks, ranks);
      got[1] = matrix_copy(&da);
    }
    for (int i = 0; i < 3; i++)
      if (h->rank[i] > 0) got[2 + i] = matrix_copy(&db[i]);
    const lm_lora_linear_backward_args args = {sizeof args,
                                               type,
                                               with_dx ? got[0].data : NULL,
                                               got[1].data,
                                               got[2].data,
                                               got[3].data,
                                               got[4].data,
                                               work.data,
                                               dy.data,
                                               ranks > 0 ? x.data : NULL,
                                               l.s.data,
                                               w.data,
                                               l.a.data,
                                               l.b[0].data,
                                               l.b[1].data,
                                               l.b[2].data,
                                               &h->live,
                                               h->rows,
                                               h->in,
                                               out,
                                               (int32_t)got[0].pitch,
                                               (int32_t)dy.pitch,
                                               (int32_t)x.pitch,
                                               (int32_t)l.s.pitch,
                                               (int32_t)w.pitch,
                                               w_type,
                                               w_type,
                                               h->out[0],
                                               h->out[1],
                                               h->out[2],
                                               h->rank[0],
                                               h->rank[1],
                                               h->rank[2],
                                               h->scale[0],
                                               h->scale[1],
                                               h->scale[2],
                                               0};
    lm_cpu_lora_linear_backward(devices[d], &args);
    const char *const names[5] = {"dx", "da", "db0", "db1", "db2"};
    const double *const want[5] = {want_dx, want_da, want_db[0], want_db[1], want_db[2]};
    for (int i = 0; i < 5; i++) {
      if (got[i].data == NULL || (i == 0 && !with_dx)) continue;
      const int64_t rows = i == 0 ? h->live : got[i].rows;
      const double error = distance(&got[i], want[i], rows, i == 0 ? 1e-4 : 3e-4);
      CHECK(error <= 1, "lora_linear_backward %d %s %s %s %s x%d: %g", (int)(h - shapes), names[i], type_names[type],
            type_names[w_type], NAME(d), error);
      if (!first_of_level(d))
        CHECK(same_rows(&first[i], &got[i], rows), "lora_linear_backward %s %s x%d: other bits", names[i], NAME(d));
    }
    if (ranks > 0) { /* the same in two calls */
      matrix later = matrix_copy(&da), none[4] = {0};
      lm_lora_linear_backward_args without = args;
      without.x = NULL, without.da = NULL;
      if (with_dx) without.dx = (none[0] = matrix_empty(type, h->rows, h->in, h->in + h->gap)).data;
      float **const db_of[3] = {&without.db0, &without.db1, &without.db2};
      for (int i = 0; i < 3; i++)
        if (h->rank[i] > 0) *db_of[i] = (none[1 + i] = matrix_copy(&db[i])).data;
      lm_cpu_lora_linear_backward(devices[d], &without);
      const lm_lora_down_backward_args down = {sizeof down, type,    later.data,   work.data,   x.data,     &h->live,    h->rows,
                                               h->in,       (int32_t)x.pitch, w_type, h->rank[0], h->rank[1], h->rank[2], 0};
      lm_cpu_lora_down_backward(devices[d], &down);
      CHECK(same_rows(&got[1], &later, ranks), "lora_down_backward %d %s x%d: other bits", (int)(h - shapes), NAME(d));
      for (int i = 0; i < 3; i++)
        if (h->rank[i] > 0) CHECK(same_rows(&got[2 + i], &none[1 + i], h->out[i]), "lora_linear_backward without x: other db%d", i);
      if (with_dx) CHECK(same_rows(&got[0], &none[0], h->live), "lora_linear_backward without x: other dx");
      free(later.data);
      for (int i = 0; i < 4; i++) free(none[i].data);
    }
    CHECK(untouched(&got[0], with_dx ? h->live : 0), "lora_linear_backward %s x%d wrote outside", NAME(d));
    if (ranks > 0) CHECK(untouched(&work, h->live), "lora_linear_backward ds %s x%d wrote outside", NAME(d));
    free(work.data);
    for (int i = 0; i < 5; i++) {
      if (first_of_level(d)) {
        free(first[i].data);
        first[i] = got[i];
      } else {
        free(got[i].data);
      }
    }
  }
  adapters_free(&l);
  for (int i = 0; i < 5; i++) free(first[i].data);
  for (int i = 0; i < 3; i++) free(db[i].data), free(want_db[i]);
  free(da.data), free(want_da), free(want_dx), free(ds), free(x.data), free(dy.data), free(w.data);
}

/* Products whose packed weights pass through shared scratch in several blocks, or are too long for it. Only some rows are
 * compared. */
static void test_long(int32_t rows, int32_t in, int32_t out) {
  const matrix x = matrix_random(LM_F32, rows, in, in, rows, 1), dy = matrix_random(LM_F32, rows, out, out, rows, 1);
  const matrix w = matrix_random(LM_BF16, out, in, in, out, 1);
  matrix first[2] = {0};
  for (int d = 0; d < device_count; d++) {
    const matrix y = matrix_empty(LM_F32, rows, out, out), dx = matrix_empty(LM_F32, rows, in, in);
    const lm_lora_linear_forward_args forward = {.size = sizeof forward,
                                                 .y = y.data,
                                                 .x = x.data,
                                                 .w = w.data,
                                                 .rows = rows,
                                                 .in = in,
                                                 .out = out,
                                                 .y_pitch = out,
                                                 .x_pitch = in,
                                                 .w_pitch = in,
                                                 .w_type = LM_BF16,
                                                 .out0 = out};
    const lm_lora_linear_backward_args backward = {.size = sizeof backward,
                                                   .dx = dx.data,
                                                   .dy = dy.data,
                                                   .w = w.data,
                                                   .rows = rows,
                                                   .in = in,
                                                   .out = out,
                                                   .dx_pitch = in,
                                                   .dy_pitch = out,
                                                   .w_pitch = in,
                                                   .w_type = LM_BF16,
                                                   .out0 = out};
    lm_cpu_lora_linear_forward(devices[d], &forward);
    lm_cpu_lora_linear_backward(devices[d], &backward);
    if (!first_of_level(d)) {
      CHECK(same_rows(&first[0], &y, rows), "lora_linear_forward %dx%dx%d %s x%d: other bits", rows, in, out, NAME(d));
      CHECK(same_rows(&first[1], &dx, rows), "lora_linear_backward %dx%dx%d %s x%d: other bits", rows, in, out, NAME(d));
      free(y.data), free(dx.data);
      continue;
    }
    double worst = 0;
    for (int32_t t = 0; t < rows; t += rows - 1) {
      for (int32_t n = 0; n < out; n++) {
        double sum = 0;
        for (int32_t k = 0; k < in; k++) sum += at(&x, t, k) * at(&w, n, k);
        worst = fmax(worst, fabs(sum - at(&y, t, n)) / sqrt(in));
      }
      for (int32_t k = 0; k < in; k++) {
        double sum = 0;
        for (int32_t n = 0; n < out; n++) sum += at(&dy, t, n) * at(&w, n, k);
        worst = fmax(worst, fabs(sum - at(&dx, t, k)) / sqrt(out));
      }
    }
    CHECK(worst < 3e-5, "lora_linear %dx%dx%d %s x%d: %g", rows, in, out, NAME(d), worst);
    free(first[0].data), free(first[1].data);
    first[0] = y, first[1] = dx;
  }
  free(first[0].data), free(first[1].data), free(x.data), free(dy.data), free(w.data);
}

int main(void) {
  open_devices();
  test_long(130, 10000, 230);
  test_long(140, 230, 10000);
  test_long(130, 70000, 33);
  test_long(130, 33, 70000);
  test_long(2, 300000, 5); /* too long for the shared scratch of few rows, too */
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int t = 0; t < 3; t++) {
      const int32_t type = all_types[t], w_type = all_types[(t + i) % 3];
      test_down(&shapes[i], type, w_type);
      test_forward(&shapes[i], type, w_type);
      test_backward(&shapes[i], type, w_type);
    }
  close_devices();
  return report();
}
