/* pool_debug.c: red zones and poison around the pool's blocks, in debug mode. */
#include "pool.h"

void lm_block_mark_zones(lm_pool *pool, lm_block *block, lm_stream *stream) {
  lm_ctx *ctx = pool->ctx;
  uint64_t behind = LM_ZONE + block->requested;
  /* Without zones the block is used as it is: a failure here is not the user's. */
  block->zoned =
      !ctx->api->fill(ctx->backend, stream->handle, block->address, LM_ZONE_BYTE, LM_ZONE) &&
      !ctx->api->fill(ctx->backend, stream->handle, block->address + behind, LM_ZONE_BYTE, block->bytes - behind);
}

/* What a look needs of a block, taken under the mutex. */
typedef struct looked_at {
  uint64_t handle;
  uint8_t *address;
  uint64_t bytes, requested;
  char label[LM_LABEL_MAX];
} looked_at;

static looked_at describe(const lm_block *block) {
  looked_at at = {.handle = lm_block_handle(block), .address = block->address, .bytes = block->bytes,
                  .requested = block->requested};
  lm_set_label(at.label, block->label);
  return at;
}

int32_t lm_block_before_free(lm_pool *pool, uint64_t handle, lm_stream *stream) {
  static const char op[] = "lm_pool_free";
  lm_ctx *ctx = pool->ctx;
  pthread_mutex_lock(&pool->mutex);
  const lm_block *block = lm_block_of(pool, handle);
  bool zoned = block && block->zoned;
  looked_at at = {0};
  if (zoned) at = describe(block);
  pthread_mutex_unlock(&pool->mutex);
  if (!zoned) return LM_OK;
  int32_t status = lm_zones_check(ctx, op, at.address, at.bytes, at.requested, at.label, stream);
  if (!status) (void)ctx->api->fill(ctx->backend, stream->handle, at.address, LM_POISON, at.bytes);
  return status;
}

int32_t lm_pool_check(lm_pool *pool) {
  static const char op[] = "lm_pool_check";
  if (!pool) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = pool->ctx;
  if (!ctx->debug) return lm_fail(ctx, LM_ERR_STATE, "%s: the context is not in debug mode: call lm_debug_enable first", op);
  (void)ctx->api->synchronize(ctx->backend);
  pthread_mutex_lock(&pool->mutex);
  looked_at *list = lm_heap_alloc(ctx, (pool->block_count + 1) * sizeof *list, op);
  uint32_t count = 0;
  for (uint32_t i = 0; list && i < pool->block_count; i++) {
    if (pool->blocks[i]->live && pool->blocks[i]->zoned) list[count++] = describe(pool->blocks[i]);
  }
  pthread_mutex_unlock(&pool->mutex);
  int32_t status = list ? LM_OK : LM_ERR_OUT_OF_MEMORY;
  for (uint32_t i = 0; i < count && !status; i++) {
    int32_t found = lm_zones_check(ctx, op, list[i].address, list[i].bytes, list[i].requested, list[i].label, NULL);
    if (!found) continue;
    pthread_mutex_lock(&pool->mutex); /* freed meanwhile by another thread: the look was at somebody else's memory */
    if (lm_block_of(pool, list[i].handle)) status = found;
    pthread_mutex_unlock(&pool->mutex);
  }
  lm_heap_release(list);
  return status;
}
