/* cluster.cuh: blocks of a cluster (sm_90 and later) that read each other's shared memory. Elsewhere nothing of this runs. */
#ifndef LM_CUDA_CLUSTER_CUH
#define LM_CUDA_CLUSTER_CUH

#include <stdint.h>

/* lm_cluster_sync: all threads of the cluster; what they wrote to shared memory is seen by the others. */
__device__ __forceinline__ void lm_cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* lm_cluster_load: 16 bytes at the shared address `from` of the cluster's block of this rank. */
__device__ __forceinline__ float4 lm_cluster_load(uint32_t from, int rank) {
  float4 v = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .u32 p; mapa.shared::cluster.u32 p, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [p]; }"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from), "r"(rank)
               : "memory");
#endif
  return v;
}

#endif
