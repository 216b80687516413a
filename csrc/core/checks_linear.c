/* checks_linear.c: argument checks of the linear groups with LoRA. */
#include "checks.h"

/* Ranks of the up to three adapters of a group; their sum R must fit an int32. */
static int32_t check_ranks(lm_ctx *ctx, const char *op, const int32_t rank[3], int64_t *sum) {
  *sum = 0;
  for (int i = 0; i < 3; i++) {
    if (UNLIKELY(rank[i] < 0)) FAIL("%s: rank%d is negative: rank%d=%d: 0 means no adapter", op, i, i, rank[i]);
    *sum += rank[i];
  }
  if (UNLIKELY(*sum > INT32_MAX)) {
    FAIL("%s: the ranks are too large: rank0=%d rank1=%d rank2=%d", op, rank[0], rank[1], rank[2]);
  }
  return LM_OK;
}

static int32_t check_parts(lm_ctx *ctx, const char *op, int32_t out, const int32_t part[3], const int32_t rank[3]) {
  int64_t sum = 0;
  for (int i = 0; i < 3; i++) {
    if (UNLIKELY(part[i] < 0)) FAIL("%s: out%d is negative: out%d=%d: 0 means no such part", op, i, i, part[i]);
    if (UNLIKELY(rank[i] > 0 && part[i] == 0)) {
      FAIL("%s: an adapter on a part without outputs: rank%d=%d out%d=0", op, i, rank[i], i);
    }
    sum += part[i];
  }
  if (UNLIKELY(sum != out)) {
    FAIL("%s: the parts do not add up: out=%d out0=%d out1=%d out2=%d", op, out, part[0], part[1], part[2]);
  }
  return LM_OK;
}

int32_t lm_check_lora_down(lm_ctx *ctx, const lm_lora_down_args *a) {
  static const char op[] = "lm_lora_down";
  CHECK_TYPE(type);
  CHECK_TYPE(a_type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(in, 1);
  int64_t ranks;
  int32_t status = check_ranks(ctx, op, (const int32_t[3]){a->rank0, a->rank1, a->rank2}, &ranks);
  if (status) return status;
  if (ranks == 0) FAIL("%s: there is no adapter: rank0=0 rank1=0 rank2=0", op);
  CHECK_PITCH(s_pitch, a->rows, ranks);
  CHECK_PITCH(x_pitch, a->rows, a->in);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(s, bytes);
  CHECK_POINTER(x, bytes);
  CHECK_POINTER(a, lm_float_bytes(a->a_type));
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_lora_linear_forward(lm_ctx *ctx, const lm_lora_linear_forward_args *a) {
  static const char op[] = "lm_lora_linear_forward";
  CHECK_TYPE(type);
  CHECK_TYPE(w_type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(in, 1);
  CHECK_MIN(out, 1);
  const int32_t rank[3] = {a->rank0, a->rank1, a->rank2};
  int64_t ranks;
  int32_t status = check_ranks(ctx, op, rank, &ranks);
  if (!status) status = check_parts(ctx, op, a->out, (const int32_t[3]){a->out0, a->out1, a->out2}, rank);
  if (status) return status;
  CHECK_PITCH(y_pitch, a->rows, a->out);
  CHECK_PITCH(x_pitch, a->rows, a->in);
  CHECK_PITCH(w_pitch, a->out, a->in);
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_POINTER(y, bytes);
  CHECK_POINTER(x, bytes);
  CHECK_POINTER(w, lm_float_bytes(a->w_type));
  if (a->bias) {
    CHECK_TYPE(bias_type);
    CHECK_ALIGNED(bias, lm_float_bytes(a->bias_type));
  }
  if (a->residual) {
    CHECK_PITCH(residual_pitch, a->rows, a->out);
    CHECK_ALIGNED(residual, bytes);
  }
  if (ranks) {
    CHECK_TYPE(b_type);
    CHECK_PITCH(s_pitch, a->rows, ranks);
    CHECK_POINTER(s, bytes);
    uint32_t b_bytes = lm_float_bytes(a->b_type);
    if (a->rank0) CHECK_POINTER(b0, b_bytes);
    if (a->rank1) CHECK_POINTER(b1, b_bytes);
    if (a->rank2) CHECK_POINTER(b2, b_bytes);
  }
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_lora_linear_backward(lm_ctx *ctx, const lm_lora_linear_backward_args *a) {
  static const char op[] = "lm_lora_linear_backward";
  CHECK_TYPE(type);
  CHECK_TYPE(w_type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(in, 1);
  CHECK_MIN(out, 1);
  const int32_t rank[3] = {a->rank0, a->rank1, a->rank2};
  int64_t ranks;
  int32_t status = check_ranks(ctx, op, rank, &ranks);
  if (!status) status = check_parts(ctx, op, a->out, (const int32_t[3]){a->out0, a->out1, a->out2}, rank);
  if (status) return status;
  uint32_t bytes = lm_float_bytes(a->type);
  CHECK_PITCH(dy_pitch, a->rows, a->out);
  CHECK_POINTER(dy, bytes);
  if (a->dx) {
    CHECK_PITCH(dx_pitch, a->rows, a->in);
    CHECK_PITCH(w_pitch, a->out, a->in);
    CHECK_ALIGNED(dx, bytes);
    CHECK_POINTER(w, lm_float_bytes(a->w_type));
  } else if (ranks == 0) {
    FAIL("%s: nothing to compute: dx is NULL and there is no adapter", op);
  }
  if (ranks) {
    CHECK_TYPE(a_type);
    if (UNLIKELY(!a->x != !a->da)) FAIL("%s: one of x and da is NULL: give both, or neither to add to da later", op);
    if (a->x) {
      CHECK_PITCH(x_pitch, a->rows, a->in);
      CHECK_ALIGNED(x, bytes);
      CHECK_ALIGNED(da, 4);
    }
    CHECK_PITCH(s_pitch, a->rows, ranks);
    CHECK_POINTER(s, bytes);
    CHECK_POINTER(ds, 4);
    uint32_t a_bytes = lm_float_bytes(a->a_type);
    CHECK_POINTER(a, a_bytes);
    if (a->rank0) {
      CHECK_POINTER(b0, a_bytes);
      CHECK_POINTER(db0, 4);
    }
    if (a->rank1) {
      CHECK_POINTER(b1, a_bytes);
      CHECK_POINTER(db1, 4);
    }
    if (a->rank2) {
      CHECK_POINTER(b2, a_bytes);
      CHECK_POINTER(db2, 4);
    }
  }
  CHECK_LIVE();
  return LM_OK;
}

int32_t lm_check_lora_down_backward(lm_ctx *ctx, const lm_lora_down_backward_args *a) {
  static const char op[] = "lm_lora_down_backward";
  CHECK_TYPE(type);
  CHECK_TYPE(a_type);
  CHECK_MIN(rows, 1);
  CHECK_MIN(in, 1);
  int64_t ranks;
  int32_t status = check_ranks(ctx, op, (const int32_t[3]){a->rank0, a->rank1, a->rank2}, &ranks);
  if (status) return status;
  if (ranks == 0) FAIL("%s: there is no adapter: rank0=0 rank1=0 rank2=0", op);
  CHECK_PITCH(x_pitch, a->rows, a->in);
  CHECK_POINTER(da, 4);
  CHECK_POINTER(ds, 4);
  CHECK_POINTER(x, lm_float_bytes(a->type));
  CHECK_LIVE();
  return LM_OK;
}
