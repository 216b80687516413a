/* gemm_tensor.cu: the tensor-core products of sm_80 and later, chosen by tile, form and type. */
#include "gemm_plan.cuh"
#include "gemm_tensor.cuh"

/* 16-byte copies need every line of every operand to start on 16 bytes. */
static bool all_aligned(const lm_gemm *g) {
  for (const lm_gemm_part &p : g->part)
    for (int i = 0; i < 2; i++) {
      if (p.columns == 0 || p.depth[i] == 0) continue;
      for (const lm_matrix *m : {&p.left[i], &p.right[i]})
        if (((uintptr_t)m->data | (uint64_t)m->pitch * 2) % 16 != 0) return false;
    }
  return true;
}

constexpr int STATIC_SHARED = 1024; /* at most; the kernels declare a few words */

template <typename T, int FORM, typename C, bool GUARDED>
static cudaError_t launch_tile(const lm_gemm *g, const lm_gemm_grid &grid, cudaStream_t stream) {
  constexpr auto kernel = lm_tensor_product<T, FORM, C, GUARDED>;
  if (C::SHARED + STATIC_SHARED > 48 * 1024) { /* the limit that holds unless a kernel asks for more counts both kinds */
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
    if (error) return error;
  }
  return lm_cuda_launch<kernel>(grid.items(), C::THREADS, C::SHARED, stream, *g, grid);
}

enum { LARGE, MIDDLE, SMALL, SHAPES };

template <typename T, int FORM>
static cudaError_t launch_form(const lm_gemm *g, const lm_gemm_plan &plan, bool aligned, cudaStream_t stream) {
  if (!aligned) return launch_tile<T, FORM, lm_small_tile, true>(g, plan.grid, stream);
  if constexpr (FORM != LM_TN) {
    if (plan.shape == LARGE) return launch_tile<T, FORM, lm_large_tile, false>(g, plan.grid, stream);
    if (plan.shape == MIDDLE) return launch_tile<T, FORM, lm_middle_tile, false>(g, plan.grid, stream);
  }
  return launch_tile<T, FORM, lm_small_tile, false>(g, plan.grid, stream);
}

template <typename T>
static cudaError_t launch_type(const lm_gemm *g, const lm_gemm_plan &plan, bool aligned, cudaStream_t stream) {
  switch (g->form) {
    case LM_NT: return launch_form<T, LM_NT>(g, plan, aligned, stream);
    case LM_NN: return launch_form<T, LM_NN>(g, plan, aligned, stream);
    default: return launch_form<T, LM_TN>(g, plan, aligned, stream);
  }
}

cudaError_t lm_cuda_gemm_tensor(lm_cuda *cuda, const lm_gemm *g, int32_t type, void *workspace, uint64_t workspace_bytes,
                                cudaStream_t stream) {
  const bool aligned = all_aligned(g);
  const int64_t columns = (int64_t)g->part[0].columns + g->part[1].columns + g->part[2].columns;
  if (aligned && columns >= 128 && g->rows > 64 && lm_cuda_gemm_hopper_can(cuda, g))
    return lm_cuda_gemm_hopper(cuda, g, type, workspace, workspace_bytes, stream);
  lm_tile_shape shapes[SHAPES] = {{128, 256, 1, 1.0f, 1.0f}, {128, 128, 2, 0.92f, 0.6f}, {64, 64, 4, 0.55f, 0.3f}};
  const bool wide = aligned && g->form != LM_TN; /* TN products are gradients of adapters: narrow */
  if (!wide || cuda->shared_max < lm_large_tile::SHARED + 1024) shapes[LARGE].blocks = 0;
  if (!wide) shapes[MIDDLE].blocks = 0;
  lm_gemm_plan plan;
  const cudaError_t error =
      lm_gemm_make_plan(cuda, g, shapes, SHAPES, lm_large_tile::DEPTH, workspace, workspace_bytes, &plan);
  if (error || plan.grid.items() == 0) return error;
  return type == LM_BF16 ? launch_type<lm_bf16>(g, plan, aligned, stream) : launch_type<lm_f16>(g, plan, aligned, stream);
}
