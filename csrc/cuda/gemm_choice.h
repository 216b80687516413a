/* gemm_choice.h: which products cuBLASLt serves and by which of its algorithms: by timing them before the first step, or as an
 * earlier run chose. Without either, lm_cuda_gemm_library_pays estimates and the library's first advice is taken. */
#ifndef LM_CUDA_GEMM_CHOICE_H
#define LM_CUDA_GEMM_CHOICE_H

#include "gemm.cuh"

void lm_cuda_choices_open(lm_cuda *cuda);
void lm_cuda_choices_close(lm_cuda *cuda);

/* lm_cuda_choices_time: while on, lm_cuda_gemm_time works; else it does nothing. */
void lm_cuda_choices_time(lm_cuda *cuda, bool on);

/* lm_cuda_gemm_time: times both ways of computing a product once per shape: `fused` by the own kernels, and `base`, of which
 * lm_cuda_blas_can holds, by the library, after `term` by the own kernels if the LoRA term of `ranks` columns stands apart.
 * Waits for the stream; overwrites the operands with random numbers and the result. Nothing is timed while the stream is
 * recorded. */
void lm_cuda_gemm_time(lm_cuda *cuda, const lm_gemm *fused, const lm_gemm *term, const lm_gemm *base, int32_t ranks,
                       void *workspace, uint64_t workspace_bytes, cudaStream_t stream);

/* lm_cuda_choice_of: what was chosen for the product: 1 the library, 0 the own kernels, -1 nothing. */
int32_t lm_cuda_choice_of(const lm_cuda *cuda, const lm_gemm *base, int32_t ranks);

/* lm_cuda_choices_write: all choices as text, one line each. @return the bytes needed including the terminator */
int32_t lm_cuda_choices_write(lm_cuda *cuda, char *text, uint64_t cap);
/* lm_cuda_choices_read: takes over what lm_cuda_choices_write wrote. Choices of another device or library are left out.
 * @return false if the text is not understood; then nothing is taken over */
bool lm_cuda_choices_read(lm_cuda *cuda, const char *text);

#endif
