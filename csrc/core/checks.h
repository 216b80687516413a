/* checks.h: what the argument checks of kernels are written with.
 *
 * A check is a function lm_check_<op>(ctx, args): it returns LM_OK, or LM_ERR_ARGUMENT with a text naming op, field and
 * values. It sees everything that can be judged without reading device memory. The macros expect `ctx`, `a` (the struct)
 * and `op` (its name) in scope and return from the function. */
#ifndef LM_CHECKS_H
#define LM_CHECKS_H

#include "core.h"

#define LM_CHECK_DECLARE(op) int32_t lm_check_##op(lm_ctx *ctx, const lm_##op##_args *a);
LM_KERNEL_MAP(LM_CHECK_DECLARE)

/* No matrix may have more elements than this; it keeps rows * pitch * 8 far from overflow. */
#define LM_ELEMENTS_MAX (INT64_C(1) << 44)

#define FAIL(...) return lm_fail(ctx, LM_ERR_ARGUMENT, __VA_ARGS__)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Bytes of an activation or weight type, 0 if it is none. */
static inline uint32_t lm_float_bytes(int32_t type) {
  return type == LM_F32 ? 4 : type == LM_BF16 || type == LM_F16 ? 2 : 0;
}

#define CHECK_TYPE(field)                                                                                              \
  do {                                                                                                                 \
    if (UNLIKELY(!lm_float_bytes(a->field)))                                                                           \
      FAIL("%s: " #field " is not a float type: " #field "=%d: use LM_F32, LM_BF16 or LM_F16", op, a->field);          \
  } while (0)

#define CHECK_MIN(field, low)                                                                                  \
  do {                                                                                                         \
    if (UNLIKELY(a->field < (low)))                                                                            \
      FAIL("%s: " #field " is too small: " #field "=%lld: at least %d", op, (long long)a->field, (int)(low));  \
  } while (0)

#define CHECK_COUNT(field)                                                                                             \
  do {                                                                                                                 \
    CHECK_MIN(field, 1);                                                                                               \
    if (UNLIKELY((int64_t)a->field > LM_ELEMENTS_MAX))                                                                 \
      FAIL("%s: " #field " is too large: " #field "=%lld: at most %lld", op, (long long)a->field,                      \
           (long long)LM_ELEMENTS_MAX);                                                                                \
  } while (0)

/* A pointer that must be given, aligned to `bytes`. */
#define CHECK_POINTER(field, bytes)                                                                                  \
  do {                                                                                                               \
    if (UNLIKELY(!a->field)) FAIL("%s: " #field " is NULL", op);                                                      \
    CHECK_ALIGNED(field, bytes);                                                                                     \
  } while (0)

#define CHECK_ALIGNED(field, bytes)                                                                                  \
  do {                                                                                                               \
    if (UNLIKELY((uintptr_t)a->field & ((bytes) - 1)))                                                               \
      FAIL("%s: " #field " is not aligned to %d bytes: " #field "=%p", op, (int)(bytes), (const void *)a->field);    \
  } while (0)

/* Row pitch of a matrix of `rows` rows, each `width` wide. Both are at least 1 by now. */
#define CHECK_PITCH(field, rows, width)                                                                              \
  do {                                                                                                               \
    if (UNLIKELY((int64_t)a->field < (int64_t)(width)))                                                              \
      FAIL("%s: " #field " is smaller than the width of a row: " #field "=%d width=%lld", op, a->field,              \
           (long long)(width));                                                                                      \
    if (UNLIKELY((int64_t)(rows) * a->field > LM_ELEMENTS_MAX))                                                      \
      FAIL("%s: the matrix is too large: rows=%d " #field "=%d", op, (int)(rows), a->field);                         \
  } while (0)

#define CHECK_LIVE() CHECK_ALIGNED(live, 4)

#endif
