/* cuda.h: the CUDA device as kernels and the parts of the backend see it.
 *
 * A kernel of loramem_kernels.h is one launch function, declared in kernels.h. It only enqueues: no synchronisation, no
 * allocation, no read of device memory on the host; grids are sized for the maximum and what depends on data is read on the
 * device. So every launch function can be recorded into a graph. Arguments were checked by core; what device memory holds
 * (live, ids, offsets) is clamped in the kernel. */
#ifndef LM_CUDA_H
#define LM_CUDA_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "../core/backend.h"

struct lm_cuda_blas;
struct lm_cuda_runtime;

typedef struct lm_cuda {
  lm_backend base;
  lm_host host;
  int32_t device;      /* index for cudaSetDevice */
  int32_t capability;  /* 10 * major + minor, e.g. 90 */
  int32_t sm_count;    /* multiprocessors */
  int32_t shared_max;  /* bytes of dynamic shared memory a block may ask for; LORAMEM_CUDA_SHARED lowers it */
  int64_t l2_bytes;
  cudaDeviceProp properties;
  struct lm_cuda_blas *blas;       /* cuBLASLt and what it is used for, see cublaslt.h */
  struct lm_cuda_choices *choices; /* what timing chose, see gemm_choice.h; with blas */
  uint64_t workspace_bytes;        /* size of a stream's workspace; 0 = streams have none */
  struct lm_cuda_runtime *runtime; /* streams, memory: private to the backend's own files */
} lm_cuda;

typedef cudaError_t (*lm_cuda_kernel_fn)(lm_cuda *cuda, const void *args, cudaStream_t stream);

/* lm_cuda_workspace: device memory of the stream, cuda->workspace_bytes long, 256-byte aligned, content undefined: for one
 * launch function at a time, since kernels of a stream run in order. The first call on a stream takes the memory, so it
 * belongs before the first step; a graph keeps that of the stream it was recorded on.
 * @return NULL when there is no memory left or workspace_bytes is 0 */
void *lm_cuda_workspace(lm_cuda *cuda, cudaStream_t stream);

/* lm_cuda_blas_open: called once when the device is opened, with it current: sets cuda->blas and cuda->workspace_bytes.
 * Never fails: without cuBLASLt the own matrix product serves. */
void lm_cuda_blas_open(lm_cuda *cuda);
/* lm_cuda_blas_close: gives back what lm_cuda_blas_open took; all work has ended. cuda->blas may be NULL. */
void lm_cuda_blas_close(lm_cuda *cuda);

/* Kernels are loaded when the device is opened: a load inside a step would stop every stream and take memory. Whoever
 * launches through lm_cuda_launch is on the list that is loaded then. */
typedef struct lm_cuda_kernel {
  const void *function;
  struct lm_cuda_kernel *next;
} lm_cuda_kernel;

extern lm_cuda_kernel *lm_cuda_kernels;

#ifdef __CUDACC__
template <auto kernel>
struct lm_cuda_listed {
  lm_cuda_kernel node;
  lm_cuda_listed() : node{reinterpret_cast<const void *>(kernel), lm_cuda_kernels} { lm_cuda_kernels = &node; }
  static lm_cuda_listed entry;
};
template <auto kernel>
lm_cuda_listed<kernel> lm_cuda_listed<kernel>::entry;

/* lm_cuda_launch<kernel>(grid, block, shared bytes, stream, arguments...) */
template <auto kernel, typename... Arguments>
inline cudaError_t lm_cuda_launch(dim3 grid, dim3 block, size_t shared, cudaStream_t stream, const Arguments &...arguments) {
  (void)&lm_cuda_listed<kernel>::entry;
  kernel<<<grid, block, shared, stream>>>(arguments...);
  return cudaGetLastError();
}
#endif

#endif
