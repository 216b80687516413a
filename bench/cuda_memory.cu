/* cuda_memory.cu: what memory costs in C on a GPU, ours beside the runtime's own, in one process. bench/memory.ts runs it.
 *   cmake --build build --target cuda_benches && build/tests/cuda_memory
 * Prints one JSON object per line: a name, and nanoseconds per pair of calls or GB/s, the median of several rounds in which
 * the candidates take turns. */
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "../csrc/include/loramem.h"

#define ROUNDS 7
#define MIB (UINT64_C(1) << 20)
#define COPY (256 * MIB)
#define COPIES 8

static lm_ctx *ctx;

static void check(bool good, const char *what) {
  if (good) return;
  char text[2048] = "";
  if (ctx) lm_last_error(ctx, text, sizeof text);
  printf("%s failed: %s %s\n", what, text, cudaGetErrorString(cudaGetLastError()));
  exit(1);
}

#define CUDA(call) check((call) == cudaSuccess, #call)
#define LM(call) check((call) == LM_OK, #call)

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

struct candidate {
  const char *name;
  int calls;
  std::function<void()> call;
  double bytes; /* of a call, for GB/s; 0 = nanoseconds */
  std::function<void()> end;
  std::vector<double> times;
};

static void measure(std::vector<candidate> candidates) {
  for (candidate &one : candidates) { /* warm */
    one.call();
    one.end();
  }
  for (int round = 0; round < ROUNDS; round++) {
    for (candidate &one : candidates) {
      const double start = now();
      for (int i = 0; i < one.calls; i++) one.call();
      one.end();
      one.times.push_back((now() - start) / one.calls);
    }
  }
  for (candidate &one : candidates) {
    std::sort(one.times.begin(), one.times.end());
    const double ns = one.times[ROUNDS / 2];
    if (one.bytes > 0) printf("{\"name\":\"%s\",\"gbPerSecond\":%.2f}\n", one.name, one.bytes / ns);
    else printf("{\"name\":\"%s\",\"ns\":%.1f}\n", one.name, ns);
    fflush(stdout);
  }
}

static void nothing(void) {}

int main(void) {
  char error[1024];
  ctx = lm_ctx_open("cuda:0", 0, error, sizeof error);
  if (!ctx) {
    printf("%s\n", error);
    return 1;
  }
  lm_stream *stream = lm_stream_create(ctx, 0);
  lm_pool *pool = lm_pool_create(ctx, 0);
  lm_pinned_pool *pinned_pool = lm_pinned_pool_create(ctx, 0);
  lm_pinned *pinned = lm_pinned_create(ctx, COPY, 0);
  void *device = lm_mem_reserve(ctx, COPY), *raw_device = NULL, *raw_host = NULL;
  check(stream && pool && pinned_pool && pinned && device, "setting up");
  cudaStream_t raw;
  CUDA(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
  CUDA(cudaMalloc(&raw_device, COPY));
  CUDA(cudaMallocHost(&raw_host, COPY));
  cudaMemPool_t driver_pool;
  uint64_t keep = UINT64_MAX;
  CUDA(cudaDeviceGetDefaultMemPool(&driver_pool, 0));
  CUDA(cudaMemPoolSetAttribute(driver_pool, cudaMemPoolAttrReleaseThreshold, &keep));
  const auto raw_end = [&] { CUDA(cudaStreamSynchronize(raw)); };
  const auto end = [&] { LM(lm_stream_wait(stream)); };

  measure({{"C: pool alloc + free, 1 MiB", 200000,
            [&] {
              const uint64_t block = lm_pool_alloc(pool, MIB, "x", stream);
              if (lm_pool_free(pool, block, stream)) check(false, "the pool");
            },
            0, end, {}},
           {"C: cudaMallocAsync + cudaFreeAsync, 1 MiB", 20000,
            [&] {
              void *memory;
              CUDA(cudaMallocAsync(&memory, MIB, raw));
              CUDA(cudaFreeAsync(memory, raw));
            },
            0, raw_end, {}},
           {"C: cudaMalloc + cudaFree, 1 MiB", 100,
            [&] {
              void *memory;
              CUDA(cudaMalloc(&memory, MIB));
              CUDA(cudaFree(memory));
            },
            0, nothing, {}}});
  measure({{"C: pinned pool acquire + release, 1 MiB", 100000,
            [&] { lm_pinned_destroy(lm_pinned_pool_acquire(pinned_pool, MIB, 0)); }, 0, nothing, {}},
           {"C: cudaMallocHost + cudaFreeHost, 1 MiB", 20,
            [&] {
              void *memory;
              CUDA(cudaMallocHost(&memory, MIB));
              CUDA(cudaFreeHost(memory));
            },
            0, nothing, {}}});
  measure({{"C: 256 MiB to the device, lm_mem_copy", COPIES,
            [&] { LM(lm_mem_copy(ctx, device, lm_pinned_data(pinned), COPY, stream)); }, (double)COPY, end, {}},
           {"C: 256 MiB to the device, cudaMemcpyAsync", COPIES,
            [&] { CUDA(cudaMemcpyAsync(raw_device, raw_host, COPY, cudaMemcpyHostToDevice, raw)); }, (double)COPY, raw_end, {}}});
  measure({{"C: 256 MiB to the host, lm_mem_copy", COPIES,
            [&] { LM(lm_mem_copy(ctx, lm_pinned_data(pinned), device, COPY, stream)); }, (double)COPY, end, {}},
           {"C: 256 MiB to the host, cudaMemcpyAsync", COPIES,
            [&] { CUDA(cudaMemcpyAsync(raw_host, raw_device, COPY, cudaMemcpyDeviceToHost, raw)); }, (double)COPY, raw_end, {}}});
  lm_ctx_destroy(ctx);
  return 0;
}
