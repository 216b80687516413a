/* kernels.c: the entry point of every kernel: check, then hand to the backend. */
#include "checks.h"
#include "core.h"

typedef struct kernel {
  const char *name;
  uint32_t size;
  int32_t (*check)(lm_ctx *ctx, const void *args);
} kernel;

#define KERNEL_CHECK(op)                                       \
  static int32_t check_##op(lm_ctx *ctx, const void *args) {   \
    return lm_check_##op(ctx, args);                           \
  }                                                            \
  _Static_assert(sizeof(lm_##op##_args) <= LM_KERNEL_ARGS_MAX, "raise LM_KERNEL_ARGS_MAX");
LM_KERNEL_MAP(KERNEL_CHECK)

#define KERNEL_ROW(op) {.name = "lm_" #op, .size = sizeof(lm_##op##_args), .check = check_##op},
static const kernel kernels[LM_KERNEL_COUNT] = {LM_KERNEL_MAP(KERNEL_ROW)};

static int32_t launch(lm_ctx *ctx, int32_t id, const void *args, lm_stream *stream) {
  const kernel *k = &kernels[id];
  int32_t status = lm_stream_check(ctx, stream, true, k->name);
  if (status) return status;
  if (!args || (uintptr_t)args % 8) {
    return lm_fail(ctx, LM_ERR_ARGUMENT, "%s: args must be a pointer to 8-byte aligned memory: args=%p", k->name, args);
  }
  uint32_t size = *(const uint32_t *)args; /* the first field of every argument struct */
  if (size != k->size) {
    return lm_fail(ctx, LM_ERR_ARGUMENT,
                   "%s: args is of another version: size=%u, wanted %u: use the header of this library", k->name, size,
                   k->size);
  }
  status = k->check(ctx, args);
  if (!status) status = ctx->api->launch(ctx->backend, stream->handle, id, args, size);
  if (status) return status;
  lm_note(ctx, k->name, NULL, 0, stream, NULL);
  if (atomic_load_explicit(&stream->recording, memory_order_relaxed)) {
    atomic_fetch_add_explicit(&stream->nodes, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&stream->kernels, 1, memory_order_relaxed);
  } else {
    atomic_fetch_add_explicit(&ctx->kernel_launches, 1, memory_order_relaxed);
  }
  return LM_OK;
}

#define KERNEL_ENTRY(op)                                                            \
  int32_t lm_##op(lm_ctx *ctx, const lm_##op##_args *args, lm_stream *stream) {     \
    return launch(ctx, LM_KERNEL_##op, args, stream);                               \
  }
LM_KERNEL_MAP(KERNEL_ENTRY)
