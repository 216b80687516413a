/* cpu_gemm.c: rates of the CPU kernels on the demo model's shapes, beside the FMA peak measured in the same run.
 *   cc -std=c11 -O3 -Icsrc/include -Icsrc/cpu bench/cpu_gemm.c <the objects of csrc/cpu> -o cpu_gemm -lm -lpthread
 *   ./cpu_gemm [threads ...]        default: 1 2;  LORAMEM_ISA=avx2 measures that level
 * GFLOP/s counts two operations per multiply-add of the products alone. The peak is that of register-only FMAs on each of
 * the threads at once; with one thread it is one core's. Every figure is the fastest of the calls of 0.2 s or more. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "cpu.h"
#include "kernels.h"

static lm_cpu *cpu;

/* now: with one thread, time on a core, which other processes do not disturb. */
static double now(void) {
  struct timespec t;
  clock_gettime(lm_cpu_threads(cpu) == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double peak; /* GFLOP/s */

typedef void (*kernel_fn)(lm_cpu *cpu, const void *args);

/* seconds: the fastest call. */
static double seconds(kernel_fn fn, const void *args) {
  double best = 1e9;
  fn(cpu, args);
  int count = 0;
  for (const double start = now(); count < 10 || now() - start < 0.2; count++) {
    const double before = now();
    fn(cpu, args);
    const double time = now() - before;
    if (time < best) best = time;
  }
  return best;
}

static void show(const char *name, kernel_fn fn, const void *args, double flop) {
  const double s = seconds(fn, args), rate = flop / s * 1e-9;
  printf("  %-44s %9.1f us %8.1f GFLOP/s  %5.1f %% of peak\n", name, s * 1e6, rate, 100 * rate / peak);
}

static void show_bytes(const char *name, kernel_fn fn, const void *args, double bytes) {
  const double s = seconds(fn, args);
  printf("  %-44s %9.1f us %8.1f GB/s\n", name, s * 1e6, bytes / s * 1e-9);
}

/* Register-only FMAs: ten chains hide the latency. */
enum { CHAINS = 10, STEPS = 200000 };
#ifdef __x86_64__
__attribute__((target("avx512f"))) static void fma_512(void) {
  __m512 sum[CHAINS], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
  for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_set1_ps((float)i);
  for (int k = 0; k < STEPS; k++)
#pragma GCC unroll 10
    for (int i = 0; i < CHAINS; i++) {
      sum[i] = _mm512_fmadd_ps(sum[i], x, y);
      __asm__ volatile("" : "+v"(sum[i]));
    }
}
__attribute__((target("avx2,fma"))) static void fma_256(void) {
  __m256 sum[CHAINS], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
  for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_set1_ps((float)i);
  for (int k = 0; k < STEPS; k++)
#pragma GCC unroll 10
    for (int i = 0; i < CHAINS; i++) {
      sum[i] = _mm256_fmadd_ps(sum[i], x, y);
      __asm__ volatile("" : "+x"(sum[i]));
    }
}
#endif

static void fma_task(const void *arg, int64_t task, float *scratch) {
  (void)arg, (void)task, (void)scratch;
#ifdef __x86_64__
  if (strcmp(lm_cpu_isa(cpu), "avx512") == 0) fma_512();
  else if (strcmp(lm_cpu_isa(cpu), "avx2") == 0) fma_256();
#endif
}

static void fma_region(lm_cpu *c, const void *args) {
  (void)args;
  lm_cpu_enter(c);
  lm_cpu_parallel(c, lm_cpu_threads(c), fma_task, NULL);
  lm_cpu_leave(c);
}

static void empty_task(const void *arg, int64_t task, float *scratch) { (void)arg, (void)task, (void)scratch; }

static void empty_region(lm_cpu *c, const void *args) {
  (void)args;
  lm_cpu_enter(c);
  for (int i = 0; i < 100; i++) lm_cpu_parallel(c, lm_cpu_threads(c), empty_task, NULL);
  lm_cpu_leave(c);
}

/* Memory of random small numbers in any type. */
static void *fill(int32_t type, int64_t n) {
  void *data = aligned_alloc(64, (size_t)(n * 4 + 63) / 64 * 64);
  for (int64_t i = 0; i < n; i++) {
    const float x = (float)(rand() % 2001 - 1000) * 1e-3f;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (type == LM_F32) ((float *)data)[i] = x;
    else ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
  }
  return data;
}

#define KERNEL(op)                                                                                                         \
  static void run_##op(lm_cpu *c, const void *args) { lm_cpu_##op(c, args); }
KERNEL(lora_down)
KERNEL(lora_linear_forward)
KERNEL(lora_linear_backward)
KERNEL(attention_forward)
KERNEL(attention_backward)
KERNEL(linear_cross_entropy)
KERNEL(rms_norm_forward)
KERNEL(rms_norm_backward)
KERNEL(glu_forward)
KERNEL(glu_backward)
KERNEL(adamw)

static int32_t sum3(const int32_t v[3]) { return v[0] + v[1] + v[2]; }

static void linear(const char *name, int32_t type, int32_t rows, int32_t in, const int32_t out[3], int32_t rank) {
  const int32_t n = sum3(out), r[3] = {rank, out[1] ? rank : 0, out[2] ? rank : 0}, ranks = sum3(r);
  void *x = fill(type, (int64_t)rows * in), *y = fill(type, (int64_t)rows * n), *w = fill(LM_BF16, (int64_t)n * in);
  void *s = fill(type, (int64_t)rows * (ranks + 1)), *a = fill(LM_F32, (int64_t)ranks * in + 1),
       *ds = fill(LM_F32, (int64_t)rows * (ranks + 1));
  void *da = fill(LM_F32, (int64_t)ranks * in + 1), *b[3], *db[3], *dx = fill(type, (int64_t)rows * in);
  for (int i = 0; i < 3; i++)
    b[i] = fill(LM_F32, (int64_t)out[i] * rank + 1), db[i] = fill(LM_F32, (int64_t)out[i] * rank + 1);
  const lm_lora_linear_forward_args f = {.size = sizeof f,
                                         .type = type,
                                         .y = y,
                                         .x = x,
                                         .w = w,
                                         .s = s,
                                         .b0 = b[0],
                                         .b1 = b[1],
                                         .b2 = b[2],
                                         .rows = rows,
                                         .in = in,
                                         .out = n,
                                         .y_pitch = n,
                                         .x_pitch = in,
                                         .w_pitch = in,
                                         .s_pitch = ranks,
                                         .w_type = LM_BF16,
                                         .b_type = LM_F32,
                                         .out0 = out[0],
                                         .out1 = out[1],
                                         .out2 = out[2],
                                         .rank0 = r[0],
                                         .rank1 = r[1],
                                         .rank2 = r[2]};
  const lm_lora_down_args d = {.size = sizeof d,
                               .type = type,
                               .s = s,
                               .x = x,
                               .a = a,
                               .rows = rows,
                               .in = in,
                               .s_pitch = ranks,
                               .x_pitch = in,
                               .a_type = LM_F32,
                               .rank0 = r[0],
                               .rank1 = r[1],
                               .rank2 = r[2],
                               .scale0 = 2,
                               .scale1 = 2,
                               .scale2 = 2};
  lm_lora_linear_backward_args g = {.size = sizeof g,
                                    .type = type,
                                    .dx = dx,
                                    .da = da,
                                    .db0 = db[0],
                                    .db1 = db[1],
                                    .db2 = db[2],
                                    .ds = ds,
                                    .dy = y,
                                    .x = x,
                                    .s = s,
                                    .w = w,
                                    .a = a,
                                    .b0 = b[0],
                                    .b1 = b[1],
                                    .b2 = b[2],
                                    .rows = rows,
                                    .in = in,
                                    .out = n,
                                    .dx_pitch = in,
                                    .dy_pitch = n,
                                    .x_pitch = in,
                                    .s_pitch = ranks,
                                    .w_pitch = in,
                                    .w_type = LM_BF16,
                                    .a_type = LM_F32,
                                    .out0 = out[0],
                                    .out1 = out[1],
                                    .out2 = out[2],
                                    .rank0 = r[0],
                                    .rank1 = r[1],
                                    .rank2 = r[2],
                                    .scale0 = 2,
                                    .scale1 = 2,
                                    .scale2 = 2};
  double base = 2.0 * rows * n * in, up = 0;
  for (int i = 0; i < 3; i++) up += 2.0 * rows * out[i] * r[i];
  const double down = 2.0 * rows * ranks * in;
  char text[96];
  snprintf(text, sizeof text, "%s NT forward %dx%dx%d r%d", name, rows, in, n, rank);
  show(text, run_lora_linear_forward, &f, base + up);
  if (rank > 0) {
    snprintf(text, sizeof text, "%s lora_down r%d", name, ranks);
    show(text, run_lora_down, &d, down);
    snprintf(text, sizeof text, "%s NN + TN backward", name);
    show(text, run_lora_linear_backward, &g, base + 2 * up + 2 * down);
    g.dx = NULL;
    snprintf(text, sizeof text, "%s TN backward, adapters only", name);
    show(text, run_lora_linear_backward, &g, 2 * up + down);
  } else if (rows > LM_GRAIN / 1024) {
    g.da = NULL, g.ds = NULL, g.x = NULL, g.s = NULL, g.a = NULL;
    snprintf(text, sizeof text, "%s NN backward", name);
    show(text, run_lora_linear_backward, &g, base);
  }
  free(x), free(y), free(w), free(s), free(a), free(ds), free(da), free(dx);
  for (int i = 0; i < 3; i++) free(b[i]), free(db[i]);
}

static void attention(int32_t type, int32_t documents, int32_t length, int32_t heads, int32_t kv_heads, int32_t dim) {
  const int32_t rows = documents * length, q_width = heads * dim, pitch = (heads + 2 * kv_heads) * dim;
  char *qkv = fill(type, (int64_t)rows * pitch), *dqkv = fill(type, (int64_t)rows * pitch);
  void *o = fill(type, (int64_t)rows * q_width), *go = fill(type, (int64_t)rows * q_width);
  float *lse = fill(LM_F32, (int64_t)rows * heads), *delta = fill(LM_F32, (int64_t)rows * heads);
  int32_t *cu = malloc(sizeof(int32_t) * (size_t)(documents + 1));
  for (int i = 0; i <= documents; i++) cu[i] = i * length;
  const size_t size = type == LM_F32 ? 4 : 2, k = (size_t)q_width * size, v = k + (size_t)(kv_heads * dim) * size;
  const lm_attention_forward_args f = {sizeof f, type,      o,     lse,      qkv, qkv + k, qkv + v, cu,
                                       rows,     documents, heads, kv_heads, dim, pitch,   q_width, 0.2f};
  const lm_attention_backward_args b = {sizeof b, type,    dqkv,    dqkv + k, dqkv + v, delta,     go,    o,        lse,
                                        qkv,      qkv + k, qkv + v, cu,       rows,     documents, heads, kv_heads, dim,
                                        pitch,    pitch,   q_width, 0.2f,     0,        NULL,      0};
  const double flop = 2.0 * documents * length * (length + 1) / 2 * heads * dim; /* one causal product */
  char text[96];
  snprintf(text, sizeof text, "attention forward %dx%d heads %d/%d dim %d", documents, length, heads, kv_heads, dim);
  show(text, run_attention_forward, &f, 2 * flop);
  show("attention backward (5 products counted)", run_attention_backward, &b, 5 * flop);
  free(qkv), free(dqkv), free(o), free(go), free(lse), free(delta), free(cu);
}

static void head(int32_t type, int32_t rows, int32_t width, int32_t vocab) {
  void *x = fill(type, (int64_t)rows * width), *dx = fill(type, (int64_t)rows * width),
       *w = fill(LM_BF16, (int64_t)vocab * width);
  void *logits = fill(type, (int64_t)rows * vocab), *gathered = fill(type, (int64_t)rows * width);
  float *loss = fill(LM_F32, rows);
  int32_t *index = malloc((size_t)rows * 4), *ids = malloc((size_t)rows * 4);
  for (int i = 0; i < rows; i++) index[i] = i, ids[i] = i % vocab;
  const lm_batch_header batch = {rows, 1, rows, 1e-3f};
  const lm_linear_cross_entropy_args a = {sizeof a, type,  loss,  dx, logits, gathered, x,     w,     index,   ids, &batch,
                                          rows,     width, vocab, 0,  rows,   width,    width, width, LM_BF16, 0,   NULL};
  show("linear_cross_entropy", run_linear_cross_entropy, &a, 4.0 * rows * width * vocab);
  free(x), free(dx), free(w), free(logits), free(gathered), free(loss), free(index), free(ids);
}

static void rows_kernels(int32_t type, int32_t rows, int32_t width, int32_t inner) {
  const double size = type == LM_F32 ? 4 : 2;
  void *x = fill(type, (int64_t)rows * width), *y = fill(type, (int64_t)rows * width), *w = fill(LM_BF16, width);
  void *gu = fill(type, (int64_t)rows * inner * 2), *h = fill(type, (int64_t)rows * inner),
       *dgu = fill(type, (int64_t)rows * inner * 2);
  const lm_rms_norm_forward_args nf = {sizeof nf, type, y, x, w, NULL, rows, width, width, width, LM_BF16, 1e-5f};
  const lm_rms_norm_backward_args nb = {sizeof nb, type,  y,     h,     x,     w,     x,       NULL,
                                        rows,      width, width, width, width, width, LM_BF16, 1e-5f};
  const lm_glu_forward_args gf = {sizeof gf, type, h, gu, NULL, rows, inner, inner, 2 * inner};
  const lm_glu_backward_args gb = {sizeof gb, type, dgu, h, gu, NULL, rows, inner, 2 * inner, inner, 2 * inner, 0};
  show_bytes("rms_norm_forward", run_rms_norm_forward, &nf, 2 * size * rows * width);
  show_bytes("rms_norm_backward", run_rms_norm_backward, &nb, 4 * size * rows * width);
  show_bytes("glu_forward", run_glu_forward, &gf, 3 * size * rows * inner);
  show_bytes("glu_backward", run_glu_backward, &gb, 5 * size * rows * inner);
  const int64_t n = 1 << 20;
  float *p = fill(LM_F32, n), *m = fill(LM_F32, n), *v = fill(LM_F32, n), *g = fill(LM_F32, n);
  for (int64_t i = 0; i < n; i++) v[i] *= v[i];
  const lm_optimizer_control c = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
  const lm_step_metrics metrics = {.factor = 1, .decay = 1, .rate = 1e-3f, .root = 1};
  const lm_adamw_args a = {sizeof a, LM_F32, p, m, v, g, NULL, &c, &metrics, n, LM_F32, 0};
  show_bytes("adamw 1M", run_adamw, &a, 32.0 * (double)n);
  free(x), free(y), free(w), free(gu), free(h), free(dgu), free(p), free(m), free(v), free(g);
}

static void measure(int32_t threads, int32_t type) {
  cpu = lm_cpu_create(threads);
  const int lanes = strcmp(lm_cpu_isa(cpu), "avx512") == 0 ? 16 : 8;
  peak = 2.0 * lanes * CHAINS * STEPS * lm_cpu_threads(cpu) / seconds(fma_region, NULL) * 1e-9;
  printf("%s, %d threads, activations %s, weights bf16: FMA peak %.1f GFLOP/s\n", lm_cpu_isa(cpu), (int)lm_cpu_threads(cpu),
         type == LM_F32 ? "f32" : "bf16", peak);
  printf("  %-44s %9.2f us\n", "an empty parallel region", seconds(empty_region, NULL) * 1e4);
  linear("square", type, 1024, 1024, (const int32_t[3]){1024, 0, 0}, 0);
  for (int32_t rows = 1024; rows >= 256; rows /= 4) {
    linear("qkv", type, rows, 256, (const int32_t[3]){256, 128, 128}, 16);
    linear("o", type, rows, 256, (const int32_t[3]){256, 0, 0}, 16);
    linear("gate|up", type, rows, 256, (const int32_t[3]){688, 688, 0}, 16);
    linear("down", type, rows, 688, (const int32_t[3]){256, 0, 0}, 16);
    head(type, rows, 256, 4096);
    attention(type, rows / 128, 128, 8, 4, 32);
  }
  attention(type, 1, 1024, 8, 2, 64);
  attention(type, 1, 1024, 4, 1, 128);
  rows_kernels(type, 1024, 256, 688);
  linear("decode", type, 1, 2048, (const int32_t[3]){2048, 0, 0}, 0);
  lm_cpu_destroy(cpu);
}

int main(int argc, char **argv) {
  for (int i = 1; i < (argc > 1 ? argc : 3); i++)
    for (int32_t type = LM_F32; type <= LM_BF16; type++) measure(argc > 1 ? atoi(argv[i]) : i, type);
  return 0;
}
