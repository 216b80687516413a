/* gemm_short.cu: launches of gemm_short.cuh. */
#include "gemm_short.cuh"

enum { MOST_STEPS = 4, WARPS_ACROSS = 4 };

static bool on(const void *p, int64_t pitch_bytes, unsigned bytes) {
  return ((uintptr_t)p | (uint64_t)pitch_bytes) % bytes == 0;
}

bool lm_cuda_gemm_short_can(const lm_gemm *g, int32_t type) {
  if (g->form == LM_TN || g->rows < 64 || g->y_type != type || g->y_index) return false;
  for (const lm_gemm_part &p : g->part) {
    if (p.columns == 0) continue;
    const lm_matrix &l = p.left[0], &r = p.right[0];
    if (p.columns % 8 != 0 || p.depth[0] > 16 * MOST_STEPS || p.depth[0] % 2 != 0 || p.depth[1] > 0 || l.type != type || r.type != type ||
        !on(l.data, l.pitch * 2ll, 4) || !on(r.data, r.pitch * 2ll, g->form == LM_NT ? 4 : 16) || !on(p.y, g->y_pitch * 2ll, 16) ||
        !on(p.residual, p.residual ? g->residual_pitch * 2ll : 0, 16))
      return false;
  }
  return true;
}

template <typename T, int FORM, int STEPS>
static cudaError_t launch_steps(const lm_cuda *cuda, const lm_gemm *g, cudaStream_t stream) {
  constexpr int span = STEPS <= 2 ? 2 : 1, down = UP_THREADS / 32 / WARPS_ACROSS * 16;
  int64_t stripes = 0;
  for (const lm_gemm_part &p : g->part) stripes += lm_ceil_div(p.columns, 32 * span * WARPS_ACROSS);
  if (stripes == 0) return cudaSuccess;
  int64_t runs = 4ll * cuda->sm_count / stripes;
  if (runs > g->rows / 64) runs = g->rows / 64;
  if (runs < 1) runs = 1;
  const int64_t run_rows = lm_ceil_div(lm_ceil_div(g->rows, runs), down) * down;
  return lm_cuda_launch<up_rows<T, FORM, STEPS, span, WARPS_ACROSS>>(dim3((unsigned)stripes, (unsigned)lm_ceil_div(g->rows, run_rows)),
                                                                     UP_THREADS, 0, stream, *g, (int32_t)run_rows);
}

template <typename T, int FORM>
static cudaError_t launch_form(const lm_cuda *cuda, const lm_gemm *g, cudaStream_t stream) {
  int32_t depth = 0;
  for (const lm_gemm_part &p : g->part)
    if (p.columns > 0 && p.depth[0] > depth) depth = p.depth[0];
  switch (lm_ceil_div(depth, 16)) {
    case 0:
    case 1: return launch_steps<T, FORM, 1>(cuda, g, stream);
    case 2: return launch_steps<T, FORM, 2>(cuda, g, stream);
    case 3: return launch_steps<T, FORM, 3>(cuda, g, stream);
    default: return launch_steps<T, FORM, 4>(cuda, g, stream);
  }
}

cudaError_t lm_cuda_gemm_short(const lm_cuda *cuda, const lm_gemm *g, int32_t type, cudaStream_t stream) {
  if (type == LM_BF16)
    return g->form == LM_NT ? launch_form<lm_bf16, LM_NT>(cuda, g, stream) : launch_form<lm_bf16, LM_NN>(cuda, g, stream);
  return g->form == LM_NT ? launch_form<lm_f16, LM_NT>(cuda, g, stream) : launch_form<lm_f16, LM_NN>(cuda, g, stream);
}
