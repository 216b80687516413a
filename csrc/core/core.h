/* core.h: what the files of core share: the objects behind the handles of loramem.h and their life.
 *
 * Life: every object a user owns holds one reference on its context; the context is freed with the last of them. Memory
 * that work may still use is never freed at once but "retired": kept with the marks that must pass first.
 * Locks, in the order they may be taken: pool.mutex, ctx.mutex, ctx.error_mutex. None is held while a device is awaited, but
 * by lm_pool_check. */
#ifndef LM_CORE_H
#define LM_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend.h"

#define LM_ERROR_TEXT_MAX 2048
#define LM_LABEL_MAX 32
#define LM_PAGE UINT64_C(4096)

typedef struct lm_notifier lm_notifier;
typedef struct lm_notice lm_notice;
typedef struct lm_retired lm_retired;
typedef struct lm_debug lm_debug;

/* Who owns a range of addresses that copies and fills may touch. */
enum { LM_RANGE_RESERVED, LM_RANGE_POOL, LM_RANGE_PINNED, LM_RANGE_PAGEABLE, LM_RANGE_MANAGED };

#define LM_CLASS_COUNT 4

typedef struct lm_range {
  uint8_t *begin;
  uint64_t bytes;
  int32_t kind;
  uint64_t *pages; /* of a range whose pages come and go: a bit for each page that has memory; else NULL */
  uint64_t held;   /* bytes of these pages */
  lm_pinned *pinned; /* of LM_RANGE_PINNED and LM_RANGE_PAGEABLE */
  uint64_t since;    /* milliseconds on lm_clock_ms */
  char label[LM_LABEL_MAX];
} lm_range;

struct lm_ctx {
  _Atomic int32_t refs;
  lm_host host;
  const lm_backend_api *api;
  lm_backend *backend;

  pthread_mutex_t error_mutex;
  int32_t error_status;
  uint64_t errors; /* texts that were written so far */
  char error_text[LM_ERROR_TEXT_MAX];

  _Atomic uint64_t heap_allocs;
  _Atomic uint64_t kernel_launches;
  _Atomic int32_t recordings; /* streams that record a graph now */
  _Atomic uint32_t streams; /* made so far: the next one's number */
  uint64_t heap_fail_at;    /* tests only: this allocation fails, 0 = none */
  uint64_t opened;          /* milliseconds on lm_clock_ms */
  lm_debug *debug;          /* NULL unless lm_debug_enable was called */

  pthread_mutex_t mutex; /* everything below */
  lm_stats stats;        /* heap_allocs and kernel_launches stay 0 here */
  lm_memory_stats classes[LM_CLASS_COUNT];
  lm_range *ranges;      /* sorted by address */
  uint32_t range_count, range_capacity;
  lm_retired *retired;
  lm_notifier *notifier; /* created by the first lm_stream_on_done */
};

struct lm_stream {
  lm_ctx *ctx;
  lm_backend_stream *handle;
  uint32_t number;           /* from 1, in the order of creation */
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
  int32_t kind;         /* LM_RANGE_PINNED or LM_RANGE_PAGEABLE */
  int32_t flags;        /* 1 = write-combined */
  lm_pinned_pool *pool; /* where it goes back to, or NULL */
  uint64_t requested;   /* of a buffer of a pool that is out */
  lm_point *uses; /* streams whose copies used it; under ctx->mutex */
  uint32_t use_count, use_capacity;
};

/* context.c ------------------------------------------------------------------------------------------------------ */

/* lm_fail: keep status and text as the last failure. @return status */
int32_t lm_fail(lm_ctx *ctx, int32_t status, const char *format, ...) __attribute__((cold, format(printf, 3, 4)));
/* lm_error_count: how many failures were noted so far, by whom ever. */
uint64_t lm_error_count(lm_ctx *ctx);
/* lm_status_text: the text of LM_STATUS_MAP. */
const char *lm_status_text(int32_t status);
/* lm_heap_alloc: zeroed memory, counted; NULL with LM_ERR_OUT_OF_MEMORY reported for op. */
void *lm_heap_alloc(lm_ctx *ctx, uint64_t bytes, const char *op);
void lm_heap_release(void *memory);
/* lm_heap_grow: make room for one more element of an array that holds count. @return false with the failure reported */
bool lm_heap_grow(lm_ctx *ctx, void *array, uint32_t count, uint32_t *capacity, uint64_t element, const char *op);
/* lm_set_label: copies a name, cut to LM_LABEL_MAX; NULL becomes "". */
void lm_set_label(char label[LM_LABEL_MAX], const char *text);
void lm_ctx_ref(lm_ctx *ctx);
void lm_ctx_unref(lm_ctx *ctx);

/* device.c ------------------------------------------------------------------------------------------------------- */

/* lm_device_open: sets backend and api of ctx from the name of a device. */
int32_t lm_device_open(lm_ctx *ctx, const char *device, int32_t threads);
/* lm_device_list: names of the backends of this build, for lm_build_info. */
const char *lm_device_list(void);

/* memory.c ------------------------------------------------------------------------------------------------------- */

/* lm_memory_take, _give: take memory of a kind from the system and give it back, with the counters kept. Give requires that
 * all work on the memory has ended. */
void *lm_memory_take(lm_ctx *ctx, uint64_t bytes, int32_t kind, int32_t flags, const char *op);
void lm_memory_give(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t kind);
/* lm_device_memory_reserve, _release: the same with the range kept. */
void *lm_device_memory_reserve(lm_ctx *ctx, uint64_t bytes, int32_t kind, const char *op);
void lm_device_memory_release(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t kind);
/* lm_range_add, _remove: under ctx->mutex. */
bool lm_range_add(lm_ctx *ctx, lm_range range, const char *op);
void lm_range_remove(lm_ctx *ctx, const void *begin);
/* lm_range_find: the range that holds [pointer, pointer + bytes), with memory behind all of it, or NULL; under ctx->mutex. */
lm_range *lm_range_find(lm_ctx *ctx, const void *pointer, uint64_t bytes);
/* lm_count_taken, _given: so many pieces of memory of a kind came from or went to the system; under ctx->mutex. */
void lm_count_taken(lm_ctx *ctx, int32_t kind, uint64_t pieces, uint64_t bytes);
void lm_count_given(lm_ctx *ctx, int32_t kind, uint64_t pieces, uint64_t bytes);

/* paged.c: address ranges of device memory whose pages come and go -------------------------------------------------- */

/* lm_paged_reserve: addresses without memory, of LM_RANGE_POOL; writes how many.
 * @return NULL with the failure reported: LM_ERR_UNSUPPORTED where the device cannot do it */
void *lm_paged_reserve(lm_ctx *ctx, uint64_t *bytes, const char *op);
/* lm_paged_commit, _decommit: put memory behind whole pages, and take it away. Decommit requires that all work on them has
 * ended. Commit does all or, with the failure reported, nothing. */
bool lm_paged_commit(lm_ctx *ctx, void *memory, uint64_t bytes);
void lm_paged_decommit(lm_ctx *ctx, void *memory, uint64_t bytes);
/* lm_paged_release: everything, whatever pages have memory. */
void lm_paged_release(lm_ctx *ctx, void *memory);
/* lm_paged_held: all pages that [offset, offset + bytes) touches have memory; under ctx->mutex. */
bool lm_paged_held(const lm_range *range, uint64_t offset, uint64_t bytes);

/* retired.c ------------------------------------------------------------------------------------------------------ */

/* lm_retire: give memory back once all points have passed. Takes over the points' references, not the array.
 * When the heap is exhausted it waits instead. */
void lm_retire(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t kind, const lm_point *points, uint32_t count);
/* lm_retired_sweep: give back what has passed; with wait, everything. */
void lm_retired_sweep(lm_ctx *ctx, bool wait);

/* pinned.c ------------------------------------------------------------------------------------------------------- */

/* lm_pinned_new: newly taken memory with one reference and no range; NULL with the failure reported. */
lm_pinned *lm_pinned_new(lm_ctx *ctx, uint64_t bytes, int32_t kind, int32_t flags, const char *op);
/* lm_pinned_retire: give memory and description back once its uses have passed. */
void lm_pinned_retire(lm_pinned *pinned);
/* lm_pinned_return: a buffer of a pool that nobody holds any more. */
void lm_pinned_return(lm_pinned *pinned);

/* lm_pinned_use: note that work on stream uses the buffer; under ctx->mutex. @return false with the failure reported */
bool lm_pinned_use(lm_pinned *pinned, lm_stream *stream);
void lm_pinned_unref(lm_pinned *pinned);
/* lm_pinned_record: note that the stream's recording uses the buffer; under ctx->mutex. */
bool lm_pinned_record(lm_pinned *pinned, lm_stream *stream);

/* debug.c -------------------------------------------------------------------------------------------------------- */

#define LM_ZONE UINT64_C(256)
#define LM_ZONE_BYTE 0xfb
#define LM_POISON 0xff

void lm_debug_note(lm_ctx *ctx, const char *op, const void *address, uint64_t bytes, const lm_stream *stream,
                   const char *label);
/* lm_note: keep an operation for the snapshot, in debug mode. op is a constant. */
static inline void lm_note(lm_ctx *ctx, const char *op, const void *address, uint64_t bytes, const lm_stream *stream,
                           const char *label) {
  if (__builtin_expect(ctx->debug != NULL, 0)) lm_debug_note(ctx, op, address, bytes, stream, label);
}
/* lm_debug_close: before the backend closes. */
void lm_debug_close(lm_ctx *ctx);
/* lm_zones_check: the red zones of a block [start, start + bytes) that holds `requested` bytes after the first zone, looked
 * at in the order of stream (NULL: at once). Waits; not under a lock. @return LM_OK, or the failure reported */
int32_t lm_zones_check(lm_ctx *ctx, const char *op, const uint8_t *start, uint64_t bytes, uint64_t requested,
                       const char *label, lm_stream *stream);

typedef struct lm_text lm_text;
/* lm_debug_write: the operations as a JSON array. */
void lm_debug_write(lm_ctx *ctx, lm_text *text);

/* snapshot.c ----------------------------------------------------------------------------------------------------- */

/* A text that may not fit: length goes on counting. */
struct lm_text {
  char *buf;
  uint64_t cap, length;
};
void lm_text_add(lm_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* lm_text_string: quoted and escaped. */
void lm_text_string(lm_text *text, const char *string);
/* lm_clock_ms: a clock that costs nothing and steps by a few milliseconds. */
uint64_t lm_clock_ms(void);

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

/* lm_notice_reserve: a callback that can be posted later without fail; NULL with the failure reported. Post it or drop it. */
lm_notice *lm_notice_reserve(lm_ctx *ctx, lm_done_fn fn, uint64_t tag, const char *op);
/* lm_notice_post: call fn(tag, status) soon, from the notifier's thread. */
void lm_notice_post(lm_notice *notice, int32_t status);
/* lm_notice_drop: it will not be called. NULL is a no-op. */
void lm_notice_drop(lm_notice *notice);
/* lm_notifier_request: call fn(tag, status) when stream has passed this point. */
int32_t lm_notifier_request(lm_stream *stream, lm_done_fn fn, uint64_t tag);
/* lm_notifier_close: no more requests; callbacks that are due are still made. Does not wait. */
void lm_notifier_close(lm_notifier *notifier);

#endif
