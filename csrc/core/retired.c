/* retired.c: memory whose owner is gone while enqueued work may still use it. */
#include "core.h"

#include <string.h>

struct lm_retired {
  lm_retired *next;
  void *memory;
  uint64_t bytes;
  int32_t kind;
  uint32_t count;
  lm_point points[];
};

static void give_back(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t kind) {
  /* The range of a host buffer went when its owner did. */
  if (kind == LM_RANGE_PINNED || kind == LM_RANGE_PAGEABLE) lm_memory_give(ctx, memory, bytes, kind);
  else lm_device_memory_release(ctx, memory, bytes, kind);
}

void lm_retire(lm_ctx *ctx, void *memory, uint64_t bytes, int32_t kind, const lm_point *points, uint32_t count) {
  uint32_t pending = 0;
  for (uint32_t i = 0; i < count; i++) pending += !lm_point_passed(points[i]);
  lm_retired *item = pending ? ctx->host.alloc(ctx, sizeof *item + count * sizeof *points) : NULL;
  if (!item) {
    for (uint32_t i = 0; i < count; i++) {
      if (pending) lm_point_wait(points[i]);
      lm_stream_unref(points[i].stream);
    }
    give_back(ctx, memory, bytes, kind);
    return;
  }
  item->memory = memory;
  item->bytes = bytes;
  item->kind = kind;
  item->count = count;
  memcpy(item->points, points, count * sizeof *points);
  pthread_mutex_lock(&ctx->mutex);
  item->next = ctx->retired;
  ctx->retired = item;
  pthread_mutex_unlock(&ctx->mutex);
}

static bool passed(lm_retired *item) {
  for (uint32_t i = 0; i < item->count; i++) {
    if (!lm_point_passed(item->points[i])) return false;
  }
  return true;
}

void lm_retired_sweep(lm_ctx *ctx, bool wait) {
  /* Unlink first, free afterwards: giving memory back takes the lock again and may be slow. */
  lm_retired *due = NULL;
  pthread_mutex_lock(&ctx->mutex);
  for (lm_retired **link = &ctx->retired; *link;) {
    lm_retired *item = *link;
    if (!wait && !passed(item)) {
      link = &item->next;
      continue;
    }
    *link = item->next;
    item->next = due;
    due = item;
  }
  pthread_mutex_unlock(&ctx->mutex);
  while (due) {
    lm_retired *item = due;
    due = item->next;
    for (uint32_t i = 0; i < item->count; i++) {
      if (wait) lm_point_wait(item->points[i]);
      lm_stream_unref(item->points[i].stream);
    }
    give_back(ctx, item->memory, item->bytes, item->kind);
    lm_heap_release(item);
  }
}
