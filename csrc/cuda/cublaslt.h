/* cublaslt.h: cuBLASLt, where the machine has it: opened at run time with own declarations, tested against the own product
 * before it is trusted, never needed. LORAMEM_CUBLASLT names its file, or is "off". */
#ifndef LM_CUDA_CUBLASLT_H
#define LM_CUDA_CUBLASLT_H

#include "gemm.cuh"

/* lm_cuda_blas_can: whether the library can serve the product: one part with one 16-bit operand pair, NT or NN, rows on 16
 * bytes, no row index. It computes all planned rows: what y holds past the live rows is undefined afterwards. */
bool lm_cuda_blas_can(const lm_cuda *cuda, const lm_gemm *g);

/* lm_cuda_blas_gemm: enqueue a product that lm_cuda_blas_can accepted. The algorithm is chosen once per shape, by the
 * library's first advice or, while tuning, by timing; nothing is timed while the stream is recorded.
 * @return cudaErrorNotSupported if the library has no algorithm: nothing was enqueued */
cudaError_t lm_cuda_blas_gemm(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream);

/* lm_cuda_gemm_tune: while on, a product of a shape that was not timed yet times up to 8 algorithms where it is launched,
 * waiting for the stream and leaving its result undefined. Belongs before the first step, over memory that holds no data. */
void lm_cuda_gemm_tune(lm_cuda *cuda, bool on);

/* lm_cuda_blas_text: what serves matrix products and why, for lm_ctx_info, e.g. "cuBLASLt 130100 (libcublasLt.so.13)". */
const char *lm_cuda_blas_text(const lm_cuda *cuda);

#endif
