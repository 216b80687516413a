/* gemm_short.cu: y = factor l r + bias + residual over a few steps of contraction, as LoRA terms are: bound by writing y.
 *
 * A warp keeps its columns of the right operand in registers and takes 16 rows after the other. Columns are dealt to the
 * fragments so that every lane ends up with 8 neighbouring ones, so sums go from registers to memory in whole words. */
#include "gemm.cuh"
#include "tensor.cuh"

enum { SHORT_THREADS = 256, SHORT_BLOCKS = 2, MOST_STEPS = 4, WARPS_ACROSS = 4, WARPS_DOWN = SHORT_THREADS / 32 / WARPS_ACROSS };

/* STEPS: 16 steps of the contraction each. SPAN: blocks of 32 columns per warp. */
template <typename T, int FORM, int STEPS, int SPAN>
__global__ void __launch_bounds__(SHORT_THREADS, SHORT_BLOCKS)
    short_product(const __grid_constant__ lm_gemm g, const int32_t run_rows) {
  constexpr int COLUMNS = 32 * SPAN;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, at = lane >> 2, word = lane & 3;
  int stripe = blockIdx.x, index = 0;
  for (;;) {
    const int own = (g.part[index].columns + COLUMNS * WARPS_ACROSS - 1) / (COLUMNS * WARPS_ACROSS);
    if (stripe < own) break;
    stripe -= own, index++;
  }
  const lm_gemm_part &part = g.part[index];
  const int column0 = (stripe * WARPS_ACROSS + warp % WARPS_ACROSS) * COLUMNS, depth = part.depth[0];
  const int last = min(lm_gemm_live(g, g.rows), (int)(blockIdx.y + 1) * run_rows);
  int row0 = blockIdx.y * run_rows + warp / WARPS_ACROSS * 16;
  if (column0 >= part.columns || row0 >= last) return;

  /* right[s][b][j]: columns 8 * (at / 2) + 2 * j + at % 2 of the block, steps 2 * word and, in the second, 8 more. */
  const T *const right = (const T *)part.right[0].data;
  const int pitch = part.right[0].pitch;
  uint32_t r[STEPS][SPAN][4][2];
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int b = 0; b < SPAN; b++) {
      if constexpr (FORM == LM_NT) {
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int column = column0 + 32 * b + 8 * (at >> 1) + 2 * j + (at & 1), k = 16 * s + 8 * h + 2 * word;
            r[s][b][j][h] = column < part.columns && k < depth
                                ? __ldg(reinterpret_cast<const uint32_t *>(right + (int64_t)column * pitch + k)) : 0;
          }
      } else {
        const int column = column0 + 32 * b + 8 * (at >> 1);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int k = 16 * s + 8 * h + 2 * word;
          uint4 low = {0, 0, 0, 0}, high = low;
          if (column < part.columns && k < depth) {
            low = __ldg(reinterpret_cast<const uint4 *>(right + (int64_t)k * pitch + column));
            high = __ldg(reinterpret_cast<const uint4 *>(right + (int64_t)(k + 1) * pitch + column));
          }
          const uint32_t pick = at & 1 ? 0x7632 : 0x5410;
          r[s][b][0][h] = __byte_perm(low.x, high.x, pick);
          r[s][b][1][h] = __byte_perm(low.y, high.y, pick);
          r[s][b][2][h] = __byte_perm(low.z, high.z, pick);
          r[s][b][3][h] = __byte_perm(low.w, high.w, pick);
        }
      }
    }

  const T *const left = (const T *)part.left[0].data;
  const auto fetch = [&](uint32_t(&l)[STEPS][4], int row) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int line = row + at + 8 * (i & 1), k = 16 * s + 8 * (i >> 1) + 2 * word;
        const T *const from = left + (int64_t)line * part.left[0].pitch + k;
        l[s][i] = line < last && k < depth ? __ldg(reinterpret_cast<const uint32_t *>(from)) : 0;
      }
  };
  uint32_t l[2][STEPS][4];
  fetch(l[0], row0);
  for (; row0 < last; row0 += 16 * WARPS_DOWN) {
    fetch(l[1], row0 + 16 * WARPS_DOWN);
#pragma unroll
    for (int b = 0; b < SPAN; b++) {
      float sum[4][4] = {};
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) lm_multiply<T>(sum[j], l[0][s], r[s][b][j][0], r[s][b][j][1]);
      const int column = column0 + 32 * b + 8 * word;
      if (column < part.columns) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = row0 + at + 8 * half;
          if (row >= last) continue;
          float x[8];
#pragma unroll
          for (int j = 0; j < 4; j++) x[2 * j] = sum[j][2 * half] * part.factor, x[2 * j + 1] = sum[j][2 * half + 1] * part.factor;
          if (part.bias) LM_CUDA_BY_TYPE(g.bias_type, B, lm_add_up_to<8>(x, (const B *)part.bias + column, 8, false));
          if (part.residual) lm_add_up_to<8>(x, (const T *)part.residual + (int64_t)row * g.residual_pitch + column, 8, true);
          lm_store<8>((T *)part.y + (int64_t)row * g.y_pitch + column, x);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) l[0][s][i] = l[1][s][i];
  }
}

static bool on(const void *p, int64_t pitch_bytes, unsigned bytes) {
  return ((uintptr_t)p | (uint64_t)pitch_bytes) % bytes == 0;
}

bool lm_cuda_gemm_short_can(const lm_gemm *g, int32_t type) {
  if (g->form == LM_TN || g->rows < 64 || g->y_type != type || g->y_index) return false;
  for (const lm_gemm_part &p : g->part) {
    if (p.columns == 0) continue;
    const lm_matrix &l = p.left[0], &r = p.right[0];
    if (p.columns % 8 != 0 || p.depth[0] > 16 * MOST_STEPS || p.depth[0] % 2 != 0 || p.depth[1] > 0 || l.type != type ||
        r.type != type || !on(l.data, l.pitch * 2ll, 4) || !on(r.data, r.pitch * 2ll, g->form == LM_NT ? 4 : 16) ||
        !on(p.y, g->y_pitch * 2ll, 16) || !on(p.residual, p.residual ? g->residual_pitch * 2ll : 0, 16))
      return false;
  }
  return true;
}

/* Runs of rows: as many as let every block run at once, each of at least 64. */
template <typename T, int FORM, int STEPS>
static cudaError_t launch_steps(const lm_cuda *cuda, const lm_gemm *g, cudaStream_t stream) {
  constexpr int span = STEPS <= 3 ? 2 : 1, down = 16 * WARPS_DOWN;
  int64_t stripes = 0;
  for (const lm_gemm_part &p : g->part) stripes += lm_ceil_div(p.columns, 32 * span * WARPS_ACROSS);
  if (stripes == 0) return cudaSuccess;
  int64_t runs = SHORT_BLOCKS * (int64_t)cuda->sm_count / stripes;
  if (runs > g->rows / 64) runs = g->rows / 64;
  if (runs < 1) runs = 1;
  const int64_t run_rows = lm_ceil_div(lm_ceil_div(g->rows, runs), down) * down;
  const dim3 grid((unsigned)stripes, (unsigned)lm_ceil_div(g->rows, run_rows));
  return lm_cuda_launch<short_product<T, FORM, STEPS, span>>(grid, SHORT_THREADS, 0, stream, *g, (int32_t)run_rows);
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
