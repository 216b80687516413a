/* core.h: what the files of core share: the objects behind the handles of loramem.h and their life.
 *
 * Life: every object a user owns holds one reference on its context; the context is freed with the last of them. Memory
 * that work may still use is never freed at once but "retired": kept with the marks that must pass first.
 * Locks, in the order they may be taken: pool.mutex, ctx.mutex, ctx.error_mutex. None is held while a device is awaited. */
#ifndef LM_CORE_H
#define LM_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend.h"

#define LM_ERROR_TEXT_MAX 2048

typedef struct lm_notifier lm_notifier;
typedef struct lm_retired lm_retired;

/* Who owns a range of addresses that copies and fills may touch. */
enum { LM_RANGE_RESERVED, LM_RANGE_POOL, LM_RANGE_PINNED };

typedef struct lm_range {
  uint8_t *begin;
  uint64_t bytes;
  int32_t kind;
  lm_pinned *pinned; /* of LM_RANGE_PINNED */
} lm_range;

struct lm_ctx {
  _Atomic int32_t refs;
  lm_host host;
  const lm_backend_api *api;
  lm_backend *backend;

  pthread_mutex_t error_mutex;
  int32_t error_status;
  char error_text[LM_ERROR_TEXT_MAX];

  _Atomic uint64_t heap_allocs;
  _Atomic uint64_t kernel_launches;
  _Atomic int32_t recordings; /* streams that record a graph now */
#ifdef LORAMEM_SIM
  uint64_t heap_fail_at;
#endif

  pthread_mutex_t mutex; /* everything below */
  lm_stats stats;        /* heap_allocs and kernel_launches stay 0 here */
  lm_range *ranges;      /* sorted by address */
  uint32_t range_count, range_capacity;
  lm_retired *retired;
  lm_notifier *notifier; /* created by the first lm_stream_on_done */
};

struct lm_stream {
  lm_ctx *ctx;
  lm_backend_stream *handle;
  _Atomic int32_t refs;      /* the user's handle, plus whoever keeps marks of this stream */
  _Atomic bool closed;       /* destroyed by the user */
  _Atomic bool recording;
  _Atomic int32_t nodes;     /* operations of the recording */
  _Atomic int32_t kernels;   /* kernels among them */
  lm_pinned **recorded;      /* page-locked buffers its copies use, one reference each */
  uint32_t recorded_count, recorded_capacity;
};

/* A point that must pass before something may be reused. Holds a reference on the stream. */
typedef struct lm_point {
  lm_stream *stream;
  uint64_t mark;
} lm_point;

struct lm_pinned {
  lm_ctx *ctx;
  _Atomic int32_t refs; /* the user's handle, plus graphs that copy from or to it */
  uint8_t *data;
  uint64_t bytes;
  lm_point *uses; /* streams whose copies used it; under ctx->mutex */
  uint32_t use_count, use_capacity;
};

/* context.c ------------------------------------------------------------------------------------------------------ */

/* lm_fail: keep status and text as the last failure. @return status */
int32_t lm_fail(lm_ctx *ctx, int32_t status, const char *format, ...) __attribute__((cold, format(printf, 3, 4)));
/* lm_status_text: the text of LM_STATUS_MAP. */
const char *lm_status_text(int32_t status);
/* lm_heap_alloc: zeroed memory, counted; NULL with LM_ERR_OUT_OF_MEMORY reported for op. */
void *lm_heap_alloc(lm_ctx *ctx, uint64_t bytes, const char *op);
void lm_heap_release(void *memory);
/* lm_heap_grow: make room for one more element of an array that holds count. @return false with the failure reported */
bool lm_heap_grow(lm_ctx *ctx, void *array, uint32_t count, uint32_t *capacity, uint64_t element, const char *op);
void lm_ctx_ref(lm_ctx *ctx);
void lm_ctx_unref(lm_ctx *ctx);

/* device.c ------------------------------------------------------------------------------------------------------- */

/* lm_device_open: sets backend and api of ctx from the name of a device. */
int32_t lm_device_open(lm_ctx *ctx, const char *device, int32_t threads);
/* lm_device_list: names of the backends of this build, for lm_build_info. */
const char *lm_device_list(void);

/* memory.c ------------------------------------------------------------------------------------------------------- */

/* lm_device_memory_reserve, _release: take and give back device memory with the counters and the range kept.
 * Release requires that all work on the memory has ended. */
void *lm_device_memory_reserve(lm_ctx *ctx, uint64_t bytes, int32_t kind, const char *op);
void lm_device_memory_release(lm_ctx *ctx, void *memory, uint64_t bytes);
/* lm_range_add, _remove: under ctx->mutex. */
bool lm_range_add(lm_ctx *ctx, lm_range range, const char *op);
void lm_range_remove(lm_ctx *ctx, const void *begin);
/* lm_range_find: the range that holds [pointer, pointer + bytes), or NULL; under ctx->mutex. */
lm_range *lm_range_find(lm_ctx *ctx, const void *pointer, uint64_t bytes);

/* retired.c ------------------------------------------------------------------------------------------------------ */

/* lm_retire: give memory back once all points have passed. Takes over the points' references, not the array.
 * When the heap is exhausted it waits instead. */
void lm_retire(lm_ctx *ctx, void *memory, uint64_t bytes, bool pinned, const lm_point *points, uint32_t count);
/* lm_retired_sweep: give back what has passed; with wait, everything. */
void lm_retired_sweep(lm_ctx *ctx, bool wait);

/* pinned.c ------------------------------------------------------------------------------------------------------- */

/* lm_pinned_use: note that work on stream uses the buffer; under ctx->mutex. @return false with the failure reported */
bool lm_pinned_use(lm_pinned *pinned, lm_stream *stream);
void lm_pinned_unref(lm_pinned *pinned);
/* lm_pinned_record: note that the stream's recording uses the buffer; under ctx->mutex. */
bool lm_pinned_record(lm_pinned *pinned, lm_stream *stream);

/* stream.c ------------------------------------------------------------------------------------------------------- */

void lm_stream_ref(lm_stream *stream);
void lm_stream_unref(lm_stream *stream);
/* lm_stream_check: LM_OK if stream belongs to ctx and, unless recordable, does not record. */
int32_t lm_stream_check(lm_ctx *ctx, lm_stream *stream, bool recordable, const char *op);
static inline uint64_t lm_stream_mark(lm_stream *stream) {
  return stream->ctx->api->stream_mark(stream->ctx->backend, stream->handle);
}
/* lm_point_passed: true once the stream is past the point, whether it failed or not. */
static inline bool lm_point_passed(lm_point point) {
  lm_ctx *ctx = point.stream->ctx;
  return ctx->api->stream_query(ctx->backend, point.stream->handle, point.mark) != LM_NOT_READY;
}
static inline void lm_point_wait(lm_point point) {
  lm_ctx *ctx = point.stream->ctx;
  (void)ctx->api->stream_wait(ctx->backend, point.stream->handle, point.mark);
}

/* graph.c -------------------------------------------------------------------------------------------------------- */

/* lm_recording_drop: forget the buffers of a stream's recording. */
void lm_recording_drop(lm_stream *stream);

/* notifier.c ----------------------------------------------------------------------------------------------------- */

/* lm_notifier_request: call fn(tag, status) when stream has passed this point. */
int32_t lm_notifier_request(lm_stream *stream, lm_done_fn fn, uint64_t tag);
/* lm_notifier_close: no more requests; callbacks that are due are still made. Does not wait. */
void lm_notifier_close(lm_notifier *notifier);

#endif
