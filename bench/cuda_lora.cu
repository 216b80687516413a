/* cuda_lora.cu: the LoRA kernels of a training step on one GPU against the bytes that they must move, and against the matrix
 * tiles that serve where they cannot.
 *   cmake --build build --target cuda_benches && build/tests/cuda_lora [copy bandwidth in GB/s, default: measured]
 * Each figure is the median of several replays of a graph of many launches, whose large operand rotates through an arena. */
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "../csrc/cuda/gemm.cuh"
#include "../csrc/cuda/kernels.h"
#include "cuda_check.h"

__attribute__((weak)) lm_cuda_kernel *lm_cuda_kernels;

typedef lm_bf16 T;
enum { LAUNCHES = 16, REPEATS = 7, TILES_ONLY = 80 /* a compute capability without clusters and wgmma */ };

static const int64_t ARENA = 512ll << 20; /* elements */
static lm_cuda cuda;
static cudaStream_t stream;
static cudaEvent_t from, to;
static void *workspace;
static T *arena, *a, *b, *s;
static float *sums;
static float copy_rate;

void *lm_cuda_workspace(lm_cuda *, cudaStream_t) { return workspace; }

__global__ void fill(T *x, int64_t n, float scale, uint32_t seed) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    uint32_t h = (uint32_t)i * 2654435761u + seed;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    x[i] = __float2bfloat16(((float)(h >> 8) / 8388608.0f - 1.0f) * scale);
  }
}

/* Microseconds per launch; the launches get a place in the arena for `elements` each. */
static float time_of(int64_t elements, const std::function<cudaError_t(T *)> &launch) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(launch(arena));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < LAUNCHES; i++) CUDA(launch(arena + i % (ARENA / elements) * elements));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<float> us;
  for (int i = -2; i < REPEATS; i++) {
    CUDA(cudaEventRecord(from, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(to, stream));
    CUDA(cudaEventSynchronize(to));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, from, to));
    if (i >= 0) us.push_back(ms * 1000 / LAUNCHES);
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

/* A model's adapters of rank 16; the feed-forward network works on tiles of the rows. */
struct linear {
  const char *model, *name;
  int32_t calls, rows, in, out[3]; /* calls: per step */
};
static const linear linears[] = {
    {"8B", "qkv", 32, 4096, 4096, {4096, 1024, 1024}},     {"8B", "o", 32, 4096, 4096, {4096, 0, 0}},
    {"8B", "gate|up", 128, 1024, 4096, {14336, 14336, 0}}, {"8B", "down", 128, 1024, 14336, {4096, 0, 0}},
    {"1B", "qkv", 16, 8192, 2048, {2048, 512, 512}},       {"1B", "o", 16, 8192, 2048, {2048, 0, 0}},
    {"1B", "gate|up", 64, 2048, 2048, {8192, 8192, 0}},    {"1B", "down", 64, 2048, 8192, {2048, 0, 0}},
    {"0.5B", "qkv", 24, 8192, 896, {896, 128, 128}},       {"0.5B", "o", 24, 8192, 896, {896, 0, 0}},
    {"0.5B", "gate|up", 48, 4096, 896, {4864, 4864, 0}},   {"0.5B", "down", 48, 4096, 4864, {896, 0, 0}},
};
enum { RANK = 16, KINDS = 5 };
static const char *const kinds[KINDS] = {"s = x A^T", "dA", "dB, ds", "s B^T", "ds A"};

/* The LoRA term as the linears ask for it in front of the library's product. */
static lm_gemm term(const linear &l, int32_t form, T *y) {
  const int32_t n = l.out[1] == 0 ? 1 : l.out[2] == 0 ? 2 : 3, out = l.out[0] + l.out[1] + l.out[2], ranks = n * RANK;
  lm_gemm g = {};
  g.form = form, g.rows = l.rows, g.y_type = LM_BF16, g.y_pitch = form == LM_NT ? out : l.in;
  if (form == LM_NN) {
    g.part[0] = {l.in, {ranks, 0}, 1, {{s, ranks, LM_BF16}, {}}, {{a, l.in, LM_BF16}, {}}, nullptr, nullptr, y};
    return g;
  }
  int64_t column = 0;
  for (int i = 0; i < n; column += l.out[i++])
    g.part[i] = {l.out[i], {RANK, 0}, 1, {{s + i * RANK, ranks, LM_BF16}, {}}, {{b + column * RANK, RANK, LM_BF16}, {}},
                 nullptr, nullptr, y + column};
  return g;
}

static void measure(const linear &l, double (&total)[KINDS][2]) {
  const int32_t out = l.out[0] + l.out[1] + l.out[2], r1 = l.out[1] ? RANK : 0, r2 = l.out[2] ? RANK : 0, ranks = RANK + r1 + r2;
  T *const b1 = b + (int64_t)l.out[0] * RANK, *const b2 = b1 + (int64_t)l.out[1] * RANK;
  float *const db1 = sums + (int64_t)l.out[0] * RANK, *const db2 = db1 + (int64_t)l.out[1] * RANK;
  float *const ds = sums + (int64_t)out * RANK;
  const auto down = [&](T *x) {
    const lm_lora_down_args args = {sizeof args, LM_BF16, s,    x,  a,  nullptr, l.rows, l.in, ranks,
                                    l.in,        LM_BF16, RANK, r1, r2, 2,       2,      2,    0};
    return lm_cuda_lora_down(&cuda, &args, stream);
  };
  const auto down_backward = [&](T *x) {
    const lm_lora_down_backward_args args = {sizeof args, LM_BF16, sums,    ds,   x,  nullptr, l.rows,
                                             l.in,        l.in,    LM_BF16, RANK, r1, r2,      0};
    return lm_cuda_lora_down_backward(&cuda, &args, stream);
  };
  const auto gradient = [&](T *dy) {
    const lm_lora_linear_backward_args args = {
        sizeof args, LM_BF16, nullptr, nullptr, sums, db1, db2, ds, dy, arena, s, a, a, b, b1, b2, nullptr, l.rows, l.in, out,
        l.in, out, l.in, ranks, l.in, LM_BF16, LM_BF16, l.out[0], l.out[1], l.out[2], RANK, r1, r2, 2, 2, 2, 0};
    return lm_cuda_lora_linear_backward(&cuda, &args, stream);
  };
  const auto term_of = [&](int32_t form, bool tiles) {
    return [&, form, tiles](T *y) {
      const lm_gemm g = term(l, form, y);
      return tiles ? lm_cuda_gemm_tensor(&cuda, &g, LM_BF16, workspace, cuda.workspace_bytes, stream)
                   : lm_cuda_gemm_own(&cuda, &g, workspace, cuda.workspace_bytes, stream);
    };
  };
  const int32_t widths[KINDS] = {l.in, l.in, out, out, l.in}, capability = cuda.capability;
  for (int k = 0; k < KINDS; k++) {
    float us[2];
    for (int tiles = 0; tiles < 2; tiles++) {
      const std::function<cudaError_t(T *)> launches[KINDS] = {down, down_backward, gradient, term_of(LM_NT, tiles),
                                                               term_of(LM_NN, tiles)};
      if (tiles && k < 3) cuda.capability = TILES_ONLY;
      us[tiles] = time_of((int64_t)l.rows * widths[k], launches[k]);
      cuda.capability = capability;
      total[k][tiles] += l.calls * us[tiles] / 1000;
    }
    const double rate = 2.0 * l.rows * (widths[k] + ranks) / us[0] / 1e3;
    printf("%-5s %-8s %-9s %8.2f us, tiles %8.2f us, %6.0f GB/s %5.1f %%\n", l.model, l.name, kinds[k], us[0], us[1], rate,
           100 * rate / copy_rate);
  }
}

int main(int argc, char **argv) {
  CUDA(cudaGetDeviceProperties(&cuda.properties, 0));
  cuda.capability = 10 * cuda.properties.major + cuda.properties.minor;
  cuda.sm_count = cuda.properties.multiProcessorCount;
  cuda.shared_max = (int32_t)cuda.properties.sharedMemPerBlockOptin;
  cuda.workspace_bytes = 32u << 20;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  CUDA(cudaMalloc(&workspace, cuda.workspace_bytes));
  const int64_t small = 4ll << 20;
  CUDA(cudaMalloc(&arena, ARENA * 2));
  CUDA(cudaMalloc(&sums, small * 4));
  CUDA(cudaMemset(sums, 0, small * 4));
  fill<<<1024, 256, 0, stream>>>(arena, ARENA, 1.0f, 1);
  for (T **const matrix : {&a, &b, &s}) {
    CUDA(cudaMalloc(matrix, small * 2));
    fill<<<1024, 256, 0, stream>>>(*matrix, small, 0.1f, (uint32_t)(uintptr_t)*matrix);
  }
  copy_rate = argc > 1 ? (float)atof(argv[1]) : 0;
  if (copy_rate == 0) {
    const int64_t half = ARENA / 2;
    copy_rate = (float)half * 4 / 1e3f /
                time_of(ARENA, [&](T *x) { return cudaMemcpyAsync(x + half, x, half * 2, cudaMemcpyDeviceToDevice, stream); });
  }
  printf("%s, %d multiprocessors, copy %.0f GB/s; tiles: by the matrix tiles (dB and ds know one way)\n", cuda.properties.name,
         cuda.sm_count, copy_rate);
  double total[KINDS][2] = {};
  for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
    measure(linears[i], total);
    if (i % 4 < 3) continue;
    for (int k = 0; k < KINDS; k++)
      printf("%-5s step     %-9s %8.2f ms, tiles %8.2f ms\n", linears[i].model, kinds[k], total[k][0], total[k][1]);
    for (auto &pair : total) pair[0] = pair[1] = 0;
  }
  return 0;
}
