/* cuda_loss_test.cu: linear_cross_entropy: the GPU against the CPU backend, chunk by chunk. */
#include "cuda_test.h"

struct shape {
  int32_t rows, labelled, width, vocab, chunk_rows, gap;
  float shift; /* added to every logit through a constant input */
};

static const shape shapes[] = {
    {1, 1, 8, 2, 1, 0, 0},         {5, 3, 33, 37, 2, 1, 0},      {64, 63, 64, 257, 64, 0, 0},      {65, 65, 64, 256, 16, 8, 0},
    {129, 127, 96, 1000, 64, 0, 0}, {70, 70, 72, 1032, 32, 0, -120}, {200, 0, 64, 512, 64, 0, 0},   {300, 129, 128, 4096, 128, 0, 0},
    {512, 500, 256, 8200, 256, 0, 120}, {600, 513, 128, 50257, 512, 0, 0}, {1024, 1024, 896, 3000, 1024, 0, 0},
    {2048, 1500, 128, 640, 1024, 0, -120},
};

static bool library;

static void test_shape(const shape *h, int32_t type, int32_t w_type, bool gradient) {
  clear_arrays();
  const std::string what = "linear_cross_entropy shape " + std::to_string(h - shapes) + " (" + std::to_string(h->labelled) + " of " +
                           std::to_string(h->rows) + " rows, width " + std::to_string(h->width) + ", vocab " +
                           std::to_string(h->vocab) + ") " + type_names[type] + " over " + type_names[w_type] +
                           (gradient ? "" : ", evaluation") + (library ? ", library" : "");
  array x = make(type, h->rows, h->width, h->width + h->gap), w = make(w_type, h->vocab, h->width, h->width + h->gap, h->vocab,
                                                                     2 / sqrtf((float)h->width));
  if (h->shift != 0) {
    for (int64_t t = 0; t < h->rows; t++) put_float(type, x.data(), t * x.pitch, 16);
    for (int64_t v = 0; v < h->vocab; v++) put_float(w_type, w.data(), v * w.pitch, h->shift / 16);
    upload(x), upload(w);
  }
  std::vector<int32_t> rows, ids; /* labelled rows ascend; some labels are out of range */
  for (int32_t t = 0; t < h->rows; t++) rows.push_back(t);
  for (int32_t i = h->rows; i > h->labelled; i--) rows.erase(rows.begin() + (int64_t)(random_u32() % (uint32_t)i));
  for (int32_t i = 0; i < h->labelled; i++) ids.push_back(i % 17 == 9 ? -5 : (int32_t)(random_u32() % (uint32_t)h->vocab));
  rows.resize((size_t)h->rows, 0x7fffffff), ids.resize((size_t)h->rows, 0x7fffffff); /* past the count: never used */
  const lm_batch_header header = {h->rows, 1, h->labelled, h->labelled ? 1.0f / (float)h->labelled : 0};
  array label_rows = make_ints(rows), label_ids = make_ints(ids), batch = make_struct(header);
  array loss = make_empty(LM_F32, 1, h->rows, h->rows), dx = make_empty(type, h->rows, h->width, h->width + h->gap);
  array logits = make_empty(type, h->chunk_rows, h->vocab, h->vocab), gathered = make_empty(type, h->chunk_rows, h->width, h->width);
  const auto call = [&](side &d) {
    int32_t status = LM_OK;
    for (int32_t chunk = 0; chunk * h->chunk_rows < h->rows && !status; chunk++) { /* also chunks past the last labelled row */
      const lm_linear_cross_entropy_args args = {
          sizeof args, type, d.floats(loss), gradient ? d.at(dx) : nullptr, d.at(logits), d.at(gathered), d.at(x), d.at(w),
          d.ints(label_rows), d.ints(label_ids), (const lm_batch_header *)d.at(batch), h->rows, h->width, h->vocab, chunk,
          h->chunk_rows, (int32_t)dx.pitch, (int32_t)x.pitch, (int32_t)w.pitch, w_type, 0, nullptr};
      status = lm_linear_cross_entropy(d.ctx, &args, d.stream);
    }
    return status;
  };
  if (!run(what.c_str(), call)) return;

  const std::vector<uint8_t> cpu_loss = download(loss, 0), gpu_loss = download(loss, 1);
  double worst = 0, total_cpu = 0, total_gpu = 0;
  for (int32_t i = 0; i < h->labelled; i++) {
    const double p = float_of(LM_F32, cpu_loss.data() + GUARD, i), q = float_of(LM_F32, gpu_loss.data() + GUARD, i);
    /* The logits are rounded to the type: one unit of the shift is what two of them may differ by. */
    const double limit = type == LM_F32 ? 2e-5 * (1 + fabs(h->shift)) : type_ulp(type) * (8 + fabs(h->shift));
    const double over = fabs(p - q) / limit;
    worst = over <= worst ? worst : isnan(over) ? INFINITY : over;
    total_cpu += p, total_gpu += q;
  }
  CHECK(worst <= 1, "%s: loss of a row %.2f of its limit", what.c_str(), worst);
  const double mean_limit = type == LM_F32 ? 1e-5 : 2e-3 + (h->shift != 0 ? type_ulp(type) * 16 : 0);
  CHECK(h->labelled == 0 || fabs(total_cpu - total_gpu) / h->labelled <= mean_limit, "%s: mean loss %.6f, wanted %.6f", what.c_str(),
        total_gpu / h->labelled, total_cpu / h->labelled);
  bool outside = true;
  for (int32_t i = h->labelled; i < h->rows; i++)
    outside = outside && memcmp(&gpu_loss[GUARD + 4 * (size_t)i], &loss.host[GUARD + 4 * (size_t)i], 4) == 0;
  CHECK(outside, "%s: wrote losses past the labelled rows", what.c_str());

  /* The gradient of each labelled row; other rows are left alone. */
  const std::vector<uint8_t> cpu = download(dx, 0), gpu = download(dx, 1);
  std::vector<uint8_t> masked = gpu;
  double distance = 0, norm = 0;
  for (int32_t i = 0; i < h->labelled && gradient; i++) {
    const int64_t row = rows[(size_t)i];
    for (int64_t c = 0; c < h->width; c++) {
      const double p = float_of(type, cpu.data() + GUARD, row * dx.pitch + c), q = float_of(type, gpu.data() + GUARD, row * dx.pitch + c);
      distance += (p - q) * (p - q), norm += p * p;
    }
    const size_t at = GUARD + (size_t)(row * dx.pitch) * type_size(type);
    memcpy(&masked[at], &dx.host[at], (size_t)h->width * type_size(type));
  }
  CHECK(masked == dx.host, "%s: dx was written outside the labelled rows", what.c_str());
  const double limit = type == LM_F32 ? 2e-5 * (1 + fabs(h->shift)) : type_ulp(type) * (h->shift != 0 ? 16 : 2);
  if (norm > 0) CHECK(sqrt(distance / norm) <= limit, "%s: dx differs by %.2e, limit %.2e", what.c_str(), sqrt(distance / norm), limit);
  CHECK(norm > 0 || !(distance > 0), "%s: dx is not zero", what.c_str());
  repeats(what.c_str(), {&loss, &dx}, call);
}

int main(void) {
  for (int turn = 0; turn < 2; turn++) {
    library = turn == 1;
    if (library) unsetenv("LORAMEM_CUBLASLT");
    else setenv("LORAMEM_CUBLASLT", "off", 1);
    if (!open_sides()) return 0;
    char info[4096];
    lm_ctx_info(sides[1].ctx, info, sizeof info);
    if (!library || strstr(info, "cuBLASLt 1")) {
      for (const shape &h : shapes)
        for (const int32_t type : all_types) {
          test_shape(&h, type, type, true);
          test_shape(&h, type, type, false);
          if (h.rows <= 129) test_shape(&h, type, (type + 1) % 3, true);
        }
    } else {
      printf("cuBLASLt was not found: the second turn is left out\n");
    }
    close_sides();
  }
  return report();
}
