/* backend.h: what a device backend implements and what it may use. Internal to the library and its plugins.
 *
 * Core checks arguments and states, counts, and owns handles; a backend moves bytes and runs kernels. A backend includes
 * core headers only and never another backend. Every function takes the backend first, so that one backend can wrap
 * another. Unless its entry says otherwise a function may be called from any thread at the same time as any other.
 *
 * Failures: a function that fails calls host->fail once and returns that status (or NULL).
 *
 * Marks: a mark is a point in one stream, the point after everything enqueued before it was taken. Marks of a stream grow;
 * 0 is the start. They are how core orders the reuse of memory between streams without creating an event per free. */
#ifndef LM_BACKEND_H
#define LM_BACKEND_H

#include "../include/loramem.h"
#include "kernel_list.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when lm_backend_api, lm_host or a kernel's argument struct changes; a plugin of another version is refused. */
#define LM_BACKEND_VERSION 3u

/* What memory comes and goes by in a range: what drivers hand out. */
#define LM_RANGE_PAGE UINT64_C(0x200000)

typedef struct lm_backend lm_backend;
typedef struct lm_backend_stream lm_backend_stream;
typedef struct lm_backend_event lm_backend_event;
typedef struct lm_backend_graph lm_backend_graph;

/* The system calls that touch files; the whole file path goes through one such table. Each takes the owner first and
 * returns what the system call does, but a negative errno where that returns -1. */
typedef struct lm_file_calls {
  void *owner;
  int32_t (*open)(void *owner, const char *path, int32_t flags, uint32_t mode);
  int32_t (*close)(void *owner, int32_t fd);
  /* pread: with cached_only, what the page cache holds, else -EAGAIN; -EOPNOTSUPP where it cannot be told. */
  int64_t (*pread)(void *owner, int32_t fd, void *memory, uint64_t bytes, uint64_t offset, int32_t cached_only);
  int64_t (*pwrite)(void *owner, int32_t fd, const void *memory, uint64_t bytes, uint64_t offset);
  int32_t (*fallocate)(void *owner, int32_t fd, uint64_t bytes);
  int32_t (*ftruncate)(void *owner, int32_t fd, uint64_t bytes);
  int32_t (*fdatasync)(void *owner, int32_t fd);
  int32_t (*fsync)(void *owner, int32_t fd);
  int32_t (*rename)(void *owner, const char *from, const char *to);
  int32_t (*unlink)(void *owner, const char *path);
  int32_t (*mkdir)(void *owner, const char *path, uint32_t mode);
  int32_t (*flock)(void *owner, int32_t fd, int32_t operation);
  /* fstat: size of a regular file, and its mode. */
  int32_t (*fstat)(void *owner, int32_t fd, uint64_t *bytes, uint32_t *mode);
  /* statvfs: bytes that this user can still write. */
  int32_t (*statvfs)(void *owner, const char *path, uint64_t *free_bytes);
} lm_file_calls;

/* What core offers to a backend. The struct is copied by the backend; owner outlives it. */
typedef struct lm_host {
  void *owner;
  /* fail: keep status and text as the last failure of the context. @return status */
  int32_t (*fail)(void *owner, int32_t status, const char *format, ...) __attribute__((format(printf, 3, 4)));
  /* alloc: zeroed heap memory, counted; NULL when there is none (nothing is reported). */
  void *(*alloc)(void *owner, uint64_t bytes);
  /* release: give memory from alloc back. NULL is a no-op. */
  void (*release)(void *memory);
  /* file_calls: those of the system. */
  const lm_file_calls *file_calls;
} lm_host;

/* Work of the host inside a stream. status is the stream's state when it is reached; a negative result fails the stream.
 * It runs on a thread of the backend and holds the stream up, so it must be short and must not wait for the stream. */
typedef int32_t (*lm_host_fn)(void *arg, int32_t status);

typedef struct lm_backend_api {
  uint32_t version; /* LM_BACKEND_VERSION */
  uint32_t reserved;

  /* close: every stream is freed by now; waits until their work has ended, then frees the backend. */
  void (*close)(lm_backend *backend);
  /* info: the JSON object of lm_ctx_info. @return the bytes needed including the terminator */
  int32_t (*info)(lm_backend *backend, char *text, uint64_t cap);
  /* synchronize: block until all streams have passed what was enqueued before the call. */
  int32_t (*synchronize)(lm_backend *backend);

  /* Device memory, 4096-byte aligned, touched. release is called when no stream uses the memory any more. */
  void *(*mem_reserve)(lm_backend *backend, uint64_t bytes);
  void (*mem_release)(lm_backend *backend, void *memory, uint64_t bytes);
  /* A range: addresses of device memory without memory behind them, LM_RANGE_PAGE-aligned; bytes are multiples of it. Reserve
   * writes how many it took, an even number of pages: several times the memory of the device where the system allows, so that
   * no search for a place ends for want of addresses; it fails with LM_ERR_UNSUPPORTED where the device cannot do this. Commit
   * puts memory, content undefined, behind pages that have none: all of them or none. Decommit takes it away from pages that no
   * stream uses any more. Release is called when no page has memory. */
  void *(*range_reserve)(lm_backend *backend, uint64_t *bytes);
  int32_t (*range_commit)(lm_backend *backend, void *memory, uint64_t bytes);
  void (*range_decommit)(lm_backend *backend, void *memory, uint64_t bytes);
  void (*range_release)(lm_backend *backend, void *memory, uint64_t bytes);
  /* Page-locked host memory, page-aligned, touched. */
  void *(*pinned_reserve)(lm_backend *backend, uint64_t bytes, int32_t flags);
  void (*pinned_release)(lm_backend *backend, void *memory, uint64_t bytes);

  lm_backend_stream *(*stream_create)(lm_backend *backend, int32_t priority);
  /* stream_close: nothing more is enqueued; drops a recording; work already enqueued still runs. Does not wait.
   * Marks stay valid until stream_free, which does not wait either. */
  void (*stream_close)(lm_backend *backend, lm_backend_stream *stream);
  void (*stream_free)(lm_backend *backend, lm_backend_stream *stream);
  uint64_t (*stream_mark)(lm_backend *backend, lm_backend_stream *stream);
  /* stream_query: LM_NOT_READY until the mark is passed, from then on the state of the stream (LM_OK or its failure). */
  int32_t (*stream_query)(lm_backend *backend, lm_backend_stream *stream, uint64_t mark);
  int32_t (*stream_wait)(lm_backend *backend, lm_backend_stream *stream, uint64_t mark);
  /* stream_follow: later work of stream starts after the mark of other; a failure of other carries over. */
  int32_t (*stream_follow)(lm_backend *backend, lm_backend_stream *stream, lm_backend_stream *other, uint64_t mark);
  int32_t (*stream_call)(lm_backend *backend, lm_backend_stream *stream, lm_host_fn fn, void *arg);

  /* Recorded between graph_begin and graph_end instead of run. A stream that failed skips them. */
  int32_t (*launch)(lm_backend *backend, lm_backend_stream *stream, int32_t kernel, const void *args, uint32_t size);
  int32_t (*copy)(lm_backend *backend, lm_backend_stream *stream, void *dst, const void *src, uint64_t bytes);
  int32_t (*fill)(lm_backend *backend, lm_backend_stream *stream, void *dst, int32_t value, uint64_t bytes);

  lm_backend_event *(*event_create)(lm_backend *backend);
  void (*event_destroy)(lm_backend *backend, lm_backend_event *event);
  int32_t (*event_record)(lm_backend *backend, lm_backend_event *event, lm_backend_stream *stream);
  int32_t (*event_query)(lm_backend *backend, lm_backend_event *event);
  int32_t (*event_wait)(lm_backend *backend, lm_backend_event *event);
  int32_t (*event_elapsed)(lm_backend *backend, float *ms, lm_backend_event *start, lm_backend_event *end);
  int32_t (*stream_wait_event)(lm_backend *backend, lm_backend_stream *stream, lm_backend_event *event);

  int32_t (*graph_begin)(lm_backend *backend, lm_backend_stream *stream);
  /* graph_end: recording ends whether or not it succeeds. */
  lm_backend_graph *(*graph_end)(lm_backend *backend, lm_backend_stream *stream);
  /* graph_launch: the graph stays alive until its launches have run. */
  int32_t (*graph_launch)(lm_backend *backend, lm_backend_graph *graph, lm_backend_stream *stream);
  void (*graph_destroy)(lm_backend *backend, lm_backend_graph *graph);

  /* Named ranges of the calling thread for profilers, optional: NULL = the backend has none, and then both are NULL.
   * profile_push: @return 1 if a profiler listens, 0 if not: then nothing was pushed */
  int32_t (*profile_push)(lm_backend *backend, const char *name);
  void (*profile_pop)(lm_backend *backend);

  /* Managed memory, optional: NULL = the backend has none, and then all four are NULL. Reserve refuses more than is free on
   * the device with LM_ERR_OUT_OF_MEMORY. Release is called when no stream uses the memory any more. */
  void *(*managed_reserve)(lm_backend *backend, uint64_t bytes);
  void (*managed_release)(lm_backend *backend, void *memory, uint64_t bytes);
  int32_t (*managed_advise)(lm_backend *backend, void *memory, uint64_t bytes, int32_t advice);
  int32_t (*managed_prefetch)(lm_backend *backend, lm_backend_stream *stream, void *memory, uint64_t bytes, int32_t to_host);

  /* Choices by timing, optional: NULL = the backend makes none, and then all three are NULL. See lm_choices_*. */
  int32_t (*choices_time)(lm_backend *backend, int32_t on);
  int32_t (*choices_write)(lm_backend *backend, char *text, uint64_t cap);
  int32_t (*choices_read)(lm_backend *backend, const char *text);
  /* file_calls: the system calls of the file path, alive as long as the backend. NULL = those of the system. */
  const lm_file_calls *(*file_calls)(lm_backend *backend);
} lm_backend_api;

/* First member of every backend's own struct. */
struct lm_backend {
  const lm_backend_api *api;
};

/* lm_cpu_backend_open: the CPU backend.   threads  workers, 0 = one per available core */
lm_backend *lm_cpu_backend_open(const lm_host *host, int32_t threads);

/* lm_host_memory_available: bytes that the machine, or the cgroup if that is less, can still give. */
uint64_t lm_host_memory_available(void);

/* lm_backend_open_fn: type of the symbol "lm_backend_open" of a plugin. A plugin of another version returns NULL. */
typedef lm_backend *(*lm_backend_open_fn)(uint32_t version, const lm_host *host, int32_t index, int32_t threads);

/* The simulated device, for tests: libloramem_sim.so holds the two functions below, core finds them by name.
 *
 * What it does on purpose. Counts start at 1; 0 = never. All of it belongs to one context. */
typedef struct lm_sim_options {
  uint64_t fail_at;      /* this call of the backend fails at once */
  uint64_t fault_at;     /* this kernel, copy or fill fails later, on its stream */
  uint64_t heap_fail_at; /* this heap allocation of the library returns NULL */
  uint64_t pinned_limit; /* bytes that can be page-locked; 0 = no limit */
  uint64_t driver_delay; /* microseconds that taking and giving back memory last */
  uint64_t file_fail_at; /* this file call fails ... */
  uint64_t file_fails;   /* ... and those after it, so many in all; 0 = 1 */
  uint64_t file_error;   /* with this errno; 0 = pread and pwrite move nothing, others fail with EIO */
  uint64_t file_most;    /* bytes that one pread or pwrite moves; 0 = no limit */
  uint64_t file_kill_at; /* the process is killed before this file call */
  char file_log[256];    /* a file that every file call is written to, see csrc/sim/files.c; "" = none */
  uint64_t no_ranges;    /* 1 = range_reserve says that the device cannot do it */
  uint32_t delay_count;
  uint32_t delays[16]; /* microseconds before each operation, by order of stream creation; streams beyond it: none */
} lm_sim_options;

/* lm_sim_parse: "sim" or "sim:<name>=<value>,...", e.g. "sim:fail_at=7,delays=0/500". A value holds no comma.
 * @return false if malformed */
LM_API int lm_sim_parse(const char *device, lm_sim_options *options);
typedef int (*lm_sim_parse_fn)(const char *device, lm_sim_options *options);

/* lm_sim_backend_wrap: owns inner from now on, also when it fails. */
LM_API lm_backend *lm_sim_backend_wrap(const lm_host *host, lm_backend *inner, const lm_sim_options *options);
typedef lm_backend *(*lm_sim_wrap_fn)(const lm_host *host, lm_backend *inner, const lm_sim_options *options);

#ifdef __cplusplus
}
#endif
#endif
