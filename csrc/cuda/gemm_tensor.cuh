/* gemm_tensor.cuh: matrix products on the tensor cores of sm_80 and later (mma.sync m16n8k16, fp32 sums).
 *
 * A block computes one tile. Slices of both operands travel through a ring of stages in shared memory (cp.async); 16-byte
 * chunks are stored at chunk ^ line, so that neither the copies nor ldmatrix meet bank conflicts. What lies outside a matrix
 * is filled with zeros on the way, so the main loop knows no borders. */
#ifndef LM_CUDA_GEMM_TENSOR_CUH
#define LM_CUDA_GEMM_TENSOR_CUH

#include "gemm.cuh"
#include "tensor.cuh"

/* ROWS x COLUMNS per block, WARP_ROWS x WARP_COLUMNS per warp, DEPTH steps of the contraction per stage. */
template <int ROWS_, int COLUMNS_, int WARP_ROWS_, int WARP_COLUMNS_, int STAGES_, int BLOCKS_>
struct lm_tile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, WARP_ROWS = WARP_ROWS_, WARP_COLUMNS = WARP_COLUMNS_;
  static constexpr int DEPTH = 32, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr int WARPS_DOWN = ROWS / WARP_ROWS, THREADS = WARPS_DOWN * (COLUMNS / WARP_COLUMNS) * 32;
  static constexpr int STAGE = (ROWS + COLUMNS) * DEPTH * 2; /* bytes */
  static constexpr int SLAB = 16 * WARP_COLUMNS;         /* floats of a warp's way out */
  static constexpr int SHARED = STAGES * STAGE;
  static_assert(SHARED >= THREADS / 32 * SLAB * 4, "the sums leave through the stages");
};

/* All fit into the 99 KB of the consumer cards. The large tile needs the fewest bytes from shared memory per product, two
 * blocks of the middle one hide each other's barriers; the small one is for narrow results and short contractions. */
using lm_large_tile = lm_tile<128, 256, 64, 64, 4, 1>;
using lm_middle_tile = lm_tile<128, 128, 64, 64, 3, 2>;
using lm_small_tile = lm_tile<64, 64, 32, 32, 4, 4>;

/* lm_fetch: LINES x WIDTH elements of m from (line, column) on, to the shared address `tile`; those at or past
 * (lines, columns) are 0.
 * GUARDED: element by element, for matrices whose rows are not 16-byte aligned. */
template <typename T, int LINES, int WIDTH, int THREADS, bool GUARDED>
__device__ __forceinline__ void lm_fetch(uint32_t tile, const lm_matrix &m, int line, int lines, int column, int columns) {
  constexpr int chunks = WIDTH / 8, turns = (LINES * chunks + THREADS - 1) / THREADS;
#pragma unroll
  for (int i = 0; i < turns; i++) {
    const int index = i * THREADS + threadIdx.x, l = index / chunks, c = index % chunks;
    if (LINES * chunks % THREADS != 0 && index >= LINES * chunks) break;
    const int count = line + l < lines ? max(0, min(8, columns - column - 8 * c)) : 0;
    const T *from = (const T *)m.data + (count > 0 ? (int64_t)(line + l) * m.pitch + column + 8 * c : 0);
    const uint32_t to = tile + lm_chunk_place<WIDTH>(l, c);
    if constexpr (GUARDED) {
      union {
        T x[8];
        uint4 word;
      } v = {};
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (e < count) v.x[e] = from[e];
      lm_store_shared(to, v.word);
    } else {
      lm_copy_async(to, from, 2 * count);
    }
  }
}

/* lm_fragment: 16 lines (rows, or columns of the result) x 16 steps, as lm_multiply wants its left operand; the right one
 * has its two halves of 8 columns in words 0, 2 and 1, 3. along: the tile's lines are the steps of the contraction. */
template <bool along, int WIDTH>
__device__ __forceinline__ void lm_fragment(uint32_t (&x)[4], uint32_t tile, int lines, int steps) {
  const int lane = threadIdx.x & 31;
  if constexpr (along) {
    const int step = steps + (lane >> 4 << 3) + (lane & 7), line = lines + (lane & 8);
    lm_load_matrices<true>(x, tile + lm_chunk_place<WIDTH>(step, line >> 3));
  } else {
    lm_load_matrices<false>(x, tile + lm_chunk_place<WIDTH>(lines + (lane & 15), (steps >> 3) + (lane >> 4)));
  }
}

template <typename T, int FORM, typename C, bool GUARDED>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    lm_tensor_product(const __grid_constant__ lm_gemm g, const __grid_constant__ lm_gemm_grid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int DEPTH = C::DEPTH, STAGES = C::STAGES, DOWN = C::WARP_ROWS / 16, ACROSS = C::WARP_COLUMNS / 16;
  const lm_gemm_item item(grid, blockIdx.x);
  const lm_gemm_place place = lm_gemm_locate<C::ROWS, C::COLUMNS>(grid, item.tile);
  const lm_gemm_part &part = g.part[place.part];
  const int rows = FORM == LM_TN ? g.rows : lm_gemm_live(g, g.rows);
  if (place.row >= rows) return;
  const int depth = FORM == LM_TN ? lm_gemm_live(g, part.depth[0]) : part.depth[0];
  const int first_slices = (part.depth[0] + DEPTH - 1) / DEPTH;
  const int slices = first_slices + (part.depth[1] + DEPTH - 1) / DEPTH;
  const int begin = item.begin(slices);
  int end = item.end(slices);
  if (FORM == LM_TN) end = max(begin, min(end, (depth + DEPTH - 1) / DEPTH)); /* a TN product has one operand only */
  const uint32_t stages = lm_shared_address(shared);

  const auto fetch = [&](int slice, int stage) {
    const int second = slice >= first_slices, step = (slice - (second ? first_slices : 0)) * DEPTH;
    const int steps = second ? part.depth[1] : depth;
    const uint32_t left = stages + stage * C::STAGE, right = left + C::ROWS * DEPTH * 2;
    const lm_matrix &l = part.left[second], &r = part.right[second];
    if constexpr (FORM == LM_TN) lm_fetch<T, DEPTH, C::ROWS, C::THREADS, GUARDED>(left, l, step, steps, place.row, rows);
    else lm_fetch<T, C::ROWS, DEPTH, C::THREADS, GUARDED>(left, l, place.row, rows, step, steps);
    if constexpr (FORM == LM_NT)
      lm_fetch<T, C::COLUMNS, DEPTH, C::THREADS, GUARDED>(right, r, place.column, part.columns, step, steps);
    else lm_fetch<T, DEPTH, C::COLUMNS, C::THREADS, GUARDED>(right, r, step, steps, place.column, part.columns);
  };

  const int warp = threadIdx.x >> 5, warp_row = warp % C::WARPS_DOWN * C::WARP_ROWS;
  const int warp_column = warp / C::WARPS_DOWN * C::WARP_COLUMNS;
  uint32_t a[2][DOWN][4], b[2][ACROSS][4];
  const auto read = [&](int buffer, int stage, int step) {
    const uint32_t left = stages + stage * C::STAGE, right = left + C::ROWS * DEPTH * 2;
#pragma unroll
    for (int i = 0; i < DOWN; i++)
      lm_fragment<FORM == LM_TN, FORM == LM_TN ? C::ROWS : DEPTH>(a[buffer][i], left, warp_row + 16 * i, step);
#pragma unroll
    for (int i = 0; i < ACROSS; i++)
      lm_fragment<FORM != LM_NT, FORM != LM_NT ? C::COLUMNS : DEPTH>(b[buffer][i], right, warp_column + 16 * i, step);
  };

  float sum[DOWN * ACROSS * 8];
#pragma unroll
  for (int i = 0; i < DOWN * ACROSS * 8; i++) sum[i] = 0;
  const auto multiply = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
      for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          lm_multiply<T>(*reinterpret_cast<float(*)[4]>(&sum[((i * ACROSS + j) * 2 + half) * 4]), a[buffer][i],
                         b[buffer][j][half], b[buffer][j][half + 2]);
  };

#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (begin + s < end) fetch(begin + s, s);
    lm_copy_commit();
  }
  lm_copy_wait<STAGES - 2>();
  __syncthreads();
  if (begin < end) read(0, 0, 0);
  int stage = 0, free_stage = STAGES - 1;
  for (int slice = begin; slice < end; slice++) {
    read(1, stage, 16);
    /* The stage that the whole block left at the last barrier is filled again. */
    if (slice + STAGES - 1 < end) fetch(slice + STAGES - 1, free_stage);
    lm_copy_commit();
    multiply(0);
    free_stage = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    lm_copy_wait<STAGES - 2>();
    __syncthreads();
    if (slice + 1 < end) read(0, stage, 0);
    multiply(1);
  }
  lm_copy_wait<0>();
  __syncthreads();

  if (!lm_gemm_join<DOWN * ACROSS * 8, C::THREADS>(sum, grid, item)) return;

  float *const slab = reinterpret_cast<float *>(shared) + warp * C::SLAB;
  const lm_gemm_end last(g, part);
#pragma unroll
  for (int i = 0; i < DOWN; i++)
    lm_gemm_leave<T, C::WARP_COLUMNS>(g, part, last, slab, &sum[i * ACROSS * 8], place.row + warp_row + 16 * i,
                                      place.column + warp_column, rows);
}

#endif
