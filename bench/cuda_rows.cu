/* cuda_rows.cu: time of the elementwise, row-wise and optimizer kernels at the shapes of three models, against copying the same
 * bytes. Columns: ms, GB/s of the bytes that must be moved, and the share of the copy rate of this GPU.
 *   cmake --build build --target cuda_benches && build/tests/cuda_rows
 * Each figure is the median of several replays of a graph of many launches, over buffers that rotate through more than the L2. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "../csrc/include/loramem.h"

#define ARENA (UINT64_C(6) << 30)
#define REPEATS 7
#define LAUNCHES 20

static lm_ctx *ctx;
static lm_stream *stream;
static uint8_t *arena;
static double copy_rate; /* bytes read and written per second */

static void check(int32_t status) {
  if (status == LM_OK) return;
  char text[2048];
  lm_last_error(ctx, text, sizeof text);
  printf("%s\n", text);
  exit(1);
}

/* Buffers of one launch, laid one after the other; the next launch takes the next place. */
struct place {
  uint8_t *at;
  void *take(uint64_t bytes) {
    void *memory = at;
    at += (bytes + 255) / 256 * 256;
    return memory;
  }
};

/* Median milliseconds of one call of launch, which uses `footprint` bytes of buffers. */
static double time_of(uint64_t footprint, const std::function<int32_t(place)> &launch) {
  const uint64_t places = std::max<uint64_t>(1, ARENA / (footprint + 65536));
  lm_event *start = lm_event_create(ctx), *end = lm_event_create(ctx);
  for (int i = 0; i < 3; i++) check(launch({arena}));
  check(lm_graph_begin(stream));
  for (uint64_t i = 0; i < LAUNCHES; i++) check(launch({arena + i % places * ((footprint + 65536) / 256 * 256)}));
  lm_graph *graph = lm_graph_end(stream);
  if (!graph) check(LM_ERR_INTERNAL);
  std::vector<float> times;
  for (int i = 0; i < REPEATS + 2; i++) {
    float ms = 0;
    check(lm_event_record(start, stream));
    check(lm_graph_launch(graph, stream));
    check(lm_event_record(end, stream));
    check(lm_event_wait(end));
    check(lm_event_elapsed(&ms, start, end));
    if (i >= 2) times.push_back(ms / LAUNCHES);
  }
  std::sort(times.begin(), times.end());
  lm_graph_destroy(graph);
  lm_event_destroy(start), lm_event_destroy(end);
  return times[times.size() / 2];
}

static void row(const char *model, const char *name, uint64_t bytes, uint64_t footprint, const std::function<int32_t(place)> &launch) {
  const double ms = time_of(footprint, launch), rate = (double)bytes / ms * 1e3;
  printf("%-6s %-34s %9.4f ms %7.0f GB/s  %5.1f %% of copy\n", model, name, ms, rate * 1e-9, 100 * rate / copy_rate);
  fflush(stdout);
}

/* count numbers in [0, limit) on the device: scattered, or counting up from 0 again and again. */
static int32_t *numbers(int32_t count, int32_t limit, bool scattered) {
  lm_pinned *pinned = lm_pinned_create(ctx, (uint64_t)count * 4, 0);
  int32_t *const device = (int32_t *)lm_mem_reserve(ctx, (uint64_t)count * 4), *const values = (int32_t *)lm_pinned_data(pinned);
  if (!device || !values) check(LM_ERR_OUT_OF_MEMORY);
  for (int64_t i = 0; i < count; i++) values[i] = (int32_t)((scattered ? (uint32_t)i * 2654435761u >> 4 : (uint32_t)i) % (uint32_t)limit);
  check(lm_mem_copy(ctx, device, values, (uint64_t)count * 4, stream));
  check(lm_stream_wait(stream));
  lm_pinned_destroy(pinned);
  return device;
}

struct shape {
  const char *name;
  int32_t tokens, width, heads, kv_heads, head_dim, mlp, vocab;
  int64_t adapters;
};

static void model(const shape &m, int32_t type) {
  const int64_t T = m.tokens, C = m.width, I = m.mlp, size = type == LM_F32 ? 4 : 2;
  const int32_t q = m.heads * m.head_dim, k = m.kv_heads * m.head_dim, qkv = q + 2 * k;
  const uint64_t activations = (uint64_t)(T * C * size);
  const float eps = 1e-5f;
  int32_t *const ids = numbers(m.tokens, m.vocab, true), *const index = numbers(m.tokens, m.tokens, true);
  int32_t *const positions = numbers(m.tokens, 1024, false);
  row(m.name, "embedding_forward", 2 * activations, 2 * activations + (uint64_t)m.vocab * C * size, [&](place p) {
    const lm_embedding_forward_args a = {sizeof a, type, p.take(activations), p.take((uint64_t)m.vocab * C * size), ids, NULL, m.tokens, m.width,
                                         m.vocab, m.width, type, 0};
    return lm_embedding_forward(ctx, &a, stream);
  });
  row(m.name, "gather_rows", 2 * activations, 2 * activations, [&](place p) {
    const lm_gather_rows_args a = {sizeof a, type, p.take(activations), p.take(activations), index, NULL, m.tokens, m.width, m.tokens,
                                   m.width, m.width, 0};
    return lm_gather_rows(ctx, &a, stream);
  });
  row(m.name, "rms_norm_forward", 2 * activations, 2 * activations, [&](place p) {
    const void *w = p.take(C * size);
    const lm_rms_norm_forward_args a = {sizeof a, type, p.take(activations), p.take(activations), w, NULL, m.tokens, m.width, m.width, m.width,
                                        type, eps};
    return lm_rms_norm_forward(ctx, &a, stream);
  });
  row(m.name, "rms_norm_backward", 3 * activations, 3 * activations, [&](place p) {
    const void *w = p.take(C * size);
    const lm_rms_norm_backward_args a = {sizeof a, type, p.take(activations), p.take(activations), p.take(activations), w, NULL, NULL, m.tokens,
                                         m.width, m.width, m.width, m.width, 0, type, eps};
    return lm_rms_norm_backward(ctx, &a, stream);
  });
  row(m.name, "rms_norm_backward with add", 4 * activations, 4 * activations, [&](place p) {
    const void *w = p.take(C * size);
    void *add = p.take(activations);
    const lm_rms_norm_backward_args a = {sizeof a, type, add, p.take(activations), p.take(activations), w, add, NULL, m.tokens, m.width, m.width,
                                         m.width, m.width, m.width, type, eps};
    return lm_rms_norm_backward(ctx, &a, stream);
  });
  row(m.name, "glu_forward", 3 * (uint64_t)(T * I * size), 3 * (uint64_t)(T * I * size), [&](place p) {
    const lm_glu_forward_args a = {sizeof a, type, p.take(T * I * size), p.take(2 * T * I * size), NULL, m.tokens, m.mlp, m.mlp, 2 * m.mlp};
    return lm_glu_forward(ctx, &a, stream);
  });
  row(m.name, "glu_backward in place", 5 * (uint64_t)(T * I * size), 3 * (uint64_t)(T * I * size), [&](place p) {
    void *gu = p.take(2 * T * I * size);
    const lm_glu_backward_args a = {sizeof a, type, gu, p.take(T * I * size), gu, NULL, m.tokens, m.mlp, 2 * m.mlp, m.mlp, 2 * m.mlp, 0};
    return lm_glu_backward(ctx, &a, stream);
  });
  const uint64_t rotated = (uint64_t)(2 * T * (q + k) * size), angles = (uint64_t)(T * m.head_dim / 2 * 4);
  row(m.name, "rope in place", rotated, (uint64_t)(T * qkv * size), [&](place p) {
    const float *cos = (const float *)p.take(angles), *sin = (const float *)p.take(angles);
    void *x = p.take(T * qkv * size);
    const lm_rope_args a = {sizeof a, type, x, x, cos, sin, positions, NULL, m.tokens, qkv, m.heads + m.kv_heads, m.head_dim, m.tokens, qkv, qkv, 1};
    return lm_rope(ctx, &a, stream);
  });
  row(m.name, "add", 3 * activations, 3 * activations, [&](place p) {
    const lm_add_args a = {sizeof a, type, p.take(activations), p.take(activations), p.take(activations), T * C};
    return lm_add(ctx, &a, stream);
  });
  const int64_t n = m.adapters;
  row(m.name, "grad_norm", (uint64_t)n * 4, (uint64_t)n * 4, [&](place p) {
    lm_step_metrics *metrics = (lm_step_metrics *)p.take(sizeof *metrics);
    const lm_optimizer_control *control = (const lm_optimizer_control *)p.take(sizeof *control);
    double *partial = (double *)p.take((n + 65535) / 65536 * 8);
    lm_optimizer_state *state = (lm_optimizer_state *)p.take(sizeof *state);
    const lm_grad_norm_args a = {sizeof a, LM_F32, metrics, partial, state, nullptr, nullptr, (const float *)p.take(n * 4), control, n};
    return lm_grad_norm(ctx, &a, stream);
  });
  row(m.name, "adamw with 16-bit copy (34 B)", (uint64_t)n * 34, (uint64_t)n * 18, [&](place p) {
    const lm_step_metrics *metrics = (const lm_step_metrics *)p.take(sizeof *metrics);
    const lm_optimizer_control *control = (const lm_optimizer_control *)p.take(sizeof *control);
    float *param = (float *)p.take(n * 4), *moment1 = (float *)p.take(n * 4), *moment2 = (float *)p.take(n * 4), *g = (float *)p.take(n * 4);
    const lm_adamw_args a = {sizeof a, LM_F32, param, moment1, moment2, g, p.take(n * 2), control, metrics, n, LM_BF16, 0};
    return lm_adamw(ctx, &a, stream);
  });
  const uint64_t logits = (uint64_t)(8 * (int64_t)m.vocab * size);
  row(m.name, "argmax, 8 rows", logits, logits, [&](place p) {
    int32_t *out = (int32_t *)p.take(32);
    const lm_argmax_args a = {sizeof a, type, out, p.take(logits), NULL, 8, m.vocab, m.vocab, 0};
    return lm_argmax(ctx, &a, stream);
  });
  lm_mem_release(ctx, ids), lm_mem_release(ctx, index), lm_mem_release(ctx, positions);
}

int main(void) {
  char error[2048] = "", info[4096];
  ctx = lm_ctx_open("cuda:0", 0, error, sizeof error);
  if (!ctx) {
    printf("skipped: %s\n", error);
    return 0;
  }
  lm_ctx_info(ctx, info, sizeof info);
  printf("%s\n", info);
  stream = lm_stream_create(ctx, 0);
  arena = stream ? (uint8_t *)lm_mem_reserve(ctx, ARENA + (UINT64_C(2) << 30)) : NULL;
  if (!arena) check(LM_ERR_OUT_OF_MEMORY);
  /* Small random-looking values, so that the arithmetic has no special cases: bytes 0x3c are 0.0115 in bf16 and f32. */
  check(lm_mem_fill(ctx, arena, 0x3c, ARENA + (UINT64_C(2) << 30), stream));
  check(lm_stream_wait(stream));
  const uint64_t block = UINT64_C(512) << 20;
  const double ms = time_of(2 * block, [&](place p) {
    void *to = p.take(block);
    return lm_mem_copy(ctx, to, p.take(block), block, stream);
  });
  copy_rate = 2.0 * (double)block / ms * 1e3;
  printf("copy %.0f GB/s\n", copy_rate * 1e-9);
  const shape shapes[] = {{"0.5B", 8192, 896, 14, 2, 64, 4864, 151936, 8798208},
                          {"1B", 8192, 2048, 32, 8, 64, 8192, 128256, 11272192},
                          {"8B", 4096, 4096, 32, 8, 128, 14336, 128256, 41943040}};
  for (const shape &m : shapes) model(m, LM_BF16);
  lm_mem_release(ctx, arena);
  lm_stream_destroy(stream);
  lm_ctx_destroy(ctx);
  return 0;
}
