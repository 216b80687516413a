/* cluster.cuh: blocks of one cluster read each other's shared memory (sm_90 and later). Elsewhere a cluster is one block. */
#ifndef LM_CUDA_CLUSTER_CUH
#define LM_CUDA_CLUSTER_CUH

#include "tensor.cuh"

/* lm_cluster_sync: all threads of the cluster; what they wrote to shared memory is seen by the others. */
__device__ __forceinline__ void lm_cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

/* lm_cluster_load: 16 bytes at the shared address `from` of the block of this rank. */
__device__ __forceinline__ float4 lm_cluster_load(uint32_t from, int rank) {
  float4 v;
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .u32 p; mapa.shared::cluster.u32 p, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [p]; }"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from), "r"(rank)
               : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
#endif
  return v;
}

/* lm_cuda_launch in clusters of `cluster` blocks along y, which divides grid.y. */
template <auto kernel, typename... Arguments>
inline cudaError_t lm_cuda_launch_clusters(unsigned cluster, dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                                           const Arguments &...arguments) {
  if (cluster == 1) return lm_cuda_launch<kernel>(grid, block, shared, stream, arguments...);
  (void)&lm_cuda_listed<kernel>::entry;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = attribute.val.clusterDim.z = 1;
  attribute.val.clusterDim.y = cluster;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

#endif
