/* linear_gradient.cuh: the gradients of a group's adapters that need dy, in one read of it. */
#ifndef LM_CUDA_LINEAR_GRADIENT_CUH
#define LM_CUDA_LINEAR_GRADIENT_CUH

#include "gemm.cuh"

/* lm_cuda_linear_gradient: ds_i = scale_i dy_i B_i, written in the activations' type to ds [T, R], and dB_i += dy_i^T s_i.
 * The sums take workspace: 4 bytes per row and rank for every 8192 / rank columns of dy, and per element of B_i for every
 * block of rows; what does not fit at once goes in turns over the rows.
 * @return cudaErrorNotSupported unless everything is of one 16-bit type on 16 bytes and no rank is above 64: nothing was done */
cudaError_t lm_cuda_linear_gradient(lm_cuda *cuda, const lm_lora_linear_backward_args *args, const lm_matrix &ds, void *workspace,
                                    uint64_t workspace_bytes, cudaStream_t stream);

#endif
