/* kernel_list.h: the one list of kernels. Entry points, kernel ids, argument checks and every backend's dispatch table are
 * generated from it, so that a kernel that is declared but not listed, or listed but not implemented, does not link. */
#ifndef LM_KERNEL_LIST_H
#define LM_KERNEL_LIST_H

#define LM_KERNEL_MAP(X)     \
  X(scale)                   \
  X(add)                     \
  X(cast)                    \
  X(embedding_forward)       \
  X(gather_rows)             \
  X(argmax)                  \
  X(rms_norm_forward)        \
  X(rms_norm_backward)       \
  X(glu_forward)             \
  X(glu_backward)            \
  X(rope)                    \
  X(lora_down)               \
  X(lora_linear_forward)     \
  X(lora_linear_backward)    \
  X(lora_down_backward)      \
  X(attention_forward)       \
  X(attention_backward)      \
  X(attention_cached_forward) \
  X(linear_cross_entropy)    \
  X(loss_sum)                \
  X(grad_norm)               \
  X(adamw)                   \
  X(scaler_set)              \
  X(scaler_scale)            \
  X(scaler_unscale)          \
  X(scaler_update)

/* Kernel ids are private to one build: they index dispatch tables and are never stored. */
#define LM_KERNEL_ENUM(op) LM_KERNEL_##op,
enum { LM_KERNEL_MAP(LM_KERNEL_ENUM) LM_KERNEL_COUNT };

/* Largest argument struct of any kernel; backends may keep copies in fixed slots of this size. */
#define LM_KERNEL_ARGS_MAX 240

#endif
