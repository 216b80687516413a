/* cuda_memory_test.cu: memory of the CUDA backend that core builds on: ranges of pages, managed memory, failures to lock pages,
 * and the pool and pageable copies over them. Asks for little managed memory: more than the card holds could stop it. */
#include <cuda_runtime.h>

#include "cuda_vtable.h"

#define MIB (UINT64_C(1) << 20)

/* The backend is linked into this program, so that a call of the runtime can be made to fail for real. */
extern "C" lm_backend *lm_backend_open(uint32_t version, const lm_host *host, int32_t index, int32_t threads);
extern "C" cudaError_t __real_cudaHostRegister(void *memory, size_t bytes, unsigned flags);
static bool refuse_to_register;

extern "C" cudaError_t __wrap_cudaHostRegister(void *memory, size_t bytes, unsigned flags) {
  return __real_cudaHostRegister(refuse_to_register ? NULL : memory, bytes, flags);
}

/* Scales 1,024 floats of 3 in place of whatever is there. */
static bool launches(lm_backend_stream *stream) {
  float *x = floats(api->mem_reserve(backend, 4096)), *back = floats(api->pinned_reserve(backend, 4096, 0));
  bool good = x && back;
  for (int i = 0; good && i < 1024; i++) back[i] = 3;
  good = good && !api->copy(backend, stream, x, back, 4096) && !scale(stream, x, x, 1024, 2) &&
         !api->copy(backend, stream, back, x, 4096) && !wait_all(stream) && back[0] == 6 && back[1023] == 6;
  if (x) api->mem_release(backend, x, 4096);
  if (back) api->pinned_release(backend, back, 4096);
  return good;
}

static void test_ranges(lm_backend_stream *stream) {
  const uint64_t page = LM_RANGE_PAGE, before = field_of("memoryFree");
  uint64_t space = 0;
  uint8_t *range = bytes(api->range_reserve(backend, &space));
  CHECK(range && space >= 4 * field_of("memoryTotal") && (uintptr_t)range % page == 0 && space % page == 0, "range_reserve: %s", text);
  if (!range) return;
  uint8_t *host_side = bytes(api->pinned_reserve(backend, 8 * page, 0));
  CHECK(field_of("memoryFree") + 64 * MIB > before, "addresses take no memory");
  OK(api->range_commit(backend, range, 4 * page));
  OK(api->range_commit(backend, range + 4 * page, page)); /* beside the others: one piece for kernels and copies */
  OK(api->fill(backend, stream, range, 7, 5 * page));
  OK(api->copy(backend, stream, host_side, range, 5 * page));
  OK(wait_all(stream));
  CHECK(all_bytes(host_side, 5 * page, 7), "a fill over pages of two commits");
  float *numbers = floats(host_side);
  for (uint64_t i = 0; i < 5 * page / 4; i++) numbers[i] = (float)(i % 1000);
  OK(api->copy(backend, stream, range, host_side, 5 * page));
  OK(scale(stream, range, range, (int64_t)(5 * page / 4), 2));
  OK(api->copy(backend, stream, host_side, range, 5 * page));
  OK(wait_all(stream));
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < 5 * page / 4; i++) wrong += numbers[i] != 2 * (float)(i % 1000);
  CHECK(wrong == 0, "a kernel over pages of two commits: %llu wrong", (unsigned long long)wrong);
  /* One page from the middle to the far end of the addresses. */
  api->range_decommit(backend, range + 2 * page, page);
  uint8_t *far = range + space - page;
  OK(api->range_commit(backend, far, page));
  OK(api->fill(backend, stream, far, 9, page));
  OK(api->copy(backend, stream, host_side, far, page));
  OK(api->copy(backend, stream, host_side + page, range + 3 * page, page));
  OK(wait_all(stream));
  CHECK(all_bytes(host_side, page, 9) && floats(host_side + page)[1] == 2 * (float)((3 * page / 4 + 1) % 1000), "a page that moved");
  /* More than there is: nothing of it stays, and the device works on. */
  const uint64_t much = (field_of("memoryFree") / page + 64) * page, held = field_of("memoryFree");
  CHECK(api->range_commit(backend, range + 64 * page, much) == LM_ERR_OUT_OF_MEMORY && failed_with(LM_ERR_OUT_OF_MEMORY, "out of device memory"),
        "range_commit of %llu", (unsigned long long)much);
  CHECK(field_of("memoryFree") + 64 * MIB > held && launches(stream), "after a commit that failed: %s", text);
  api->range_decommit(backend, range, 2 * page);
  api->range_decommit(backend, range + 3 * page, 2 * page);
  api->range_decommit(backend, far, page);
  api->range_release(backend, range, space);
  api->pinned_release(backend, host_side, 8 * page);
  CHECK(field_of("memoryFree") + 64 * MIB > before, "memory that was given back is free");
}

static void test_managed(lm_backend_stream *stream) {
  const uint64_t size = 8 * MIB, count = size / 4;
  int managed = 0;
  CHECK(cudaDeviceGetAttribute(&managed, cudaDevAttrManagedMemory, 0) == cudaSuccess, "attribute");
  float *x = floats(api->managed_reserve(backend, size)), *small = floats(api->managed_reserve(backend, 1));
  if (!managed) {
    CHECK(!x && !small && failed_with(LM_ERR_UNSUPPORTED, "no managed memory"), "a device without managed memory says so");
    return;
  }
  CHECK(x && small && (uintptr_t)x % 4096 == 0 && (uintptr_t)small % 4096 == 0, "managed_reserve: %p %p %s", (void *)x, (void *)small, text);
  if (!x || !small) return;
  for (uint64_t i = 0; i < count; i++) x[i] = (float)(i % 1000);
  for (int32_t advice = LM_ADVISE_READ_MOSTLY; advice <= LM_UNADVISE_ACCESSED_BY; advice++) OK(api->managed_advise(backend, x, size, advice));
  OK(api->managed_prefetch(backend, stream, x, size, 0));
  OK(scale(stream, x, x, (int64_t)count, 2));
  OK(api->managed_prefetch(backend, stream, x, size, 1));
  OK(wait_all(stream));
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < count; i++) wrong += x[i] != 2 * (float)(i % 1000);
  CHECK(wrong == 0, "managed memory from both sides: %llu wrong", (unsigned long long)wrong);
  /* Refused by the numbers alone: such memory is never asked for. Mutant: ask whatever is free. */
  for (uint64_t size_refused : {field_of("memoryFree") + 64 * MIB, field_of("memoryTotal") + 1, UINT64_MAX}) {
    CHECK(api->managed_reserve(backend, size_refused) == NULL && failed_with(LM_ERR_OUT_OF_MEMORY, "must fit what is free"), "managed_reserve(%llu)",
          (unsigned long long)size_refused);
    CHECK(launches(stream), "a launch after a refusal: %s", text);
  }
  api->managed_release(backend, x, size);
  api->managed_release(backend, small, 1);
}

/* A failed registration leaves no error for the next launch to find. Mutant: leave out cudaGetLastError in pin_failed. */
static void test_failed_pin(lm_backend_stream *stream) {
  void *x = api->mem_reserve(backend, 4096);
  for (int i = 0; i < 3; i++) {
    refuse_to_register = true;
    CHECK(api->pinned_reserve(backend, MIB, 0) == NULL && failed_with(LM_ERR_PINNED, "page-locked host memory is not available"), "pinned_reserve");
    refuse_to_register = false;
    OK(scale(stream, x, x, 1024, 2)); /* straight after it, on this thread */
    CHECK(launches(stream), "a launch after a failed pin: %s", text);
  }
  OK(wait_all(stream));
  api->mem_release(backend, x, 4096);
}

/* Pools and copies through the public interface ------------------------------------------------------------------------ */

static std::string last_error(lm_ctx *ctx) {
  char said[2048];
  lm_last_error(ctx, said, sizeof said);
  return said;
}

/* Blocks of all sizes in two streams near the limit, so that pages move while the device works; each is read back. */
static void test_pool(lm_ctx *ctx) {
  enum { LIVE = 12, ROUNDS = 600 };
  struct {
    uint64_t handle, size;
    uint8_t tag;
    int stream;
  } live[LIVE] = {};
  lm_stream *streams[2] = {lm_stream_create(ctx, 0), lm_stream_create(ctx, 0)};
  lm_pool *pool = lm_pool_create(ctx, 48 * MIB);
  lm_pinned *pinned = lm_pinned_create(ctx, 8 * MIB, 0);
  CHECK(pool && pinned, "objects: %s", last_error(ctx).c_str());
  if (!pool || !pinned) return;
  uint8_t *seen = bytes(lm_pinned_data(pinned));
  uint64_t random = 88172645463325252u;
  int wrong = 0, refused = 0;
  for (int round = 0; round < ROUNDS + LIVE; round++) {
    auto &one = live[round % LIVE];
    if (one.handle) {
      lm_stream *stream = streams[one.stream];
      wrong += lm_mem_copy(ctx, seen, lm_pool_pointer(pool, one.handle), one.size, stream) != LM_OK;
      wrong += lm_pool_free(pool, one.handle, stream) != LM_OK || lm_stream_wait(stream) != LM_OK;
      wrong += !all_bytes(seen, one.size, one.tag);
      one.handle = 0;
    }
    if (round >= ROUNDS) continue;
    random = random * 6364136223846793005u + 1442695040888963407u;
    one = {0, 1 + (random >> 33) % (random >> 20 & 1 ? 8 * MIB : MIB), (uint8_t)(round + 1), (int)(random >> 21 & 1)};
    one.handle = lm_pool_alloc(pool, one.size, "x", streams[one.stream]);
    refused += one.handle == 0;
    if (one.handle) wrong += lm_mem_fill(ctx, lm_pool_pointer(pool, one.handle), one.tag, one.size, streams[one.stream]) != LM_OK;
  }
  lm_pool_stats stats;
  lm_pool_stats_get(pool, &stats);
  CHECK(wrong == 0 && stats.reserved <= 48 * MIB && stats.current == 0, "%d wrong: %s", wrong, last_error(ctx).c_str());
  printf("pool: %d of %d refused, %llu page calls, %llu retries\n", refused, ROUNDS, (unsigned long long)stats.driver_calls,
         (unsigned long long)stats.retries);
  OK(lm_pool_trim(pool));
  lm_pool_stats_get(pool, &stats);
  CHECK(stats.reserved == 0, "trim left %llu", (unsigned long long)stats.reserved);
  CHECK(lm_pool_alloc(pool, UINT64_C(1) << 50, "much", streams[0]) == 0, "a petabyte");
  lm_pool *open = lm_pool_create(ctx, 0);
  CHECK(lm_pool_alloc(open, UINT64_C(1) << 42, "much", streams[0]) == 0 && last_error(ctx).find("out of memory") != std::string::npos,
        "more than the device has: %s", last_error(ctx).c_str());
  lm_pool_destroy(open);
  lm_pool_destroy(pool);
  lm_pinned_destroy(pinned);
  for (lm_stream *stream : streams) lm_stream_destroy(stream);
}

/* Pageable memory of a pinned pool at its cap: 1 MiB x 200 each way, changed by the host as soon as the call is back. */
static void test_pageable(lm_ctx *ctx) {
  lm_stream *stream = lm_stream_create(ctx, 0);
  lm_pinned_pool *pool = lm_pinned_pool_create(ctx, 4096);
  lm_pinned *source = lm_pinned_pool_acquire(pool, MIB, 0), *target = lm_pinned_pool_acquire(pool, MIB, 0);
  void *device = lm_mem_reserve(ctx, MIB);
  CHECK(source && target && device && !lm_pinned_locked(source), "pageable buffers: %s", last_error(ctx).c_str());
  if (!source || !target || !device) return;
  int wrong = 0;
  for (int i = 0; i < 200; i++) {
    memset(lm_pinned_data(source), i + 1, MIB);
    wrong += lm_mem_copy(ctx, device, lm_pinned_data(source), MIB, stream) != LM_OK;
    memset(lm_pinned_data(source), 0xee, MIB); /* the copy has ended */
    wrong += lm_mem_copy(ctx, lm_pinned_data(target), device, MIB, stream) != LM_OK;
    wrong += !all_bytes(lm_pinned_data(target), MIB, (uint8_t)(i + 1));
  }
  CHECK(wrong == 0, "pageable copies: %d wrong: %s", wrong, last_error(ctx).c_str());
  lm_pinned_destroy(source);
  lm_pinned_destroy(target);
  lm_pinned_pool_destroy(pool);
  OK(lm_mem_release(ctx, device));
  lm_stream_destroy(stream);
}

int main(void) {
  backend = lm_backend_open(LM_BACKEND_VERSION, &host, 0, 0);
  if (!backend) {
    printf("skipped: %s\n0 passed, 0 failed\n", text);
    return 0;
  }
  api = backend->api;
  lm_backend_stream *stream = new_stream();
  CHECK(launches(stream), "a launch: %s", text);
  test_ranges(stream);
  test_managed(stream);
  test_failed_pin(stream);
  drop(stream);
  OK(api->synchronize(backend));
  api->close(backend);
  char error[1024];
  lm_ctx *ctx = lm_ctx_open("cuda:0", 0, error, sizeof error);
  CHECK(ctx != NULL, "lm_ctx_open: %s", error);
  if (ctx) {
    test_pool(ctx);
    test_pageable(ctx);
    lm_ctx_destroy(ctx);
  }
  return report();
}
