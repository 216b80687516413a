/* attention_hopper.h: attention by the products of warp groups, see attention_hopper_{forward,backward}.cu. */
#ifndef LM_CUDA_ATTENTION_HOPPER_H
#define LM_CUDA_ATTENTION_HOPPER_H

#include "attention.cuh"

/* lm_attention_hopper_can: whether the device has them, this build holds their code, the head size is one of theirs, and there is
 * neither a window nor a cap. The forward pass takes a window. */
bool lm_attention_hopper_can(const lm_cuda *cuda, const lm_attention &a);
bool lm_attention_hopper_can_forward(const lm_cuda *cuda, const lm_attention &a);

/* lm_attention_hopper_forward: lse may be NULL. */
cudaError_t lm_attention_hopper_forward(const lm_cuda *cuda, const lm_attention &a, int32_t type, void *o, float *lse,
                                        cudaStream_t stream);

/* lm_attention_hopper_keys, lm_attention_hopper_queries: rows of a block of the backward pass. */
int32_t lm_attention_hopper_keys(void);
int32_t lm_attention_hopper_queries(const lm_attention &a);

/* lm_attention_hopper_backward: dq, dk and dv, after delta; dk_sum, dv_sum and dkv_turn are used with g.slices > 1 only. */
cudaError_t lm_attention_hopper_backward(const lm_attention &a, const lm_attention_gradients &g, int32_t type, cudaStream_t stream);

#endif
