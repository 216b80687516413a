/* cuda_gemm.cu: the matrix products of a training step on one GPU: own kernels against cuBLASLt, and the linear ops against
 * the bytes that they must move.
 *   cmake --build build --target cuda_benches && build/tests/cuda_gemm [copy bandwidth in GB/s, default: measured] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "../csrc/cuda/cublaslt.h"
#include "../csrc/cuda/kernels.h"
#include "cuda_check.h"

lm_cuda_kernel *lm_cuda_kernels;

static void *workspace;
void *lm_cuda_workspace(lm_cuda *, cudaStream_t) { return workspace; }

struct linear {
  const char *model, *name;
  int32_t rows, in, out[3], rank;
};

static const linear linears[] = {
    {"0.5B", "qkv", 8192, 896, {896, 128, 128}, 16},      {"0.5B", "o", 8192, 896, {896, 0, 0}, 16},
    {"0.5B", "gate|up", 8192, 896, {4864, 4864, 0}, 16},  {"0.5B", "down", 8192, 4864, {896, 0, 0}, 16},
    {"1B", "qkv", 8192, 2048, {2048, 512, 512}, 16},      {"1B", "o", 8192, 2048, {2048, 0, 0}, 16},
    {"1B", "gate|up", 8192, 2048, {8192, 8192, 0}, 16},   {"1B", "down", 8192, 8192, {2048, 0, 0}, 16},
    {"8B", "qkv", 4096, 4096, {4096, 1024, 1024}, 16},    {"8B", "o", 4096, 4096, {4096, 0, 0}, 16},
    {"8B", "gate|up", 4096, 4096, {14336, 14336, 0}, 16}, {"8B", "down", 4096, 14336, {4096, 0, 0}, 16},
};

struct head {
  const char *model;
  int32_t width, vocab;
};
static const head heads[] = {{"0.5B", 896, 151936}, {"1B", 2048, 128256}, {"8B", 4096, 128256}};

__global__ void fill(__nv_bfloat16 *x, int64_t n, float scale) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    uint32_t h = (uint32_t)i * 2654435761u;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    x[i] = __float2bfloat16(((float)(h >> 8) / 8388608.0f - 1.0f) * scale);
  }
}

static cudaEvent_t from, to;

/* Median of 9 in milliseconds; -1 if fn does not take it. */
template <typename Fn>
static float time_of(Fn fn) {
  std::vector<float> ms;
  for (int i = -2; i < 9; i++) {
    CUDA(cudaEventRecord(from));
    const cudaError_t error = fn();
    if (error == cudaErrorNotSupported) return -1;
    CUDA(error);
    CUDA(cudaEventRecord(to));
    CUDA(cudaEventSynchronize(to));
    float now;
    CUDA(cudaEventElapsedTime(&now, from, to));
    if (i >= 0) ms.push_back(now);
  }
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2];
}

static void *host_alloc(void *, uint64_t bytes) { return calloc(1, bytes); }

int main(int argc, char **argv) {
  lm_cuda cuda = {};
  CUDA(cudaGetDeviceProperties(&cuda.properties, 0));
  cuda.host.alloc = host_alloc;
  cuda.host.release = free;
  cuda.capability = 10 * cuda.properties.major + cuda.properties.minor;
  cuda.sm_count = cuda.properties.multiProcessorCount;
  cuda.shared_max = (int32_t)cuda.properties.sharedMemPerBlockOptin;
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  lm_cuda_blas_open(&cuda);
  CUDA(cudaMalloc(&workspace, cuda.workspace_bytes));
  typedef __nv_bfloat16 bf16;
  const int64_t count[] = {8192LL * 16384, 8192LL * 16384, 151936LL * 4096, 8192LL * 256, 256LL * 16384, 256LL * 16384, 1024LL * 151936};
  bf16 *memory[7];
  for (int i = 0; i < 7; i++) {
    CUDA(cudaMalloc(&memory[i], (size_t)count[i] * 2));
    fill<<<1024, 256>>>(memory[i], count[i], 0.1f);
  }
  bf16 *const x = memory[0], *const y = memory[1], *const w = memory[2], *const s = memory[3], *const a = memory[4], *const b = memory[5];
  bf16 *const logits = memory[6];
  float *gradient;
  CUDA(cudaMalloc(&gradient, (64u << 20) * 4));
  CUDA(cudaMemset(gradient, 0, (64u << 20) * 4));
  float copy = argc > 1 ? (float)atof(argv[1]) : 0;
  if (copy == 0) {
    const float ms = time_of([&] { return cudaMemcpyAsync(y, x, (size_t)count[0] * 2, cudaMemcpyDeviceToDevice, 0); });
    copy = (float)count[0] * 4 / ms / 1e6f;
  }
  printf("%s, %d multiprocessors, %s, copy %.0f GB/s\n", cuda.properties.name, cuda.sm_count, lm_cuda_blas_text(&cuda), copy);
  printf("TFLOP/s count the base product only. tuned: the best algorithm; +: with the LoRA term\n\n");
  printf("%-5s %-8s %-3s %7s | %8s %8s %8s | %8s %8s %8s | own+/library+\n", "", "", "", "GFLOP", "wgmma+", "mma+", "library+",
         "wgmma", "library", "tuned");

  const auto rate = [](double flop, float ms) { return ms > 0 ? flop / ms / 1e9 : 0; };
  const int32_t shared = cuda.shared_max;
  for (const linear &l : linears)
    for (int form = LM_NT; form <= LM_NN; form++) {
      const int32_t out = l.out[0] + l.out[1] + l.out[2], adapters = l.out[1] == 0 ? 1 : l.out[2] == 0 ? 2 : 3;
      const int32_t ranks = adapters * l.rank;
      lm_gemm fused = {}, base = {}, term = {};
      fused.form = form, fused.rows = l.rows, fused.y_type = LM_BF16;
      fused.y_pitch = fused.residual_pitch = form == LM_NT ? out : l.in;
      base = term = fused;
      int32_t column = 0;
      for (int i = 0; i < (form == LM_NT ? 3 : 1); i++) {
        lm_gemm_part &p = fused.part[i], &t = term.part[i];
        if (form == LM_NT && l.out[i] == 0) continue;
        if (form == LM_NT) {
          p = {l.out[i], {l.in, l.rank}, 1.0f, {{x, l.in, LM_BF16}, {s + i * l.rank, ranks, LM_BF16}},
               {{w + (int64_t)column * l.in, l.in, LM_BF16}, {b + (int64_t)column * l.rank, l.rank, LM_BF16}}, nullptr, nullptr, y + column};
          column += l.out[i];
        } else {
          p = {l.in, {out, ranks}, 1.0f, {{x, out, LM_BF16}, {s, ranks, LM_BF16}}, {{w, l.in, LM_BF16}, {a, l.in, LM_BF16}},
               nullptr, nullptr, y};
        }
        t = p;
        t.depth[0] = p.depth[1], t.depth[1] = 0, t.left[0] = p.left[1], t.right[0] = p.right[1];
      }
      base.part[0] = fused.part[0];
      base.part[0].columns = fused.y_pitch;
      base.part[0].depth[1] = 0;
      const auto hopper = [&](const lm_gemm &g) {
        return time_of([&] {
          return lm_cuda_gemm_hopper_can(&cuda, &g) ? lm_cuda_gemm_hopper(&cuda, &g, LM_BF16, workspace, cuda.workspace_bytes, 0)
                                                    : cudaErrorNotSupported;
        });
      };
      const auto library = [&](bool with_term) {
        return time_of([&] {
          if (!lm_cuda_blas_can(&cuda, &base)) return cudaErrorNotSupported;
          base.part[0].residual = with_term ? base.part[0].y : nullptr;
          if (with_term) {
            const cudaError_t error = lm_cuda_gemm_own(&cuda, &term, workspace, cuda.workspace_bytes, 0);
            if (error) return error;
          }
          return lm_cuda_blas_gemm(&cuda, &base, workspace, cuda.workspace_bytes, 0);
        });
      };
      const float with_wgmma = hopper(fused);
      cuda.shared_max = std::min(shared, 101376);
      const float with_mma = time_of([&] { return lm_cuda_gemm_tensor(&cuda, &fused, LM_BF16, workspace, cuda.workspace_bytes, 0); });
      cuda.shared_max = shared;
      const float with_library = library(true), wgmma = hopper(base), alone = library(false);
      float tuned = -1;
      base.part[0].residual = nullptr;
      lm_blas_algo algos[LM_BLAS_CANDIDATES];
      const int32_t candidates = lm_cuda_blas_can(&cuda, &base) ? lm_cuda_blas_candidates(&cuda, &base, cuda.workspace_bytes, algos) : 0;
      for (int32_t c = 0; c < candidates; c++) {
        lm_cuda_blas_select(&cuda, &base, cuda.workspace_bytes, &algos[c]);
        const float ms = library(false);
        if (ms > 0 && (tuned < 0 || ms < tuned)) tuned = ms;
      }
      const double flop = 2.0 * l.rows * l.in * out;
      const float own = with_wgmma > 0 ? std::min(with_wgmma, with_mma) : with_mma;
      printf("%-5s %-8s %-3s %7.0f | %8.0f %8.0f %8.0f | %8.0f %8.0f %8.0f | %.2f\n", l.model, l.name, form == LM_NT ? "NT" : "NN",
             flop / 1e9, rate(flop, with_wgmma), rate(flop, with_mma), rate(flop, with_library), rate(flop, wgmma), rate(flop, alone),
             rate(flop, tuned), with_library > 0 ? with_library / own : 0);
    }

  printf("\n%-5s %-8s | %-34s | %-34s | %-34s | %s\n", "", "", "lora_down: ms, GB/s, of floor", "backward without dx", "backward", "forward ms");
  for (const linear &l : linears) {
    const int32_t out = l.out[0] + l.out[1] + l.out[2], r1 = l.out[1] ? l.rank : 0, r2 = l.out[2] ? l.rank : 0, ranks = l.rank + r1 + r2;
    const lm_lora_down_args down = {sizeof down, LM_BF16, s, x, a, nullptr, l.rows, l.in, ranks, l.in, LM_BF16, l.rank, r1, r2, 2, 2, 2, 0};
    bf16 *const b1 = b + (int64_t)l.out[0] * l.rank, *const b2 = b1 + (int64_t)l.out[1] * l.rank;
    float *const da = gradient, *const db = da + (int64_t)ranks * l.in, *const ds = db + (int64_t)out * l.rank;
    lm_lora_linear_backward_args back = {
        sizeof back, LM_BF16, nullptr, da, db, db + (int64_t)l.out[0] * l.rank, db + (int64_t)(l.out[0] + l.out[1]) * l.rank, ds, y, x, s,
        w, a, b, b1, b2, nullptr, l.rows, l.in, out, l.in, out, l.in, ranks, l.in, LM_BF16, LM_BF16, l.out[0], l.out[1], l.out[2],
        l.rank, r1, r2, 2, 2, 2, 0};
    const lm_lora_linear_forward_args forward = {
        sizeof forward, LM_BF16, y, x, w, nullptr, nullptr, s, b, b1, b2, nullptr, l.rows, l.in, out, out, l.in, l.in, out, ranks,
        LM_BF16, LM_BF16, LM_BF16, l.out[0], l.out[1], l.out[2], l.rank, r1, r2, 0};
    const float ms_down = time_of([&] { return lm_cuda_lora_down(&cuda, &down, 0); });
    const float ms_forward = time_of([&] { return lm_cuda_lora_linear_forward(&cuda, &forward, 0); });
    fill<<<1024, 256>>>(y, count[1], 0.1f);
    const float ms_gradient = time_of([&] { return lm_cuda_lora_linear_backward(&cuda, &back, 0); });
    back.dx = logits;
    const float ms_back = time_of([&] { return lm_cuda_lora_linear_backward(&cuda, &back, 0); });
    const double down_bytes = 2.0 * l.rows * (l.in + ranks), gradient_bytes = 2.0 * l.rows * (l.in + out + 3 * ranks);
    printf("%-5s %-8s | %10.4f %8.0f %8.2f       | %10.4f %8.0f %8.2f       | %10.4f                         | %.4f\n", l.model, l.name,
           ms_down, down_bytes / ms_down / 1e6, down_bytes / copy / 1e6 / ms_down, ms_gradient, gradient_bytes / ms_gradient / 1e6,
           gradient_bytes / copy / 1e6 / ms_gradient, ms_back, ms_forward);
  }

  printf("\nhead of 1024 labelled rows\n%-5s | %10s %8s | %10s\n", "", "ms", "TFLOP/s", "evaluation");
  int32_t *labels;
  lm_batch_header *batch;
  const lm_batch_header header = {1024, 1, 1024, 1.0f / 1024};
  CUDA(cudaMalloc(&labels, 1024 * 4));
  CUDA(cudaMalloc(&batch, sizeof header));
  std::vector<int32_t> ids(1024);
  for (int32_t i = 0; i < 1024; i++) ids[(size_t)i] = i;
  CUDA(cudaMemcpy(labels, ids.data(), 4096, cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(batch, &header, sizeof header, cudaMemcpyHostToDevice));
  for (const head &h : heads) {
    lm_linear_cross_entropy_args args = {sizeof args, LM_BF16, gradient, y, logits, s, x, w, labels, labels, batch, 1024, h.width, h.vocab,
                                         0, 1024, h.width, h.width, h.width, LM_BF16, 0, nullptr};
    args.gathered = a;
    const float ms = time_of([&] { return lm_cuda_linear_cross_entropy(&cuda, &args, 0); });
    args.dx = nullptr;
    const float evaluation = time_of([&] { return lm_cuda_linear_cross_entropy(&cuda, &args, 0); });
    printf("%-5s | %10.4f %8.0f | %10.4f\n", h.model, ms, rate(4.0 * 1024 * h.width * h.vocab, ms), evaluation);
  }
  lm_cuda_blas_close(&cuda);
  return 0;
}
