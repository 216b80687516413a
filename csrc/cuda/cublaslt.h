/* cublaslt.h: cuBLASLt, where the machine has it: opened at run time with own declarations, tested against the own product
 * before it is trusted, never needed. LORAMEM_CUBLASLT names its file, or is "off". */
#ifndef LM_CUDA_CUBLASLT_H
#define LM_CUDA_CUBLASLT_H

#include "gemm.cuh"

/* lm_cuda_blas_can: whether the library can serve the product: one part with one 16-bit operand pair, NT or NN, rows on 16
 * bytes, no row index. It computes all planned rows: what y holds past the live rows is undefined afterwards. */
bool lm_cuda_blas_can(const lm_cuda *cuda, const lm_gemm *g);

/* One of the library's algorithms. */
typedef struct lm_blas_algo {
  uint64_t data[8];
} lm_blas_algo;
enum { LM_BLAS_CANDIDATES = 6 };

/* lm_cuda_blas_gemm: enqueue a product that lm_cuda_blas_can accepted. The algorithm is settled once per shape: what
 * lm_cuda_choice_algo knows, else the library's first advice.
 * @return cudaErrorNotSupported if the library has no algorithm: nothing was enqueued */
cudaError_t lm_cuda_blas_gemm(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream);

/* lm_cuda_blas_candidates: what the library advises for the shape of g, best first.   algos  [LM_BLAS_CANDIDATES] written
 * @return how many */
int32_t lm_cuda_blas_candidates(lm_cuda *cuda, const lm_gemm *g, uint64_t workspace_bytes, lm_blas_algo *algos);
/* lm_cuda_blas_select: the shape of g is served by this algorithm from now on. */
void lm_cuda_blas_select(lm_cuda *cuda, const lm_gemm *g, uint64_t workspace_bytes, const lm_blas_algo *algo);
/* lm_cuda_choice_algo: the algorithm that was chosen for the shape of base, of gemm_choice.cu. @return false if none was */
bool lm_cuda_choice_algo(const lm_cuda *cuda, const lm_gemm *base, lm_blas_algo *algo);

/* lm_cuda_blas_text: what serves matrix products and why, for lm_ctx_info, e.g. "cuBLASLt 130100 (libcublasLt.so.13)". */
const char *lm_cuda_blas_text(const lm_cuda *cuda);

#endif
