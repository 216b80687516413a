/* tensor_map.h: matrices as tensor copies (TMA, sm_90) want them described. */
#ifndef LM_CUDA_TENSOR_MAP_H
#define LM_CUDA_TENSOR_MAP_H

#include <cuda.h>

#include "gemm.cuh"

/* lm_cuda_has_tensor_maps: whether the driver can describe matrices. */
bool lm_cuda_has_tensor_maps(void);

/* lm_cuda_tensor_map: m [lines, width] of 16-bit elements on 16 bytes, to be copied in boxes of 64 elements by up to 256 lines,
 * swizzled as products read them. @return false if the driver refuses */
bool lm_cuda_tensor_map(CUtensorMap *map, const lm_matrix &m, int32_t lines, int32_t width, int32_t box_lines);

#endif
