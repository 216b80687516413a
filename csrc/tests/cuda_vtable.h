/* cuda_vtable.h: what the tests of the CUDA backend's vtable share: the plugin opened from beside the library, as the library does
 * it, a host for it, and gates that hold a stream up. */
#ifndef LM_CUDA_VTABLE_H
#define LM_CUDA_VTABLE_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <vector>

#include "../cuda/runtime.h"

static int passed, failed;

#define CHECK(condition, ...)                     \
  do {                                            \
    if (condition) {                              \
      passed++;                                   \
    } else if (failed++ < 60) {                   \
      printf("%s:%d: ", __FILE__, __LINE__);      \
      printf(__VA_ARGS__);                        \
      printf("\n");                               \
    }                                             \
  } while (0)

/* Host side of the backend ------------------------------------------------------------------------------------------- */

static pthread_mutex_t text_mutex = PTHREAD_MUTEX_INITIALIZER;
static char text[2048];
static int32_t text_status;
static std::atomic<uint64_t> allocations, fail_at; /* the fail_at-th allocation fails */

static inline int32_t host_fail(void *, int32_t status, const char *format, ...) {
  va_list values;
  va_start(values, format);
  pthread_mutex_lock(&text_mutex);
  vsnprintf(text, sizeof text, format, values);
  text_status = status;
  pthread_mutex_unlock(&text_mutex);
  va_end(values);
  return status;
}

static inline void *host_alloc(void *, uint64_t bytes) {
  return ++allocations == fail_at ? NULL : calloc(1, bytes);
}

static const lm_host host = {NULL, host_fail, host_alloc, free};

static inline bool failed_with(int32_t status, const char *part) {
  if (text_status == status && strstr(text, part)) return true;
  printf("  last failure: %d %s\n", text_status, text);
  return false;
}

static inline lm_backend_open_fn open_plugin(void) {
  Dl_info library;
  if (lm_abi_version() == 0 || !dladdr(dlsym(RTLD_DEFAULT, "lm_abi_version"), &library)) return NULL;
  std::string path = library.dli_fname;
  path = path.substr(0, path.rfind('/') + 1) + "libloramem_cuda.so";
  void *plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!plugin) printf("%s\n", dlerror());
  return plugin ? reinterpret_cast<lm_backend_open_fn>(dlsym(plugin, "lm_backend_open")) : NULL;
}

static lm_backend_open_fn open_backend;
static lm_backend *backend;
static const lm_backend_api *api;

/* A gate holds a stream up until it is opened: the way to say in which order things happen. It is a kernel that looks at a word
 * of host memory: host work would not do, because the driver runs that of all streams one after the other. */
enum { GATES = 64 };
static int32_t *gate_words; /* mapped page-locked memory, allocated before any gate is closed */
static int gates_used;

/* Gives up in the end, so that a failure is not a hang. */
static const uint64_t GATE_MILLISECONDS = 20000;
__global__ void gate_wait(const volatile int32_t *word, uint64_t milliseconds) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (*word == 0 && now - start < milliseconds * 1000000);
}

struct gate {
  int32_t *word = NULL;
};

static inline void gate_hold(gate &g, lm_backend_stream *stream, uint64_t milliseconds = GATE_MILLISECONDS) {
  g.word = gate_words + gates_used++ % GATES;
  __atomic_store_n(g.word, 0, __ATOMIC_SEQ_CST);
  gate_wait<<<1, 1, 0, stream->handle>>>(g.word, milliseconds);
  const cudaError_t error = cudaGetLastError();
  CHECK(error == cudaSuccess, "gate: %s", cudaGetErrorString(error));
  lm_cuda_enqueued(stream);
}

static inline void gate_open(gate &g) { __atomic_store_n(g.word, 1, __ATOMIC_SEQ_CST); }

/* Loads the kernel: later that would wait for the streams that it holds up. */
static inline bool gates_ready(void) {
  if (cudaHostAlloc(reinterpret_cast<void **>(&gate_words), GATES * sizeof *gate_words, cudaHostAllocMapped)) return false;
  gate_words[0] = 1;
  gate_wait<<<1, 1>>>(gate_words, GATE_MILLISECONDS);
  return cudaDeviceSynchronize() == cudaSuccess;
}

static inline lm_backend_stream *new_stream(int32_t priority = 0) {
  lm_backend_stream *stream = api->stream_create(backend, priority);
  CHECK(stream != NULL, "stream_create: %s", text);
  return stream;
}

static inline void drop(lm_backend_stream *stream) {
  api->stream_close(backend, stream);
  api->stream_free(backend, stream);
}

static inline uint64_t mark(lm_backend_stream *stream) { return api->stream_mark(backend, stream); }
static inline int32_t query(lm_backend_stream *stream, uint64_t at) { return api->stream_query(backend, stream, at); }
static inline int32_t wait_all(lm_backend_stream *stream) { return api->stream_wait(backend, stream, mark(stream)); }

#define OK(call) CHECK((call) == LM_OK, #call ": %s", text)

static inline uint64_t field_of(const char *name) {
  char json[4096];
  api->info(backend, json, sizeof json);
  const char *at = strstr(json, (std::string("\"") + name + "\":").c_str());
  return at ? strtoull(at + strlen(name) + 3, NULL, 10) : 0;
}

static inline int32_t scale(lm_backend_stream *stream, void *y, const void *x, int64_t n, float factor) {
  const lm_scale_args args = {sizeof args, LM_F32, y, x, n, factor, 0};
  return api->launch(backend, stream, LM_KERNEL_scale, &args, sizeof args);
}

static inline float *floats(void *memory) { return static_cast<float *>(memory); }
static inline uint8_t *bytes(void *memory) { return static_cast<uint8_t *>(memory); }

static inline bool all_bytes(const void *memory, uint64_t count, uint8_t value) {
  const uint8_t *at = static_cast<const uint8_t *>(memory);
  for (uint64_t i = 0; i < count; i++)
    if (at[i] != value) return false;
  return true;
}

static inline int32_t note_status(void *arg, int32_t status) {
  *static_cast<std::atomic<int32_t> *>(arg) = status;
  return LM_OK;
}

/* Opens the device. @return false if there is none, which was said then */
static inline bool open_device(void) {
  open_backend = open_plugin();
  backend = open_backend ? open_backend(LM_BACKEND_VERSION, &host, 0, 0) : NULL;
  if (backend) {
    api = backend->api;
    CHECK(gates_ready(), "gates: %s", cudaGetErrorString(cudaGetLastError()));
    return true;
  }
  printf("skipped: %s\n0 passed, 0 failed\n", open_backend ? text : "the CUDA backend is not beside the library");
  return false;
}

static inline int report(void) {
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

#endif
