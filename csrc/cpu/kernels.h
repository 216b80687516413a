/* kernels.h: the kernels of loramem_kernels.h on the CPU. Each runs to its end on the caller's thread and the workers.
 * Arguments were checked before; what device memory holds (live, ids, positions, offsets) is checked here, so that bad
 * values cannot reach outside a buffer. Nothing is allocated. Head sizes up to 256. */
#ifndef LM_CPU_KERNELS_H
#define LM_CPU_KERNELS_H

#include "loramem.h"
#include "threads.h"

/* elementwise.c */
void lm_cpu_scale(lm_cpu *cpu, const lm_scale_args *args);
void lm_cpu_add(lm_cpu *cpu, const lm_add_args *args);
void lm_cpu_cast(lm_cpu *cpu, const lm_cast_args *args);

/* rows.c */
void lm_cpu_embedding_forward(lm_cpu *cpu, const lm_embedding_forward_args *args);
void lm_cpu_gather_rows(lm_cpu *cpu, const lm_gather_rows_args *args);
void lm_cpu_argmax(lm_cpu *cpu, const lm_argmax_args *args);
void lm_cpu_rms_norm_forward(lm_cpu *cpu, const lm_rms_norm_forward_args *args);
void lm_cpu_rms_norm_backward(lm_cpu *cpu, const lm_rms_norm_backward_args *args);
void lm_cpu_glu_forward(lm_cpu *cpu, const lm_glu_forward_args *args);
void lm_cpu_glu_backward(lm_cpu *cpu, const lm_glu_backward_args *args);
void lm_cpu_rope(lm_cpu *cpu, const lm_rope_args *args);

/* linear.c, linear_backward.c */
void lm_cpu_lora_down(lm_cpu *cpu, const lm_lora_down_args *args);
void lm_cpu_lora_linear_forward(lm_cpu *cpu, const lm_lora_linear_forward_args *args);
void lm_cpu_lora_linear_backward(lm_cpu *cpu, const lm_lora_linear_backward_args *args);
void lm_cpu_lora_down_backward(lm_cpu *cpu, const lm_lora_down_backward_args *args);

/* attention.c, attention_backward.c */
void lm_cpu_attention_forward(lm_cpu *cpu, const lm_attention_forward_args *args);
void lm_cpu_attention_backward(lm_cpu *cpu, const lm_attention_backward_args *args);
void lm_cpu_attention_cached_forward(lm_cpu *cpu, const lm_attention_cached_forward_args *args);

/* loss.c */
void lm_cpu_linear_cross_entropy(lm_cpu *cpu, const lm_linear_cross_entropy_args *args);
void lm_cpu_loss_sum(lm_cpu *cpu, const lm_loss_sum_args *args);

/* optimizer.c */
void lm_cpu_grad_norm(lm_cpu *cpu, const lm_grad_norm_args *args);
void lm_cpu_adamw(lm_cpu *cpu, const lm_adamw_args *args);

/* scaler.c */
void lm_cpu_scaler_set(lm_cpu *cpu, const lm_scaler_set_args *args);
void lm_cpu_scaler_scale(lm_cpu *cpu, const lm_scaler_scale_args *args);
void lm_cpu_scaler_unscale(lm_cpu *cpu, const lm_scaler_unscale_args *args);
void lm_cpu_scaler_update(lm_cpu *cpu, const lm_scaler_update_args *args);

#endif
