/* ranges.c: named ranges, for profilers and for the snapshot of debug mode. */
#include "core.h"

int32_t lm_range_push(lm_ctx *ctx, const char *name) {
  static const char op[] = "lm_range_push";
  if (!ctx) return LM_ERR_ARGUMENT;
  if (!name) return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: name is NULL", op);
  lm_note(ctx, op, NULL, 0, NULL, name);
  const int32_t listens = ctx->api->profile_push ? ctx->api->profile_push(ctx->backend, name) : 0;
  return listens || ctx->debug;
}

int32_t lm_range_pop(lm_ctx *ctx) {
  if (!ctx) return LM_ERR_ARGUMENT;
  lm_note(ctx, "lm_range_pop", NULL, 0, NULL, NULL);
  if (ctx->api->profile_pop) ctx->api->profile_pop(ctx->backend);
  return LM_OK;
}
