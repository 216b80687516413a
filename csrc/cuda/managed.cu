/* managed.cu: unified memory. More of it than is free on the card would be moved to and fro with every access, and can stop a
 * machine that others use; so that is refused. */
#include "runtime.h"

typedef unsigned long long ull;

static lm_cuda *self(lm_backend *base) { return reinterpret_cast<lm_cuda *>(base); }

static bool attribute(const lm_cuda *cuda, cudaDeviceAttr which) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, which, cuda->device);
  if (error) (void)cudaGetLastError();
  return !error && value;
}

void *lm_cuda_managed_reserve(lm_backend *base, uint64_t bytes) {
  static const char op[] = "lm_managed_reserve";
  lm_cuda *cuda = self(base);
  const lm_host *host = &cuda->host;
  if (lm_cuda_enter(cuda, op)) return NULL;
  if (!attribute(cuda, cudaDevAttrManagedMemory)) {
    host->fail(host->owner, LM_ERR_UNSUPPORTED, "%s: cuda:%d has no managed memory: use device memory and copies", op, cuda->device);
    return NULL;
  }
  size_t free_bytes = 0, total_bytes = 0;
  cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
  void *memory = NULL;
  if (!error) error = bytes > free_bytes ? cudaErrorMemoryAllocation : cudaMallocManaged(&memory, bytes, cudaMemAttachGlobal);
  if (!error) return memory;
  if (error != cudaErrorMemoryAllocation) {
    lm_cuda_fail(cuda, error, op);
    return NULL;
  }
  (void)cudaGetLastError();
  host->fail(host->owner, LM_ERR_OUT_OF_MEMORY,
             "%s: managed memory must fit what is free on the device: requested=%llu free=%llu on cuda:%d: ask for less, or use "
             "host memory and copies",
             op, (ull)bytes, (ull)free_bytes, cuda->device);
  return NULL;
}

void lm_cuda_managed_release(lm_backend *base, void *memory, uint64_t) {
  static const char op[] = "lm_managed_release";
  lm_cuda *cuda = self(base);
  (void)lm_cuda_enter(cuda, op);
  const cudaError_t error = cudaFree(memory);
  if (error) (void)lm_cuda_fail(cuda, error, op);
}

static cudaMemLocation place(const lm_cuda *cuda, bool host) {
  cudaMemLocation location = {};
  location.type = host ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
  location.id = host ? 0 : cuda->device;
  return location;
}

int32_t lm_cuda_managed_advise(lm_backend *base, void *memory, uint64_t bytes, int32_t advice) {
  static const char op[] = "lm_managed_advise";
  static const cudaMemoryAdvise advices[] = {cudaMemAdviseSetReadMostly,         cudaMemAdviseUnsetReadMostly,
                                             cudaMemAdviseSetPreferredLocation,  cudaMemAdviseSetPreferredLocation,
                                             cudaMemAdviseUnsetPreferredLocation, cudaMemAdviseSetAccessedBy,
                                             cudaMemAdviseUnsetAccessedBy};
  lm_cuda *cuda = self(base);
  const int32_t status = lm_cuda_enter(cuda, op);
  /* Without concurrent access pages move by themselves at each launch, and there is nothing to advise. */
  if (status || !attribute(cuda, cudaDevAttrConcurrentManagedAccess)) return status;
  const cudaMemLocation to = place(cuda, advice == LM_ADVISE_PREFER_HOST);
  const cudaError_t error = cudaMemAdvise(memory, bytes, advices[advice - LM_ADVISE_READ_MOSTLY], to);
  return error ? lm_cuda_fail(cuda, error, op) : LM_OK;
}

int32_t lm_cuda_managed_prefetch(lm_backend *base, lm_backend_stream *stream, void *memory, uint64_t bytes, int32_t to_host) {
  static const char op[] = "lm_managed_prefetch";
  lm_cuda *cuda = self(base);
  const int32_t status = lm_cuda_enter(cuda, op);
  if (status || !attribute(cuda, cudaDevAttrConcurrentManagedAccess)) return status;
  if (stream->state->status.load(std::memory_order_relaxed) != LM_OK) return LM_OK; /* a stream that failed skips its work */
  const cudaError_t error = cudaMemPrefetchAsync(memory, bytes, place(cuda, to_host != 0), 0, stream->handle);
  lm_cuda_enqueued(stream);
  return error ? lm_cuda_fail(cuda, error, op) : LM_OK;
}
