/* checks_train.c: argument checks of attention, loss and optimizer. */
#include <float.h>

#include "checks.h"

/* What the tiles of the attention kernels are made for; no published decoder has more. */
#define HEAD_DIM_MAX 256

/* `!(x >= 0)` refuses NaN as well; an infinite cap would give infinity times 0. */
#define CHECK_SCORES()                                                                                                 \
  do {                                                                                                                 \
    CHECK_MIN(window, 0);                                                                                              \
    if (UNLIKELY(!(a->softcap >= 0 && a->softcap <= FLT_MAX)))                                                         \
      FAIL("%s: softcap is not a finite number of 0 or more: softcap=%g: 0 = no cap", op, (double)a->softcap);         \
  } while (0)

#define CHECK_HEADS()                                                                                                  \
  do {                                                                                                                 \
    CHECK_MIN(heads, 1);                                                                                               \
    CHECK_MIN(kv_heads, 1);                                                                                            \
    CHECK_MIN(head_dim, 1);                                                                                            \
    if (UNLIKELY(a->head_dim > HEAD_DIM_MAX))                                                                          \
      FAIL("%s: head_dim is too large: head_dim=%d: at most %d", op, a->head_dim, HEAD_DIM_MAX);                       \
    if (UNLIKELY(a->heads % a->kv_heads))                                                                              \
      FAIL("%s: heads is no multiple of kv_heads: heads=%d kv_heads=%d", op, a->heads, a->kv_heads);                   \
  } while (0)

int32_t lm_check_attention_forward(lm_ctx *ctx, const lm_attention_forward_args *a) {
  static const char op[] = "lm_attention_forward";
  CHECK_TYPE(type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(documents, 1);
  CHECK_HEADS();
  CHECK_SCORES();
  int64_t width = (int64_t)a->heads * a->head_dim;
  CHECK_PITCH(qkv_pitch, a->rows, width);
  CHECK_PITCH(o_pitch, a->rows, width);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(o, bytes);
  CHECK_POINTER(lse, 4);
  CHECK_POINTER(q, bytes);
  CHECK_POINTER(k, bytes);
  CHECK_POINTER(v, bytes);
  CHECK_POINTER(cu_seqlens, 4);
  return LM_OK;
}

int32_t lm_check_attention_backward(lm_ctx *ctx, const lm_attention_backward_args *a) {
  static const char op[] = "lm_attention_backward";
  CHECK_TYPE(type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(documents, 1);
  CHECK_HEADS();
  CHECK_SCORES();
  int64_t width = (int64_t)a->heads * a->head_dim;
  CHECK_PITCH(qkv_pitch, a->rows, width);
  CHECK_PITCH(dqkv_pitch, a->rows, width);
  CHECK_PITCH(o_pitch, a->rows, width);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(dq, bytes);
  CHECK_POINTER(dk, bytes);
  CHECK_POINTER(dv, bytes);
  CHECK_POINTER(delta, 4);
  CHECK_POINTER(grad_o, bytes);
  CHECK_POINTER(o, bytes);
  CHECK_POINTER(lse, 4);
  CHECK_POINTER(q, bytes);
  CHECK_POINTER(k, bytes);
  CHECK_POINTER(v, bytes);
  CHECK_POINTER(cu_seqlens, 4);
  return LM_OK;
}

int32_t lm_check_attention_cached_forward(lm_ctx *ctx, const lm_attention_cached_forward_args *a) {
  static const char op[] = "lm_attention_cached_forward";
  CHECK_TYPE(type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(capacity, 1);
  CHECK_HEADS();
  CHECK_SCORES();
  int64_t width = (int64_t)a->heads * a->head_dim;
  CHECK_PITCH(qkv_pitch, a->rows, width);
  CHECK_PITCH(o_pitch, a->rows, width);
  if ((int64_t)a->kv_heads * a->head_dim > LM_ELEMENTS_MAX / a->capacity) {
    FAIL("%s: the cache is too large: capacity=%d kv_heads=%d head_dim=%d", op, a->capacity, a->kv_heads, a->head_dim);
  }
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(o, bytes);
  CHECK_POINTER(k_cache, bytes);
  CHECK_POINTER(v_cache, bytes);
  CHECK_POINTER(q, bytes);
  CHECK_POINTER(k, bytes);
  CHECK_POINTER(v, bytes);
  CHECK_POINTER(past, 4);
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_linear_cross_entropy(lm_ctx *ctx, const lm_linear_cross_entropy_args *a) {
  static const char op[] = "lm_linear_cross_entropy";
  CHECK_TYPE(type);
  CHECK_TYPE(w_type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_MIN(vocab, 1);
  CHECK_MIN(chunk, 0);
  CHECK_MIN(chunk_rows, 1);
  CHECK_PITCH(x_pitch, a->rows, a->width);
  CHECK_PITCH(w_pitch, a->vocab, a->width);
  if ((int64_t)a->chunk_rows * a->vocab > LM_ELEMENTS_MAX) {
    FAIL("%s: the logits are too large: chunk_rows=%d vocab=%d", op, a->chunk_rows, a->vocab);
  }
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(loss, 4);
  CHECK_POINTER(logits, bytes);
  CHECK_ALIGNED(gathered, bytes); /* only GPUs need it */
  CHECK_POINTER(x, bytes);
  CHECK_POINTER(w, lm_float_bytes(a->w_type));
  CHECK_POINTER(label_rows, 4);
  CHECK_POINTER(label_ids, 4);
  CHECK_POINTER(batch, 4);
  CHECK_ALIGNED(scaler, 4);
  if (a->dx) {
    CHECK_PITCH(dx_pitch, a->rows, a->width);
    CHECK_ALIGNED(dx, bytes);
  }
  return LM_OK;
}

int32_t lm_check_loss_sum(lm_ctx *ctx, const lm_loss_sum_args *a) {
  static const char op[] = "lm_loss_sum";
  CHECK_MIN(rows, 1);
  CHECK_POINTER(metrics, 8);
  CHECK_POINTER(loss, 4);
  CHECK_POINTER(batch, 4);
  return LM_OK;
}

int32_t lm_check_grad_norm(lm_ctx *ctx, const lm_grad_norm_args *a) {
  static const char op[] = "lm_grad_norm";
  CHECK_COUNT(n);
  CHECK_POINTER(metrics, 8);
  CHECK_POINTER(partial, 8);
  CHECK_POINTER(state, 8);
  CHECK_ALIGNED(scaler, 4);
  CHECK_ALIGNED(found, 4);
  CHECK_POINTER(g, 4);
  CHECK_POINTER(control, 8);
  return LM_OK;
}

int32_t lm_check_adamw(lm_ctx *ctx, const lm_adamw_args *a) {
  static const char op[] = "lm_adamw";
  CHECK_COUNT(n);
  CHECK_POINTER(p, 4);
  CHECK_POINTER(m, 4);
  CHECK_POINTER(v, 4);
  CHECK_POINTER(g, 4);
  CHECK_POINTER(control, 8);
  CHECK_POINTER(metrics, 8);
  if (a->copy) {
    CHECK_TYPE(copy_type);
    CHECK_ALIGNED(copy, lm_float_bytes(a->copy_type));
  }
  return LM_OK;
}

int32_t lm_check_scaler_set(lm_ctx *ctx, const lm_scaler_set_args *a) {
  static const char op[] = "lm_scaler_set";
  CHECK_POINTER(scaler, 4);
  CHECK_MIN(growth_tracker, 0);
  CHECK_MIN(growth_interval, 1);
  if (UNLIKELY(!(a->scale > 0) || !(a->growth_factor > 1) || !(a->backoff_factor > 0 && a->backoff_factor < 1)))
    FAIL("%s: wanted scale > 0, growth_factor > 1 and backoff_factor in (0, 1): scale=%g growth_factor=%g backoff_factor=%g", op,
         (double)a->scale, (double)a->growth_factor, (double)a->backoff_factor);
  return LM_OK;
}

int32_t lm_check_scaler_scale(lm_ctx *ctx, const lm_scaler_scale_args *a) {
  static const char op[] = "lm_scaler_scale";
  CHECK_COUNT(n);
  CHECK_POINTER(y, 4);
  CHECK_POINTER(x, 4);
  CHECK_POINTER(scaler, 4);
  return LM_OK;
}

int32_t lm_check_scaler_unscale(lm_ctx *ctx, const lm_scaler_unscale_args *a) {
  static const char op[] = "lm_scaler_unscale";
  CHECK_COUNT(n);
  CHECK_POINTER(g, 4);
  CHECK_POINTER(found, 4);
  CHECK_POINTER(scaler, 4);
  return LM_OK;
}

int32_t lm_check_scaler_update(lm_ctx *ctx, const lm_scaler_update_args *a) {
  static const char op[] = "lm_scaler_update";
  CHECK_MIN(count, 1);
  CHECK_POINTER(scaler, 4);
  CHECK_POINTER(found, 4);
  return LM_OK;
}
