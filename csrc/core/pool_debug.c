/* pool_debug.c: red zones and poison around the pool's blocks, in debug mode. */
#include "pool.h"

void lm_block_mark_zones(lm_pool *pool, lm_block *block, lm_stream *stream) {
  lm_ctx *ctx = pool->ctx;
  uint64_t behind = LM_ZONE + block->requested;
  block->leaving = false;
  /* Without zones the block is used as it is: a failure here is not the user's. */
  block->zoned =
      !ctx->api->fill(ctx->backend, stream->handle, block->address, LM_ZONE_BYTE, LM_ZONE) &&
      !ctx->api->fill(ctx->backend, stream->handle, block->address + behind, LM_ZONE_BYTE, block->bytes - behind);
}

int32_t lm_block_before_free(lm_pool *pool, uint64_t handle, lm_stream *stream) {
  static const char op[] = "lm_pool_free";
  lm_ctx *ctx = pool->ctx;
  pthread_mutex_lock(&pool->mutex);
  lm_block *block = lm_block_of(pool, handle);
  bool zoned = block && block->zoned, leaving = zoned && block->leaving;
  if (zoned) block->leaving = true;
  pthread_mutex_unlock(&pool->mutex);
  if (!zoned) return LM_OK;
  if (leaving) {
    return lm_fail(ctx, LM_ERR_STALE_HANDLE, "%s: another thread frees the block right now: handle=0x%llx", op,
                   (unsigned long long)handle);
  }
  /* Nobody else frees it now, so that it stays as it is without the mutex. */
  int32_t status = lm_zones_check(ctx, op, block->address, block->bytes, block->requested, block->label, stream);
  if (!status) {
    (void)ctx->api->fill(ctx->backend, stream->handle, block->address, LM_POISON, block->bytes);
    return LM_OK;
  }
  pthread_mutex_lock(&pool->mutex);
  block->leaving = false;
  pthread_mutex_unlock(&pool->mutex);
  return status;
}

int32_t lm_pool_check(lm_pool *pool) {
  static const char op[] = "lm_pool_check";
  if (!pool) return LM_ERR_ARGUMENT;
  lm_ctx *ctx = pool->ctx;
  if (!ctx->debug) return lm_fail(ctx, LM_ERR_STATE, "%s: the context is not in debug mode: call lm_debug_enable first", op);
  int32_t status = LM_OK;
  /* The one place where a mutex is held while the device is awaited: blocks must neither come nor go meanwhile. */
  pthread_mutex_lock(&pool->mutex);
  (void)ctx->api->synchronize(ctx->backend);
  for (uint32_t i = 0; i < pool->block_count && !status; i++) {
    const lm_block *block = pool->blocks[i];
    if (!block->live || !block->zoned || block->leaving) continue;
    status = lm_zones_check(ctx, op, block->address, block->bytes, block->requested, block->label, NULL);
  }
  pthread_mutex_unlock(&pool->mutex);
  return status;
}
