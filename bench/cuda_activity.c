/* cuda_activity.c: what the GPU did, kernel by kernel, as CUPTI saw it: a library that the driver loads into any program when
 * CUDA_INJECTION64_PATH names it. Lines go to the file that LORAMEM_ACTIVITY names:
 *
 *   kernel|memcpy|memset  start  end  name      (nanoseconds of the device's clock; memcpy: kind of copy)
 *
 * Works for graph replays too: every node is recorded. A thread asks for what is complete a few times a second: CUPTI itself hands
 * over full buffers only, and at exit it may be too late. */
#define _GNU_SOURCE
#include <cupti.h>
#include <dlfcn.h>
#include <glob.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 20, FLUSH_MICROSECONDS = 100000 };

static CUptiResult (*next_record)(uint8_t *, size_t, CUpti_Activity **);
static CUptiResult (*flush_all)(uint32_t);
static FILE *out;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *size, size_t *most) {
  *buffer = aligned_alloc(8, BUFFER_BYTES);
  *size = *buffer ? BUFFER_BYTES : 0;
  *most = 0;
}

static void line(const char *kind, uint64_t start, uint64_t end, const char *name) {
  fprintf(out, "%s %llu %llu %s\n", kind, (unsigned long long)start, (unsigned long long)end, name);
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)context, (void)stream, (void)size;
  CUpti_Activity *record = NULL;
  pthread_mutex_lock(&mutex);
  while (valid > 0 && next_record(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const CUpti_ActivityKernel10 *k = (const CUpti_ActivityKernel10 *)record;
      line("kernel", k->start, k->end, k->name ? k->name : "?");
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const CUpti_ActivityMemcpy6 *m = (const CUpti_ActivityMemcpy6 *)record;
      char kind[16];
      snprintf(kind, sizeof kind, "%d", m->copyKind);
      line("memcpy", m->start, m->end, kind);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const CUpti_ActivityMemset4 *m = (const CUpti_ActivityMemset4 *)record;
      line("memset", m->start, m->end, "-");
    }
  }
  fflush(out);
  pthread_mutex_unlock(&mutex);
  free(buffer);
}

static void at_exit(void) { flush_all(1); }

static void *flush_main(void *arg) {
  for (;;) {
    usleep(FLUSH_MICROSECONDS);
    flush_all(0);
  }
  return arg;
}

static void *open_cupti(void) {
  static const char *const patterns[] = {"/usr/local/cuda*/lib64/libcupti.so.13", "/usr/local/cuda*/lib/libcupti.so.13",
                                         "/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.13",
                                         "/usr/local/lib/python3*/*-packages/nvidia/*/lib/libcupti.so.13",
                                         "/usr/lib/python3*/*-packages/nvidia/*/lib/libcupti.so.13",
                                         "/opt/*/lib/python3*/site-packages/nvidia/*/lib/libcupti.so.13"};
  void *library = dlopen("libcupti.so.13", RTLD_NOW);
  for (size_t i = 0; i < sizeof patterns / sizeof *patterns && !library; i++) {
    glob_t found;
    if (glob(patterns[i], 0, NULL, &found) == 0)
      for (size_t m = 0; m < found.gl_pathc && !library; m++) library = dlopen(found.gl_pathv[m], RTLD_NOW);
    globfree(&found);
  }
  return library;
}

/* Called by the driver when it is initialized. @return 1: the program goes on, whatever happens here */
__attribute__((visibility("default"))) int InitializeInjection(void) {
  const char *path = getenv("LORAMEM_ACTIVITY");
  void *library = path ? open_cupti() : NULL;
  if (!library) {
    fprintf(stderr, "activity: %s\n", path ? "libcupti.so.13 was not found" : "LORAMEM_ACTIVITY names no file");
    return 1;
  }
  CUptiResult (*callbacks)(CUpti_BuffersCallbackRequestFunc, CUpti_BuffersCallbackCompleteFunc);
  CUptiResult (*enable)(CUpti_ActivityKind);
  *(void **)&callbacks = dlsym(library, "cuptiActivityRegisterCallbacks");
  *(void **)&enable = dlsym(library, "cuptiActivityEnable");
  *(void **)&next_record = dlsym(library, "cuptiActivityGetNextRecord");
  *(void **)&flush_all = dlsym(library, "cuptiActivityFlushAll");
  out = fopen(path, "w");
  if (!out || !callbacks || !enable || !next_record || !flush_all) {
    fprintf(stderr, "activity: %s cannot be written, or libcupti.so.13 lacks a function\n", path);
    return 1;
  }
  const CUptiResult results[] = {callbacks(give_buffer, take_buffer), enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL),
                                 enable(CUPTI_ACTIVITY_KIND_MEMCPY), enable(CUPTI_ACTIVITY_KIND_MEMSET)};
  for (size_t i = 0; i < sizeof results / sizeof *results; i++)
    if (results[i] != CUPTI_SUCCESS) fprintf(stderr, "activity: CUPTI refuses call %zu: error %d\n", i, (int)results[i]);
  pthread_t thread;
  if (pthread_create(&thread, NULL, flush_main, NULL) == 0) pthread_detach(thread);
  atexit(at_exit);
  return 1;
}
