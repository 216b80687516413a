/* tensor_map.cu: descriptions for tensor copies, by the driver: the function is found at run time, nothing links the driver. */
#include "tensor_map.h"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_fn find_encode(void) {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<encode_fn>(function);
}

static encode_fn encode(void) {
  static const encode_fn function = find_encode();
  return function;
}

bool lm_cuda_has_tensor_maps(void) { return encode() != nullptr; }

bool lm_cuda_tensor_map(CUtensorMap *map, const lm_matrix &m, int32_t lines, int32_t width, int32_t box_lines) {
  const cuuint64_t extent[2] = {(cuuint64_t)width, (cuuint64_t)lines}, pitch[1] = {(cuuint64_t)m.pitch * 2};
  const cuuint32_t box[2] = {64, (cuuint32_t)box_lines}, step[2] = {1, 1};
  return encode()(map, m.type == LM_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                  const_cast<void *>(m.data), extent, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
