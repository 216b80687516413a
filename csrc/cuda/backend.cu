/* backend.cu: the CUDA device behind core's vtable: opening, information, and kernels, copies and fills on streams. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cublaslt.h"
#include "gemm_choice.h"
#include "kernels.h"
#include "runtime.h"

typedef unsigned long long ull;

#define OLDEST_CAPABILITY 80 /* Ampere: bf16 tensor cores and asynchronous copies to shared memory */

lm_cuda_kernel *lm_cuda_kernels;

static lm_cuda *self(lm_backend *base) { return reinterpret_cast<lm_cuda *>(base); }

/* Kernels, copies, fills ----------------------------------------------------------------------------------------- */

#define KERNEL_RUN(op)                                                                          \
  static cudaError_t run_##op(lm_cuda *cuda, const void *args, cudaStream_t stream) {           \
    return lm_cuda_##op(cuda, static_cast<const lm_##op##_args *>(args), stream);               \
  }
LM_KERNEL_MAP(KERNEL_RUN)

#define KERNEL_ROW(op) {"lm_" #op, run_##op},
static const struct {
  const char *name;
  lm_cuda_kernel_fn run;
} kernels[LM_KERNEL_COUNT] = {LM_KERNEL_MAP(KERNEL_ROW)};

/* A stream that failed skips its work. Only what is enqueued after the failure was seen can be skipped: the device runs ahead
 * of the host work that fails it. */
static bool skips(lm_backend_stream *stream) { return stream->state->status.load(std::memory_order_relaxed) != LM_OK; }

static int32_t enqueued(lm_backend_stream *stream, cudaError_t error, const char *op) {
  lm_cuda_enqueued(stream);
  return error ? lm_cuda_fail(stream->cuda, error, op) : LM_OK;
}

static int32_t launch(lm_backend *base, lm_backend_stream *stream, int32_t kernel, const void *args, uint32_t) {
  const int32_t status = lm_cuda_enter(self(base), kernels[kernel].name);
  if (status || skips(stream)) return status;
  return enqueued(stream, kernels[kernel].run(self(base), args, stream->handle), kernels[kernel].name);
}

static int32_t copy(lm_backend *base, lm_backend_stream *stream, void *dst, const void *src, uint64_t bytes) {
  static const char op[] = "lm_mem_copy";
  const int32_t status = lm_cuda_enter(self(base), op);
  if (status || skips(stream)) return status;
  return enqueued(stream, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream->handle), op);
}

static int32_t fill(lm_backend *base, lm_backend_stream *stream, void *dst, int32_t value, uint64_t bytes) {
  static const char op[] = "lm_mem_fill";
  const int32_t status = lm_cuda_enter(self(base), op);
  if (status || skips(stream)) return status;
  return enqueued(stream, cudaMemsetAsync(dst, value & 0xff, bytes, stream->handle), op);
}

/* Information ---------------------------------------------------------------------------------------------------- */

/* Copies text without what would need escaping in JSON. */
static void plain(char *to, size_t cap, const char *from) {
  size_t length = 0;
  for (; *from && length + 1 < cap; from++) {
    if (*from >= ' ' && *from < 127 && *from != '"' && *from != '\\') to[length++] = *from;
  }
  to[length] = 0;
}

static int32_t info(lm_backend *base, char *text, uint64_t cap) {
  lm_cuda *cuda = self(base);
  const cudaDeviceProp &p = cuda->properties;
  size_t free_bytes = 0, total_bytes = 0;
  int driver = 0, runtime = 0;
  char bus[32] = "", name[sizeof p.name], gemm[256];
  plain(name, sizeof name, p.name);
  plain(gemm, sizeof gemm, lm_cuda_blas_text(cuda));
  (void)lm_cuda_enter(cuda, "lm_ctx_info");
  (void)cudaMemGetInfo(&free_bytes, &total_bytes);
  (void)cudaDriverGetVersion(&driver);
  (void)cudaRuntimeGetVersion(&runtime);
  (void)cudaDeviceGetPCIBusId(bus, sizeof bus, cuda->device);
  (void)cudaGetLastError();
  return 1 + snprintf(text, cap,
                      "{\"kind\":\"cuda\",\"name\":\"%s\",\"computeCapability\":\"%d.%d\",\"driver\":\"%d.%d\","
                      "\"runtime\":\"%d.%d\",\"memoryTotal\":%llu,\"memoryFree\":%llu,\"hostMemoryFree\":%llu,\"multiprocessors\":%d,"
                      "\"sharedMemory\":%d,\"l2\":%lld,\"pciBus\":\"%s\",\"gemm\":\"%s\",\"streamWorkspace\":%llu}",
                      name, p.major, p.minor, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10,
                      (ull)total_bytes, (ull)free_bytes, (ull)lm_cuda_host_available(), cuda->sm_count, cuda->shared_max,
                      (long long)cuda->l2_bytes, bus, gemm, (ull)cuda->workspace_bytes);
}

/* Choices -------------------------------------------------------------------------------------------------------- */

static int32_t choices_time(lm_backend *base, int32_t on) {
  lm_cuda_choices_time(self(base), on != 0);
  return LM_OK;
}

static int32_t choices_write(lm_backend *base, char *text, uint64_t cap) { return lm_cuda_choices_write(self(base), text, cap); }

static int32_t choices_read(lm_backend *base, const char *text) {
  lm_cuda *cuda = self(base);
  if (lm_cuda_choices_read(cuda, text)) return LM_OK;
  return cuda->host.fail(cuda->host.owner, LM_ERR_ARGUMENT,
                         "lm_choices_read: the choices are not understood: give what lm_choices_write wrote, or none");
}

/* Life ----------------------------------------------------------------------------------------------------------- */

static void backend_free(lm_cuda *cuda) {
  const lm_host host = cuda->host;
  if (cuda->runtime) {
    if (cuda->runtime->internal) (void)cudaStreamDestroy(cuda->runtime->internal);
    pthread_mutex_destroy(&cuda->runtime->mutex);
  }
  (void)cudaGetLastError();
  host.release(cuda->runtime);
  host.release(cuda);
}

/* The device's context stays: other users of CUDA in the process share it. */
static void backend_close(lm_backend *base) {
  lm_cuda *cuda = self(base);
  (void)lm_cuda_enter(cuda, "lm_ctx_destroy");
  lm_cuda_departed_free(cuda);
  lm_cuda_blas_close(cuda);
  backend_free(cuda);
}

static const lm_backend_api api = {
    .version = LM_BACKEND_VERSION,
    .reserved = 0,
    .close = backend_close,
    .info = info,
    .synchronize = lm_cuda_synchronize,
    .mem_reserve = lm_cuda_mem_reserve,
    .mem_release = lm_cuda_mem_release,
    .range_reserve = lm_cuda_range_reserve,
    .range_commit = lm_cuda_range_commit,
    .range_decommit = lm_cuda_range_decommit,
    .range_release = lm_cuda_range_release,
    .pinned_reserve = lm_cuda_pinned_reserve,
    .pinned_release = lm_cuda_pinned_release,
    .stream_create = lm_cuda_stream_create,
    .stream_close = lm_cuda_stream_close,
    .stream_free = lm_cuda_stream_free,
    .stream_mark = lm_cuda_stream_mark,
    .stream_query = lm_cuda_stream_query,
    .stream_wait = lm_cuda_stream_wait,
    .stream_follow = lm_cuda_stream_follow,
    .stream_call = lm_cuda_stream_call,
    .launch = launch,
    .copy = copy,
    .fill = fill,
    .event_create = lm_cuda_event_create,
    .event_destroy = lm_cuda_event_destroy,
    .event_record = lm_cuda_event_record,
    .event_query = lm_cuda_event_query,
    .event_wait = lm_cuda_event_wait,
    .event_elapsed = lm_cuda_event_elapsed,
    .stream_wait_event = lm_cuda_event_follow,
    .graph_begin = lm_cuda_graph_begin,
    .graph_end = lm_cuda_graph_end,
    .graph_launch = lm_cuda_graph_launch,
    .graph_destroy = lm_cuda_graph_destroy,
    .profile_push = lm_cuda_profile_push,
    .profile_pop = lm_cuda_profile_pop,
    .managed_reserve = lm_cuda_managed_reserve,
    .managed_release = lm_cuda_managed_release,
    .managed_advise = lm_cuda_managed_advise,
    .managed_prefetch = lm_cuda_managed_prefetch,
    .choices_time = choices_time,
    .choices_write = choices_write,
    .choices_read = choices_read,
};

/* A load inside a step would stop every stream and take memory, so it happens here. */
static cudaError_t load_kernels(void) {
  cudaError_t error = cudaSuccess;
  for (const lm_cuda_kernel *kernel = lm_cuda_kernels; kernel && !error; kernel = kernel->next) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, kernel->function);
  }
  return error;
}

/* Finds the device and makes its context. @return LM_OK, or the reported failure */
static int32_t open_device(lm_cuda *cuda) {
  static const char op[] = "lm_ctx_open";
  const lm_host *host = &cuda->host;
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || (!error && count == 0)) {
    (void)cudaGetLastError();
    return host->fail(host->owner, LM_ERR_NO_DEVICE,
                      "%s: no CUDA device: the driver finds none: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device "
                      "\"cpu\"",
                      op);
  }
  if (!error && cuda->device >= count) {
    return host->fail(host->owner, LM_ERR_NO_DEVICE, "%s: no such CUDA device: cuda:%d of %d: use cuda:0 to cuda:%d", op,
                      cuda->device, count, count - 1);
  }
  if (!error) error = cudaGetDeviceProperties(&cuda->properties, cuda->device);
  if (error) return lm_cuda_fail(cuda, error, op);
  const cudaDeviceProp &p = cuda->properties;
  cuda->capability = 10 * p.major + p.minor;
  cuda->sm_count = p.multiProcessorCount;
  cuda->shared_max = (int32_t)p.sharedMemPerBlockOptin;
  cuda->l2_bytes = p.l2CacheSize;
  const char *shared = getenv("LORAMEM_CUDA_SHARED");
  if (shared && atoi(shared) > 0 && atoi(shared) < cuda->shared_max) cuda->shared_max = atoi(shared);
  if (cuda->capability < OLDEST_CAPABILITY) {
    return host->fail(host->owner, LM_ERR_UNSUPPORTED,
                      "%s: the GPU is too old: %s has compute capability %d.%d, %d.%d is needed: use device \"cpu\"", op, p.name,
                      p.major, p.minor, OLDEST_CAPABILITY / 10, OLDEST_CAPABILITY % 10);
  }
  error = cudaSetDevice(cuda->device);
  if (!error) error = load_kernels();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    (void)cudaGetLastError();
    return host->fail(host->owner, LM_ERR_UNSUPPORTED,
                      "%s: this build has no code for the GPU: %s has compute capability %d.%d: build with "
                      "-DCMAKE_CUDA_ARCHITECTURES=%d-real",
                      op, p.name, p.major, p.minor, cuda->capability);
  }
  if (!error) error = cudaStreamCreateWithFlags(&cuda->runtime->internal, cudaStreamNonBlocking);
  return error ? lm_cuda_fail(cuda, error, op) : LM_OK;
}

extern "C" LM_API lm_backend *lm_backend_open(uint32_t version, const lm_host *host, int32_t index, int32_t) {
  if (version != LM_BACKEND_VERSION) return NULL;
  if (lm_cuda_driver_check(host)) return NULL;
  lm_cuda *cuda = static_cast<lm_cuda *>(host->alloc(host->owner, sizeof *cuda));
  if (cuda) cuda->runtime = static_cast<lm_cuda_runtime *>(host->alloc(host->owner, sizeof *cuda->runtime));
  if (!cuda || !cuda->runtime) {
    host->release(cuda);
    host->fail(host->owner, LM_ERR_OUT_OF_MEMORY, "lm_ctx_open: out of host memory: %zu bytes of heap", sizeof *cuda);
    return NULL;
  }
  cuda->base.api = &api;
  cuda->host = *host;
  cuda->device = index;
  cuda->runtime->spin = sysconf(_SC_NPROCESSORS_ONLN) > 1;
  pthread_mutex_init(&cuda->runtime->mutex, NULL);
  if (open_device(cuda)) {
    backend_free(cuda);
    return NULL;
  }
  lm_cuda_blas_open(cuda);
  return &cuda->base;
}
