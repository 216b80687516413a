/* cuda_attention_test.cu: attention forward, backward and cached: the GPU against the CPU backend, with the tiles of this device
 * and with those that fit into the shared memory of consumer cards.
 *   cuda_attention_test [shape]   only this one; the number after the last is the cache, then all of windows and caps, neighbours */
#include "cuda_test.h"

struct shape {
  int32_t heads, kv_heads, head_dim;
  std::vector<int32_t> lengths; /* of the documents; 0 = empty */
  int32_t tail;                 /* rows that belong to none */
  int32_t gap, offset;          /* elements between rows, and from alignment */
  float shift;                  /* added to each scaled score */
  bool large;                   /* bf16 only, and often: many blocks wait for each other's turns */
  int32_t window = 0;
  float softcap = 0;
  int32_t period = 0; /* > 0: the shift is none, half and all of it in turn, for so many keys each: the maximum moves on the way */
};

/* So many documents that, times the heads, there are several blocks of queries for each multiprocessor: few of them are long. */
static std::vector<int32_t> many_lengths(void) {
  std::vector<int32_t> lengths;
  for (int i = 0; i < 100; i++) lengths.push_back(i % 40 == 5 ? 290 : i % 7);
  return lengths;
}

static const shape shapes[] = {
    {1, 1, 64, {1}, 0, 0, 0, 0, false},
    {2, 1, 64, {129, 0, 63, 1, 64, 0, 65, 127, 0}, 3, 8, 0, 0, false},
    {4, 1, 32, {1, 1, 1, 63, 129, 2, 0, 31, 32, 33}, 0, 16, 0, 0, false},
    {7, 1, 80, {65, 0, 127, 1}, 70, 0, 0, 0, false},
    {4, 2, 96, {64, 129, 15}, 1, 8, 0, 0, false},
    {8, 1, 128, {0, 0, 130, 63, 5}, 2, 0, 0, 0, false},
    {3, 3, 128, {257}, 0, 8, 0, 0, false},
    {4, 1, 128, {1, 63, 64, 65, 127, 128, 129, 0, 2, 300}, 70, 0, 0, 0, false},
    {4, 1, 64, {1, 63, 64, 65, 127, 128, 129, 0, 2, 300}, 70, 8, 0, 0, false},
    {3, 3, 64, {129, 255, 256, 257}, 3, 0, 0, 0, false},
    {2, 1, 256, {129, 1, 66}, 9, 0, 0, 0, false},
    {8, 2, 64, {300, 127, 20}, 0, 0, 0, 0, false},
    {4, 2, 64, {129, 65}, 0, 0, 0, -120, false},
    {2, 1, 128, {129, 65}, 4, 0, 0, -120, false},
    {2, 1, 96, {129, 65}, 4, 0, 0, 80, false},
    {2, 1, 64, {65, 64, 3}, 2, 1, 0, 0, false},  /* rows of no 16 bytes */
    {2, 2, 64, {127, 2}, 2, 0, 1, 0, false},     /* not aligned */
    {2, 1, 1, {63, 1, 5}, 0, 0, 0, 0, false},
    {6, 2, 33, {65, 2, 30}, 5, 1, 0, 0, false},
    {2, 1, 72, {129, 64}, 0, 0, 0, -120, false},
    {2, 1, 200, {70, 66}, 0, 8, 0, 0, false},
    {3, 1, 255, {35, 66}, 0, 0, 0, 0, false},
    {1, 1, 64, {0, 0}, 5, 0, 0, 0, false},       /* nothing at all */
    {8, 2, 64, {2048, 1000, 3, 1500}, 100, 0, 0, 0, true},
    {14, 2, 64, {700, 324, 1024}, 0, 0, 0, 0, true},
    {8, 2, 128, {1777, 2000}, 19, 0, 0, 0, true},
    {14, 2, 128, {700, 324, 1}, 0, 0, 0, 0, true},
    {8, 1, 64, {1777, 65}, 0, 0, 0, 0, true},
    {4, 2, 128, std::vector<int32_t>(100, 20), 5, 0, 0, 0, true},
    {4, 1, 96, {900, 1100}, 0, 0, 0, 0, true},
    {2, 1, 256, {1400}, 0, 0, 0, 0, true},
    {2, 1, 80, std::vector<int32_t>(100, 20), 0, 0, 0, 0, true}, /* more documents than a warp has lanes */
    {8, 2, 64, {2048, 1000, 3, 1500}, 100, 0, 0, 0, true, 300, 0},
    {8, 2, 128, {1777, 2000}, 19, 0, 0, 0, true, 1024, 0},
    {4, 1, 96, {900, 1100}, 0, 0, 0, 0, true, 129, 3},
    {2, 1, 256, {1400}, 0, 0, 0, 0, true, 512, 50},
    {4, 2, 64, {129, 65}, 0, 0, 0, -120, false, 65, 50},
    {2, 1, 128, {129, 65}, 4, 0, 0, 80, false, 0, 50},
    {2, 1, 72, {129, 64}, 0, 0, 0, -120, false, 70, 50},
    {2, 2, 64, {127, 2}, 2, 0, 1, 0, false, 7, 1}, /* not aligned */
    {14, 2, 64, many_lengths(), 20, 0, 0, 0, false},
    {8, 2, 128, many_lengths(), 20, 8, 0, 0, false},
    {8, 1, 128, many_lengths(), 0, 0, 0, 0, false, 70, 0},
    {4, 2, 64, {130, 5}, 400, 8, 0, 0, false}, /* blocks of rows that belong to none */
    {4, 1, 128, {3, 129}, 400, 0, 0, 0, false},
    {4, 2, 64, {400, 290}, 0, 0, 0, 9, false, 0, 0, 61},
    {4, 1, 128, {400, 290}, 3, 0, 0, 9, false, 0, 0, 61},
    {2, 1, 96, {290}, 0, 0, 0, 9, false, 0, 0, 61},
    {4, 2, 128, {400, 290}, 0, 0, 0, 9, false, 150, 0, 61},
};

static int turn; /* 0: the device's own tiles, 1: those of 99 KB */

/* Columns [first, first + count) of rows [0, live): the error of all as a norm, and the largest of one element, both against the
 * root mean square of all; that of gradients that cancel (a document of one row) counts as 0.05. */
static void compare(const array &a, int64_t first, int64_t count, int64_t live, double limit, const std::string &what) {
  const std::vector<uint8_t> cpu = download(a, 0), gpu = download(a, 1);
  const size_t start = GUARD + (size_t)a.offset * type_size(a.type);
  double distance = 0, norm = 0, worst = 0;
  int64_t at = -1;
  for (int64_t r = 0; r < live; r++)
    for (int64_t c = first; c < first + count; c++) {
      const double p = float_of(a.type, &cpu[start], r * a.pitch + c), q = float_of(a.type, &gpu[start], r * a.pitch + c), d = fabs(p - q);
      distance += d * d, norm += p * p;
      if (!(d <= worst)) worst = isnan(d) ? INFINITY : d, at = r * a.pitch + c;
    }
  const double elements = (double)count * (double)(live > 0 ? live : 1), mean = fmax(sqrt(norm / elements), 0.05);
  const double ratio = sqrt(distance / elements) / mean;
  CHECK(ratio <= limit, "%s: norm-wise %.2e, limit %.2e", what.c_str(), ratio, limit);
  CHECK(worst <= 40 * limit * mean, "%s: row %lld column %lld is %g, wanted %g, limit %.2e", what.c_str(), (long long)(at / a.pitch),
        (long long)(at % a.pitch), float_of(a.type, &gpu[start], at), float_of(a.type, &cpu[start], at), 40 * limit * mean);
}

static void inside(const array &a, int64_t live, const std::string &what) {
  CHECK(untouched(a, download(a, 1), live), "%s: wrote outside", what.c_str());
}

/* What the CPU computed becomes the input of both. */
static void share(array &a) {
  a.host = download(a, 0);
  upload(a);
}

/* Each head of q gets one large element that meets a constant of k. @return the constant */
static float shift_scores(const shape &s, array &qkv, int64_t live, float scale) {
  const int64_t Q = s.heads * s.head_dim;
  const float size = s.shift == 0 ? 0 : roundf(sqrtf(fabsf(s.shift) / scale));
  for (int64_t t = 0; t < live && size != 0; t++) {
    for (int64_t h = 0; h < s.heads; h++) put_float(qkv.type, qkv.data(), t * qkv.pitch + h * s.head_dim, copysignf(size, s.shift));
    const float part = s.period == 0 ? 1 : (float)(t / s.period % 3) / 2;
    for (int64_t h = 0; h < s.kv_heads; h++) put_float(qkv.type, qkv.data(), t * qkv.pitch + Q + h * s.head_dim, size * part);
  }
  upload(qkv);
  return size;
}

static void test_packed(const shape &s, int32_t type, const std::string &name_of_shape) {
  clear_arrays();
  std::vector<int32_t> offsets = {0};
  for (int32_t n : s.lengths) offsets.push_back(offsets.back() + n);
  const int32_t live = offsets.back(), rows = live + s.tail, documents = (int32_t)s.lengths.size();
  const int64_t D = s.head_dim, Q = s.heads * D, K = s.kv_heads * D, size = (int64_t)type_size(type);
  const float scale = 1 / sqrtf((float)D);
  const std::string what = name_of_shape + " " + type_names[type] + (turn ? ", small tiles" : "") + ": ";
  array qkv = make(type, rows, Q + 2 * K, Q + 2 * K + s.gap, live, 1, s.offset), cu = make_ints(offsets);
  array go = make(type, rows, Q, Q + s.gap, live, 1, s.offset);
  const float constant = shift_scores(s, qkv, live, scale);
  array o = make_empty(type, rows, Q, Q + s.gap, s.offset), lse = make_empty(LM_F32, s.heads, rows, rows);
  const auto part = [&](const side &d, const array &a, int64_t column) { return (uint8_t *)d.at(a) + column * size; };

  const auto forward = [&](side &d) {
    const lm_attention_forward_args args = {
        sizeof args, type, d.at(o), d.floats(lse), part(d, qkv, 0), part(d, qkv, Q), part(d, qkv, Q + K), d.ints(cu), rows, documents,
        s.heads, s.kv_heads, s.head_dim, (int32_t)qkv.pitch, (int32_t)o.pitch, scale, s.window, s.softcap};
    return lm_attention_forward(d.ctx, &args, d.stream);
  };
  if (!run((what + "forward").c_str(), forward)) return;
  /* Weights and results are rounded to the type; large scores lose what their size costs in fp32. */
  const double rounding = type == LM_BF16 ? 8e-3 : type == LM_F16 ? 1e-3 : 4e-6, scores = 2e-7 * fabs(s.shift);
  compare(o, 0, Q, live, rounding + 4 * scores, what + "o");
  inside(o, live, what + "o");
  const std::vector<uint8_t> cpu = download(lse, 0), gpu = download(lse, 1);
  double worst = 0;
  bool outside = true;
  for (int64_t h = 0; h < s.heads; h++)
    for (int64_t t = 0; t < rows; t++) {
      const double error = fabs((double)float_of(LM_F32, &cpu[GUARD], h * rows + t) - float_of(LM_F32, &gpu[GUARD], h * rows + t));
      if (t >= live) outside = outside && memcmp(&gpu[GUARD + (size_t)(h * rows + t) * 4], &lse.host[GUARD + (size_t)(h * rows + t) * 4], 4) == 0;
      else if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
    }
  CHECK(worst <= 2e-5 + 8 * scores, "%slse differs by %g", what.c_str(), worst);
  CHECK(outside, "%slse: wrote past the documents", what.c_str());
  repeats((what + "forward").c_str(), {&o, &lse}, forward);

  share(o), share(lse);
  array dqkv = make_empty(type, rows, Q + 2 * K, Q + 2 * K + 2 * s.gap, s.offset), delta = make_empty(LM_F32, s.heads, rows, rows);
  const int64_t turns = (int64_t)(s.heads + s.kv_heads) * (rows / 16 + documents) + 4;
  const int64_t sums_of_dq = 4 * (rows * D * s.heads + turns), bytes = sums_of_dq + 4 * rows * D * 2 * s.kv_heads;
  array workspace = make_empty(LM_F32, 1, bytes / 4, bytes / 4);
  static const char *const modes[] = {"ordered", "ordered dq alone", "too small a workspace", "without workspace"};
  const int64_t room[] = {bytes, sums_of_dq, rows * D * 4, 0};
  for (int mode = 0; mode < 4; mode++) {
    const std::string name = what + modes[mode] + ", ";
    const auto backward = [&](side &d) {
      const lm_attention_backward_args args = {
          sizeof args, type, part(d, dqkv, 0), part(d, dqkv, Q), part(d, dqkv, Q + K), d.floats(delta), d.at(go), d.at(o), d.floats(lse),
          part(d, qkv, 0), part(d, qkv, Q), part(d, qkv, Q + K), d.ints(cu), rows, documents, s.heads, s.kv_heads, s.head_dim,
          (int32_t)qkv.pitch, (int32_t)dqkv.pitch, (int32_t)o.pitch, scale, s.window, s.softcap, 0,
          room[mode] == 0 ? nullptr : d.at(workspace), room[mode]};
      return lm_attention_backward(d.ctx, &args, d.stream);
    };
    upload(dqkv);
    if (!run((name + "backward").c_str(), backward)) continue;
    /* The gradients of the scores of a row sum to 0; times a constant of k, their rounding is what is left of dq. */
    const double limit = (1.5 * rounding + 20 * scores) * (s.window == 1 ? 10 : 1); /* one key: nothing but that rounding */
    compare(dqkv, 0, Q, live, limit * (1 + constant / sqrt((double)D)), name + "dq");
    compare(dqkv, Q, K, live, limit, name + "dk");
    compare(dqkv, Q + K, K, live, limit, name + "dv");
    inside(dqkv, live, name + "dqkv");
    inside(workspace, 1, name + "workspace");
    for (int again = 0; again < (s.large && mode < 2 ? 5 : 1); again++)
      repeats((name + "backward").c_str(), {&dqkv}, backward);
  }
}

/* Every head size, window and cap, with the lengths around the sizes of tiles; the types take turns. A window that is one key
 * too long or too short fails, and so does a gradient without the slope of the cap. */
static void test_windows_and_caps(void) {
  static const int32_t groups[4][2] = {{4, 2}, {2, 1}, {3, 3}, {7, 1}};
  static const int32_t head_dims[8] = {32, 64, 80, 96, 128, 256, 33, 200};
  static const int32_t windows[6] = {1, 7, 64, 65, 200, 0};
  for (int w = 0; w < 6; w++)
    for (int capped = 0; capped < 2; capped++)
      for (int d = 0; d < 8; d++) {
        if (windows[w] == 0 && !capped) continue; /* the shapes above */
        const int32_t *const heads = groups[(w + d) % 4];
        shape s = {heads[0], heads[1], head_dims[d], {1, 63, 64, 0, 65, 127, 129, 290}, d % 3, d % 2 * 8, 0, 0, false};
        s.window = windows[w], s.softcap = capped ? (d % 2 ? 2.0f : 0.5f) : 0;
        const std::string name = "heads " + std::to_string(heads[0]) + "/" + std::to_string(heads[1]) + " x " +
                                 std::to_string(s.head_dim) + ", window " + std::to_string(s.window) + ", cap " +
                                 std::to_string(s.softcap);
        test_packed(s, all_types[(d + 2 * w + capped) % 3], name);
      }
}

/* What other documents hold changes no bit: the second and the last one become NaN and infinite. */
static void test_neighbours(int32_t head_dim, int32_t type, int32_t window) {
  clear_arrays();
  const int32_t heads = 4, kv_heads = 2, offsets[] = {0, 130, 207, 407, 467}, rows = offsets[4];
  const int64_t D = head_dim, Q = heads * D, K = kv_heads * D, size = (int64_t)type_size(type);
  const std::string what = "neighbours x " + std::to_string(head_dim) + ", window " + std::to_string(window) + " " + type_names[type] +
                           (turn ? ", small tiles" : "");
  array qkv = make(type, rows, Q + 2 * K, Q + 2 * K), cu = make_ints({offsets, offsets + 5});
  array o = make_empty(type, rows, Q, Q), lse = make_empty(LM_F32, heads, rows, rows);
  const auto call = [&](side &d) {
    uint8_t *const from = (uint8_t *)d.at(qkv);
    const lm_attention_forward_args args = {
        sizeof args, type, d.at(o), d.floats(lse), from, from + Q * size, from + (Q + K) * size, d.ints(cu), rows, 4, heads, kv_heads,
        head_dim, (int32_t)qkv.pitch, (int32_t)o.pitch, 1 / sqrtf((float)D), window, 0};
    return lm_attention_forward(d.ctx, &args, d.stream);
  };
  std::vector<uint8_t> seen[2][2][2]; /* [whole or broken][device][o, lse] */
  for (int broken = 0; broken < 2; broken++) {
    for (int document = 1; broken && document < 4; document += 2)
      for (int64_t i = offsets[document] * qkv.pitch; i < offsets[document + 1] * qkv.pitch; i++)
        put_float(type, qkv.data(), i, i % 3 ? NAN : INFINITY);
    upload(qkv);
    if (!run(what.c_str(), call)) return;
    for (int device = 0; device < 2; device++)
      seen[broken][device][0] = download(o, device), seen[broken][device][1] = download(lse, device);
  }
  for (int device = 0; device < 2; device++)
    for (int document = 0; document < 4; document += 2) {
      const int32_t first = offsets[document], count = offsets[document + 1] - first;
      const auto same_part = [&](int array, int64_t at, int64_t bytes) {
        return memcmp(&seen[0][device][array][GUARD + at], &seen[1][device][array][GUARD + at], (size_t)bytes) == 0;
      };
      bool same = same_part(0, first * Q * size, count * Q * size);
      for (int h = 0; h < heads; h++) same = same && same_part(1, (h * rows + first) * 4, count * 4);
      CHECK(same, "%s on %s: document %d is not what it was", what.c_str(), sides[device].name, document);
    }
}

/* A cache of `past` rows takes the live ones of `rows` more. Blocks of 64 keys before the window of all are NaN: nobody reads. */
static void test_cached(int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t capacity, int32_t past, int32_t rows, int32_t live,
                        int32_t gap, float shift, int32_t type, int32_t window = 0, float softcap = 0) {
  clear_arrays();
  const shape s = {heads, kv_heads, head_dim, {}, 0, gap, 0, shift, false, window, softcap};
  const int64_t D = head_dim, Q = heads * D, K = kv_heads * D, size = (int64_t)type_size(type);
  const float scale = 1 / sqrtf((float)D);
  const std::string what = "cached " + std::to_string(heads) + "/" + std::to_string(kv_heads) + " x " + std::to_string(head_dim) + ", past " +
                           std::to_string(past) + ", live " + std::to_string(live) + " of " + std::to_string(rows) + ", window " +
                           std::to_string(window) + ", cap " + std::to_string(softcap) + " " +
                           type_names[type] + (turn ? ", small tiles" : "") + ": ";
  array qkv = make(type, rows, Q + 2 * K, Q + 2 * K + gap, live), o = make_empty(type, rows, Q, Q + gap);
  array k = make(type, capacity, K, K, past), v = make(type, capacity, K, K, past);
  const float constant = shift_scores(s, qkv, live, scale);
  for (int64_t t = 0; t < past && constant != 0; t++)
    for (int64_t h = 0; h < kv_heads; h++) put_float(type, k.data(), t * K + h * D, constant);
  const int64_t unread = window > 0 && past >= window ? (past + 1 - window) / 64 * 64 : 0;
  for (int64_t i = 0; i < unread * K; i++) put_float(type, k.data(), i, NAN), put_float(type, v.data(), i, NAN);
  upload(k), upload(v);
  array past_rows = make_ints({past}), live_rows = make_ints({live});
  const auto call = [&](side &d) {
    uint8_t *const from = (uint8_t *)d.at(qkv);
    const lm_attention_cached_forward_args args = {
        sizeof args, type, d.at(o), d.at(k), d.at(v), from, from + Q * size, from + (Q + K) * size, d.ints(past_rows), d.ints(live_rows),
        rows, capacity, heads, kv_heads, head_dim, (int32_t)qkv.pitch, (int32_t)o.pitch, scale, window, softcap};
    return lm_attention_cached_forward(d.ctx, &args, d.stream);
  };
  if (!run((what + "forward").c_str(), call)) return;
  const int64_t kept = live < capacity - past ? live : capacity - past;
  compare(o, 0, Q, kept, (type == LM_BF16 ? 8e-3 : type == LM_F16 ? 1e-3 : 4e-6) + 8e-7 * fabs(shift), what + "o");
  inside(o, kept, what + "o");
  for (const array *cache : {&k, &v}) CHECK(download(*cache, 0) == download(*cache, 1), "%sthe cache differs", what.c_str());
  repeats(what.c_str(), {&o, &k, &v}, call);
}

static void test_cached_windows(int32_t type) {
  for (int32_t head_dim : {8, 33, 64, 96, 128, 256})
    for (int32_t window : {1, 7, 64, 65, 200, 600})
      for (int32_t past : {0, 63, 64, 257, 700}) {
        const float softcap = past % 2 ? 2.0f : 0;
        test_cached(4, 2, head_dim, 900, past, 1, 1, 0, 0, type, window, softcap);
        if (past != 64) test_cached(7, 1, head_dim, 900, past, 150, 129, 8, 0, type, window, softcap);
      }
  test_cached(8, 2, 128, 2200, 2111, 1, 1, 0, -120, type, 1024, 50);
  test_cached(4, 2, 64, 720, 700, 1, 1, 0, 0, type, 0, 1);
}

static void test_cached_all(int32_t type) {
  test_cached(4, 2, 64, 40, 0, 33, 30, 0, 0, type);
  test_cached(7, 1, 64, 200, 5, 150, 129, 0, 0, type);
  test_cached(2, 1, 128, 260, 100, 128, 127, 8, -120, type);
  test_cached(2, 2, 256, 140, 66, 65, 65, 0, 0, type);
  test_cached(4, 1, 80, 300, 129, 2, 2, 0, 0, type);
  test_cached(3, 1, 33, 70, 20, 40, 33, 1, 0, type);
  test_cached(4, 4, 96, 65, 60, 9, 9, 0, 0, type);   /* more than fits */
  test_cached(4, 2, 64, 64, 64, 3, 3, 0, 0, type);   /* full */
  test_cached(4, 2, 64, 64, 10, 3, 0, 0, 0, type);   /* no live row */
  test_cached(4, 2, 64, 500, 37, 300, 5, 0, 0, type); /* blocks without a live row */
  test_cached(4, 2, 128, 500, 37, 300, 133, 0, 0, type);
  test_cached(72, 8, 64, 600, 133, 400, 385, 0, 0, type);
  test_cached(36, 4, 128, 600, 133, 400, 385, 0, 0, type);
  for (int32_t head_dim : {8, 32, 64, 80, 96, 128, 200, 256})
    for (int32_t past : {0, 1, 31, 32, 255, 700}) test_cached(4, 2, head_dim, 720, past, 1, 1, 0, 0, type);
  for (int32_t group : {1, 2, 4, 7, 8, 9, 20}) test_cached(2 * group, 2, 64, 600, 500, 1, 1, 8, 0, type);
  test_cached(8, 2, 128, 2200, 2111, 1, 1, 0, -120, type);
  test_cached(3, 1, 33, 300, 257, 1, 1, 0, 0, type); /* no 16-byte words */
  test_cached(4, 2, 64, 64, 64, 1, 1, 0, 0, type);   /* full */
  test_cached(4, 2, 64, 64, 63, 1, 1, 0, 0, type);
  test_cached(4, 2, 64, 64, 10, 1, 0, 0, 0, type);   /* no live row */
}

int main(int count, char **arguments) {
  const int only = count > 1 ? atoi(arguments[1]) : -1;
  for (turn = 0; turn < 2; turn++) {
    if (turn == 1) setenv("LORAMEM_CUDA_SHARED", "101376", 1);
    if (!open_sides()) return 0;
    for (const shape &s : shapes)
      for (const int32_t type : all_types)
        if ((only < 0 || only == &s - shapes) && (!s.large || type == LM_BF16))
          test_packed(s, type, "shape " + std::to_string(&s - shapes));
    const int count_of_shapes = (int)(sizeof shapes / sizeof *shapes);
    for (const int32_t type : all_types)
      if (only < 0 || only == count_of_shapes) test_cached_all(type);
    if (only < 0 || only == count_of_shapes + 1) {
      test_windows_and_caps();
      for (const int32_t type : all_types) test_cached_windows(type);
    }
    for (const int32_t type : all_types)
      for (const int32_t head_dim : {64, 96, 128})
        for (const int32_t window : {0, 70})
          if (only < 0 || only == count_of_shapes + 2) test_neighbours(head_dim, type, window);
    close_sides();
  }
  return report();
}
