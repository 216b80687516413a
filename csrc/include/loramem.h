/* loramem.h: the whole C ABI of libloramem.so, and its manual. If it is not in this file, it is not API.
 *
 * Conventions
 *   Names      lm_<noun>_<verb>; a kernel is lm_<op>[_forward|_backward].
 *   Types      int32_t, uint32_t, int64_t, uint64_t, float, double and pointers; nothing else crosses the boundary.
 *   Order      context, outputs, inputs, dims, scalars, stream.
 *   Status     every function that can fail returns int32_t: 0 is LM_OK, a negative value is an error, a positive one is
 *              information. Functions that create or allocate return the pointer instead: NULL means "failed", the status
 *              and text are in the context.
 *   Errors     the text of the last failure is kept in the context and copied out with lm_last_error.
 *   Lifetime   objects may be destroyed in any order: a child keeps a reference on its context. Destroying NULL is a no-op.
 *   Threads    every function may be called from any thread, unless an entry says otherwise.
 *   Process    the library never prints, exits, aborts or throws, and starts no thread before lm_ctx_open.
 *
 * ABI promise
 *   lm_abi_version() is major << 16 | minor. Within one major version functions and struct fields are only added, at the
 *   end; status values and type codes are never reused. A caller refuses another major and a lower minor. */
#ifndef LORAMEM_H
#define LORAMEM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LM_API __attribute__((visibility("default")))

#define LM_ABI_MAJOR 0
#define LM_ABI_MINOR 1

/* ------------------------------------------------------------------------------------------------------------------
 * Status: symbol, value, text. Grouped by tens; the values are stable.
 * ------------------------------------------------------------------------------------------------------------------ */
#define LM_STATUS_MAP(X)                                                      \
  X(LM_OK, 0, "ok")                                                           \
  X(LM_NOT_READY, 1, "not finished yet")                                      \
  X(LM_ERR_ARGUMENT, -1, "bad argument")                                      \
  X(LM_ERR_STATE, -2, "call not allowed in this state")                       \
  X(LM_ERR_OUT_OF_MEMORY, -10, "out of memory")                               \
  X(LM_ERR_LIMIT, -11, "limit exceeded")                                      \
  X(LM_ERR_STALE_HANDLE, -12, "handle was freed already")                     \
  X(LM_ERR_PINNED, -13, "page-locked host memory is not available")           \
  X(LM_ERR_CORRUPT, -14, "memory was written outside a block")                \
  X(LM_ERR_NO_DEVICE, -20, "no such device")                                  \
  X(LM_ERR_DRIVER, -21, "device driver missing or too old")                   \
  X(LM_ERR_DEVICE, -22, "device failed")                                      \
  X(LM_ERR_UNSUPPORTED, -23, "not supported")                                 \
  X(LM_ERR_FILE, -30, "the file system refused")                              \
  X(LM_ERR_BUSY, -31, "locked by another process")                            \
  X(LM_ERR_CANCELLED, -32, "cancelled")                                       \
  X(LM_ERR_INTERNAL, -90, "internal error")

#define LM_STATUS_ENUM(symbol, value, text) symbol = value,
enum { LM_STATUS_MAP(LM_STATUS_ENUM) };

/* Element types. The code is passed as int32_t. */
enum { LM_F32 = 0, LM_BF16 = 1, LM_F16 = 2, LM_I32 = 3, LM_F64 = 4 };

typedef struct lm_ctx lm_ctx;       /* one opened device */
typedef struct lm_stream lm_stream; /* an ordered queue of work on a device */
typedef struct lm_event lm_event;   /* a point in a stream */
typedef struct lm_graph lm_graph;   /* recorded work that can be replayed */
typedef struct lm_pool lm_pool;     /* stream-ordered memory pool */
typedef struct lm_pinned lm_pinned; /* page-locked host buffer */
typedef struct lm_pinned_pool lm_pinned_pool; /* page-locked host buffers that are used again */

/* ------------------------------------------------------------------------------------------------------------------
 * Library
 * ------------------------------------------------------------------------------------------------------------------ */

/* lm_abi_version: major << 16 | minor of this library. */
LM_API uint32_t lm_abi_version(void);

/* lm_header_hash: first 8 bytes of the SHA-256 of loramem.h and the headers that it includes, one after the other in
 * that order, as the library was built from them, big-endian. */
LM_API uint64_t lm_header_hash(void);

/* lm_build_info: writes "version; backends; compiler" as text into buf [cap], always terminated.
 * @return the bytes needed including the terminator */
LM_API int32_t lm_build_info(void *buf, uint64_t cap);

/* ------------------------------------------------------------------------------------------------------------------
 * Context: one opened device
 * ------------------------------------------------------------------------------------------------------------------ */

/* lm_ctx_open: open a device.
 *   device   "cpu", "cuda:<n>"; where libloramem_sim.so lies beside the library also "sim"
 *   threads  CPU worker threads, 0 = one per available core
 *   error    [cap] receives a terminated text if the result is NULL
 * @return an owned context, or NULL */
LM_API lm_ctx *lm_ctx_open(const char *device, int32_t threads, void *error, uint64_t cap);

/* lm_ctx_destroy: wait for all work, then give everything back. Children may be destroyed later. */
LM_API void lm_ctx_destroy(lm_ctx *ctx);

/* lm_last_error: copies the text of the last failure on ctx into buf [cap], terminated.
 * @return the status that belongs to the text */
LM_API int32_t lm_last_error(lm_ctx *ctx, void *buf, uint64_t cap);

/* lm_ctx_info: writes a JSON object that describes the device (kind, name, threads, isa, memoryTotal, memoryFree, ...).
 * @return the bytes needed including the terminator */
LM_API int32_t lm_ctx_info(lm_ctx *ctx, void *buf, uint64_t cap);

/* Choices. Where a kernel can be computed in several ways, the device estimates which is fastest, unless it was told to time
 * them or is given what was chosen before. Different ways may round differently, so a run that is to be repeated bit by bit
 * keeps its choices. The CPU makes none. */

/* lm_choices_time: while on, a kernel with a choice that was not made yet times every way where it is launched: it waits for
 * the stream, and operands and result are overwritten with random numbers. Belongs before the first step, over memory that
 * holds no data; nothing is timed while a stream records.   on  0 or 1 */
LM_API int32_t lm_choices_time(lm_ctx *ctx, int32_t on);
/* lm_choices_write: all choices that were timed or given, as text into buf [cap], terminated; empty if there are none.
 * @return the bytes needed including the terminator */
LM_API int32_t lm_choices_write(lm_ctx *ctx, void *buf, uint64_t cap);
/* lm_choices_read: takes over what lm_choices_write wrote. Choices of another device or library are passed over.
 *   text  terminated
 * @return LM_ERR_ARGUMENT if it is not such a text */
LM_API int32_t lm_choices_read(lm_ctx *ctx, const char *text);

/* Counters since lm_ctx_open. Bytes unless named otherwise. */
typedef struct lm_stats {
  uint64_t reserved;         /* device memory reserved now */
  uint64_t reserved_peak;    /* most device memory reserved at once */
  uint64_t pinned;           /* page-locked host memory now */
  uint64_t pinned_peak;      /* most page-locked host memory at once */
  uint64_t driver_allocs;    /* calls that took device or page-locked memory from the system */
  uint64_t driver_frees;     /* calls that gave it back */
  uint64_t heap_allocs;      /* host heap allocations made by the library for this context */
  uint64_t kernel_launches;  /* kernels enqueued one by one or through a graph */
} lm_stats;

/* lm_ctx_stats: fills stats. */
LM_API int32_t lm_ctx_stats(lm_ctx *ctx, lm_stats *stats);

/* Memory classes: reservations of device memory (pages of pools are among them), page-locked host memory, host memory
 * that a pinned pool gave out in its place, managed memory. */
enum { LM_MEMORY_DEVICE = 0, LM_MEMORY_PINNED = 1, LM_MEMORY_PAGEABLE = 2, LM_MEMORY_MANAGED = 3 };

/* Memory of one class. Bytes unless named otherwise. */
typedef struct lm_memory_stats {
  uint64_t current;   /* held from the system, in whole pages */
  uint64_t peak;      /* most of it at once since lm_ctx_reset_peaks */
  uint64_t requested; /* held, as asked for */
  uint64_t count;     /* pieces held, a count */
  uint64_t allocs;    /* pieces taken, a count */
  uint64_t frees;     /* pieces given back, a count */
  uint64_t failures;  /* requests that the system or the device refused, a count */
} lm_memory_stats;

/* lm_ctx_memory_stats: fills stats for one class. */
LM_API int32_t lm_ctx_memory_stats(lm_ctx *ctx, int32_t memory_class, lm_memory_stats *stats);

/* lm_ctx_reset_peaks: every peak of the context starts again from what is held now; pools have their own. */
LM_API int32_t lm_ctx_reset_peaks(lm_ctx *ctx);

/* lm_ctx_snapshot: writes a JSON object: timeMs since lm_ctx_open; memory: every reservation, page-locked and managed
 * buffer with class, label, bytes and ageMs; operations: the last 4,096 of debug mode, oldest first.
 * @return the bytes needed including the terminator */
LM_API int32_t lm_ctx_snapshot(lm_ctx *ctx, void *buf, uint64_t cap);

/* lm_debug_enable: debug mode for a context that has taken no memory yet. Pool blocks get red zones, which lm_pool_free and
 * lm_pool_check look at (both wait for the device then); a freed block is filled with 0xFF, and so is a page-locked buffer
 * that is used again; the last 4,096 operations are kept. For finding mistakes, not for speed. */
LM_API int32_t lm_debug_enable(lm_ctx *ctx);

/* ------------------------------------------------------------------------------------------------------------------
 * Memory
 * ------------------------------------------------------------------------------------------------------------------ */

/* lm_mem_reserve: take device memory from the system, 4096-byte aligned, touched, content undefined.
 * @return owned memory, or NULL */
LM_API void *lm_mem_reserve(lm_ctx *ctx, uint64_t bytes);

/* lm_mem_release: give back a reservation. Waits for the device first. NULL is a no-op. */
LM_API int32_t lm_mem_release(lm_ctx *ctx, void *memory);

/* lm_mem_label: name the reservation, page-locked or managed buffer that starts at memory, for snapshots. Copied. */
LM_API int32_t lm_mem_label(lm_ctx *ctx, void *memory, const char *label);

/* lm_ptr_add: pointer + bytes. */
LM_API void *lm_ptr_add(void *pointer, int64_t bytes);

/* lm_mem_copy: copy bytes between any two of device memory and host memory of this context, in stream order. A copy from or
 * to pageable memory of a pinned pool waits until it has ended: no device copies such memory beside other work. */
LM_API int32_t lm_mem_copy(lm_ctx *ctx, void *dst, const void *src, uint64_t bytes, lm_stream *stream);

/* lm_mem_fill: set bytes to the low 8 bits of value, in stream order. */
LM_API int32_t lm_mem_fill(lm_ctx *ctx, void *dst, int32_t value, uint64_t bytes, lm_stream *stream);

/* lm_pinned_create: page-locked, page-aligned, touched host memory.
 *   flags  0; 1 = write-combined (host to device only: reading it on the host is very slow)
 * @return an owned buffer, or NULL (LM_ERR_PINNED) */
LM_API lm_pinned *lm_pinned_create(lm_ctx *ctx, uint64_t bytes, int32_t flags);

/* lm_pinned_data: the memory itself, borrowed. */
LM_API void *lm_pinned_data(lm_pinned *pinned);

/* lm_pinned_destroy: stream-ordered: the pages live until the copies enqueued so far have ended. A buffer of a pool goes
 * back to it and is given out again once they have. */
LM_API void lm_pinned_destroy(lm_pinned *pinned);

/* lm_pinned_locked: 1 if the buffer is page-locked, 0 if it is pageable memory that a pool gave out instead. */
LM_API int32_t lm_pinned_locked(lm_pinned *pinned);

/* lm_pinned_pool_create: a pool of page-locked buffers.
 *   limit  most bytes it may lock, 0 = a quarter of the memory that is available now, at most 2 GiB
 * @return an owned pool, or NULL */
LM_API lm_pinned_pool *lm_pinned_pool_create(lm_ctx *ctx, uint64_t limit);

/* lm_pinned_pool_destroy: gives back what is idle; buffers that are out stay valid until they are destroyed. */
LM_API void lm_pinned_pool_destroy(lm_pinned_pool *pool);

/* lm_pinned_pool_acquire: a buffer of at least `bytes` in whole pages: the smallest idle one that is not more than twice as
 * large, else newly locked memory, else any idle one, else (after giving idle ones back) newly locked memory, else pageable
 * memory. Never waits.
 *   flags  0, or a sum of 1 = write-combined as in lm_pinned_create and 2 = fail instead of pageable memory
 * @return an owned buffer, to be given back with lm_pinned_destroy, or NULL (LM_ERR_PINNED) */
LM_API lm_pinned *lm_pinned_pool_acquire(lm_pinned_pool *pool, uint64_t bytes, int32_t flags);

/* lm_pinned_pool_trim: unlock and give back the buffers that are idle and not in use by a copy. */
LM_API int32_t lm_pinned_pool_trim(lm_pinned_pool *pool);

/* State of a pinned pool. Bytes unless named otherwise. */
typedef struct lm_pinned_pool_stats {
  uint64_t locked;       /* page-locked now, idle or not */
  uint64_t locked_peak;  /* most of it at once */
  uint64_t current;      /* in buffers that are out */
  uint64_t peak;         /* most of it at once */
  uint64_t requested;    /* in buffers that are out as asked for */
  uint64_t pageable;     /* of current: not page-locked */
  uint64_t count;        /* buffers that are out, a count */
  uint64_t acquires;     /* buffers given out, a count */
  uint64_t releases;     /* buffers given back, a count */
  uint64_t reuses;       /* acquires that locked nothing new, a count */
  uint64_t fallbacks;    /* acquires that got pageable memory, a count */
  uint64_t failures;     /* acquires that got nothing, a count */
  uint64_t driver_calls; /* pieces of memory locked and unlocked, a count */
  uint64_t limit;        /* most bytes it may lock */
} lm_pinned_pool_stats;

/* lm_pinned_pool_stats_get: fills stats. */
LM_API int32_t lm_pinned_pool_stats_get(lm_pinned_pool *pool, lm_pinned_pool_stats *stats);

/* lm_managed_reserve: memory that host and device both reach and that moves between them, 4096-byte aligned. Refused with
 * LM_ERR_OUT_OF_MEMORY where it is larger than what is free on the device. On the CPU it is plain memory.
 * @return owned memory, or NULL (LM_ERR_UNSUPPORTED where the device has none) */
LM_API void *lm_managed_reserve(lm_ctx *ctx, uint64_t bytes);

/* lm_managed_release: give it back. Waits for the device first. NULL is a no-op. */
LM_API int32_t lm_managed_release(lm_ctx *ctx, void *memory);

/* Advice for managed memory: mostly read (copies on both sides), preferred on the device or on the host, reached by the
 * device without moving; each with its opposite. */
enum {
  LM_ADVISE_READ_MOSTLY = 1, LM_UNADVISE_READ_MOSTLY = 2, LM_ADVISE_PREFER_DEVICE = 3, LM_ADVISE_PREFER_HOST = 4,
  LM_UNADVISE_PREFER = 5, LM_ADVISE_ACCESSED_BY = 6, LM_UNADVISE_ACCESSED_BY = 7
};

/* lm_managed_advise: advice for bytes of a managed reservation. */
LM_API int32_t lm_managed_advise(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t advice);

/* lm_managed_prefetch: move bytes to the device (to_host 0) or to the host (1), in stream order. */
LM_API int32_t lm_managed_prefetch(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t to_host, lm_stream *stream);

/* lm_pool_create: a stream-ordered pool over device memory. It takes addresses now and memory in pages of 2 MiB as it grows;
 * pages without a live block move to where room is needed. A device that cannot map pages gives the whole limit at once.
 *   limit  most bytes in live blocks; the pool holds at most that in whole pages. 0 = no limit
 * @return an owned pool, or NULL (LM_ERR_UNSUPPORTED: the device cannot map pages and there is no limit) */
LM_API lm_pool *lm_pool_create(lm_ctx *ctx, uint64_t limit);

/* lm_pool_destroy: every block becomes stale; the memory is given back once its streams have passed. */
LM_API void lm_pool_destroy(lm_pool *pool);

/* lm_pool_alloc: take a block, 256-byte aligned, usable in `stream` at once.
 *   label   name for statistics and errors, copied; NULL allowed
 * @return a generation-tagged handle, or 0 (status and text in the context) */
LM_API uint64_t lm_pool_alloc(lm_pool *pool, uint64_t bytes, const char *label, lm_stream *stream);

/* lm_pool_pointer: the memory of a live block, borrowed; NULL if the handle is stale. */
LM_API void *lm_pool_pointer(lm_pool *pool, uint64_t handle);

/* lm_pool_free: give a block back in the order of `stream`.
 * @return LM_OK, or LM_ERR_STALE_HANDLE if it was freed already; in debug mode LM_ERR_CORRUPT if memory beside the block
 *         was written: the block then stays live */
LM_API int32_t lm_pool_free(lm_pool *pool, uint64_t handle, lm_stream *stream);

/* lm_pool_trim: give pages that hold no live block back to the system, after the streams that used them have passed. */
LM_API int32_t lm_pool_trim(lm_pool *pool);

/* State of a pool; bytes unless named otherwise. */
typedef struct lm_pool_stats {
  uint64_t current;       /* in live blocks, rounded to granules */
  uint64_t peak;          /* most of it at once */
  uint64_t requested;     /* in live blocks as asked for */
  uint64_t reserved;      /* held from the system */
  uint64_t largest_free;  /* largest block that would fit without more memory, after pages were moved together */
  uint64_t live_blocks;   /* count */
  uint64_t allocs;        /* count */
  uint64_t frees;         /* count */
  uint64_t failures;      /* count of requests that did not fit */
  uint64_t limit;         /* 0 = none */
  uint64_t total_free;    /* held and in no live block */
  uint64_t retries;       /* requests met only by waiting for other work or by giving memory back, a count */
  uint64_t driver_calls;  /* pages taken from the system and given back, those that moved among them, a count */
  double fragmentation;   /* 1 - largest_free / total_free, 0 where nothing is free */
} lm_pool_stats;

/* lm_pool_stats_get: fills stats. */
LM_API int32_t lm_pool_stats_get(lm_pool *pool, lm_pool_stats *stats);

/* lm_pool_reset_peaks: the peak starts again from what is live now. */
LM_API int32_t lm_pool_reset_peaks(lm_pool *pool);

/* lm_pool_snapshot: writes a JSON array of segments (pages side by side), each with bytes and blocks; a block has offset,
 * bytes, state ("live", "free", or "pending": freed, and its stream has not passed that yet) and, if live, label, requested
 * and ageMs.
 * @return the bytes needed including the terminator */
LM_API int32_t lm_pool_snapshot(lm_pool *pool, void *buf, uint64_t cap);

/* lm_pool_check: debug mode: waits for the device and looks at the red zones of every live block.
 * @return LM_OK, or LM_ERR_CORRUPT with block and place in the text */
LM_API int32_t lm_pool_check(lm_pool *pool);

/* ------------------------------------------------------------------------------------------------------------------
 * Streams, events, graphs
 * ------------------------------------------------------------------------------------------------------------------ */

/* Completion callback: called on a thread of the library. status is LM_OK or the failure of the stream. */
typedef void (*lm_done_fn)(uint64_t tag, int32_t status);

/* lm_stream_create: a queue whose work runs in order and beside other streams.
 *   priority  0 normal, negative = more urgent
 * @return an owned stream, or NULL */
LM_API lm_stream *lm_stream_create(lm_ctx *ctx, int32_t priority);

/* lm_stream_destroy: work already enqueued still runs. */
LM_API void lm_stream_destroy(lm_stream *stream);

/* lm_stream_query: @return LM_OK when everything enqueued has ended, LM_NOT_READY before */
LM_API int32_t lm_stream_query(lm_stream *stream);

/* lm_stream_wait: block the calling thread until everything enqueued has ended. */
LM_API int32_t lm_stream_wait(lm_stream *stream);

/* lm_stream_on_done: call fn(tag, status) once, when everything enqueued so far has ended. */
LM_API int32_t lm_stream_on_done(lm_stream *stream, lm_done_fn fn, uint64_t tag);

/* lm_event_create: @return an owned event, or NULL */
LM_API lm_event *lm_event_create(lm_ctx *ctx);
LM_API void lm_event_destroy(lm_event *event);

/* lm_event_record: the event completes when the stream reaches this point; a second record replaces the first. */
LM_API int32_t lm_event_record(lm_event *event, lm_stream *stream);

/* lm_event_query: @return LM_OK when reached (or never recorded), LM_NOT_READY before */
LM_API int32_t lm_event_query(lm_event *event);

/* lm_event_wait: block the calling thread until the event is reached. */
LM_API int32_t lm_event_wait(lm_event *event);

/* lm_event_elapsed: milliseconds between two reached events.
 *   ms  [1] written */
LM_API int32_t lm_event_elapsed(float *ms, lm_event *start, lm_event *end);

/* lm_stream_wait_event: later work of the stream starts after the event; the calling thread does not wait. */
LM_API int32_t lm_stream_wait_event(lm_stream *stream, lm_event *event);

/* lm_graph_begin: record the kernels, copies and fills enqueued on the stream from now on instead of running them. */
LM_API int32_t lm_graph_begin(lm_stream *stream);

/* lm_graph_end: stop recording. @return an owned graph, or NULL */
LM_API lm_graph *lm_graph_end(lm_stream *stream);

/* lm_graph_launch: enqueue the recorded work. Addresses and dims are those of the recording. */
LM_API int32_t lm_graph_launch(lm_graph *graph, lm_stream *stream);

/* lm_graph_nodes: how many operations were recorded. */
LM_API int32_t lm_graph_nodes(lm_graph *graph);
LM_API void lm_graph_destroy(lm_graph *graph);

/* lm_range_push: open a named range on the calling thread. A profiler that listens (Nsight, through NVTX) shows it around the
 * work that is enqueued inside; in debug mode the snapshot lists it. Ranges nest. Cheap where nobody listens.
 *   name  zero-terminated, copied
 * @return 1 if anyone listens; 0 if nobody does, and then there is nothing to pop */
LM_API int32_t lm_range_push(lm_ctx *ctx, const char *name);

/* lm_range_pop: close the innermost range of the calling thread. */
LM_API int32_t lm_range_pop(lm_ctx *ctx);

#include "loramem_kernels.h"
#include "loramem_training.h"
#include "loramem_files.h"

#ifdef __cplusplus
}
#endif
#endif
