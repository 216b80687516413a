/* kernels_train_test.c: cross entropy, loss sum, gradient norm and AdamW against double precision. */
#include "kernels_test.h"

typedef struct shape {
  int32_t rows, width, vocab, labelled, chunk_rows, gap;
  double scale, shift; /* of the logits: shift is added to all of a row's */
} shape;

static const shape shapes[] = {
    {1, 1, 1, 1, 1, 0, 1, 0},        {5, 8, 3, 0, 4, 0, 1, 0},        {6, 33, 50, 6, 6, 2, 1, 0},
    {40, 17, 129, 30, 8, 1, 3, 0},   {70, 64, 257, 65, 64, 0, 1, 0},  {130, 20, 40, 129, 129, 3, 1, -120},
    {20, 20, 40, 19, 16, 0, 1, 120}, {12, 16, 600, 12, 64, 0, 20, 0},
};

static void test_cross_entropy(const shape *s, int32_t type) {
  const int32_t w_type = (type + 1) % 3;
  matrix x = matrix_random(type, s->rows, s->width, s->width + s->gap, s->rows, s->scale);
  matrix w = matrix_random(w_type, s->vocab, s->width, s->width + s->gap, s->vocab, 1 / sqrt(s->width));
  const lm_batch_header batch = {s->rows, 1, s->labelled, 0.125f};
  int32_t *label_rows = malloc((size_t)s->rows * 4), *label_ids = malloc((size_t)s->rows * 4);
  for (int32_t i = 0; i < s->rows; i++) {
    label_rows[i] = s->rows - 1 - i; /* any order */
    label_ids[i] = i % 3 == 0 ? s->vocab - 1 : (int32_t)(random_u32() % (uint32_t)s->vocab);
  }
  if (s->shift != 0)
    for (int64_t i = 0; i < s->rows || i < s->vocab; i++) {
      if (i < s->rows) put(type, x.data, i * x.pitch, s->shift);
      if (i < s->vocab) put(w_type, w.data, i * w.pitch, 1);
    }
  for (int32_t t = 0; t < s->rows - s->labelled; t++) /* rows without a label are not read */
    for (int32_t c = 0; c < s->width; c++) put(type, x.data, t * x.pitch + c, NAN);
  double *loss = calloc((size_t)s->rows, sizeof(double)), *dx = calloc((size_t)(s->rows * s->width), sizeof(double));
  double *z = malloc(sizeof(double) * (size_t)s->vocab);
  const int64_t live = s->labelled; /* gradients by labelled row */
  for (int32_t i = 0; i < live; i++) {
    double top = -INFINITY, sum = 0;
    for (int32_t v = 0; v < s->vocab; v++) {
      z[v] = 0;
      for (int32_t c = 0; c < s->width; c++) z[v] += at(&x, label_rows[i], c) * at(&w, v, c);
      z[v] = rounded(type, z[v]); /* logits are stored */
      top = fmax(top, z[v]);
    }
    for (int32_t v = 0; v < s->vocab; v++) sum += exp(z[v] - top);
    loss[i] = log(sum) + top - z[label_ids[i]];
    for (int32_t v = 0; v < s->vocab; v++) {
      const double p = exp(z[v] - top) / sum - (v == label_ids[i]);
      for (int32_t c = 0; c < s->width; c++) dx[i * s->width + c] += 0.125 * p * at(&w, v, c);
    }
  }
  matrix first = {0};
  float *first_loss = NULL;
  for (int d = 0; d < device_count; d++) {
    matrix y = matrix_empty(type, s->rows, s->width, s->width + s->gap),
           logits = matrix_empty(type, s->chunk_rows, s->vocab, s->vocab);
    matrix gathered = matrix_empty(type, s->chunk_rows, s->width, s->width);
    float *got = malloc((size_t)s->rows * 4), *evaluated = malloc((size_t)s->rows * 4);
    memset(got, 0x5a, (size_t)s->rows * 4);
    lm_linear_cross_entropy_args args = {
        sizeof args,      type,     got,        y.data,        logits.data,      gathered.data,
        x.data,           w.data,   label_rows, label_ids,     &batch,           s->rows,
        s->width,         s->vocab, 0,          s->chunk_rows, (int32_t)y.pitch, (int32_t)x.pitch,
        (int32_t)w.pitch, w_type,   0,          NULL};
    for (int pass = 0; pass < 2; pass++) { /* with gradient, then evaluation; chunks past the labelled rows do nothing */
      for (args.chunk = 0; args.chunk <= s->rows / s->chunk_rows + 1; args.chunk++)
        lm_cpu_linear_cross_entropy(devices[d], &args);
      args.loss = evaluated, args.dx = NULL;
    }
    double worst = 0;
    for (int32_t i = 0; i < live; i++) {
      /* the kernel may round a logit to the neighbouring value of the type */
      const double allowed = 1e-5 * (s->scale + fabs(s->shift)) +
                             (type == LM_F32 ? 0 : 4 * type_step(type) * (10 * s->scale + fabs(s->shift)));
      worst = fmax(worst, fabs((double)got[i] - loss[i]) / allowed);
      CHECK(got[i] == evaluated[i], "linear_cross_entropy %s x%d: evaluation differs", NAME(d));
    }
    CHECK(worst <= 1, "linear_cross_entropy loss %d %s %s x%d: %g", (int)(s - shapes), type_names[type], NAME(d), worst);
    for (int32_t i = s->labelled; i < s->rows; i++) {
      uint32_t bits;
      memcpy(&bits, &got[i], 4);
      CHECK(bits == 0x5a5a5a5a, "linear_cross_entropy %s x%d wrote past the labelled rows", NAME(d));
    }
    matrix flipped = matrix_empty(type, s->rows, s->width, s->width + s->gap); /* labelled row i is row rows - 1 - i */
    const size_t size = type_size(type);
    for (int32_t t = 0; t < s->rows; t++)
      memcpy((char *)flipped.data + (size_t)(t * y.pitch) * size,
             (char *)y.data + (size_t)((s->rows - 1 - t) * y.pitch) * size, (size_t)s->width * size);
    const double error =
        distance(&flipped, dx, live,
                 2e-5 + (type == LM_F32 ? 1e-5 * fabs(s->shift) : type_step(type) * (4 * s->scale + 3 * fabs(s->shift))));
    CHECK(error <= 1, "linear_cross_entropy dx %d %s %s x%d: %g", (int)(s - shapes), type_names[type], NAME(d), error);
    CHECK(untouched(&flipped, live), "linear_cross_entropy dx %s x%d wrote outside", NAME(d));
    if (first_of_level(d)) {
      free(first.data), free(first_loss);
      first = flipped, first_loss = got;
    } else {
      CHECK(same_rows(&first, &flipped, live) && memcmp(first_loss, got, (size_t)s->rows * 4) == 0,
            "linear_cross_entropy %s x%d: other bits", NAME(d));
      free(flipped.data), free(got);
    }
    free(y.data), free(logits.data), free(gathered.data), free(evaluated);
  }
  free(first.data), free(first_loss), free(x.data), free(w.data), free(label_rows), free(label_ids), free(loss), free(dx),
      free(z);
}

static void test_loss_sum(void) {
  float loss[1000];
  double want = 2.5;
  for (int i = 0; i < 1000; i++) {
    loss[i] = i < 700 ? (float)random_normal() : NAN;
    if (i < 700) want += (double)loss[i];
  }
  for (int d = 0; d < device_count; d++) {
    lm_step_metrics metrics = {.loss_sum = 2.5, .grad_norm = 7, .clip = 8};
    const lm_batch_header batch = {1000, 1, 700, 1}, none = {1000, 1, 0, 1};
    lm_loss_sum_args args = {sizeof args, LM_F32, &metrics, loss, &batch, 1000, 0};
    lm_cpu_loss_sum(devices[d], &args);
    args.batch = &none;
    lm_cpu_loss_sum(devices[d], &args);
    CHECK(fabs(metrics.loss_sum - want) < 1e-12 && metrics.grad_norm == 7 && metrics.clip == 8, "loss_sum %s x%d", NAME(d));
  }
}

static void test_optimizer(int64_t n, float max_norm, int32_t copy_type) {
  float *start[4], *now[4];
  for (int i = 0; i < 4; i++) {
    start[i] = malloc((size_t)n * 4), now[i] = malloc((size_t)n * 4);
    for (int64_t k = 0; k < n; k++) start[i][k] = (float)(i == 2 ? fabs(random_normal()) : random_normal());
  }
  void *copy = malloc((size_t)n * type_size(copy_type));
  double *partial = malloc(sizeof(double) * (size_t)((n + 65535) / 65536)), squares = 0, first_norm = 0;
  float *first = malloc((size_t)n * 4);
  for (int64_t k = 0; k < n; k++) squares += (double)start[3][k] * (double)start[3][k];
  const lm_optimizer_control c = {.learning_rate = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.1,
                                  .max_norm = (double)max_norm};
  const double correction1 = 1 - pow(0.9, 4), correction2 = 1 - pow(0.99, 4); /* the fourth update */
  const double norm = sqrt(squares), clip = max_norm > 0 ? fmin(1, (double)max_norm / (norm + 1e-6)) : 1;
  for (int d = 0; d < device_count; d++) {
    for (int i = 0; i < 4; i++) memcpy(now[i], start[i], (size_t)n * 4);
    lm_step_metrics metrics = {.loss_sum = 5};
    lm_optimizer_state state = {3, 1};
    const lm_grad_norm_args g = {sizeof g, LM_F32, &metrics, partial, &state, NULL, NULL, now[3], &c, n};
    lm_cpu_grad_norm(devices[d], &g);
    CHECK(state.step == 4 && state.skipped == 1 && metrics.step == 4 && !metrics.skipped && metrics.bad_element == -1,
          "grad_norm %s x%d: counts", NAME(d));
    CHECK(fabs(metrics.grad_norm / norm - 1) < 1e-6 && fabs(metrics.clip / clip - 1) < 1e-6 && metrics.loss_sum == 5,
          "grad_norm %s x%d: %g for %g, clip %g for %g", NAME(d), metrics.grad_norm, norm, metrics.clip, clip);
    const lm_adamw_args a = {sizeof a, LM_F32,   now[0], now[1],    now[2], now[3], d % 2 ? copy : NULL,
                             &c,       &metrics, n,      copy_type, 0};
    lm_cpu_adamw(devices[d], &a);
    double worst = 0, copied = 0, left = 0;
    for (int64_t k = 0; k < n; k++) {
      const double gradient = (double)start[3][k] * clip, m = 0.9 * (double)start[1][k] + 0.1 * gradient;
      const double v = 0.99 * (double)start[2][k] + 0.01 * gradient * gradient;
      const double p = (double)start[0][k] * (1 - 1e-3) - 1e-2 * (m / correction1) / (sqrt(v / correction2) + 1e-6);
      worst =
          fmax(worst, fmax(fabs((double)now[0][k] - p), fmax(fabs((double)now[1][k] - m), fabs((double)now[2][k] - v))));
      if (d % 2) copied = fmax(copied, fabs(get(copy_type, copy, k) - rounded(copy_type, (double)now[0][k])));
      left = fmax(left, fabs((double)now[3][k]));
    }
    CHECK(worst < 3e-6 && copied == 0 && left == 0, "adamw %s x%d: %g %g %g", NAME(d), worst, copied, left);
    if (first_of_level(d)) memcpy(first, now[0], (size_t)n * 4), first_norm = metrics.grad_norm;
    else
      CHECK(first_norm == metrics.grad_norm && memcmp(first, now[0], (size_t)n * 4) == 0, "adamw %s x%d: other bits",
            NAME(d));
  }
  for (int i = 0; i < 4; i++) free(start[i]), free(now[i]);
  free(copy), free(partial), free(first);
}

/* What is not finite, or would not be after scaling down, is skipped; squares that overflow f32 alone are not. */
static void test_skip(void) {
  enum { n = 70001 };
  static const struct {
    float value, scale, found;
    int skipped;
    int64_t bad;
  } cases[] = {
      {1, 1, 0, 0, -1},         {NAN, 1, 0, 1, 66000}, {INFINITY, 1, 0, 1, 66000}, {-INFINITY, 8, 0, 1, 66000},
      {3e38f, 0x1p126f, 0, 0, -1}, {3e38f, 1, 0, 1, -1},  {1, 1e-45f, 0, 1, -1},      {1, 0, 0, 1, -1},
      {1, 8, 1, 1, -1},         {1, 8, NAN, 1, -1},     {0, 1e-45f, 0, 1, -1},
  };
  float *now[4], *before[3];
  double partial[2];
  for (int i = 0; i < 4; i++) now[i] = malloc(n * 4);
  for (int i = 0; i < 3; i++) before[i] = malloc(n * 4);
  uint16_t *copy = malloc(n * 2);
  const lm_optimizer_control c = {.learning_rate = 1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.1};
  for (int d = 0; d < device_count; d++)
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
      for (int i = 0; i < 4; i++)
        for (int64_t j = 0; j < n; j++) now[i][j] = (float)fabs(random_normal());
      for (int64_t j = 0; j < n && cases[k].value == 0; j++) now[3][j] = 0; /* 0 times an infinite factor is NaN */
      for (int i = 0; i < 3; i++) memcpy(before[i], now[i], n * 4);
      memset(copy, 0x5a, n * 2);
      now[3][66000] = cases[k].value;
      if (cases[k].bad >= 0) now[3][69000] = NAN; /* not the first */
      lm_step_metrics metrics = {.loss_sum = 5};
      lm_optimizer_state state = {3, 1};
      lm_scaler scaler = {cases[k].scale, 4, 2, 0.5f, 5, 0, 0, 0};
      const lm_grad_norm_args g = {sizeof g, LM_F32, &metrics, partial, &state, &scaler, &cases[k].found, now[3], &c, n};
      lm_cpu_grad_norm(devices[d], &g);
      CHECK(metrics.skipped == cases[k].skipped && metrics.bad_element == cases[k].bad && metrics.loss_sum == 5,
            "grad_norm %s x%d, case %d: skipped %d, bad element %lld", NAME(d), (int)k, metrics.skipped, (long long)metrics.bad_element);
      CHECK(state.step == 4 - cases[k].skipped && state.skipped == 1 + cases[k].skipped, "grad_norm %s x%d: counts", NAME(d));
      CHECK(isnan(metrics.grad_norm) == (cases[k].bad >= 0), "grad_norm %s x%d hides NaN", NAME(d));
      const int grows = !cases[k].skipped && cases[k].scale < 0x1p127f;
      CHECK(scaler.growth_tracker == 0 && scaler.scale == cases[k].scale * (grows ? 2 : 0.5f), "scaler %s x%d, case %d: %g", NAME(d),
            (int)k, (double)scaler.scale);
      const lm_adamw_args a = {sizeof a, LM_F32, now[0], now[1], now[2], now[3], copy, &c, &metrics, n, LM_F16, 0};
      lm_cpu_adamw(devices[d], &a);
      int same = copy[0] == 0x5a5a && copy[n - 1] == 0x5a5a, finite = 1, zero = 1;
      for (int i = 0; i < 3; i++) {
        same &= memcmp(now[i], before[i], n * 4) == 0;
        for (int64_t j = 0; j < n; j++) finite &= isfinite(now[i][j]) != 0;
      }
      for (int64_t j = 0; j < n; j++) zero &= now[3][j] == 0;
      CHECK(same == cases[k].skipped && finite && zero, "adamw %s x%d, case %d: same %d, finite %d, zero %d", NAME(d), (int)k, same,
            finite, zero);
    }
  for (int i = 0; i < 4; i++) free(now[i]);
  for (int i = 0; i < 3; i++) free(before[i]);
  free(copy);
}

static void test_scaler(void) {
  for (int d = 0; d < device_count; d++) {
    lm_scaler s;
    const lm_scaler_set_args set = {sizeof set, 0, &s, 0x1p126f, 1, 2, 0.5f, 2, 0, 0, 0};
    lm_cpu_scaler_set(devices[d], &set);
    float found[3] = {0, 0, 0};
    lm_scaler_update_args update = {sizeof update, 0, &s, found, 3, 0};
    for (int i = 0; i < 9; i++) lm_cpu_scaler_update(devices[d], &update);
    CHECK(s.scale == 0x1p127f && s.growth_tracker == 0, "scaler %s x%d grows to %g", NAME(d), (double)s.scale);
    found[2] = 1;
    lm_cpu_scaler_update(devices[d], &update);
    CHECK(s.scale == 0x1p126f && found[2] == 0, "scaler %s x%d backs off to %g", NAME(d), (double)s.scale);
    s.max_scale = 3, s.min_scale = 1, s.scale = 2;
    for (int i = 0; i < 4; i++) lm_cpu_scaler_update(devices[d], &update);
    CHECK(s.scale == 3, "scaler %s x%d grows beyond its maximum: %g", NAME(d), (double)s.scale);
    for (int i = 0; i < 4; i++) found[0] = 1, lm_cpu_scaler_update(devices[d], &update);
    CHECK(s.scale == 1, "scaler %s x%d falls below its minimum: %g", NAME(d), (double)s.scale);
    update.new_scale = 77, s.growth_tracker = 1;
    lm_cpu_scaler_update(devices[d], &update);
    CHECK(s.scale == 77 && s.growth_tracker == 1, "scaler %s x%d: new_scale", NAME(d));
    float x[5] = {1, -2, 3e38f, 0, 0x1p-149f}, y[5], flag = 0;
    s.scale = 4;
    const lm_scaler_scale_args scale = {sizeof scale, 0, y, x, &s, 5};
    lm_cpu_scaler_scale(devices[d], &scale);
    CHECK(y[0] == 4 && y[1] == -8 && isinf(y[2]) && y[3] == 0 && y[4] == 0x1p-147f, "scaler_scale %s x%d", NAME(d));
    lm_scaler_unscale_args unscale = {sizeof unscale, 0, x, &flag, &s, 5};
    lm_cpu_scaler_unscale(devices[d], &unscale);
    CHECK(flag == 0 && x[0] == 0.25f && x[2] == 3e38f / 4, "scaler_unscale %s x%d", NAME(d));
    unscale.g = y;
    lm_cpu_scaler_unscale(devices[d], &unscale);
    CHECK(flag == 1 && y[0] == 1 && isinf(y[2]), "scaler_unscale %s x%d does not look", NAME(d));
  }
}

int main(void) {
  open_devices();
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int t = 0; t < 3; t++) test_cross_entropy(&shapes[i], all_types[t]);
  test_loss_sum();
  test_optimizer(1, 0, LM_F32);
  test_optimizer(37, 1, LM_BF16);
  test_optimizer(200001, 5, LM_F16);
  test_skip();
  test_scaler();
  close_devices();
  return report();
}
