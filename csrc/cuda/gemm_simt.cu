/* gemm_simt.cu: matrix products in fp32 arithmetic over operands of any types, each converted when it is loaded: the parity
 * mode, and whatever the tensor cores cannot take (operands of different types). A thread holds SIDE x SIDE sums. */
#include "gemm_plan.cuh"

enum { SIMT_THREADS = 256 };

/* Four neighbours of a line, zeros from `count` on. */
__device__ __forceinline__ float4 load_four(const lm_matrix &m, int64_t place, int count, bool whole) {
  float x[4] = {0, 0, 0, 0};
  LM_CUDA_BY_TYPE(m.type, T, lm_add_up_to<4>(x, (const T *)m.data + place, count, whole));
  return make_float4(x[0], x[1], x[2], x[3]);
}

/* A slice of one operand on its way through registers into shared memory [DEPTH][TILE + 4].
 * along: the operand's lines are the steps of the contraction. */
template <bool along, int TILE, int DEPTH>
struct simt_slice {
  static constexpr int COUNT = TILE * DEPTH / 4 / SIMT_THREADS, CHUNKS = along ? TILE / 4 : DEPTH / 4;
  float4 v[COUNT];

  __device__ __forceinline__ void load(const lm_matrix &m, int first, int limit, int step, int steps) {
    const int line = along ? step : first, lines = along ? steps : limit;
    const int column = along ? first : step, columns = along ? limit : steps;
    const int size = m.type == LM_F32 ? 4 : 2;
    const bool whole = lm_is_aligned(m.data, (int64_t)m.pitch * size, 4 * size);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int index = i * SIMT_THREADS + threadIdx.x, l = line + index / CHUNKS, c = column + index % CHUNKS * 4;
      const int count = l < lines ? max(0, min(4, columns - c)) : 0;
      v[i] = load_four(m, (int64_t)l * m.pitch + c, count, whole && count == 4);
    }
  }
  __device__ __forceinline__ void store(float (*to)[TILE + 4]) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int index = i * SIMT_THREADS + threadIdx.x, l = index / CHUNKS, c = index % CHUNKS * 4;
      if constexpr (along) {
        *reinterpret_cast<float4 *>(&to[l][c]) = v[i];
      } else {
        to[c][l] = v[i].x, to[c + 1][l] = v[i].y, to[c + 2][l] = v[i].z, to[c + 3][l] = v[i].w;
      }
    }
  }
};

template <int FORM, int SIDE>
__global__ void __launch_bounds__(SIMT_THREADS, SIDE == 8 ? 2 : 3)
    simt_product(const __grid_constant__ lm_gemm g, const __grid_constant__ lm_gemm_grid grid) {
  constexpr int TILE = 16 * SIDE, GROUPS = SIDE / 4, DEPTH = 64 / SIDE;
  __shared__ __align__(16) float left[2][DEPTH][TILE + 4], right[2][DEPTH][TILE + 4];
  const lm_gemm_item item(grid, blockIdx.x);
  const lm_gemm_place place = lm_gemm_locate<TILE, TILE>(grid, item.tile);
  const lm_gemm_part &part = g.part[place.part];
  const int rows = FORM == LM_TN ? g.rows : lm_gemm_live(g, g.rows);
  if (place.row >= rows) return;
  const int depth = FORM == LM_TN ? lm_gemm_live(g, part.depth[0]) : part.depth[0];
  const int first_slices = (part.depth[0] + DEPTH - 1) / DEPTH;
  const int slices = first_slices + (part.depth[1] + DEPTH - 1) / DEPTH;
  const int begin = item.begin(slices);
  int end = item.end(slices);
  if (FORM == LM_TN) end = max(begin, min(end, (depth + DEPTH - 1) / DEPTH));

  simt_slice<FORM == LM_TN, TILE, DEPTH> l;
  simt_slice<FORM != LM_NT, TILE, DEPTH> r;
  const auto load = [&](int slice) {
    const int second = slice >= first_slices, step = (slice - (second ? first_slices : 0)) * DEPTH;
    const int steps = second ? part.depth[1] : depth;
    l.load(part.left[second], place.row, rows, step, steps);
    r.load(part.right[second], place.column, part.columns, step, steps);
  };
  const int down = threadIdx.x / 16 * 4, across = threadIdx.x % 16 * 4;
  float sum[SIDE * SIDE];
#pragma unroll
  for (int i = 0; i < SIDE * SIDE; i++) sum[i] = 0;
  if (begin < end) {
    load(begin);
    l.store(left[0]), r.store(right[0]);
  }
  __syncthreads();
  for (int slice = begin, buffer = 0; slice < end; slice++, buffer ^= 1) {
    if (slice + 1 < end) load(slice + 1);
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      float a[SIDE], b[SIDE];
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        *reinterpret_cast<float4 *>(a + 4 * i) = *reinterpret_cast<const float4 *>(&left[buffer][k][down + 64 * i]);
        *reinterpret_cast<float4 *>(b + 4 * i) = *reinterpret_cast<const float4 *>(&right[buffer][k][across + 64 * i]);
      }
#pragma unroll
      for (int i = 0; i < SIDE; i++)
#pragma unroll
        for (int j = 0; j < SIDE; j++) sum[i * SIDE + j] = fmaf(a[i], b[j], sum[i * SIDE + j]);
    }
    if (slice + 1 < end) l.store(left[buffer ^ 1]), r.store(right[buffer ^ 1]);
    __syncthreads();
  }
  if (!lm_gemm_join<SIDE * SIDE, SIMT_THREADS>(sum, grid, item)) return;

  const lm_gemm_end last(g, part);
#pragma unroll
  for (int i = 0; i < SIDE; i++)
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
      const int row = place.row + down + i / 4 * 64 + i % 4, column = place.column + across + 64 * j;
      if (row < rows && column < part.columns) {
        const float *const s = &sum[i * SIDE + 4 * j];
        float x[4] = {s[0], s[1], s[2], s[3]};
        last.write<4>(g, part, row, column, x);
      }
    }
}

template <int FORM>
static cudaError_t launch_form(const lm_gemm *g, const lm_gemm_plan &plan, cudaStream_t stream) {
  if (plan.shape == 0) return lm_cuda_launch<simt_product<FORM, 8>>(plan.grid.items(), SIMT_THREADS, 0, stream, *g, plan.grid);
  return lm_cuda_launch<simt_product<FORM, 4>>(plan.grid.items(), SIMT_THREADS, 0, stream, *g, plan.grid);
}

cudaError_t lm_cuda_gemm_simt(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream) {
  static const lm_tile_shape shapes[] = {{128, 128, 2, 1.0f, 0.7f}, {64, 64, 3, 0.6f, 0.4f}};
  lm_gemm_plan plan;
  const cudaError_t error = lm_gemm_make_plan(cuda, g, shapes, 2, 16, workspace, workspace_bytes, &plan);
  if (error || plan.grid.items() == 0) return error;
  switch (g->form) {
    case LM_NT: return launch_form<LM_NT>(g, plan, stream);
    case LM_NN: return launch_form<LM_NN>(g, plan, stream);
    default: return launch_form<LM_TN>(g, plan, stream);
  }
}
