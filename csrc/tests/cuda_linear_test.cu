/* cuda_linear_test.cu: lora_down, lora_linear forward and backward: the GPU against the CPU backend, first with the own matrix
 * products alone, then with cuBLASLt where the machine has it. */
#include "cuda_test.h"

struct shape {
  int32_t rows, live, in, out[3], rank[3];
  float scale[3];
  int32_t gap;     /* pitch beyond the width */
  int32_t offset;  /* elements off alignment */
  int32_t options; /* 1 bias, 2 residual, 4 y is the residual, 8 no dx */
};

static const shape shapes[] = {
    /* small and odd: guarded loads, few rows, parts without adapters */
    {1, 1, 1, {1, 0, 0}, {0, 0, 0}, {0, 0, 0}, 0, 0, 0},
    {1, 1, 70, {33, 0, 0}, {5, 0, 0}, {2, 0, 0}, 3, 1, 3},
    {1, 1, 896, {896, 128, 128}, {16, 16, 16}, {2, 2, 2}, 0, 0, 1},
    {3, 2, 129, {16, 7, 40}, {4, 0, 20}, {2, 0, 0.5f}, 1, 0, 5},
    {8, 5, 64, {65, 1, 31}, {0, 16, 1}, {1, 2, 3}, 2, 3, 2},
    {9, 9, 31, {32, 32, 0}, {16, 16, 0}, {2, 2, 0}, 0, 0, 0},
    {63, 63, 48, {48, 24, 24}, {16, 16, 16}, {2, 2, 2}, 0, 0, 1},
    {64, 40, 17, {100, 0, 0}, {0, 0, 0}, {0, 0, 0}, 5, 0, 3},
    {65, 65, 330, {5, 64, 3}, {3, 8, 20}, {1, 0.25f, 2}, 1, 0, 2},
    {127, 100, 96, {64, 64, 0}, {8, 0, 0}, {2, 0, 0}, 0, 0, 4},
    {129, 129, 700, {40, 0, 0}, {16, 0, 0}, {2, 0, 0}, 4, 2, 3},
    {300, 257, 64, {96, 32, 33}, {17, 9, 2}, {2, 2, 1}, 0, 0, 7},
    {260, 259, 33, {20, 0, 0}, {40, 0, 0}, {2, 0, 0}, 1, 0, 8},
    /* whole 16-byte words: every tile, both operands of the loop, split contractions */
    {65, 64, 64, {128, 0, 0}, {8, 0, 0}, {2, 0, 0}, 0, 0, 2},
    {127, 1, 896, {896, 128, 128}, {16, 16, 16}, {2, 2, 2}, 8, 0, 1},
    {129, 127, 128, {256, 256, 0}, {16, 16, 0}, {2, 2, 0}, 0, 0, 0},
    {192, 0, 64, {192, 0, 0}, {16, 0, 0}, {1, 0, 0}, 0, 0, 0},
    {512, 500, 896, {896, 128, 128}, {16, 16, 16}, {2, 2, 2}, 0, 0, 1},
    {513, 449, 896, {4864, 4864, 0}, {16, 16, 0}, {2, 2, 0}, 0, 0, 0},
    {640, 640, 4864, {896, 0, 0}, {16, 0, 0}, {2, 0, 0}, 0, 0, 4},
    {1024, 1000, 520, {264, 8, 1000}, {64, 8, 24}, {0.5f, 1, 2}, 16, 8, 3},
    {2048, 2047, 256, {512, 0, 0}, {128, 0, 0}, {1, 0, 0}, 0, 0, 2},
    {384, 384, 512, {640, 0, 0}, {0, 0, 0}, {0, 0, 0}, 0, 0, 3},
    {4100, 4099, 512, {136, 0, 0}, {16, 0, 0}, {2, 0, 0}, 0, 0, 8},
    /* adapters in clusters of 1 to 8 blocks: ends of rows, columns and ranks inside a tile, dead blocks. Adding up only the first
     * block's sums fails wherever a cluster has two. */
    {4096, 4095, 1024, {1024, 256, 256}, {16, 16, 16}, {2, 2, 2}, 0, 0, 0},
    {1000, 900, 264, {528, 136, 8}, {32, 24, 64}, {1, 2, 0.5f}, 0, 0, 0},
    {1536, 1536, 4104, {256, 0, 0}, {32, 0, 0}, {2, 0, 0}, 0, 0, 0},
    {200, 190, 16400, {64, 0, 0}, {24, 0, 0}, {2, 0, 0}, 0, 0, 0},
    {2000, 64, 2048, {384, 8, 0}, {8, 24, 0}, {1, 2, 0}, 8, 0, 0},
    {700, 699, 520, {520, 512, 512}, {32, 32, 32}, {2, 2, 2}, 0, 0, 0},
    {640, 600, 256, {1032, 264, 264}, {64, 64, 64}, {2, 1, 2}, 0, 0, 0},
    {640, 640, 776, {264, 264, 264}, {24, 24, 24}, {2, 2, 2}, 0, 0, 0},
    {9, 9, 24, {8, 0, 0}, {8, 0, 0}, {2, 0, 0}, 0, 0, 0},
    {9000, 8999, 64, {2048, 0, 0}, {64, 0, 0}, {1, 0, 0}, 0, 0, 8}, /* more sums than the workspace holds */
};

static bool library; /* cuBLASLt may serve */

static int32_t total(const int32_t v[3]) { return v[0] + v[1] + v[2]; }

/* What a product may differ by: the rounding of the result, that of ds and of a LoRA term that makes a way of its own through
 * memory, and the order of fp32 sums. */
static bounds limits(int32_t type, double size) {
  if (type == LM_F32) return {4e-6, 1e-4, 1e-5 * size};
  return {type_ulp(type) / 2, type_ulp(type) * 4, type_ulp(type) * 4 * size};
}

/* Rows past the live ones: the own kernels leave them alone, the library does not. */
static void compare(array a, int64_t live, const bounds &limit, const std::string &what) {
  if (library && a.rows > live) {
    if (live == 0) return;
    a.rows = live;
    a.host.resize(GUARD + (size_t)(a.offset + (live - 1) * a.pitch + a.width) * type_size(a.type));
  }
  same(a, live, limit, what.c_str());
}

static std::string name_of(const char *op, const shape *h, int32_t type, int32_t w_type) {
  return std::string(op) + " shape " + std::to_string(h - shapes) + " (" + std::to_string(h->rows) + " rows, " +
         std::to_string(h->in) + " in, " + std::to_string(total(h->out)) + " out, " + std::to_string(total(h->rank)) + " ranks) " +
         type_names[type] + " over " + type_names[w_type] + (library ? ", library" : "");
}

static void test_down(const shape *h, int32_t type, int32_t a_type) {
  const int32_t ranks = total(h->rank);
  if (ranks == 0) return;
  clear_arrays();
  array x = make(type, h->rows, h->in, h->in + h->gap, h->live, 1, h->offset);
  array a = make(a_type, ranks, h->in, h->in, ranks, 1 / sqrtf((float)h->in)), live = make_ints({h->live});
  array s = make_empty(type, h->rows, ranks, ranks + h->gap);
  const auto call = [&](side &d) {
    const lm_lora_down_args args = {sizeof args, type, d.at(s), d.at(x), d.at(a), d.ints(live), h->rows, h->in, (int32_t)s.pitch,
                                    (int32_t)x.pitch, a_type, h->rank[0], h->rank[1], h->rank[2], h->scale[0], h->scale[1],
                                    h->scale[2], 0};
    return lm_lora_down(d.ctx, &args, d.stream);
  };
  const std::string what = name_of("lora_down", h, type, a_type);
  if (!run(what.c_str(), call)) return;
  compare(s, h->live, limits(type, 1), what);
  repeats(what.c_str(), {&s}, call);
}

struct adapters {
  array s, a, b[3];
};

static adapters make_adapters(const shape *h, int32_t type, int32_t a_type) {
  const int32_t ranks = total(h->rank);
  adapters l = {};
  if (ranks > 0) {
    l.s = make(type, h->rows, ranks, ranks + h->gap, h->live);
    l.a = make(a_type, ranks, h->in, h->in, ranks, 0.3f);
  }
  for (int i = 0; i < 3; i++)
    if (h->rank[i] > 0) l.b[i] = make(a_type, h->out[i], h->rank[i], h->rank[i], h->out[i], 0.3f);
  return l;
}

static void *or_null(side &d, const array &a) { return a.rows > 0 ? d.at(a) : nullptr; }

static void test_forward(const shape *h, int32_t type, int32_t w_type) {
  clear_arrays();
  const int32_t out = total(h->out), bias_type = h->in % 2 ? (type + 1) % 3 : type;
  const bool in_place = (h->options & 4) != 0;
  array x = make(type, h->rows, h->in, h->in + h->gap, h->live, 1, h->offset);
  array w = make(w_type, out, h->in, h->in + h->gap, out, 1 / sqrtf((float)h->in), h->offset);
  array bias = make(bias_type, 1, out, out), residual = make(type, h->rows, out, out + h->gap, h->live, 1, h->offset);
  array live = make_ints({h->live});
  adapters l = make_adapters(h, type, w_type);
  array y = in_place ? residual : make_empty(type, h->rows, out, out + h->gap, h->offset);
  const auto call = [&](side &d) {
    const lm_lora_linear_forward_args args = {
        sizeof args, type, d.at(y), d.at(x), d.at(w), h->options & 1 ? d.at(bias) : nullptr,
        h->options & 6 ? d.at(residual) : nullptr, or_null(d, l.s), or_null(d, l.b[0]), or_null(d, l.b[1]), or_null(d, l.b[2]),
        d.ints(live), h->rows, h->in, out, (int32_t)y.pitch, (int32_t)x.pitch, (int32_t)w.pitch, (int32_t)residual.pitch,
        (int32_t)l.s.pitch, w_type, bias_type, w_type, h->out[0], h->out[1], h->out[2], h->rank[0], h->rank[1], h->rank[2], 0};
    return lm_lora_linear_forward(d.ctx, &args, d.stream);
  };
  const std::string what = name_of("lora_linear_forward", h, type, w_type);
  if (!run(what.c_str(), call)) return;
  compare(y, h->live, limits(type, 1 + 0.3 * sqrt((double)h->rank[0])), what);
  repeats(what.c_str(), {&y}, call);

  /* The same rows under a smaller live keep their bits. */
  if (h->live < 2) return;
  const int32_t fewer = h->live / 2;
  transfer(sides[1], y.place, y.host.data(), y.host.size(), true);
  if (call(sides[1])) return;
  const std::vector<uint8_t> whole = download(y, 1);
  array small = make_ints({fewer});
  live.place = small.place;
  transfer(sides[1], y.place, y.host.data(), y.host.size(), true);
  if (call(sides[1])) return;
  const std::vector<uint8_t> part = download(y, 1);
  bool equal = true;
  for (int64_t r = 0; r < fewer; r++) {
    const size_t at = GUARD + (size_t)(y.offset + r * y.pitch) * type_size(type);
    equal = equal && memcmp(&whole[at], &part[at], (size_t)y.width * type_size(type)) == 0;
  }
  CHECK(equal, "%s: other bits under a smaller live", what.c_str());
  CHECK(library || untouched(y, part, fewer), "%s: wrote past a smaller live", what.c_str());
}

static void test_backward(const shape *h, int32_t type, int32_t w_type) {
  clear_arrays();
  const int32_t out = total(h->out), ranks = total(h->rank);
  const bool with_dx = !(h->options & 8);
  array x = make(type, h->rows, h->in, h->in + h->gap, h->live, 1, h->offset);
  array dy = make(type, h->rows, out, out + h->gap, h->live, 1, h->offset);
  array w = make(w_type, out, h->in, h->in + h->gap, out, 1 / sqrtf((float)out), h->offset), live = make_ints({h->live});
  adapters l = make_adapters(h, type, w_type);
  array dx = make_empty(type, h->rows, h->in, h->in + h->gap, h->offset), da = {}, db[3] = {}, ds = {};
  if (ranks > 0) {
    da = make(LM_F32, ranks, h->in, h->in);
    ds = make_empty(LM_F32, h->rows, ranks, ranks);
  }
  for (int i = 0; i < 3; i++)
    if (h->rank[i] > 0) db[i] = make(LM_F32, h->out[i], h->rank[i], h->rank[i]);
  bool apart = false;
  const auto call = [&](side &d) {
    lm_lora_linear_backward_args args = {
        sizeof args, type, with_dx ? d.at(dx) : nullptr, (float *)or_null(d, da), (float *)or_null(d, db[0]),
        (float *)or_null(d, db[1]), (float *)or_null(d, db[2]), (float *)or_null(d, ds), d.at(dy), ranks ? d.at(x) : nullptr,
        or_null(d, l.s), d.at(w), or_null(d, l.a), or_null(d, l.b[0]), or_null(d, l.b[1]), or_null(d, l.b[2]), d.ints(live),
        h->rows, h->in, out, (int32_t)dx.pitch, (int32_t)dy.pitch, (int32_t)x.pitch, (int32_t)l.s.pitch, (int32_t)w.pitch, w_type,
        w_type, h->out[0], h->out[1], h->out[2], h->rank[0], h->rank[1], h->rank[2], h->scale[0], h->scale[1], h->scale[2], 0};
    if (!apart) return lm_lora_linear_backward(d.ctx, &args, d.stream);
    args.x = nullptr, args.da = nullptr;
    const int32_t status = lm_lora_linear_backward(d.ctx, &args, d.stream);
    const lm_lora_down_backward_args down = {sizeof down, type, (float *)d.at(da), (float *)d.at(ds), d.at(x), d.ints(live), h->rows,
                                             h->in, (int32_t)x.pitch, w_type, h->rank[0], h->rank[1], h->rank[2], 0};
    return status ? status : lm_lora_down_backward(d.ctx, &down, d.stream);
  };
  const std::string what = name_of("lora_linear_backward", h, type, w_type);
  if (!run(what.c_str(), call)) return;
  /* ds has the size of sqrt(out) * 0.3 * scale, and the sums over tokens grow with sqrt(live). */
  const double ds_size = 0.3 * sqrt((double)out) * 2, sum_size = sqrt((double)h->live + 1);
  compare(dx, with_dx ? h->live : 0, limits(type, 1 + ds_size * 0.3 * sqrt((double)ranks)), what + " dx");
  const auto sums = [&](const array &a, double size, const char *name) {
    if (a.rows == 0) return;
    bounds limit = limits(type, size);
    if (type == LM_F32) limit.norm = 1e-5;
    same(a, a.rows, limit, (what + name).c_str());
  };
  sums(da, ds_size * sum_size, " da");
  for (int i = 0; i < 3; i++) sums(db[i], sum_size, " db");
  std::vector<array *> written;
  if (with_dx) written.push_back(&dx);
  if (ranks > 0) written.push_back(&da);
  for (array &b : db)
    if (b.rows > 0) written.push_back(&b);
  repeats(what.c_str(), written, call);

  /* The part that reads x in a call of its own. */
  if (ranks > 0) {
    std::vector<std::vector<uint8_t>> whole;
    for (array *a : written) {
      whole.push_back(download(*a, 1));
      transfer(sides[1], a->place, a->host.data(), a->host.size(), true);
    }
    apart = true;
    CHECK(call(sides[1]) == LM_OK && lm_stream_wait(sides[1].stream) == LM_OK, "%s in two calls: %s", what.c_str(),
          error_of(sides[1].ctx).c_str());
    apart = false;
    for (size_t i = 0; i < written.size(); i++)
      CHECK(whole[i] == download(*written[i], 1), "%s: two calls gave other bits", what.c_str());
  }

  /* Replayed from a graph: the same bits as launched one by one. */
  side &gpu = sides[1];
  std::vector<std::vector<uint8_t>> eager;
  for (array *a : written) {
    eager.push_back(download(*a, 1));
    transfer(gpu, a->place, a->host.data(), a->host.size(), true);
  }
  int32_t status = lm_graph_begin(gpu.stream);
  if (!status) status = call(gpu);
  lm_graph *graph = lm_graph_end(gpu.stream);
  CHECK(!status && graph, "%s: recording: %s", what.c_str(), error_of(gpu.ctx).c_str());
  if (!graph) return;
  status = lm_graph_launch(graph, gpu.stream);
  if (!status) status = lm_stream_wait(gpu.stream);
  CHECK(status == LM_OK, "%s: replay: %s", what.c_str(), error_of(gpu.ctx).c_str());
  for (size_t i = 0; i < written.size(); i++) CHECK(eager[i] == download(*written[i], 1), "%s: a graph gave other bits", what.c_str());
  lm_graph_destroy(graph);
}

static void test_all(void) {
  const int32_t count = sizeof shapes / sizeof *shapes;
  for (int32_t i = 0; i < count; i++)
    for (const int32_t type : all_types) {
      const bool small = shapes[i].rows <= 300;
      for (const int32_t w_type : all_types) {
        if (w_type != type && (!small || (i + type + w_type) % 2)) continue;
        test_down(&shapes[i], type, w_type);
        test_forward(&shapes[i], type, w_type);
        test_backward(&shapes[i], type, w_type);
      }
    }
}

int main(void) {
  for (int turn = 0; turn < 2; turn++) {
    library = turn == 1;
    if (library) unsetenv("LORAMEM_CUBLASLT");
    else setenv("LORAMEM_CUBLASLT", "off", 1);
    if (!open_sides()) return 0;
    char info[4096];
    lm_ctx_info(sides[1].ctx, info, sizeof info);
    printf("%s\n", info);
    if (!library || strstr(info, "cuBLASLt 1")) test_all();
    else printf("cuBLASLt was not found: the second turn is left out\n");
    close_sides();
  }
  return report();
}
