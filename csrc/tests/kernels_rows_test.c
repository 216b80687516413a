/* kernels_rows_test.c: elementwise and row-wise kernels against double precision. */
#include "kernels_test.h"

static const int32_t widths[] = {1, 2, 7, 16, 33, 64, 100, 257};
static const int32_t row_counts[] = {1, 3, 64, 129};

/* The nearest bit patterns of every f32 class, and random ones, cast to 16 bits and back. */
static void test_cast(void) {
  const int64_t n = 5000;
  float *x = malloc((size_t)n * 4), *back = malloc((size_t)n * 4);
  uint16_t *y = malloc((size_t)n * 2);
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = random_u32();
    if (i % 4 == 1) bits = (bits & 0x807fffff) | (uint32_t)(100 + i / 4 % 46) << 23; /* the range of f16 */
    if (i % 4 == 2) bits = (bits & 0xfffff000) | (i % 8 == 2 ? 0 : 0x800);           /* ties */
    memcpy(&x[i], &bits, 4);
  }
  const float special[] = {0,        -0.0f,    INFINITY,   -INFINITY, NAN,          65504,   65519.99f, 65520, -65520,
                           0x1p-24f, 0x1p-25f, 0x1.8p-25f, 0x1p-14f,  0x1.ffcp-15f, 3.4e38f, -3.4e38f,  1e-45f};
  memcpy(x, special, sizeof special);
  for (int d = 0; d < device_count; d++)
    for (int t = 1; t < 3; t++) {
      const int32_t type = all_types[t];
      const lm_cast_args down = {sizeof down, LM_F32, y, x, n, type, 0}, up = {sizeof up, type, back, y, n, LM_F32, 0};
      lm_cpu_cast(devices[d], &down);
      lm_cpu_cast(devices[d], &up);
      int wrong = 0, lost = 0;
      for (int64_t i = 0; i < n; i++) {
        const double want = rounded(type, (double)x[i]), got = get(type, y, i);
        wrong += isnan(want) ? !isnan(got) : want != got || signbit(want) != signbit(got);
        lost += isnan(got) ? !isnan(back[i]) : (double)back[i] != got;
      }
      CHECK(wrong == 0 && lost == 0, "cast %s %s x%d: %d wrong, %d lost", type_names[t], NAME(d), wrong, lost);
    }
  free(x), free(y), free(back);
}

static void test_elementwise(int32_t type, int64_t n) {
  const matrix a = matrix_random(type, 1, n, n, 1, 1), b = matrix_random(type, 1, n, n, 1, 1);
  double *sum = malloc(sizeof(double) * (size_t)n), *product = malloc(sizeof(double) * (size_t)n);
  for (int64_t i = 0; i < n; i++) {
    sum[i] = (double)((float)at(&a, 0, i) + (float)at(&b, 0, i));
    product[i] = (double)((float)at(&a, 0, i) * 0.3f);
  }
  for (int d = 0; d < device_count; d++) {
    matrix y = matrix_copy(&a); /* in place */
    const lm_add_args add = {sizeof add, type, y.data, y.data, b.data, n};
    lm_cpu_add(devices[d], &add);
    CHECK(distance(&y, sum, 1, 0) <= 1, "add %s %s x%d n %d", type_names[type], NAME(d), (int)n);
    const lm_scale_args scale = {sizeof scale, type, y.data, a.data, n, 0.3f, 0};
    lm_cpu_scale(devices[d], &scale);
    CHECK(distance(&y, product, 1, 0) <= 1, "scale %s %s x%d n %d", type_names[type], NAME(d), (int)n);
    free(y.data);
  }
  free(a.data), free(b.data), free(sum), free(product);
}

static void test_lookup(int32_t type, int32_t rows, int32_t width) {
  const int32_t vocab = 11, table_type = (type + rows) % 3, live = (rows + 1) / 2;
  const matrix table = matrix_random(table_type, vocab, width, width, vocab, 1);
  const matrix x = matrix_random(type, vocab, width, width + 3, vocab, 1);
  int32_t *ids = malloc((size_t)rows * 4), *out = malloc((size_t)rows * 4);
  for (int32_t i = 0; i < rows; i++)
    ids[i] = i % 7 == 5 ? 1000 : i % 7 == 6 ? -1 : (int32_t)(random_u32() % (uint32_t)vocab);
  matrix flat = matrix_random(type, rows, width, width + 2, live, 1);
  for (int32_t t = 0; t < live; t++) { /* ties: two equal largest */
    const int64_t last = (int64_t)t * flat.pitch + width - 1, middle = (int64_t)t * flat.pitch + width / 2;
    put(type, flat.data, last, 100), put(type, flat.data, middle, 100);
  }
  for (int d = 0; d < device_count; d++) {
    matrix y = matrix_empty(type, rows, width, width + 1), g = matrix_empty(type, rows, width, width);
    const lm_embedding_forward_args embed = {sizeof embed, type,  y.data, table.data, ids,        &live,
                                             rows,         width, vocab,  width + 1,  table_type, 0};
    lm_cpu_embedding_forward(devices[d], &embed);
    const lm_gather_rows_args gather = {sizeof gather, type,  g.data, x.data, ids,       &live,
                                        rows,          width, vocab,  width,  width + 3, 0};
    lm_cpu_gather_rows(devices[d], &gather);
    int same = 1;
    for (int32_t t = 0; t < live; t++) {
      const int32_t id = ids[t] < 0 || ids[t] >= vocab ? 0 : ids[t];
      for (int32_t c = 0; c < width; c++)
        same &= at(&y, t, c) == rounded(type, at(&table, id, c)) && at(&g, t, c) == at(&x, id, c);
    }
    CHECK(same && untouched(&y, live) && untouched(&g, live), "embedding_forward, gather_rows %s %s x%d %d x %d",
          type_names[type], NAME(d), (int)rows, (int)width);
    memset(out, 0x5a, (size_t)rows * 4);
    const lm_argmax_args arg = {sizeof arg, type, out, flat.data, &live, rows, width, width + 2, 0};
    lm_cpu_argmax(devices[d], &arg);
    int right = 1;
    for (int32_t t = 0; t < rows; t++) right &= out[t] == (t < live ? width / 2 : 0x5a5a5a5a);
    CHECK(right, "argmax %s %s x%d %d x %d", type_names[type], NAME(d), (int)rows, (int)width);
    free(y.data), free(g.data);
  }
  free(table.data), free(x.data), free(flat.data), free(ids), free(out);
}

static void test_rms_norm(int32_t type, int32_t rows, int32_t width) {
  const int32_t live = rows - rows / 3, w_type = (type + width) % 3;
  const double eps = (double)1e-5f;
  const matrix x = matrix_random(type, rows, width, width + 1, live, 2),
               dy = matrix_random(type, rows, width, width + 2, live, 1);
  const matrix add = matrix_random(type, rows, width, width, live, 1), w = matrix_random(w_type, 1, width, width, 1, 1);
  double *y = malloc(sizeof(double) * (size_t)(rows * width)), *dx = malloc(sizeof(double) * (size_t)(rows * width));
  double *dx_add = malloc(sizeof(double) * (size_t)(rows * width)), largest = 0;
  for (int32_t t = 0; t < live; t++) {
    double squares = 0, mean = 0;
    for (int32_t c = 0; c < width; c++) squares += at(&x, t, c) * at(&x, t, c);
    const double inverse = 1 / sqrt(squares / width + eps);
    for (int32_t c = 0; c < width; c++) mean += at(&dy, t, c) * at(&w, 0, c) * at(&x, t, c) * inverse / width;
    largest = fmax(largest, inverse);
    for (int32_t c = 0; c < width; c++) {
      const int64_t i = (int64_t)t * width + c;
      y[i] = at(&x, t, c) * inverse * at(&w, 0, c);
      dx[i] = inverse * (at(&dy, t, c) * at(&w, 0, c) - at(&x, t, c) * inverse * mean);
      dx_add[i] = dx[i] + at(&add, t, c);
    }
  }
  for (int d = 0; d < device_count; d++) {
    matrix a = matrix_copy(&x), b = matrix_empty(type, rows, width, width + 3), c = matrix_copy(&add), e = matrix_copy(&dy);
    const lm_rms_norm_forward_args forward = {sizeof forward, type,  a.data,    a.data,    w.data, &live,
                                              rows,           width, width + 1, width + 1, w_type, 1e-5f}; /* in place */
    lm_cpu_rms_norm_forward(devices[d], &forward);
    lm_rms_norm_backward_args back = {sizeof back, type,  b.data,    dy.data,   x.data,    w.data, NULL,   &live,
                                      rows,        width, width + 3, width + 2, width + 1, 0,      w_type, 1e-5f};
    lm_cpu_rms_norm_backward(devices[d], &back);
    back.dx = c.data, back.dx_pitch = width, back.add = c.data, back.add_pitch = width; /* dx is add */
    lm_cpu_rms_norm_backward(devices[d], &back);
    back.dx = e.data, back.dx_pitch = width + 2, back.dy = e.data, back.add = NULL; /* dx is dy */
    lm_cpu_rms_norm_backward(devices[d], &back);
    /* y is dy, dx is add: both must keep what they need until it is read */
    matrix f = matrix_copy(&add), h = matrix_copy(&dy);
    back.dx = back.add = NULL, back.dx = f.data, back.add = f.data, back.dx_pitch = width, back.dy = h.data;
    back.y = h.data, back.y_pitch = width + 2;
    lm_cpu_rms_norm_backward(devices[d], &back);
    CHECK(same_values(&a, &h, live), "rms_norm_backward %s %s: y has other bits than forward", type_names[type],
          NAME(d));
    CHECK(same_rows(&c, &f, live), "rms_norm_backward %s %s with y: dx has other bits", type_names[type], NAME(d));
    free(f.data), free(h.data);
    const double tolerance = 2e-6 * (1 + largest);
    CHECK(distance(&a, y, live, 2e-6) <= 1, "rms_norm_forward %s %s x%d width %d", type_names[type], NAME(d), (int)width);
    CHECK(distance(&b, dx, live, tolerance) <= 1 && untouched(&b, live), "rms_norm_backward %s %s x%d width %d",
          type_names[type], NAME(d), (int)width);
    CHECK(distance(&c, dx_add, live, tolerance) <= 1, "rms_norm_backward with add %s %s x%d", type_names[type], NAME(d));
    CHECK(same_rows(&b, &e, live) || b.pitch != e.pitch, "rms_norm_backward in place");
    CHECK(distance(&e, dx, live, tolerance) <= 1, "rms_norm_backward in place %s %s x%d", type_names[type], NAME(d));
    free(a.data), free(b.data), free(c.data), free(e.data);
  }
  free(x.data), free(dy.data), free(add.data), free(w.data), free(y), free(dx), free(dx_add);
}

static void test_glu(int32_t type, int32_t rows, int32_t width) {
  const int32_t live = rows - rows / 4;
  matrix gu = matrix_random(type, rows, 2 * width, 2 * width + 1, live, 4);
  const matrix dh = matrix_random(type, rows, width, width + 5, live, 1);
  put(type, gu.data, 0, 200);
  if (rows > 1) put(type, gu.data, gu.pitch, -200); /* far tails of the sigmoid */
  double *h = malloc(sizeof(double) * (size_t)(rows * width)), *dgu = malloc(sizeof(double) * (size_t)(rows * width * 2));
  for (int32_t t = 0; t < live; t++)
    for (int32_t c = 0; c < width; c++) {
      const double g = at(&gu, t, c), u = at(&gu, t, width + c), s = 1 / (1 + exp(-g)), d = at(&dh, t, c);
      h[t * width + c] = g * s * u;
      dgu[t * 2 * width + c] = d * u * s * (1 + g * (1 - s));
      dgu[t * 2 * width + width + c] = d * g * s;
    }
  for (int d = 0; d < device_count; d++) {
    matrix y = matrix_empty(type, rows, width, width + 2), g = matrix_copy(&gu);
    const lm_glu_forward_args forward = {sizeof forward, type,  y.data,    gu.data,      &live,
                                         rows,           width, width + 2, 2 * width + 1};
    lm_cpu_glu_forward(devices[d], &forward);
    const lm_glu_backward_args back = {sizeof back, type,  g.data,        dh.data,   g.data,        &live,
                                       rows,        width, 2 * width + 1, width + 5, 2 * width + 1, 0, NULL}; /* in place */
    lm_cpu_glu_backward(devices[d], &back);
    matrix again = matrix_copy(&gu), down = matrix_copy(&dh); /* h is dh */
    lm_glu_backward_args with = back;
    with.dgu = again.data, with.gu = again.data, with.dh = down.data, with.h = down.data, with.h_pitch = width + 5;
    lm_cpu_glu_backward(devices[d], &with);
    CHECK(same_values(&y, &down, live), "glu_backward %s %s: h has other bits than forward",
          type_names[type], NAME(d));
    CHECK(same_rows(&g, &again, live), "glu_backward %s %s with h: dgu has other bits", type_names[type], NAME(d));
    free(again.data), free(down.data);
    const double forward_error = distance(&y, h, live, 4e-5), back_error = distance(&g, dgu, live, 4e-5);
    CHECK(forward_error <= 1 && untouched(&y, live), "glu_forward %s %s x%d width %d: %g", type_names[type], NAME(d),
          (int)width, forward_error);
    CHECK(back_error <= 1, "glu_backward %s %s x%d width %d: %g", type_names[type], NAME(d), (int)width, back_error);
    free(y.data), free(g.data);
  }
  free(gu.data), free(dh.data), free(h), free(dgu);
}

static void test_rope(int32_t type, int32_t rows, int32_t half) {
  const int32_t heads = 3, rest = 5, width = heads * 2 * half + rest, live = rows - rows / 5, count = 40;
  const matrix x = matrix_random(type, rows, width, width + 1, live, 1);
  float *cosines = malloc(sizeof(float) * (size_t)(count * half)), *sines = malloc(sizeof(float) * (size_t)(count * half));
  int32_t *positions = malloc((size_t)rows * 4);
  for (int32_t i = 0; i < count * half; i++) {
    cosines[i] = (float)cos(i * 0.7);
    sines[i] = (float)sin(i * 0.7);
  }
  for (int32_t t = 0; t < rows; t++) positions[t] = t < live ? (int32_t)(random_u32() % (uint32_t)count) : 1 << 30;
  for (int32_t direction = -1; direction <= 1; direction += 2) {
    double *want = malloc(sizeof(double) * (size_t)(rows * width));
    for (int32_t t = 0; t < live; t++)
      for (int32_t c = 0; c < width; c++) {
        const int32_t i = c % (2 * half);
        double *y = &want[t * width + c];
        *y = at(&x, t, c);
        if (c >= heads * 2 * half) continue;
        const double co = (double)cosines[positions[t] * half + i % half];
        const double si = direction * (double)sines[positions[t] * half + i % half];
        *y = i < half ? *y * co - at(&x, t, c + half) * si : *y * co + at(&x, t, c - half) * si;
      }
    for (int d = 0; d < device_count; d++) {
      matrix y = matrix_empty(type, rows, width, width + 2), z = matrix_copy(&x);
      lm_rope_args args = {sizeof args, type,  y.data, x.data,   cosines, sines,     positions, &live,
                           rows,        width, heads,  2 * half, count,   width + 2, width + 1, direction};
      lm_cpu_rope(devices[d], &args);
      args.y = z.data, args.x = z.data, args.y_pitch = width + 1; /* in place */
      lm_cpu_rope(devices[d], &args);
      CHECK(distance(&y, want, live, 5e-7) <= 1 && untouched(&y, live), "rope %s %s x%d half %d", type_names[type], NAME(d),
            (int)half);
      CHECK(distance(&z, want, live, 5e-7) <= 1, "rope in place %s %s x%d half %d", type_names[type], NAME(d), (int)half);
      free(y.data), free(z.data);
    }
    free(want);
  }
  free(x.data), free(cosines), free(sines), free(positions);
}

int main(void) {
  open_devices();
  test_cast();
  for (int t = 0; t < 3; t++) {
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
      for (size_t j = 0; j < sizeof row_counts / sizeof *row_counts; j++) {
        test_lookup(all_types[t], row_counts[j], widths[i]);
        test_rms_norm(all_types[t], row_counts[j], widths[i]);
        test_glu(all_types[t], row_counts[j], widths[i]);
        test_rope(all_types[t], row_counts[j], widths[i]);
      }
    test_elementwise(all_types[t], 1);
    test_elementwise(all_types[t], 31);
    test_elementwise(all_types[t], 100003);
  }
  close_devices();
  return report();
}
