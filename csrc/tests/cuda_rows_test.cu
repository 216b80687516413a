/* cuda_rows_test.cu: elementwise and row-wise kernels, optimizer and loss sum: the GPU against the CPU backend. */
#include "cuda_test.h"

static const int64_t row_counts[] = {1, 2, 63, 64, 65, 127, 129};

/* Elementwise -------------------------------------------------------------------------------------------------------- */

static void test_elementwise(int32_t type, int64_t n, int64_t offset) {
  clear_arrays();
  array a = make(type, 1, n, n, 1, 1, offset), b = make(type, 1, n, n, 1, 1, offset), y = make_empty(type, 1, n, n, offset);
  const std::string what = std::to_string(n) + " elements, offset " + std::to_string(offset);
  run("scale", [&](side &s) {
    const lm_scale_args args = {sizeof args, type, s.at(y), s.at(a), n, 0.3f, 0};
    return lm_scale(s.ctx, &args, s.stream);
  });
  same_bits(y, 1, ("scale " + what).c_str());
  run("add", [&](side &s) {
    const lm_add_args args = {sizeof args, type, s.at(y), s.at(a), s.at(b), n};
    return lm_add(s.ctx, &args, s.stream);
  });
  same_bits(y, 1, ("add " + what).c_str());
  run("add in place", [&](side &s) {
    lm_add_args args = {sizeof args, type, s.at(a), s.at(a), s.at(b), n};
    const int32_t status = lm_add(s.ctx, &args, s.stream);
    args = {sizeof args, type, s.at(b), s.at(a), s.at(b), n};
    const lm_scale_args scale = {sizeof scale, type, s.at(a), s.at(a), n, -1.5f, 0};
    return status ? status : lm_add(s.ctx, &args, s.stream) ? LM_ERR_INTERNAL : lm_scale(s.ctx, &scale, s.stream);
  });
  same_bits(a, 1, ("in place " + what).c_str());
  same_bits(b, 1, ("add into b " + what).c_str());
}

/* Every pair of types; classes of f32 and random bits, so that ties, subnormals and overflows are among them. */
static void test_cast(int32_t from, int32_t to, int64_t n, int64_t offset) {
  clear_arrays();
  array x = make_empty(from, 1, n, n, offset), y = make_empty(to, 1, n, n, offset);
  const float special[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 65504, 65519.99f, 65520, -65520, 0x1p-24f, 0x1p-25f, 0x1.8p-25f,
                           0x1p-14f, 0x1.ffcp-15f, 3.4e38f, -3.4e38f, 1e-45f};
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = random_u32();
    if (i % 4 == 1) bits = (bits & 0x807fffff) | (uint32_t)(100 + i / 4 % 46) << 23; /* the range of f16 */
    if (i % 4 == 2) bits = (bits & 0xfffff000) | (i % 8 == 2 ? 0 : 0x800);           /* ties */
    float f;
    memcpy(&f, &bits, 4);
    put_float(from, x.data(), i, i < 17 ? special[i] : f);
  }
  upload(x);
  run("cast", [&](side &s) {
    const lm_cast_args args = {sizeof args, from, s.at(y), s.at(x), n, to, 0};
    return lm_cast(s.ctx, &args, s.stream);
  });
  same_bits(y, 1, ("cast from " + std::string(type_names[from]) + " " + std::to_string(n)).c_str());
  if (from == to) {
    const std::vector<uint8_t> now = download(y, 1);
    CHECK(now == x.host, "cast to the same type keeps every bit");
  }
}

/* Copies and argmax -------------------------------------------------------------------------------------------------- */

static void test_lookup(int32_t type, int32_t table_type, int32_t rows, int32_t width, int32_t gap) {
  clear_arrays();
  const int32_t vocab = 37, live_rows = rows - rows / 3;
  std::vector<int32_t> ids((size_t)rows);
  for (int32_t i = 0; i < rows; i++) ids[(size_t)i] = i % 7 == 5 ? 1000 : i % 7 == 6 ? -1 : (int32_t)(random_u32() % vocab);
  array table = make(table_type, vocab, width, width), x = make(type, vocab, width, width + gap), index = make_ints(ids);
  array live = make_ints({live_rows}), y = make_empty(type, rows, width, width + gap), g = make_empty(type, rows, width, width + gap);
  run("embedding_forward", [&](side &s) {
    const lm_embedding_forward_args args = {sizeof args, type,  s.at(y),     s.at(table), s.ints(index), s.ints(live), rows,
                                            width,       vocab, width + gap, table_type,  0};
    return lm_embedding_forward(s.ctx, &args, s.stream);
  });
  same_bits(y, live_rows, named("embedding_forward", rows, width, live_rows).c_str());
  run("gather_rows", [&](side &s) {
    const lm_gather_rows_args args = {sizeof args, type,  s.at(g),     s.at(x),     s.ints(index), s.ints(live), rows,
                                      width,       vocab, width + gap, width + gap, 0};
    return lm_gather_rows(s.ctx, &args, s.stream);
  });
  same_bits(g, live_rows, named("gather_rows", rows, width, live_rows).c_str());
}

static void test_argmax(int32_t type, int32_t rows, int32_t width, int32_t gap) {
  clear_arrays();
  const int32_t live_rows = rows > 6 ? rows - 1 : rows;
  array x = make(type, rows, width, width + gap, live_rows), live = make_ints({live_rows});
  array out = make_empty(LM_I32, rows, 1, 1);
  for (int64_t t = 0; t < live_rows; t++) {
    const int64_t row = t * x.pitch;
    switch (t % 6) {
      case 0: /* ties: the lowest index wins */
        put_float(type, x.data(), row + width - 1, 100), put_float(type, x.data(), row + width / 2, 100);
        break;
      case 1: /* NaN never wins */
        put_float(type, x.data(), row + width / 3, NAN);
        break;
      case 2: /* all NaN */
        for (int64_t c = 0; c < width; c++) put_float(type, x.data(), row + c, NAN);
        break;
      case 3: /* NaN and minus infinity */
        for (int64_t c = 0; c < width; c++) put_float(type, x.data(), row + c, c * 2 < width ? NAN : -INFINITY);
        break;
      case 4: /* all equal, shifted far */
        for (int64_t c = 0; c < width; c++) put_float(type, x.data(), row + c, -120);
        break;
      default:
        for (int64_t c = 0; c < width; c++) put_float(type, x.data(), row + c, float_of(type, x.data(), row + c) - 120);
    }
  }
  upload(x);
  run("argmax", [&](side &s) {
    const lm_argmax_args args = {sizeof args, type, s.ints(out), s.at(x), s.ints(live), rows, width, width + gap, 0};
    return lm_argmax(s.ctx, &args, s.stream);
  });
  same_bits(out, live_rows, named("argmax", rows, width, live_rows).c_str());
}

/* equal_rows: whether two arrays of one type and width hold the same bits in their first rows. */
static bool equal_rows(const array &a, const std::vector<uint8_t> &a_bytes, const array &b, const std::vector<uint8_t> &b_bytes,
                       int64_t rows) {
  const size_t size = type_size(a.type);
  for (int64_t r = 0; r < rows; r++) {
    const size_t x = GUARD + (size_t)(a.offset + r * a.pitch) * size, y = GUARD + (size_t)(b.offset + r * b.pitch) * size;
    if (memcmp(&a_bytes[x], &b_bytes[y], (size_t)a.width * size) != 0) return false;
  }
  return true;
}

/* RMSNorm ------------------------------------------------------------------------------------------------------------ */

static void test_rms_norm(int32_t type, int32_t w_type, int32_t rows, int32_t width, int32_t gap, float scale) {
  clear_arrays();
  const int32_t live_rows = rows - rows / 3, pitch = width + gap;
  const float eps = 1e-5f;
  array x = make(type, rows, width, pitch, live_rows, scale), dy = make(type, rows, width, pitch, live_rows);
  array add = make(type, rows, width, pitch, live_rows), w = make(w_type, 1, width, width), live = make_ints({live_rows});
  array y = make_empty(type, rows, width, pitch), dx = make_empty(type, rows, width, pitch);
  const std::string shape = named("rms_norm", rows, width, live_rows) + " weight " + type_names[w_type];
  auto forward = [&](side &s, array &to) {
    const lm_rms_norm_forward_args args = {sizeof args,  type, s.at(to), s.at(x), s.at(w), s.ints(live), rows,
                                           width, pitch, pitch, w_type,   eps};
    return lm_rms_norm_forward(s.ctx, &args, s.stream);
  };
  auto backward = [&](side &s, array &to, array &from, array *plus) {
    const lm_rms_norm_backward_args args = {sizeof args, type,  s.at(to), s.at(from), s.at(x), s.at(w), plus ? s.at(*plus) : NULL,
                                            s.ints(live), rows, width,    pitch,      pitch,   pitch,   pitch,
                                            w_type,      eps};
    return lm_rms_norm_backward(s.ctx, &args, s.stream);
  };
  auto restore = [&](side &s) { /* y over dy, dx over add */
    const lm_rms_norm_backward_args args = {sizeof args, type,  s.at(add), s.at(dy), s.at(x), s.at(w), s.at(add),
                                            s.ints(live), rows, width,     pitch,    pitch,   pitch,   pitch,
                                            w_type,      eps,   s.at(dy),  pitch,    0};
    return lm_rms_norm_backward(s.ctx, &args, s.stream);
  };
  run("rms_norm_forward", [&](side &s) { return forward(s, y); });
  same(y, live_rows, close_bounds(type), (shape + " forward").c_str());
  /* The difference of two sums: what cancels is of the size of dy / rms. */
  /* One column alone has hardly a gradient: what is left is the rounding of two numbers that cancel. */
  const bounds limit = close_bounds(type, (width == 1 ? 16e-6 : 4e-6) / (scale < 1 ? scale : 1));
  run("rms_norm_backward", [&](side &s) { return backward(s, dx, dy, NULL); });
  same(dx, live_rows, limit, (shape + " backward").c_str());
  repeats("rms_norm", {&y, &dx}, [&](side &s) { return forward(s, y) ? LM_ERR_INTERNAL : backward(s, dx, dy, &add); });
  run("rms_norm_backward with add", [&](side &s) { return backward(s, add, dy, &add); });
  same(add, live_rows, limit, (shape + " backward into add").c_str());
  const std::vector<uint8_t> with_add = download(add, 1), forward_bits = download(y, 1);
  upload(add);
  run("rms_norm_backward with y", restore);
  same(add, live_rows, limit, (shape + " backward with y into add").c_str());
  CHECK(download(add, 1) == with_add, "%s: y changes the bits of dx", shape.c_str());
  CHECK(equal_rows(dy, download(dy, 1), y, forward_bits, live_rows), "%s: y has other bits than forward", shape.c_str());
  upload(dy);
  run("rms_norm_backward in place", [&](side &s) { return backward(s, dy, dy, NULL); });
  same(dy, live_rows, limit, (shape + " backward into dy").c_str());
  run("rms_norm_forward in place", [&](side &s) { return forward(s, x); });
  same(x, live_rows, close_bounds(type), (shape + " forward in place").c_str());
}

/* Gated unit and rotation -------------------------------------------------------------------------------------------- */

static void test_glu(int32_t type, int32_t rows, int32_t width, int32_t gap, float scale) {
  clear_arrays();
  const int32_t live_rows = rows - rows / 4;
  array gu = make(type, rows, 2 * width, 2 * width + gap, live_rows, scale), dh = make(type, rows, width, width + gap, live_rows);
  array h = make_empty(type, rows, width, width + gap), dgu = make_empty(type, rows, 2 * width, 2 * width + gap);
  array live = make_ints({live_rows});
  const std::string shape = named("glu", rows, width, live_rows) + " scale " + std::to_string(scale);
  auto backward = [&](side &s, array &to) {
    const lm_glu_backward_args args = {sizeof args, type, s.at(to), s.at(dh), s.at(gu), s.ints(live), rows, width, 2 * width + gap,
                                       width + gap, 2 * width + gap, 0, NULL};
    return lm_glu_backward(s.ctx, &args, s.stream);
  };
  auto restore = [&](side &s) { /* h over dh, dgu over gu */
    const lm_glu_backward_args args = {sizeof args, type, s.at(gu), s.at(dh), s.at(gu), s.ints(live), rows, width, 2 * width + gap,
                                       width + gap, 2 * width + gap, width + gap, s.at(dh)};
    return lm_glu_backward(s.ctx, &args, s.stream);
  };
  auto forward = [&](side &s) {
    const lm_glu_forward_args args = {sizeof args, type,  s.at(h),     s.at(gu),       s.ints(live),
                                      rows,        width, width + gap, 2 * width + gap};
    return lm_glu_forward(s.ctx, &args, s.stream);
  };
  const bounds limit = close_bounds(type, type == LM_F32 ? 2e-6 * scale : 1e-5 * scale);
  run("glu_forward", forward);
  same(h, live_rows, limit, (shape + " forward").c_str());
  run("glu_backward", [&](side &s) { return backward(s, dgu); });
  same(dgu, live_rows, limit, (shape + " backward").c_str());
  repeats("glu", {&h, &dgu}, [&](side &s) { return forward(s) ? LM_ERR_INTERNAL : backward(s, dgu); });
  run("glu_backward in place", [&](side &s) { return backward(s, gu); });
  same(gu, live_rows, limit, (shape + " backward in place").c_str());
  const std::vector<uint8_t> without_h = download(gu, 1), forward_bits = download(h, 1);
  upload(gu);
  run("glu_backward with h", restore);
  CHECK(download(gu, 1) == without_h, "%s: h changes the bits of dgu", shape.c_str());
  CHECK(equal_rows(dh, download(dh, 1), h, forward_bits, live_rows), "%s: h has other bits than forward", shape.c_str());
}

static void test_rope(int32_t type, int32_t rows, int32_t heads, int32_t head_dim, int32_t rest, int32_t gap) {
  clear_arrays();
  const int32_t width = heads * head_dim + rest, pitch = width + gap, live_rows = rows - rows / 3, count = 50, half = head_dim / 2;
  std::vector<int32_t> place((size_t)rows);
  for (int32_t i = 0; i < rows; i++) place[(size_t)i] = i % 9 == 7 ? count : i % 9 == 8 ? -1 : (int32_t)(random_u32() % count);
  array x = make(type, rows, width, pitch, live_rows), y = make_empty(type, rows, width, pitch), positions = make_ints(place);
  array cosines = make_empty(LM_F32, count, half, half), sines = make_empty(LM_F32, count, half, half), live = make_ints({live_rows});
  for (int64_t i = 0; i < count * half; i++) {
    const double angle = (double)(i / half) * pow(10000, -2.0 * (double)(i % half) / head_dim);
    put_float(LM_F32, cosines.data(), i, (float)cos(angle)), put_float(LM_F32, sines.data(), i, (float)sin(angle));
  }
  upload(cosines), upload(sines);
  const std::string shape = named("rope", rows, width, live_rows) + " head size " + std::to_string(head_dim);
  auto rope = [&](side &s, array &to, array &from, int32_t direction) {
    const lm_rope_args args = {sizeof args, type, s.at(to), s.at(from), s.floats(cosines), s.floats(sines), s.ints(positions),
                               s.ints(live), rows, width, heads, head_dim, count, pitch, pitch, direction};
    return lm_rope(s.ctx, &args, s.stream);
  };
  run("rope", [&](side &s) { return rope(s, y, x, 1); });
  same(y, live_rows, close_bounds(type), shape.c_str());
  run("rope backward", [&](side &s) { return rope(s, y, x, -1); });
  same(y, live_rows, close_bounds(type), (shape + " backward").c_str());
  run("rope in place", [&](side &s) { return rope(s, x, x, 1); });
  same(x, live_rows, close_bounds(type), (shape + " in place").c_str());
}

/* Optimizer and losses ----------------------------------------------------------------------------------------------- */

static lm_step_metrics metrics_of(const array &a, int device) {
  lm_step_metrics metrics;
  memcpy(&metrics, download(a, device).data() + GUARD, sizeof metrics);
  return metrics;
}

static bool near(double a, double b, double relative) { return a == b || fabs(a - b) <= relative * fabs(b) || (isnan(a) && isnan(b)); }

static void test_grad_norm(int64_t n, int64_t offset, double max_norm, float poison, float scale = 0) {
  clear_arrays();
  const int64_t blocks = (n + 65535) / 65536;
  array g = make(LM_F32, 1, n, n, 1, 1, offset), partial = make_empty(LM_F64, 1, blocks, blocks);
  lm_optimizer_control control = {};
  control.learning_rate = 2, control.beta1 = 0.9, control.beta2 = 0.999, control.weight_decay = 0.1, control.max_norm = max_norm;
  control.warmup_steps = 9, control.total_steps = 20, control.schedule = (int32_t)(n % 3);
  lm_step_metrics start = {};
  start.loss_sum = 1.5;
  const lm_optimizer_state counts = {4, 2};
  const lm_scaler start_scaler = {scale, 1, 2, 0.5f, 2, 0, 0, 0};
  array settings = make_struct(control), metrics = make_struct(start), state = make_struct(counts), scaler = make_struct(start_scaler);
  if (poison != 0) put_float(LM_F32, g.data(), n / 2, poison), put_float(LM_F32, g.data(), n - 1, poison), upload(g);
  auto norm = [&](side &s) {
    const lm_grad_norm_args args = {sizeof args, LM_F32, static_cast<lm_step_metrics *>(s.at(metrics)), static_cast<double *>(s.at(partial)),
                                    static_cast<lm_optimizer_state *>(s.at(state)),
                                    scale ? static_cast<lm_scaler *>(s.at(scaler)) : nullptr, nullptr,
                                    s.floats(g), static_cast<lm_optimizer_control *>(s.at(settings)), n};
    return lm_grad_norm(s.ctx, &args, s.stream);
  };
  run("grad_norm", norm);
  const lm_step_metrics a = metrics_of(metrics, 0), b = metrics_of(metrics, 1);
  CHECK(near(b.grad_norm, a.grad_norm, 1e-6) && near(b.clip, a.clip, 1e-6) && b.loss_sum == 1.5,
        "grad_norm %lld: %.9g %.9g, wanted %.9g %.9g", (long long)n, b.grad_norm, b.clip, a.grad_norm, a.clip);
  CHECK(b.skipped == a.skipped && b.bad_element == a.bad_element && b.step == a.step && b.loss_scale == a.loss_scale,
        "grad_norm %lld: skipped %d, bad element %lld, step %lld, wanted %d, %lld, %lld", (long long)n, b.skipped,
        (long long)b.bad_element, (long long)b.step, a.skipped, (long long)a.bad_element, (long long)a.step);
  CHECK(near(b.learning_rate, a.learning_rate, 1e-14) && near(b.factor, a.factor, 1e-6) && near(b.decay, a.decay, 1e-6) &&
            near(b.rate, a.rate, 1e-6) && near(b.root, a.root, 1e-6),
        "grad_norm %lld: learning rate %.17g, wanted %.17g", (long long)n, b.learning_rate, a.learning_rate);
  CHECK(download(state, 1) == download(state, 0) && download(scaler, 1) == download(scaler, 0), "grad_norm %lld: state", (long long)n);
  const std::vector<uint8_t> gpu = download(partial, 1);
  CHECK(untouched(partial, gpu, 1) && untouched(g, download(g, 1), 0), "grad_norm %lld: wrote outside", (long long)n);
  repeats("grad_norm", {&metrics, &partial, &state, &scaler}, norm);
}

static void test_adamw(int64_t n, int64_t offset, int32_t copy_type, bool has_copy, bool skipped = false) {
  clear_arrays();
  array p = make(LM_F32, 1, n, n, 1, 1, offset), m = make(LM_F32, 1, n, n, 1, 0.1f, offset), v = make(LM_F32, 1, n, n, 1, 0.1f, offset);
  array g = make(LM_F32, 1, n, n, 1, 3, offset), copy = make_empty(copy_type, 1, n, n, offset);
  for (int64_t i = 0; i < n; i++) put_float(LM_F32, v.data(), i, i % 5 == 0 ? 0 : fabsf(float_of(LM_F32, v.data(), i)));
  upload(v);
  lm_optimizer_control control = {};
  control.beta1 = 0.9, control.beta2 = 0.999, control.eps = 1e-8;
  lm_step_metrics start = {};
  start.skipped = skipped, start.factor = 0.25f, start.decay = 0.999f;
  start.rate = 1e-2f / (1 - powf(0.9f, 3)), start.root = 1 / sqrtf(1 - powf(0.999f, 3));
  array settings = make_struct(control), metrics = make_struct(start);
  auto step = [&](side &s) {
    const lm_adamw_args args = {sizeof args, LM_F32, s.floats(p), s.floats(m), s.floats(v), s.floats(g), has_copy ? s.at(copy) : NULL,
                                static_cast<lm_optimizer_control *>(s.at(settings)), static_cast<lm_step_metrics *>(s.at(metrics)), n,
                                copy_type, 0};
    return lm_adamw(s.ctx, &args, s.stream);
  };
  run("adamw", step);
  const std::string what = "adamw " + std::to_string(n) + " offset " + std::to_string(offset);
  same(p, 1, close_bounds(LM_F32, 1e-7), (what + " p").c_str());
  same(m, 1, close_bounds(LM_F32, 1e-7), (what + " m").c_str());
  same(v, 1, close_bounds(LM_F32, 1e-7), (what + " v").c_str());
  same_bits(g, 1, (what + " g").c_str());
  same(copy, has_copy ? 1 : 0, close_bounds(copy_type, 1e-7), (what + " copy").c_str());
  repeats("adamw", {&p, &m, &v, &g, &copy}, step);
}

static void test_scaler(int64_t n, int64_t offset) {
  for (int turn = 0; turn < 2; turn++) { /* finite, then not */
    clear_arrays();
    array x = make(LM_F32, 1, n, n, 1, 1, offset), y = make_empty(LM_F32, 1, n, n, offset), found = make_empty(LM_F32, 1, 3, 3);
    for (int64_t i = 0; i < 3; i++) put_float(LM_F32, found.data(), i, 0);
    if (turn) put_float(LM_F32, x.data(), n - 1, INFINITY);
    upload(x), upload(found);
    array scaler = make_struct(lm_scaler{});
    run("scaler", [&](side &s) {
      lm_scaler *const at = static_cast<lm_scaler *>(s.at(scaler));
      const lm_scaler_set_args set = {sizeof set, 0, at, 24, 1, 2, 0.5f, 2, 0, 0, 0};
      const lm_scaler_scale_args scale = {sizeof scale, 0, s.floats(y), s.floats(x), at, n};
      const lm_scaler_unscale_args unscale = {sizeof unscale, 0, s.floats(x), s.floats(found) + 2, at, n};
      const lm_scaler_update_args update = {sizeof update, 0, at, s.floats(found), 3, 0};
      int32_t status = lm_scaler_set(s.ctx, &set, s.stream);
      if (!status) status = lm_scaler_scale(s.ctx, &scale, s.stream);
      if (!status) status = lm_scaler_unscale(s.ctx, &unscale, s.stream);
      return status ? status : lm_scaler_update(s.ctx, &update, s.stream);
    });
    const std::string what = "scaler " + std::to_string(n) + " offset " + std::to_string(offset);
    same_bits(y, 1, (what + " scale").c_str());
    same_bits(x, 1, (what + " unscale").c_str());
    same_bits(found, 1, (what + " found").c_str());
    lm_scaler got;
    memcpy(&got, download(scaler, 1).data() + GUARD, sizeof got);
    CHECK(got.scale == (turn ? 12 : 48) && got.growth_tracker == 0, "%s: %g", what.c_str(), got.scale);
  }
}

static void test_loss_sum(int32_t rows, int32_t labelled) {
  clear_arrays();
  const lm_batch_header header = {rows, 1, labelled, 1};
  lm_step_metrics start = {};
  start.loss_sum = 10, start.grad_norm = 2, start.clip = 3, start.root = 4;
  array loss = make(LM_F32, 1, rows, rows), batch = make_struct(header), metrics = make_struct(start);
  for (int32_t i = labelled < 0 ? 0 : labelled; i < rows; i++) put_float(LM_F32, loss.data(), i, NAN);
  upload(loss);
  auto sum = [&](side &s) {
    const lm_loss_sum_args args = {sizeof args, LM_F32, static_cast<lm_step_metrics *>(s.at(metrics)), s.floats(loss),
                                   static_cast<lm_batch_header *>(s.at(batch)), rows, 0};
    return lm_loss_sum(s.ctx, &args, s.stream);
  };
  run("loss_sum", sum);
  const lm_step_metrics a = metrics_of(metrics, 0), b = metrics_of(metrics, 1);
  CHECK(fabs(a.loss_sum - b.loss_sum) <= 1e-9 * (1 + rows) && b.grad_norm == 2 && b.clip == 3 && b.root == 4,
        "loss_sum %d of %d: %.17g, wanted %.17g", labelled, rows, b.loss_sum, a.loss_sum);
  repeats("loss_sum", {&metrics}, sum);
}

/* A recorded sequence, replayed, gives the bits of the eager one. ------------------------------------------------------ */

static void test_graph(int32_t type) {
  clear_arrays();
  const int32_t rows = 65, width = 896;
  array x = make(type, rows, width, width), w = make(type, 1, width, width), y = make_empty(type, rows, width, width);
  array h = make_empty(type, rows, width / 2, width / 2), live = make_ints({50});
  auto steps = [&](side &s) {
    const lm_rms_norm_forward_args norm = {sizeof norm, type,  s.at(y), s.at(x), s.at(w), s.ints(live), rows,
                                           width,       width, width,   type,    1e-5f};
    const lm_glu_forward_args glu = {sizeof glu, type, s.at(h), s.at(y), s.ints(live), rows, width / 2, width / 2, width};
    const lm_scale_args scale = {sizeof scale, type, s.at(x), s.at(x), (int64_t)rows * width, 0.5f, 0};
    const int32_t status = lm_rms_norm_forward(s.ctx, &norm, s.stream);
    if (status || lm_glu_forward(s.ctx, &glu, s.stream)) return (int32_t)LM_ERR_INTERNAL;
    return lm_scale(s.ctx, &scale, s.stream);
  };
  side &s = sides[1];
  std::vector<uint8_t> eager[3], replayed[3];
  array *const arrays[3] = {&x, &y, &h};
  for (int turn = 0; turn < 3; turn++) CHECK(steps(s) == LM_OK, "eager: %s", error_of(s.ctx).c_str());
  for (int i = 0; i < 3; i++) eager[i] = download(*arrays[i], 1);
  for (array *a : arrays) upload(*a);
  CHECK(lm_graph_begin(s.stream) == LM_OK && steps(s) == LM_OK, "recording: %s", error_of(s.ctx).c_str());
  lm_graph *graph = lm_graph_end(s.stream);
  CHECK(graph != NULL && lm_graph_nodes(graph) == 3, "lm_graph_end: %s", error_of(s.ctx).c_str());
  CHECK(download(x, 1) == x.host, "a recording does not run");
  for (int turn = 0; turn < 3; turn++) CHECK(lm_graph_launch(graph, s.stream) == LM_OK, "%s", error_of(s.ctx).c_str());
  for (int i = 0; i < 3; i++) replayed[i] = download(*arrays[i], 1);
  for (int i = 0; i < 3; i++) CHECK(eager[i] == replayed[i], "%s: replayed bits differ", type_names[type]);
  lm_graph_destroy(graph);
}

int main(void) {
  if (!open_sides()) return 0;
  for (int32_t type : all_types) {
    for (int64_t n : {1, 7, 8, 31, 1000, 4096, 65537, (1 << 20) + 3})
      for (int64_t offset : {0, 1}) test_elementwise(type, n, offset);
    for (int32_t to : all_types)
      for (int64_t n : {17, 5000, 8192}) test_cast(type, to, n, n == 5000), test_cast(type, to, n, 0);
    for (int32_t table_type : all_types)
      for (int64_t rows : row_counts)
        for (int32_t width : {1, 33, 64, 896}) test_lookup(type, table_type, (int32_t)rows, width, rows % 2 ? 8 : 3);
    for (int32_t width : {1, 2, 31, 100, 1024, 8200, 50257, 151936})
      for (int32_t rows : {1, 7}) test_argmax(type, rows, width, width % 8 ? 1 : 8);
    for (int32_t width : {1, 7, 8, 64, 100, 128, 896, 1536, 2048, 3584, 4096, 5120, 8192, 16384, 32768, 65544})
      for (int32_t w_type : all_types) test_rms_norm(type, w_type, width > 8192 ? 5 : 65, width, width % 3 ? 8 : 0, 2);
    for (int64_t rows : row_counts) test_rms_norm(type, type, (int32_t)rows, 896, rows % 2 ? 8 : 1, rows % 2 ? 1 : 0.05f);
    for (int64_t rows : row_counts)
      for (int32_t width : {1, 7, 8, 100, 4864}) test_glu(type, (int32_t)rows, width, rows % 2 ? 8 : 3, rows == 2 ? 40 : 2);
    test_glu(type, 129, 14336, 0, 1);
    for (int32_t head_dim : {2, 6, 32, 64, 80, 96, 128, 256})
      for (int64_t rows : row_counts) {
        test_rope(type, (int32_t)rows, rows % 2 ? 14 : 3, head_dim, rows % 2 ? 128 : 0, rows % 3 ? 8 : 1);
      }
    for (int64_t n : {1, 3, 4, 1023, 1000003})
      for (int64_t offset : {0, 1}) test_adamw(n, offset, type, n != 1023), test_adamw(n, offset, type, n != 1023, true);
    test_graph(type);
  }
  for (int64_t n : {1, 1023, 65536, 65537, 1000003, 11272192})
    for (int64_t offset : {0, 1}) test_grad_norm(n, offset, offset ? 0.5 : 0, 0);
  test_grad_norm(100000, 0, 1, NAN), test_grad_norm(100000, 0, 1, INFINITY), test_grad_norm(100, 0, 1e9, 0);
  test_grad_norm(100000, 0, 1, 0, 65536), test_grad_norm(100000, 0, 1, NAN, 65536), test_grad_norm(100000, 1, 1, 3e38f, 0x1p127f);
  test_grad_norm(100000, 0, 0, 3e38f, 1), test_grad_norm(300001, 0, 1, -INFINITY, 2);
  test_scaler(1, 0), test_scaler(100003, 0), test_scaler(4096, 1);
  for (int32_t labelled : {-3, 0, 1, 31, 1000, 8192, 9000}) test_loss_sum(8192, labelled);
  close_sides();
  return report();
}
