/* lora_down.h: the products of an adapter that read x, in clusters of blocks. Everything is of one 16-bit type on 16 bytes,
 * else cudaErrorNotSupported: nothing was done, and lm_cuda_gemm serves. */
#ifndef LM_CUDA_LORA_DOWN_H
#define LM_CUDA_LORA_DOWN_H

#include "gemm.cuh"

/* s_i = scale_i x A_i^T in one read of x. */
cudaError_t lm_cuda_lora_down_tiles(lm_cuda *cuda, const lm_lora_down_args *args, cudaStream_t stream);

/* dA += ds^T x in one read of x.   ds  [rows, ranks] as lm_cuda_linear_gradient left it */
cudaError_t lm_cuda_lora_down_gradient(lm_cuda *cuda, const lm_lora_down_backward_args *args, const lm_matrix &ds,
                                       cudaStream_t stream);

#endif
