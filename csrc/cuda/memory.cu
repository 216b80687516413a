/* memory.cu: reservations of device memory and page-locked host memory.
 *
 * Page-locking through the runtime's own allocator runs at a few GB/s, most of it spent in clearing pages on one thread. Here
 * the pages are mapped, touched by several threads, as huge pages where the system gives them, and then registered. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

typedef unsigned long long ull;

#define ALIGNMENT UINT64_C(4096)
#define HUGE_PAGE UINT64_C(0x200000)
#define HUGE_FROM (2 * HUGE_PAGE)
#define SHARE (UINT64_C(64) << 20)  /* bytes that are worth another thread */
#define TOUCHERS 8u
#define SPARE (UINT64_C(256) << 20) /* host memory that stays free */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static lm_cuda *self(lm_backend *base) { return reinterpret_cast<lm_cuda *>(base); }

/* Remembers how memory goes back. @return false with the failure reported */
static bool remember(lm_cuda *cuda, const lm_cuda_memory &given, const char *op) {
  lm_cuda_memory *item = static_cast<lm_cuda_memory *>(lm_cuda_alloc(cuda, sizeof *item, op));
  if (!item) return false;
  *item = given;
  pthread_mutex_lock(&cuda->runtime->mutex);
  item->next = cuda->runtime->memories;
  cuda->runtime->memories = item;
  pthread_mutex_unlock(&cuda->runtime->mutex);
  return true;
}

static void give_back(lm_cuda *cuda, void *memory, const char *op) {
  (void)lm_cuda_enter(cuda, op);
  pthread_mutex_lock(&cuda->runtime->mutex);
  lm_cuda_memory **link = &cuda->runtime->memories;
  while (*link && (*link)->memory != memory) link = &(*link)->next;
  lm_cuda_memory *item = *link;
  if (item) *link = item->next;
  pthread_mutex_unlock(&cuda->runtime->mutex);
  if (!item) return;
  const cudaError_t error = item->mapped   ? cudaHostUnregister(item->raw)
                            : item->pinned ? cudaFreeHost(item->raw)
                                           : cudaFree(item->raw);
  if (error) (void)lm_cuda_fail(cuda, error, op);
  if (item->mapped) munmap(item->raw, item->mapped);
  cuda->host.release(item);
}

/* Device memory -------------------------------------------------------------------------------------------------- */

void *lm_cuda_mem_reserve(lm_backend *base, uint64_t bytes) {
  static const char op[] = "lm_mem_reserve";
  lm_cuda *cuda = self(base);
  if (lm_cuda_enter(cuda, op)) return NULL;
  size_t free_bytes = 0, total_bytes = 0;
  cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
  void *raw = NULL;
  if (!error) error = bytes > total_bytes ? cudaErrorMemoryAllocation : cudaMalloc(&raw, bytes);
  /* Small requests are cut from larger pieces at 512 bytes. */
  if (!error && reinterpret_cast<uintptr_t>(raw) % ALIGNMENT) {
    (void)cudaFree(raw);
    raw = NULL;
    error = cudaMalloc(&raw, bytes + ALIGNMENT);
  }
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    cuda->host.fail(cuda->host.owner, LM_ERR_OUT_OF_MEMORY,
                    "%s: out of device memory: requested=%llu free=%llu total=%llu on cuda:%d: ask for less", op, (ull)bytes,
                    (ull)free_bytes, (ull)total_bytes, cuda->device);
    return NULL;
  }
  void *memory = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(raw) + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
  if (!error) error = cudaMemsetAsync(memory, 0, bytes, cuda->runtime->internal);
  if (!error) error = cudaStreamSynchronize(cuda->runtime->internal);
  if (error) lm_cuda_fail(cuda, error, op);
  if (error || !remember(cuda, {NULL, memory, raw, 0, false}, op)) {
    if (raw) (void)cudaFree(raw);
    (void)cudaGetLastError();
    return NULL;
  }
  return memory;
}

void lm_cuda_mem_release(lm_backend *base, void *memory, uint64_t) { give_back(self(base), memory, "lm_mem_release"); }

/* Page-locked host memory ---------------------------------------------------------------------------------------- */

/* Number behind `key` in a file of such lines, times unit; UINT64_MAX if it is not there. An empty key: the first number. */
static uint64_t number_in(const char *path, const char *key, uint64_t unit) {
  FILE *file = fopen(path, "re");
  char line[256];
  uint64_t value = UINT64_MAX;
  while (file && value == UINT64_MAX && fgets(line, sizeof line, file)) {
    const char *digits = line + strlen(key);
    char *end = NULL;
    if (strncmp(line, key, strlen(key)) != 0) continue;
    const ull number = strtoull(digits, &end, 10);
    if (end != digits) value = number * unit;
  }
  if (file) fclose(file);
  return value;
}

/* What the machine and the container can still give, the page cache included; beyond it the kernel kills instead of refusing. */
uint64_t lm_cuda_host_available(void) {
  uint64_t available = number_in("/proc/meminfo", "MemAvailable:", 1024);
  const uint64_t limit = number_in("/sys/fs/cgroup/memory.max", "", 1);
  uint64_t used = number_in("/sys/fs/cgroup/memory.current", "", 1);
  const uint64_t cache = number_in("/sys/fs/cgroup/memory.stat", "inactive_file ", 1);
  if (limit == UINT64_MAX || used == UINT64_MAX) return available;
  if (cache != UINT64_MAX) used -= cache < used ? cache : used;
  const uint64_t rest = used < limit ? limit - used : 0;
  return rest < available ? rest : available;
}

typedef struct touch_job {
  uint8_t *begin;
  uint64_t bytes;
  int error;
} touch_job;

static void *touch(void *arg) {
  touch_job *job = static_cast<touch_job *>(arg);
  if (madvise(job->begin, job->bytes, MADV_POPULATE_WRITE) == 0) return NULL;
  job->error = errno;
  if (job->error != EINVAL) return NULL;
  job->error = 0; /* Linux before 5.14 */
  for (uint64_t at = 0; at < job->bytes; at += ALIGNMENT) *(volatile uint8_t *)(job->begin + at) = 0;
  return NULL;
}

/* Brings in all pages, in shares of whole huge pages. @return 0 or an errno */
static int touch_all(uint8_t *memory, uint64_t bytes) {
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  uint64_t threads = bytes / SHARE;
  if (threads > TOUCHERS) threads = TOUCHERS;
  if (cores > 0 && threads > (uint64_t)cores) threads = (uint64_t)cores;
  if (threads < 1) threads = 1;
  const uint64_t share = threads == 1 ? bytes : (bytes / threads + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
  touch_job jobs[TOUCHERS];
  pthread_t ids[TOUCHERS];
  bool started[TOUCHERS] = {};
  sigset_t all, old; /* signals belong to the threads of the program */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  uint64_t count = 0;
  for (uint64_t at = 0; at < bytes; at += share, count++) {
    jobs[count] = {memory + at, bytes - at < share ? bytes - at : share, 0};
    if (count > 0) started[count] = pthread_create(&ids[count], NULL, touch, &jobs[count]) == 0;
  }
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  int error = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (started[i]) pthread_join(ids[i], NULL);
    else touch(&jobs[i]);
    if (jobs[i].error) error = jobs[i].error;
  }
  return error;
}

/* Anonymous memory, aligned to a huge page if it is large. */
static uint8_t *map(uint64_t bytes) {
  const uint64_t extra = bytes >= HUGE_FROM ? HUGE_PAGE - ALIGNMENT : 0;
  void *mapped = mmap(NULL, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return NULL;
  uint8_t *raw = static_cast<uint8_t *>(mapped);
  if (!extra) return raw;
  const uint64_t before = -reinterpret_cast<uintptr_t>(raw) & (HUGE_PAGE - 1);
  if (before) munmap(raw, before);
  if (extra > before) munmap(raw + before + bytes, extra - before);
  (void)madvise(raw + before, bytes, MADV_HUGEPAGE);
  return raw + before;
}

/* A failure to lock pages leaves nothing behind: neither the mapping, nor an error for the next launch to find. */
static void *pin_failed(lm_cuda *cuda, uint64_t bytes, const char *reason) {
  (void)cudaGetLastError();
  cuda->host.fail(cuda->host.owner, LM_ERR_PINNED,
                  "lm_pinned_create: page-locked host memory is not available: %s: requested=%llu available=%llu: ask for less, "
                  "or raise the limit of the container",
                  reason, (ull)bytes, (ull)lm_cuda_host_available());
  return NULL;
}

void *lm_cuda_pinned_reserve(lm_backend *base, uint64_t bytes, int32_t flags) {
  static const char op[] = "lm_pinned_create";
  lm_cuda *cuda = self(base);
  if (lm_cuda_enter(cuda, op)) return NULL;
  if (bytes > UINT64_MAX / 4 || bytes + SPARE > lm_cuda_host_available())
    return pin_failed(cuda, bytes, "the host has too little memory");
  const uint64_t size = (bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
  lm_cuda_memory given = {NULL, NULL, NULL, 0, true};
  cudaError_t error;
  if (flags & 1) {
    error = cudaHostAlloc(&given.raw, size, cudaHostAllocWriteCombined | cudaHostAllocPortable);
  } else {
    uint8_t *mapped = map(size);
    if (!mapped) return pin_failed(cuda, bytes, strerror(errno));
    const int failed = touch_all(mapped, size);
    if (failed) {
      munmap(mapped, size);
      return pin_failed(cuda, bytes, strerror(failed));
    }
    error = cudaHostRegister(mapped, size, cudaHostRegisterPortable);
    if (error) munmap(mapped, size);
    given.raw = mapped;
    given.mapped = size;
  }
  if (error == cudaErrorMemoryAllocation || error == cudaErrorNotSupported || error == cudaErrorNotPermitted ||
      error == cudaErrorInvalidValue || error == cudaErrorHostMemoryAlreadyRegistered || error == cudaErrorOperatingSystem)
    return pin_failed(cuda, bytes, cudaGetErrorString(error));
  if (error) {
    lm_cuda_fail(cuda, error, op);
    return NULL;
  }
  given.memory = given.raw;
  if (remember(cuda, given, op)) return given.memory;
  if (given.mapped) {
    (void)cudaHostUnregister(given.raw);
    munmap(given.raw, size);
  } else {
    (void)cudaFreeHost(given.raw);
  }
  return NULL;
}

void lm_cuda_pinned_release(lm_backend *base, void *memory, uint64_t) { give_back(self(base), memory, "lm_pinned_destroy"); }
