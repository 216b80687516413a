/* checks_rows.c: argument checks of elementwise and row-wise kernels. */
#include "checks.h"

int32_t lm_check_scale(lm_ctx *ctx, const lm_scale_args *a) {
  static const char op[] = "lm_scale";
  CHECK_TYPE(type);
  CHECK_COUNT(n);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(y, bytes);
  CHECK_POINTER(x, bytes);
  return LM_OK;
}

int32_t lm_check_add(lm_ctx *ctx, const lm_add_args *a) {
  static const char op[] = "lm_add";
  CHECK_TYPE(type);
  CHECK_COUNT(n);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(y, bytes);
  CHECK_POINTER(a, bytes);
  CHECK_POINTER(b, bytes);
  return LM_OK;
}

int32_t lm_check_cast(lm_ctx *ctx, const lm_cast_args *a) {
  static const char op[] = "lm_cast";
  CHECK_TYPE(type);
  CHECK_TYPE(y_type);
  CHECK_COUNT(n);
  CHECK_POINTER(y, lm_float_bytes(a->y_type));
  CHECK_POINTER(x, lm_float_bytes(a->type));
  return LM_OK;
}

int32_t lm_check_embedding_forward(lm_ctx *ctx, const lm_embedding_forward_args *a) {
  static const char op[] = "lm_embedding_forward";
  CHECK_TYPE(type);
  CHECK_TYPE(table_type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_MIN(vocab, 1);
  CHECK_PITCH(y_pitch, a->rows, a->width);
  CHECK_POINTER(y, lm_float_bytes(a->type));
  CHECK_POINTER(table, lm_float_bytes(a->table_type));
  CHECK_POINTER(ids, 4);
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_gather_rows(lm_ctx *ctx, const lm_gather_rows_args *a) {
  static const char op[] = "lm_gather_rows";
  CHECK_TYPE(type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_MIN(source_rows, 1);
  CHECK_PITCH(y_pitch, a->rows, a->width);
  CHECK_PITCH(x_pitch, a->source_rows, a->width);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(y, bytes);
  CHECK_POINTER(x, bytes);
  CHECK_POINTER(index, 4);
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_argmax(lm_ctx *ctx, const lm_argmax_args *a) {
  static const char op[] = "lm_argmax";
  CHECK_TYPE(type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_PITCH(x_pitch, a->rows, a->width);
  CHECK_POINTER(out, 4);
  CHECK_POINTER(x, lm_float_bytes(a->type));
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_rms_norm_forward(lm_ctx *ctx, const lm_rms_norm_forward_args *a) {
  static const char op[] = "lm_rms_norm_forward";
  CHECK_TYPE(type);
  CHECK_TYPE(weight_type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_PITCH(y_pitch, a->rows, a->width);
  CHECK_PITCH(x_pitch, a->rows, a->width);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(y, bytes);
  CHECK_POINTER(x, bytes);
  CHECK_POINTER(weight, lm_float_bytes(a->weight_type));
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_rms_norm_backward(lm_ctx *ctx, const lm_rms_norm_backward_args *a) {
  static const char op[] = "lm_rms_norm_backward";
  CHECK_TYPE(type);
  CHECK_TYPE(weight_type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_PITCH(dx_pitch, a->rows, a->width);
  CHECK_PITCH(dy_pitch, a->rows, a->width);
  CHECK_PITCH(x_pitch, a->rows, a->width);
  if (a->add) CHECK_PITCH(add_pitch, a->rows, a->width);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(dx, bytes);
  CHECK_POINTER(dy, bytes);
  CHECK_POINTER(x, bytes);
  CHECK_POINTER(weight, lm_float_bytes(a->weight_type));
  CHECK_ALIGNED(add, bytes);
  if (a->y) {
    CHECK_PITCH(y_pitch, a->rows, a->width);
    CHECK_ALIGNED(y, bytes);
    if (UNLIKELY(a->y == a->dx)) FAIL("%s: y is dx: both are written: give y memory of its own", op);
  }
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_glu_forward(lm_ctx *ctx, const lm_glu_forward_args *a) {
  static const char op[] = "lm_glu_forward";
  CHECK_TYPE(type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_PITCH(h_pitch, a->rows, a->width);
  CHECK_PITCH(gu_pitch, a->rows, 2 * (int64_t)a->width);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(h, bytes);
  CHECK_POINTER(gu, bytes);
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_glu_backward(lm_ctx *ctx, const lm_glu_backward_args *a) {
  static const char op[] = "lm_glu_backward";
  CHECK_TYPE(type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_PITCH(dgu_pitch, a->rows, 2 * (int64_t)a->width);
  CHECK_PITCH(dh_pitch, a->rows, a->width);
  CHECK_PITCH(gu_pitch, a->rows, 2 * (int64_t)a->width);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(dgu, bytes);
  CHECK_POINTER(dh, bytes);
  CHECK_POINTER(gu, bytes);
  if (a->h) {
    CHECK_PITCH(h_pitch, a->rows, a->width);
    CHECK_ALIGNED(h, bytes);
  }
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_rope(lm_ctx *ctx, const lm_rope_args *a) {
  static const char op[] = "lm_rope";
  CHECK_TYPE(type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(width, 1);
  CHECK_MIN(heads, 1);
  CHECK_MIN(head_dim, 2);
  CHECK_MIN(position_count, 1);
  if (a->head_dim % 2) FAIL("%s: head_dim is odd: head_dim=%d: rotation works on pairs", op, a->head_dim);
  if ((int64_t)a->heads * a->head_dim > a->width) {
    FAIL("%s: the heads do not fit into a row: heads=%d head_dim=%d width=%d", op, a->heads, a->head_dim, a->width);
  }
  if (a->direction != 1 && a->direction != -1) {
    FAIL("%s: direction is neither 1 (forward) nor -1 (backward): direction=%d", op, a->direction);
  }
  CHECK_PITCH(y_pitch, a->rows, a->width);
  CHECK_PITCH(x_pitch, a->rows, a->width);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(y, bytes);
  CHECK_POINTER(x, bytes);
  CHECK_POINTER(cos, 4);
  CHECK_POINTER(sin, 4);
  CHECK_POINTER(positions, 4);
  CHECK_LIVE();
  return LM_OK;
}
