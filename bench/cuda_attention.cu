/* cuda_attention.cu: attention on one GPU at the shapes of three models and of single long documents, bf16, random data.
 * TFLOP/s count two products forward and five backward, of the pairs that the mask leaves; `of cuDNN` is against what cuDNN 9.19
 * reaches on an H200 at that head size and length. Decoding: GB/s of the cache rows that one new row must read.
 *   cmake --build build --target cuda_benches && build/tests/cuda_attention */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "../csrc/include/loramem.h"

static lm_ctx *ctx;
static lm_stream *stream;

static void check(int32_t status) {
  if (status == LM_OK) return;
  char text[2048];
  lm_last_error(ctx, text, sizeof text);
  printf("%s\n", text);
  exit(1);
}

static void *reserve(uint64_t bytes) {
  void *memory = lm_mem_reserve(ctx, bytes);
  if (!memory) check(LM_ERR_OUT_OF_MEMORY);
  return memory;
}

static void upload(void *to, const void *from, uint64_t bytes) {
  lm_pinned *pinned = lm_pinned_create(ctx, bytes, 0);
  if (!pinned) check(LM_ERR_PINNED);
  memcpy(lm_pinned_data(pinned), from, bytes);
  check(lm_mem_copy(ctx, to, lm_pinned_data(pinned), bytes, stream));
  check(lm_stream_wait(stream));
  lm_pinned_destroy(pinned);
}

/* About normal bf16 numbers: zeros and repeated values would draw less power and run faster. */
static void *random_bf16(int64_t count) {
  static uint64_t state = 88172645463325252u;
  std::vector<uint16_t> x((size_t)count);
  for (uint16_t &h : x) {
    float sum = -2;
    for (int i = 0; i < 4; i++) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      sum += (float)(state >> 40) / 16777216.0f;
    }
    sum *= 1.7320508f;
    uint32_t bits;
    memcpy(&bits, &sum, 4);
    h = (uint16_t)(bits >> 16);
  }
  void *memory = reserve((uint64_t)count * 2);
  upload(memory, x.data(), (uint64_t)count * 2);
  return memory;
}

static void *integers(const std::vector<int32_t> &values) {
  void *memory = reserve(values.size() * 4);
  upload(memory, values.data(), values.size() * 4);
  return memory;
}

/* Median milliseconds of one launch, out of replays of a graph of many. */
static double time_of(int launches, const std::function<int32_t()> &launch) {
  lm_event *start = lm_event_create(ctx), *end = lm_event_create(ctx);
  for (int i = 0; i < 3; i++) check(launch());
  check(lm_graph_begin(stream));
  for (int i = 0; i < launches; i++) check(launch());
  lm_graph *graph = lm_graph_end(stream);
  if (!graph) check(LM_ERR_INTERNAL);
  std::vector<float> times;
  for (int i = 0; i < 9; i++) {
    float ms = 0;
    check(lm_event_record(start, stream));
    check(lm_graph_launch(graph, stream));
    check(lm_event_record(end, stream));
    check(lm_event_wait(end));
    check(lm_event_elapsed(&ms, start, end));
    if (i >= 2) times.push_back(ms / (float)launches);
  }
  std::sort(times.begin(), times.end());
  lm_graph_destroy(graph);
  lm_event_destroy(start), lm_event_destroy(end);
  return times[times.size() / 2];
}

struct shape {
  const char *name;
  int32_t documents, length, heads, kv_heads, head_dim;
  double forward, backward; /* cuDNN, TFLOP/s; 0 = not known */
  int32_t window = 0;
  float softcap = 0;
};

static const shape shapes[] = {
    {"Qwen2.5-0.5B", 8, 1024, 14, 2, 64, 0, 0}, {"Llama-3.2-1B", 4, 2048, 32, 8, 64, 319, 264},
    {"Llama-3.1-8B", 2, 2048, 32, 8, 128, 484, 370}, {"one document", 1, 2048, 32, 8, 64, 319, 264},
    {"one document", 1, 2048, 14, 2, 64, 0, 0}, {"one document", 1, 8192, 32, 8, 64, 0, 0},
    {"one document", 1, 2048, 32, 8, 128, 484, 370}, {"one document", 1, 8192, 32, 8, 128, 644, 541},
    {"one document", 1, 2048, 32, 8, 96, 0, 0}, {"one document", 1, 2048, 32, 8, 80, 0, 0},
    {"one document", 1, 2048, 8, 4, 256, 0, 0}, {"short documents", 64, 128, 32, 8, 64, 0, 0},
    {"window 1024", 1, 8192, 32, 8, 128, 0, 0, 1024, 0}, {"window 1024", 1, 8192, 32, 8, 64, 0, 0, 1024, 0},
    {"window 4096, cap", 1, 8192, 8, 4, 256, 0, 0, 4096, 50},
};

static void run_shape(const shape &s) {
  const int32_t rows = s.documents * s.length, D = s.head_dim;
  const int64_t Q = (int64_t)s.heads * D, K = (int64_t)s.kv_heads * D, pitch = Q + 2 * K;
  std::vector<int32_t> offsets;
  for (int32_t d = 0; d <= s.documents; d++) offsets.push_back(d * s.length);
  const int64_t turns = (int64_t)(s.heads + s.kv_heads) * (rows / 16 + s.documents) + 4;
  const int64_t bytes = 4 * ((int64_t)rows * D * (s.heads + 2 * s.kv_heads) + turns);
  uint16_t *const qkv = (uint16_t *)random_bf16(rows * pitch), *const dqkv = (uint16_t *)reserve((uint64_t)(rows * pitch) * 2);
  void *const go = random_bf16(rows * Q), *const o = reserve((uint64_t)(rows * Q) * 2), *const cu = integers(offsets);
  void *const lse = reserve((uint64_t)rows * s.heads * 4), *const delta = reserve((uint64_t)rows * s.heads * 4);
  void *const workspace = reserve((uint64_t)bytes);
  const float scale = D == 64 ? 0.125f : D == 256 ? 0.0625f : 0.1f;
  const lm_attention_forward_args forward = {
      sizeof forward, LM_BF16, o, (float *)lse, qkv, qkv + Q, qkv + Q + K, (const int32_t *)cu, rows, s.documents, s.heads, s.kv_heads, D,
      (int32_t)pitch, (int32_t)Q, scale, s.window, s.softcap};
  lm_attention_backward_args backward = {
      sizeof backward, LM_BF16, dqkv, dqkv + Q, dqkv + Q + K, (float *)delta, go, o, (const float *)lse, qkv, qkv + Q, qkv + Q + K,
      (const int32_t *)cu, rows, s.documents, s.heads, s.kv_heads, D, (int32_t)pitch, (int32_t)pitch, (int32_t)Q, scale, s.window,
      s.softcap, 0, workspace, bytes};
  const double reach = s.window ? s.window : s.length, twice_pairs = reach * (2 * s.length - reach);
  const double work = s.documents * twice_pairs * (double)Q;
  printf("%-16s %2d x %4d  %2d/%d heads of %-3d ", s.name, s.documents, s.length, s.heads, s.kv_heads, D);
  const auto print = [&](const char *name, double flop, double ms, double reference) {
    printf("| %s %7.3f ms %4.0f TFLOP/s", name, ms, flop / ms * 1e-9);
    if (reference > 0) printf(" %3.0f %% of cuDNN", 100 * flop / ms * 1e-9 / reference);
    else printf("               ");
  };
  print("forward", 2 * work, time_of(20, [&] { return lm_attention_forward(ctx, &forward, stream); }), s.forward);
  print("backward", 5 * work, time_of(10, [&] { return lm_attention_backward(ctx, &backward, stream); }), s.backward);
  backward.workspace = nullptr;
  print("without workspace", 5 * work, time_of(10, [&] { return lm_attention_backward(ctx, &backward, stream); }), s.backward);
  printf("\n");
  fflush(stdout);
  for (void *memory : {(void *)qkv, (void *)dqkv, go, o, cu, lse, delta, workspace}) check(lm_mem_release(ctx, memory));
}

/* One new row behind `past` others, over several caches, so that they come from memory. */
static void run_decode(const char *name, int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t past) {
  const int64_t Q = (int64_t)heads * head_dim, K = (int64_t)kv_heads * head_dim, capacity = past + 64;
  const int caches = (int)std::min<int64_t>(64, std::max<int64_t>(1, (INT64_C(256) << 20) / (capacity * K * 4)));
  std::vector<void *> k, v;
  for (int i = 0; i < caches; i++) {
    k.push_back(i ? reserve((uint64_t)(capacity * K) * 2) : random_bf16(capacity * K));
    v.push_back(i ? reserve((uint64_t)(capacity * K) * 2) : random_bf16(capacity * K));
    for (std::vector<void *> *all : {&k, &v})
      if (i) check(lm_mem_copy(ctx, all->back(), all->front(), (uint64_t)(capacity * K) * 2, stream));
  }
  uint16_t *const qkv = (uint16_t *)random_bf16(Q + 2 * K);
  void *const o = reserve((uint64_t)Q * 2), *const past_row = integers({past}), *const live = integers({1});
  int next = 0;
  const double ms = time_of(2 * caches, [&] {
    const int i = next++ % caches;
    const lm_attention_cached_forward_args args = {
        sizeof args, LM_BF16, o, k[(size_t)i], v[(size_t)i], qkv, qkv + Q, qkv + Q + K, (const int32_t *)past_row, (const int32_t *)live, 1,
        (int32_t)capacity, heads, kv_heads, head_dim, (int32_t)(Q + 2 * K), (int32_t)Q, 0.1f, 0, 0};
    return lm_attention_cached_forward(ctx, &args, stream);
  });
  printf("%-16s decode behind %6d rows: %8.4f ms %6.0f GB/s\n", name, past, ms, (double)past * (double)K * 4 / ms * 1e-6);
  fflush(stdout);
  for (int i = 0; i < caches; i++) check(lm_mem_release(ctx, k[(size_t)i])), check(lm_mem_release(ctx, v[(size_t)i]));
  for (void *memory : {(void *)qkv, o, past_row, live}) check(lm_mem_release(ctx, memory));
}

int main(int count, char **arguments) {
  char text[2048] = "";
  ctx = lm_ctx_open(count > 1 ? arguments[1] : "cuda:0", 0, text, sizeof text);
  if (!ctx) {
    printf("skipped: %s\n", text);
    return 0;
  }
  stream = lm_stream_create(ctx, 0);
  lm_ctx_info(ctx, text, sizeof text);
  printf("%s\n", text);
  for (const shape &s : shapes) run_shape(s);
  for (const int32_t past : {512, 4096, 32768}) {
    run_decode("Qwen2.5-0.5B", 14, 2, 64, past);
    run_decode("Llama-3.1-8B", 32, 8, 128, past);
  }
  lm_stream_destroy(stream);
  lm_ctx_destroy(ctx);
  return 0;
}
