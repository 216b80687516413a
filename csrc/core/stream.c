/* stream.c: streams and events: states and references; the queues themselves are the backend's. */
#include "core.h"

struct lm_event {
  lm_ctx *ctx;
  lm_backend_event *handle;
};

void lm_stream_ref(lm_stream *stream) {
  atomic_fetch_add_explicit(&stream->refs, 1, memory_order_relaxed);
}

void lm_stream_unref(lm_stream *stream) {
  if (atomic_fetch_sub_explicit(&stream->refs, 1, memory_order_acq_rel) != 1) return;
  stream->ctx->api->stream_free(stream->ctx->backend, stream->handle);
  lm_heap_release(stream);
}

int32_t lm_stream_check(lm_ctx *ctx, lm_stream *stream, bool recordable, const char *op) {
  if (!ctx) return LM_ERR_ARGUMENT;
  if (!stream) return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: stream is NULL", op);
  if (stream->ctx != ctx) return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: stream belongs to another context", op);
  if (!recordable && atomic_load_explicit(&stream->recording, memory_order_acquire)) {
    return lm_fail(ctx, LM_ERR_STATE, "%s: the stream records a graph: only kernels, copies and fills can be recorded", op);
  }
  return LM_OK;
}

lm_stream *lm_stream_create(lm_ctx *ctx, int32_t priority) {
  if (!ctx) return NULL;
  lm_stream *stream = lm_heap_alloc(ctx, sizeof *stream, "lm_stream_create");
  if (!stream) return NULL;
  stream->handle = ctx->api->stream_create(ctx->backend, priority);
  if (!stream->handle) {
    lm_heap_release(stream);
    return NULL;
  }
  stream->ctx = ctx;
  stream->number = atomic_fetch_add(&ctx->streams, 1) + 1;
  atomic_store(&stream->refs, 1);
  lm_ctx_ref(ctx);
  return stream;
}

void lm_stream_destroy(lm_stream *stream) {
  if (!stream) return;
  lm_ctx *ctx = stream->ctx;
  if (atomic_exchange(&stream->recording, false)) atomic_fetch_sub(&ctx->recordings, 1);
  ctx->api->stream_close(ctx->backend, stream->handle);
  lm_recording_drop(stream);
  atomic_store(&stream->closed, true);
  lm_stream_unref(stream);
  lm_ctx_unref(ctx);
}

/* The text says where a failure became visible, unless the backend has just said what failed.
 *   before  lm_error_count when the backend was asked */
static int32_t reported(lm_ctx *ctx, int32_t status, uint64_t before, const char *op) {
  if (status >= 0 || lm_error_count(ctx) != before) return status;
  return lm_fail(ctx, status, "%s: work enqueued earlier failed: %s (%d): destroy the stream", op, lm_status_text(status),
                 status);
}

int32_t lm_stream_query(lm_stream *stream) {
  if (!stream) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = stream->ctx;
  int32_t status = lm_stream_check(ctx, stream, false, "lm_stream_query");
  if (status) return status;
  const uint64_t before = lm_error_count(ctx);
  status = ctx->api->stream_query(ctx->backend, stream->handle, lm_stream_mark(stream));
  return reported(ctx, status, before, "lm_stream_query");
}

int32_t lm_stream_wait(lm_stream *stream) {
  if (!stream) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = stream->ctx;
  int32_t status = lm_stream_check(ctx, stream, false, "lm_stream_wait");
  if (status) return status;
  const uint64_t before = lm_error_count(ctx);
  status = reported(ctx, ctx->api->stream_wait(ctx->backend, stream->handle, lm_stream_mark(stream)), before, "lm_stream_wait");
  lm_retired_sweep(ctx, false);
  return status;
}

int32_t lm_stream_on_done(lm_stream *stream, lm_done_fn fn, uint64_t tag) {
  if (!stream) return LM_ERR_ARGUMENT;
  int32_t status = lm_stream_check(stream->ctx, stream, false, "lm_stream_on_done");
  if (status) return status;
  if (!fn) return lm_fail(stream->ctx, LM_ERR_ARGUMENT, "lm_stream_on_done: fn is NULL");
  return lm_notifier_request(stream, fn, tag);
}

lm_event *lm_event_create(lm_ctx *ctx) {
  if (!ctx) return NULL;
  lm_event *event = lm_heap_alloc(ctx, sizeof *event, "lm_event_create");
  if (!event) return NULL;
  event->handle = ctx->api->event_create(ctx->backend);
  if (!event->handle) {
    lm_heap_release(event);
    return NULL;
  }
  event->ctx = ctx;
  lm_ctx_ref(ctx);
  return event;
}

void lm_event_destroy(lm_event *event) {
  if (!event) return;
  lm_ctx *ctx = event->ctx;
  ctx->api->event_destroy(ctx->backend, event->handle);
  lm_heap_release(event);
  lm_ctx_unref(ctx);
}

int32_t lm_event_record(lm_event *event, lm_stream *stream) {
  if (!event) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = event->ctx;
  int32_t status = lm_stream_check(ctx, stream, false, "lm_event_record");
  if (status) return status;
  lm_note(ctx, "lm_event_record", event, 0, stream, NULL);
  return ctx->api->event_record(ctx->backend, event->handle, stream->handle);
}

int32_t lm_event_query(lm_event *event) {
  if (!event) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = event->ctx;
  const uint64_t before = lm_error_count(ctx);
  return reported(ctx, ctx->api->event_query(ctx->backend, event->handle), before, "lm_event_query");
}

int32_t lm_event_wait(lm_event *event) {
  if (!event) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = event->ctx;
  const uint64_t before = lm_error_count(ctx);
  return reported(ctx, ctx->api->event_wait(ctx->backend, event->handle), before, "lm_event_wait");
}

int32_t lm_event_elapsed(float *ms, lm_event *start, lm_event *end) {
  if (!start) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = start->ctx;
  if (!ms || !end || end->ctx != ctx) {
    return lm_fail(ctx, LM_ERR_ARGUMENT, "lm_event_elapsed: ms and end must be given, end from the same context");
  }
  return ctx->api->event_elapsed(ctx->backend, ms, start->handle, end->handle);
}

int32_t lm_stream_wait_event(lm_stream *stream, lm_event *event) {
  if (!stream) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = stream->ctx;
  int32_t status = lm_stream_check(ctx, stream, false, "lm_stream_wait_event");
  if (status) return status;
  if (!event || event->ctx != ctx) {
    return lm_fail(ctx, LM_ERR_ARGUMENT, "lm_stream_wait_event: event is NULL or belongs to another context");
  }
  lm_note(ctx, "lm_stream_wait_event", event, 0, stream, NULL);
  return ctx->api->stream_wait_event(ctx->backend, stream->handle, event->handle);
}
