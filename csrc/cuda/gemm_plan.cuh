/* gemm_plan.cuh: which tile a product gets and how many blocks share a contraction. */
#ifndef LM_CUDA_GEMM_PLAN_CUH
#define LM_CUDA_GEMM_PLAN_CUH

#include "gemm.cuh"

struct lm_tile_shape {
  int32_t rows, columns;
  int32_t blocks; /* that fit on a multiprocessor at once; 0 = this device or product cannot take the shape */
  float speed;    /* of a full multiprocessor, relative to the other shapes */
  float alone;    /* share of that which a single block reaches */
};

struct lm_gemm_plan {
  int32_t shape; /* index into the shapes */
  lm_gemm_grid grid;
};

/* lm_gemm_make_plan: the cheapest of the shapes and splits, from planned sizes only.   depth  steps of a slice */
cudaError_t lm_gemm_make_plan(const lm_cuda *cuda, const lm_gemm *g, const lm_tile_shape *shapes, int32_t count, int32_t depth,
                              void *workspace, uint64_t workspace_bytes, lm_gemm_plan *plan);

#endif
