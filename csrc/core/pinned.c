/* pinned.c: page-locked host buffers. */
#include "core.h"

lm_pinned *lm_pinned_new(lm_ctx *ctx, uint64_t bytes, int32_t kind, int32_t flags, const char *op) {
  lm_pinned *pinned = lm_heap_alloc(ctx, sizeof *pinned, op);
  if (!pinned) return NULL;
  pinned->data = lm_memory_take(ctx, bytes, kind, flags, op);
  if (!pinned->data) {
    lm_heap_release(pinned);
    return NULL;
  }
  pinned->ctx = ctx;
  pinned->bytes = bytes;
  pinned->kind = kind;
  pinned->flags = flags;
  atomic_store(&pinned->refs, 1);
  return pinned;
}

lm_pinned *lm_pinned_create(lm_ctx *ctx, uint64_t bytes, int32_t flags) {
  static const char op[] = "lm_pinned_create";
  if (!ctx) return NULL;
  if (bytes == 0 || (flags & ~1)) {
    lm_fail(ctx, LM_ERR_ARGUMENT, "%s: bytes must be at least 1 and flags 0 or 1: bytes=%llu flags=%d", op,
            (unsigned long long)bytes, flags);
    return NULL;
  }
  if (atomic_load(&ctx->recordings) > 0) {
    lm_fail(ctx, LM_ERR_STATE, "%s: a stream of this context records a graph: end the recording first", op);
    return NULL;
  }
  lm_retired_sweep(ctx, false);
  lm_pinned *pinned = lm_pinned_new(ctx, bytes, LM_RANGE_PINNED, flags, op);
  if (!pinned) return NULL;
  lm_range range = {.begin = pinned->data, .bytes = bytes, .kind = LM_RANGE_PINNED, .pinned = pinned};
  pthread_mutex_lock(&ctx->mutex);
  bool added = lm_range_add(ctx, range, op);
  pthread_mutex_unlock(&ctx->mutex);
  if (!added) {
    lm_pinned_retire(pinned);
    return NULL;
  }
  lm_note(ctx, op, pinned->data, bytes, NULL, NULL);
  lm_ctx_ref(ctx);
  return pinned;
}

void *lm_pinned_data(lm_pinned *pinned) {
  return pinned ? pinned->data : NULL;
}

int32_t lm_pinned_locked(lm_pinned *pinned) {
  return pinned && pinned->kind == LM_RANGE_PINNED;
}

bool lm_pinned_use(lm_pinned *pinned, lm_stream *stream) {
  /* Only the stream is noted, not the point: destroying takes one mark per stream, a copy stays cheap. */
  for (uint32_t i = 0; i < pinned->use_count;) {
    lm_stream *used = pinned->uses[i].stream;
    if (used == stream) return true;
    if (atomic_load(&used->closed) && lm_point_passed((lm_point){.stream = used, .mark = lm_stream_mark(used)})) {
      pinned->uses[i] = pinned->uses[--pinned->use_count];
      lm_stream_unref(used);
    } else {
      i++;
    }
  }
  bool room = lm_heap_grow(stream->ctx, &pinned->uses, pinned->use_count, &pinned->use_capacity, sizeof *pinned->uses,
                           "lm_mem_copy");
  if (!room) return false;
  lm_stream_ref(stream);
  pinned->uses[pinned->use_count++] = (lm_point){.stream = stream};
  return true;
}

bool lm_pinned_record(lm_pinned *pinned, lm_stream *stream) {
  for (uint32_t i = 0; i < stream->recorded_count; i++) {
    if (stream->recorded[i] == pinned) return true;
  }
  bool room = lm_heap_grow(stream->ctx, &stream->recorded, stream->recorded_count, &stream->recorded_capacity,
                           sizeof *stream->recorded, "lm_mem_copy");
  if (!room) return false;
  atomic_fetch_add(&pinned->refs, 1);
  stream->recorded[stream->recorded_count++] = pinned;
  return true;
}

void lm_pinned_retire(lm_pinned *pinned) {
  lm_retire(pinned->ctx, pinned->data, pinned->bytes, pinned->kind, pinned->uses, pinned->use_count);
  lm_heap_release(pinned->uses);
  lm_heap_release(pinned);
}

void lm_pinned_unref(lm_pinned *pinned) {
  if (atomic_fetch_sub_explicit(&pinned->refs, 1, memory_order_acq_rel) != 1) return;
  for (uint32_t i = 0; i < pinned->use_count; i++) pinned->uses[i].mark = lm_stream_mark(pinned->uses[i].stream);
  if (pinned->pool) lm_pinned_return(pinned);
  else lm_pinned_retire(pinned);
}

void lm_pinned_destroy(lm_pinned *pinned) {
  if (!pinned) return;
  lm_ctx *ctx = pinned->ctx;
  lm_note(ctx, "lm_pinned_destroy", pinned->data, pinned->bytes, NULL, NULL);
  pthread_mutex_lock(&ctx->mutex);
  lm_range_remove(ctx, pinned->data);
  pthread_mutex_unlock(&ctx->mutex);
  lm_pinned_unref(pinned);
  lm_retired_sweep(ctx, false);
  lm_ctx_unref(ctx);
}
