/* kernels.h: the launch functions of the kernels of loramem_kernels.h, one per row of LM_KERNEL_MAP. */
#ifndef LM_CUDA_KERNELS_H
#define LM_CUDA_KERNELS_H

#include "cuda.h"

#define LM_CUDA_DECLARE(op) cudaError_t lm_cuda_##op(lm_cuda *cuda, const lm_##op##_args *args, cudaStream_t stream);
LM_KERNEL_MAP(LM_CUDA_DECLARE)

#endif
