/* cuda_check.h: CUDA(call) ends the benchmark where a call fails. */
#ifndef LM_BENCH_CUDA_CHECK_H
#define LM_BENCH_CUDA_CHECK_H

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#define CUDA(call)                                                                  \
  do {                                                                              \
    const cudaError_t e = (call);                                                   \
    if (e) {                                                                        \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e));  \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

#endif
