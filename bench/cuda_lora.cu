/* cuda_lora.cu: the LoRA kernels of a training step on one GPU against the bytes that they must move.
 *   cmake --build build --target cuda_benches && build/tests/cuda_lora [copy bandwidth in GB/s, default: measured] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "../csrc/cuda/cublaslt.h"
#include "../csrc/cuda/kernels.h"
#include "../csrc/cuda/lora_down.cuh"
#include "../csrc/cuda/gemm_short.cuh"
#include "../csrc/cuda/gradient2.cuh"
#ifdef OLD
cudaError_t lm_cuda_linear_gradient_old(lm_cuda *cuda, const lm_lora_linear_backward_args *args, const lm_matrix &ds, void *workspace,
                                        uint64_t workspace_bytes, cudaStream_t stream);
#endif

__attribute__((weak)) lm_cuda_kernel *lm_cuda_kernels;

#define CUDA(call)                                                                  \
  do {                                                                              \
    const cudaError_t e = (call);                                                   \
    if (e) {                                                                        \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e));  \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

static void *workspace;
void *lm_cuda_workspace(lm_cuda *, cudaStream_t) { return workspace; }
static lm_cuda cuda;
static cudaStream_t stream;
static float copy_rate;
typedef lm_bf16 T;

static const int64_t ARENA = 768ll << 20; /* elements of each */
static T *arena_x, *arena_y;
static T *w_a, *w_b, *s_in, *s_out;
static float *sum_out, *ds_f32;

__global__ void fill(T *x, int64_t n, float scale, uint32_t seed) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    uint32_t h = (uint32_t)i * 2654435761u + seed;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    x[i] = __float2bfloat16(((float)(h >> 8) / 8388608.0f - 1.0f) * scale);
  }
}

/* Microseconds per launch: the median of replays of a graph of launches whose operands rotate through the arena. */
static float time_of(int64_t elements, const std::function<cudaError_t(int64_t)> &launch) {
  const int64_t places = std::max<int64_t>(1, ARENA / elements);
  cudaGetLastError();
  if (launch(0)) { cudaGetLastError(); return -1; }
  CUDA(cudaStreamSynchronize(stream));
  const int launches = 16;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; i++) CUDA(launch(i % places * elements));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  static cudaEvent_t from, to;
  if (!from) { CUDA(cudaEventCreate(&from)); CUDA(cudaEventCreate(&to)); }
  std::vector<float> us;
  for (int i = 0; i < 7; i++) {
    CUDA(cudaEventRecord(from, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(to, stream));
    CUDA(cudaEventSynchronize(to));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, from, to));
    if (i >= 2) us.push_back(ms * 1000 / launches);
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

/* Reference: y[r, c] = sum_k l(r, k) r(c, k), in double, element strides given. */
__global__ void product(double *y, const T *l, int64_t lr, int64_t lk, const T *r, int64_t rc, int64_t rk, int rows, int columns, int depth) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (int64_t)rows * columns) return;
  const int row = (int)(i / columns), c = (int)(i % columns);
  double sum = 0;
  for (int k = 0; k < depth; k++) sum += (double)lm_to_float(l[row * lr + k * lk]) * (double)lm_to_float(r[c * rc + k * rk]);
  y[i] = sum;
}
static std::vector<double> reference(const T *l, int64_t lr, int64_t lk, const T *r, int64_t rc, int64_t rk, int rows, int columns, int depth) {
  double *y;
  const int64_t n = (int64_t)rows * columns;
  CUDA(cudaMalloc(&y, n * 8));
  product<<<(unsigned)((n + 127) / 128), 128, 0, stream>>>(y, l, lr, lk, r, rc, rk, rows, columns, depth);
  std::vector<double> v((size_t)n);
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaMemcpy(v.data(), y, n * 8, cudaMemcpyDeviceToHost));
  CUDA(cudaFree(y));
  return v;
}
static int bad;
template <typename E>
static void compare(const char *what, const E *device, int64_t pitch, int rows, int columns, const std::vector<double> &want, double scale, double limit) {
  std::vector<E> got((size_t)(rows * pitch));
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaMemcpy(got.data(), device, got.size() * sizeof(E), cudaMemcpyDeviceToHost));
  double error = 0, norm = 0;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) {
      const double w = want[(size_t)r * columns + c] * scale, d = (double)(float)got[(size_t)(r * pitch + c)] - w;
      error += d * d, norm += w * w;
    }
  const double e = sqrt(error / (norm + 1e-300));
  if (!(e < limit)) bad++, printf("WRONG %s: %g\n", what, e);
}

struct linear {
  const char *model, *name;
  int32_t rows, in, out[3], rank;
};
static const linear linears[] = {
    {"8B", "qkv", 4096, 4096, {4096, 1024, 1024}, 16},    {"8B", "o", 4096, 4096, {4096, 0, 0}, 16},
    {"8B", "gate|up", 1024, 4096, {14336, 14336, 0}, 16}, {"8B", "down", 1024, 14336, {4096, 0, 0}, 16},
    {"1B", "qkv", 8192, 2048, {2048, 512, 512}, 16},      {"1B", "o", 8192, 2048, {2048, 0, 0}, 16},
    {"1B", "gate|up", 2048, 2048, {8192, 8192, 0}, 16},   {"1B", "down", 2048, 8192, {2048, 0, 0}, 16},
    {"0.5B", "qkv", 8192, 896, {896, 128, 128}, 16},      {"0.5B", "o", 8192, 896, {896, 0, 0}, 16},
    {"0.5B", "gate|up", 4096, 896, {4864, 4864, 0}, 16},  {"0.5B", "down", 4096, 4864, {896, 0, 0}, 16},
    {"odd", "odd", 1000, 520, {264, 8, 1000}, 16},
};
static int adapters_of(const linear &l) { return l.out[1] == 0 ? 1 : l.out[2] == 0 ? 2 : 3; }

static void row(const linear &l, const char *kind, const std::string &variant, double bytes, float us) {
  if (us < 0) return;
  printf("%-5s %-8s %-6s %-30s %8.2f us %7.0f GB/s %5.1f %%\n", l.model, l.name, kind, variant.c_str(), us, bytes / us / 1e3, 100 * bytes / us / 1e3 / copy_rate);
}

constexpr int stages_of(int blocks, int stage, int extra = 0) {
  const int n = ((blocks == 1 ? 220 : blocks == 2 ? 98 : 72) * 1024 - extra) / stage;
  return n > 12 ? 12 : n;
}

template <auto kernel>
static cudaError_t allow(int bytes) { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); }

/* lora_down ------------------------------------------------------------------------------------------------------- */
template <int RANKS, int ROWS, int BLOCKS>
static void down_variant(const linear &l, int ranks, double bytes, const std::vector<double> &want) {
  constexpr int depth = ROWS == 32 ? 128 : 64, stage = (ROWS + RANKS) * depth * 2;
  using C = down_tile<RANKS, ROWS, stages_of(BLOCKS, stage), BLOCKS>;
  if (C::SHARED > cuda.shared_max) { printf("shared %d\n", C::SHARED); return; }
  CUDA((allow<down_tiles<T, C>>(C::SHARED)));
  float best = -1;
  int best_splits = 0;
  std::string all;
  for (int splits = 1; splits <= 8; splits *= 2) {
    const int tiles = (l.rows + ROWS - 1) / ROWS;
    if (tiles * splits > 132 * BLOCKS * 3 || tiles * splits < 40) continue;
    const auto launch = [&](int64_t at) {
      const down_job job = {arena_x + at, w_a, s_out, nullptr, l.rows, l.in, ranks, l.in, ranks, {ranks, ranks}, {2, 2, 2}};
      return lm_cuda_launch_clusters<down_tiles<T, C>>(splits, dim3(tiles, splits), DOWN_THREADS, C::SHARED, stream, job);
    };
    CUDA(cudaMemsetAsync(s_out, 0xff, (size_t)l.rows * ranks * 2, stream));
    const cudaError_t error = launch(0);
    if (error) { printf("down error %s\n", cudaGetErrorString(error)); continue; }
    compare("down", s_out, ranks, l.rows, ranks, want, 2, 6e-3);
    const float us = time_of((int64_t)l.rows * l.in, launch);
    all += " " + std::to_string(splits) + ":" + std::to_string(us).substr(0, 5);
    if (best < 0 || us < best) best = us, best_splits = splits;
  }
  row(l, "down", std::to_string(ROWS) + "x" + std::to_string(C::DEPTH) + " st" + std::to_string(C::STAGES) + " b" + std::to_string(BLOCKS) + all, bytes, best);
  (void)best_splits;
}
template <int RANKS>
static void down_all(const linear &l, int ranks) {
  const double bytes = 2.0 * l.rows * (l.in + ranks);
  const lm_lora_down_args args = {sizeof args, LM_BF16, s_out, nullptr, w_a, nullptr, l.rows, l.in, ranks, l.in, LM_BF16, l.rank,
                                  ranks >= 2 * l.rank ? l.rank : 0, ranks >= 3 * l.rank ? l.rank : 0, 2, 2, 2, 0};
  for (const int capability : {80, cuda.capability}) {
    const int real = cuda.capability;
    cuda.capability = capability;
    row(l, "down", capability == 80 ? "old" : "now", bytes, time_of((int64_t)l.rows * l.in, [&](int64_t at) {
          lm_lora_down_args now = args;
          now.x = arena_x + at;
          return lm_cuda_lora_down(&cuda, &now, stream);
        }));
    cuda.capability = real;
  }
  const auto want = reference(arena_x, l.in, 1, w_a, l.in, 1, l.rows, ranks, l.in);
  down_variant<RANKS, 128, 1>(l, ranks, bytes, want);
  down_variant<RANKS, 128, 2>(l, ranks, bytes, want);
  down_variant<RANKS, 64, 1>(l, ranks, bytes, want);
  down_variant<RANKS, 64, 2>(l, ranks, bytes, want);
  down_variant<RANKS, 64, 3>(l, ranks, bytes, want);
  down_variant<RANKS, 32, 2>(l, ranks, bytes, want);
}

/* dA -------------------------------------------------------------------------------------------------------------- */
template <int RANKS, int COLUMNS, int BLOCKS>
static void da_variant(const linear &l, int ranks, double bytes, const std::vector<double> &want) {
  constexpr int stage = 64 * (COLUMNS + (RANKS == 48 ? 64 : RANKS)) * 2;
  using C = da_tile<RANKS, COLUMNS, stages_of(BLOCKS, stage), BLOCKS>;
  if (C::SHARED > cuda.shared_max) { printf("shared %d\n", C::SHARED); return; }
  if (C::STAGES < 2) return;
  CUDA((allow<da_tiles<T, C>>(C::SHARED)));
  float best = -1;
  std::string all;
  for (int splits = 1; splits <= 8; splits *= 2) {
    const int tiles = (l.in + COLUMNS - 1) / COLUMNS;
    if (tiles * splits > 132 * BLOCKS * 3 || (tiles * splits < 50 && splits < 8)) continue;
    const auto launch = [&](int64_t at) {
      const da_job job = {s_in, arena_x + at, sum_out, nullptr, l.rows, l.in, ranks, ranks, l.in};
      return lm_cuda_launch_clusters<da_tiles<T, C>>(splits, dim3(tiles, splits), DOWN_THREADS, C::SHARED, stream, job);
    };
    CUDA(cudaMemsetAsync(sum_out, 0, (size_t)l.in * ranks * 4, stream));
    const cudaError_t error = launch(0);
    if (error) { printf("da error %s\n", cudaGetErrorString(error)); continue; }
    compare("da", sum_out, l.in, ranks, l.in, want, 1, 1e-4);
    const float us = time_of((int64_t)l.rows * l.in, launch);
    all += " " + std::to_string(splits) + ":" + std::to_string(us).substr(0, 5);
    if (best < 0 || us < best) best = us;
  }
  row(l, "dA", "64x" + std::to_string(COLUMNS) + " st" + std::to_string(C::STAGES) + " b" + std::to_string(BLOCKS) + all, bytes, best);
}
template <int RANKS>
static void da_all(const linear &l, int ranks) {
  const double bytes = 2.0 * l.rows * (l.in + ranks);
  const lm_lora_down_backward_args args = {sizeof args, LM_BF16, sum_out, (const float *)s_in, nullptr, nullptr, l.rows, l.in, l.in, LM_BF16, l.rank,
                                           ranks >= 2 * l.rank ? l.rank : 0, ranks >= 3 * l.rank ? l.rank : 0, 0};
  for (const int capability : {80, cuda.capability}) {
    const int real = cuda.capability;
    cuda.capability = capability;
    row(l, "dA", capability == 80 ? "old" : "now", bytes, time_of((int64_t)l.rows * l.in, [&](int64_t at) {
          lm_lora_down_backward_args now = args;
          now.x = arena_x + at;
          return lm_cuda_lora_down_backward(&cuda, &now, stream);
        }));
    cuda.capability = real;
  }
  const auto want = reference(s_in, 1, ranks, arena_x, 1, l.in, ranks, l.in, l.rows);
  da_variant<RANKS, 256, 1>(l, ranks, bytes, want);
  if (RANKS < 48) da_variant<RANKS, 256, 2>(l, ranks, bytes, want);
  da_variant<RANKS, 128, 1>(l, ranks, bytes, want);
  da_variant<RANKS, 128, 2>(l, ranks, bytes, want);
  da_variant<RANKS, 64, 2>(l, ranks, bytes, want);
  da_variant<RANKS, 64, 3>(l, ranks, bytes, want);
}

/* gradient -------------------------------------------------------------------------------------------------------- */
template <typename C>
static cudaError_t launch_gradient(const linear &l, const T *dy, int target, int most_cluster, int pdl, std::string *text, cudaStream_t stream) {
  const int n = adapters_of(l), out = l.out[0] + l.out[1] + l.out[2], ranks = n * l.rank;
  g2::gradient_job job = {};
  job.ds = s_out, job.rows = l.rows, job.dy_pitch = out, job.s_pitch = ranks, job.ds_pitch = ranks;
  int stripes = 0;
  int64_t column = 0, db_floats = 0;
  for (int i = 0; i < n; i++) {
    g2::gradient_part &p = job.part[i];
    p.dy = dy + column, p.b = w_b + column * l.rank, p.s = s_in + i * l.rank, p.db = sum_out + column * l.rank, p.scale = 2, p.out = l.out[i], p.rank = l.rank;
    p.stripes = (l.out[i] + C::COLUMNS - 1) / C::COLUMNS, p.offset = i * l.rank;
    stripes += p.stripes, column += l.out[i], db_floats += (int64_t)l.out[i] * l.rank;
  }
  int runs = std::max(1, std::min(target / stripes, (l.rows + 63) / 64));
  int cluster = 1;
  while (cluster < most_cluster && runs >= 2 * cluster) cluster *= 2;
  runs = runs / cluster * cluster;
  job.run_rows = ((l.rows + runs - 1) / runs + 63) / 64 * 64;
  runs = (l.rows + job.run_rows - 1) / job.run_rows;
  runs = (runs + cluster - 1) / cluster * cluster;
  job.cluster = cluster, job.groups = runs / cluster;
  float *sums = (float *)workspace;
  for (int i = 0; i < n; i++) {
    g2::gradient_part &p = job.part[i];
    p.ds_sums = sums, sums += (int64_t)p.stripes * l.rows * p.rank;
    p.db_sums = sums;
    if (job.groups > 1) sums += (int64_t)job.groups * p.out * p.rank;
  }
  if ((uint64_t)((char *)sums - (char *)workspace) > cuda.workspace_bytes) return cudaErrorNotSupported;
  if (text) *text = std::to_string(stripes) + "*" + std::to_string(runs) + "/" + std::to_string(cluster);
  cudaError_t error = lm_cuda_launch_clusters<g2::gradient_tiles<T, C>>(cluster, dim3(stripes, runs), 256, C::SHARED, stream, job);
  if (error) return error;
  const int64_t count = (int64_t)l.rows * ranks + (job.groups > 1 ? db_floats : 0);
  if (!pdl) return lm_cuda_launch<g2::gradient_add<T, false>>((unsigned)((count + 1023) / 1024), 256, 0, stream, job);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = (unsigned)((count + 1023) / 1024), config.blockDim = 256, config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, g2::gradient_add<T, true>, job);
}
template <int RANK, int TILES, int BLOCKS>
static void gradient_variant(const linear &l, double bytes, const std::vector<double> *want_ds, const std::vector<double> *want_db) {
  constexpr int stage = 64 * (128 + RANK) * 2;
  using C = g2::gradient_tile<RANK, TILES, stages_of(BLOCKS, stage, TILES * 128 * RANK * 2), BLOCKS>;
  CUDA((allow<g2::gradient_tiles<T, C>>(C::SHARED)));
  const int n = adapters_of(l), out = l.out[0] + l.out[1] + l.out[2];
  for (int target = 132; target <= 264; target += 132)
    for (int cluster : {1, 4, 8})
      for (int pdl = 0; pdl < 2; pdl++) {
        if (pdl && cluster != 4) continue;
        std::string text;
        CUDA(cudaMemsetAsync(sum_out, 0, (size_t)out * l.rank * 4, stream));
        CUDA(cudaMemsetAsync(s_out, 0xff, (size_t)l.rows * n * l.rank * 2, stream));
        const cudaError_t error = launch_gradient<C>(l, arena_x, target, cluster, pdl, &text, stream);
        if (error == cudaErrorNotSupported) continue;
        if (error) { printf("gradient error %s\n", cudaGetErrorString(error)); cudaGetLastError(); continue; }
        int64_t column = 0;
        for (int i = 0; i < n; i++) {
          compare("gradient ds", s_out + i * l.rank, n * l.rank, l.rows - 1, l.rank, want_ds[i], 2, 6e-3);
          compare("gradient db", sum_out + column * l.rank, l.rank, l.out[i], l.rank, want_db[i], 1, 1e-4);
          column += l.out[i];
        }
        const float us = time_of((int64_t)l.rows * out, [&](int64_t at) { return launch_gradient<C>(l, arena_x + at, target, cluster, pdl, nullptr, stream); });
        row(l, "dB+ds", "t" + std::to_string(TILES) + " st" + std::to_string(C::STAGES) + " b" + std::to_string(BLOCKS) + " " + text + (pdl ? " pdl" : ""), bytes, us);
      }
}
static void gradient_all(const linear &l) {
  const int n = adapters_of(l), out = l.out[0] + l.out[1] + l.out[2], ranks = n * l.rank, r1 = n > 1 ? l.rank : 0, r2 = n > 2 ? l.rank : 0;
  const double bytes = 2.0 * l.rows * (out + 2 * ranks);
  T *const b1 = w_b + (int64_t)l.out[0] * l.rank, *const b2 = b1 + (int64_t)l.out[1] * l.rank;
  const lm_lora_linear_backward_args args = {
      sizeof args, LM_BF16, nullptr, nullptr, sum_out, sum_out + (int64_t)l.out[0] * l.rank, sum_out + (int64_t)(l.out[0] + l.out[1]) * l.rank, ds_f32, nullptr, arena_y, s_in,
      w_a, w_a, w_b, b1, b2, nullptr, l.rows, l.in, out, l.in, out, l.in, ranks, l.in, LM_BF16, LM_BF16, l.out[0], l.out[1], l.out[2],
      l.rank, r1, r2, 2, 2, 2, 0};
#ifdef OLD
  row(l, "dB+ds", "old", bytes, time_of((int64_t)l.rows * out, [&](int64_t at) {
        lm_lora_linear_backward_args now = args;
        now.dy = arena_x + at;
        return lm_cuda_linear_gradient_old(&cuda, &now, {ds_f32, ranks, LM_BF16}, workspace, cuda.workspace_bytes, stream);
      }));
#endif
  row(l, "dB+ds", "now", bytes, time_of((int64_t)l.rows * out, [&](int64_t at) {
        lm_lora_linear_backward_args now = args;
        now.dy = arena_x + at;
        return lm_cuda_lora_linear_backward(&cuda, &now, stream);
      }));
  std::vector<double> ds[3], db[3];
  int64_t column = 0;
  for (int i = 0; i < n; i++) {
    ds[i] = reference(arena_x + column, out, 1, w_b + column * l.rank, 1, l.rank, l.rows, l.rank, l.out[i]);
    db[i] = reference(arena_x + column, 1, out, s_in + i * l.rank, 1, ranks, l.out[i], l.rank, l.rows);
    column += l.out[i];
  }
  gradient_variant<16, 4, 1>(l, bytes, ds, db);
  gradient_variant<16, 2, 2>(l, bytes, ds, db);
  gradient_variant<16, 2, 1>(l, bytes, ds, db);
}

/* term ------------------------------------------------------------------------------------------------------------ */
template <int FORM, int STEPS, int SPAN, int ACROSS>
static void up_variant(const linear &l, const lm_gemm &g, double bytes, const std::vector<double> &want) {
  int stripes = 0;
  for (const lm_gemm_part &p : g.part) stripes += (p.columns + 32 * SPAN * ACROSS - 1) / (32 * SPAN * ACROSS);
  float best = -1;
  std::string all;
  for (int blocks : {1, 2, 4, 8}) {
    const int down = 8 / ACROSS * 16, runs = std::max(1, std::min((l.rows + 63) / 64, blocks * 132 / stripes));
    const int run_rows = ((l.rows + runs - 1) / runs + down - 1) / down * down;
    const auto launch = [&](int64_t at) {
      lm_gemm now = g;
      for (lm_gemm_part &p : now.part) if (p.columns) p.y = (T *)p.y + at;
      return lm_cuda_launch<up_rows<T, FORM, STEPS, SPAN, ACROSS>>(dim3(stripes, (l.rows + run_rows - 1) / run_rows), UP_THREADS, 0, stream, now, run_rows);
    };
    CUDA(cudaMemsetAsync(arena_y, 0xff, (size_t)l.rows * g.y_pitch * 2, stream));
    const cudaError_t error = launch(0);
    if (error) { printf("up error %s\n", cudaGetErrorString(error)); continue; }
    if (g.part[1].columns == 0 && !want.empty() && (blocks == 1 || l.rows == 1000)) compare("up", arena_y, g.y_pitch, l.rows, g.part[0].columns, want, 1, 6e-3);
    const float us = time_of((int64_t)l.rows * g.y_pitch, launch);
    all += " " + std::to_string(us).substr(0, 5);
    if (best < 0 || us < best) best = us;
  }
  row(l, FORM == LM_NT ? "up NT" : "up NN", "span" + std::to_string(SPAN) + " across" + std::to_string(ACROSS) + all, bytes, best);
}
template <int FORM, int STEPS>
static void up_all(const linear &l) {
  const int n = adapters_of(l), out = l.out[0] + l.out[1] + l.out[2], ranks = n * l.rank;
  lm_gemm g = {};
  g.form = FORM, g.rows = l.rows, g.y_type = LM_BF16, g.y_pitch = g.residual_pitch = FORM == LM_NT ? out : l.in;
  int64_t column = 0;
  for (int i = 0; i < (FORM == LM_NT ? n : 1); i++) {
    if (FORM == LM_NT) g.part[i] = {l.out[i], {l.rank, 0}, 1, {{s_in + i * l.rank, ranks, LM_BF16}, {}}, {{w_b + column * l.rank, l.rank, LM_BF16}, {}}, nullptr, nullptr, arena_y + column};
    else g.part[i] = {l.in, {ranks, 0}, 1, {{s_in, ranks, LM_BF16}, {}}, {{w_a, l.in, LM_BF16}, {}}, nullptr, nullptr, arena_y};
    column += l.out[i];
  }
  const double bytes = 2.0 * l.rows * (g.y_pitch + ranks);
  const auto shifted = [&](int64_t at) {
    lm_gemm now = g;
    for (lm_gemm_part &p : now.part) if (p.columns) p.y = (T *)p.y + at;
    return now;
  };
  const auto old = [&](int64_t at) {
    const lm_gemm now = shifted(at);
    return lm_cuda_gemm_tensor(&cuda, &now, LM_BF16, workspace, cuda.workspace_bytes, stream);
  };
  row(l, FORM == LM_NT ? "up NT" : "up NN", "old", bytes, time_of((int64_t)l.rows * g.y_pitch, old));
  row(l, FORM == LM_NT ? "up NT" : "up NN", "now", bytes, time_of((int64_t)l.rows * g.y_pitch, [&](int64_t at) {
        const lm_gemm now = shifted(at);
        return lm_cuda_gemm_own(&cuda, &now, workspace, cuda.workspace_bytes, stream);
      }));
  const int shared = cuda.shared_max;
  cuda.shared_max = 101376;
  row(l, FORM == LM_NT ? "up NT" : "up NN", "old mma", bytes, time_of((int64_t)l.rows * g.y_pitch, old));
  cuda.shared_max = shared;
  std::vector<double> want;
  const lm_gemm_part &p = g.part[0];
  if (g.part[1].columns == 0 && (int64_t)l.rows * g.y_pitch < (8 << 20))
    want = FORM == LM_NT ? reference((const T *)p.left[0].data, ranks, 1, (const T *)p.right[0].data, l.rank, 1, l.rows, p.columns, l.rank)
                         : reference(s_in, ranks, 1, w_a, 1, l.in, l.rows, l.in, ranks);
  up_variant<FORM, STEPS, 1, 8>(l, g, bytes, want);
  up_variant<FORM, STEPS, 2, 8>(l, g, bytes, want);
  up_variant<FORM, STEPS, 2, 4>(l, g, bytes, want);
  up_variant<FORM, STEPS, 2, 2>(l, g, bytes, want);
}

/* What reading alone takes. */
__global__ void __launch_bounds__(512) read_all(const uint4 *x, int64_t n, uint32_t *out) {
  uint32_t sum = 0;
  const int64_t step = (int64_t)gridDim.x * 512;
  int64_t i = (int64_t)blockIdx.x * 512 + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __ldcs(x + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; k++) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += step) sum ^= x[i].x ^ x[i].w;
  if (sum == 0x12345678) *out = sum;
}
__global__ void write_all(uint4 *y, int64_t n) {
  for (int64_t i = (int64_t)blockIdx.x * 512 + threadIdx.x; i < n; i += (int64_t)gridDim.x * 512) y[i] = make_uint4(i, i, i, i);
}

static void *host_alloc(void *, uint64_t bytes) { return calloc(1, bytes); }

int main(int argc, char **argv) {
  CUDA(cudaGetDeviceProperties(&cuda.properties, 0));
  cuda.host.alloc = host_alloc;
  cuda.host.release = free;
  cuda.capability = 10 * cuda.properties.major + cuda.properties.minor;
  cuda.sm_count = cuda.properties.multiProcessorCount;
  cuda.shared_max = (int32_t)cuda.properties.sharedMemPerBlockOptin;
  cuda.workspace_bytes = 32u << 20;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaMalloc(&workspace, cuda.workspace_bytes));
  CUDA(cudaMalloc(&arena_x, ARENA * 2));
  CUDA(cudaMalloc(&arena_y, ARENA * 2));
  const int64_t small = 8ll << 20;
  for (T **p : {&w_a, &w_b, &s_in, &s_out}) CUDA(cudaMalloc(p, small * 2));
  CUDA(cudaMalloc(&sum_out, small * 4));
  CUDA(cudaMalloc(&ds_f32, small * 4));
  CUDA(cudaMemset(sum_out, 0, small * 4));
  fill<<<1024, 256, 0, stream>>>(arena_x, ARENA, 1, 1);
  fill<<<1024, 256, 0, stream>>>(arena_y, ARENA, 1, 2);
  fill<<<1024, 256, 0, stream>>>(w_a, small, 0.1f, 3);
  fill<<<1024, 256, 0, stream>>>(w_b, small, 0.1f, 4);
  fill<<<1024, 256, 0, stream>>>(s_in, small, 1, 5);
  fill<<<1024, 256, 0, stream>>>(s_out, small, 1, 6);
  const int64_t half = 256ll << 20;
  const float copy_us = time_of(half, [&](int64_t at) { return cudaMemcpyAsync(arena_y + at % (2 * half), arena_x + at % (2 * half), half * 2, cudaMemcpyDeviceToDevice, stream); });
  copy_rate = argc > 1 ? (float)atof(argv[1]) : (float)(half * 4 / copy_us / 1e3);
  printf("%s, %d multiprocessors, copy %.0f GB/s\n", cuda.properties.name, cuda.sm_count, copy_rate);
  for (const int64_t mb : {8, 16, 32, 64}) {
    const int64_t n = mb << 19;
    const float us = time_of(n, [&](int64_t at) { return cudaMemcpyAsync(arena_y + at, arena_x + at, n * 2, cudaMemcpyDeviceToDevice, stream); });
    printf("copy of %d MB: %.2f us, %.0f GB/s\n", (int)mb, us, n * 4 / us / 1e3);
  }
  for (const int64_t mb : {0, 8, 16, 32, 58, 112}) {
    const int64_t n = std::max<int64_t>(mb << 19, 8);
    printf("%d MB:", (int)mb);
    for (int blocks : {132, 264, 528}) {
      const float r = time_of(n, [&](int64_t at) { return lm_cuda_launch<read_all>(blocks, 512, 0, stream, (const uint4 *)(arena_x + at), n / 8, (uint32_t *)workspace); });
      const float w = time_of(n, [&](int64_t at) { return lm_cuda_launch<write_all>(blocks, 512, 0, stream, (uint4 *)(arena_y + at), n / 8); });
      printf("  %d blocks: read %.2f us %.0f GB/s, write %.2f us %.0f GB/s", blocks, r, n * 2 / r / 1e3, w, n * 2 / w / 1e3);
    }
    printf("\n");
  }
  const char *only = argc > 2 ? argv[2] : "";
  for (const linear &l : linears) {
    const int n = adapters_of(l), ranks = n * l.rank;
    if (*only && strcmp(only, l.model)) continue;
    if (n == 1) down_all<16>(l, ranks);
    if (n == 2) down_all<32>(l, ranks);
    if (n == 3) down_all<48>(l, ranks);
    if (n == 1) da_all<16>(l, ranks);
    if (n == 2) da_all<32>(l, ranks);
    if (n == 3) da_all<48>(l, ranks);
    gradient_all(l);
    if (n == 1) up_all<LM_NN, 1>(l);
    if (n == 2) up_all<LM_NN, 2>(l);
    if (n == 3) up_all<LM_NN, 3>(l);
    up_all<LM_NT, 1>(l);
    fflush(stdout);
  }
  CUDA(cudaDeviceSynchronize());
  printf("%s: %d wrong\n", bad ? "FAILED" : "ok", bad);
  return bad != 0;
}
