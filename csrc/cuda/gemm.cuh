/* gemm.cuh: matrix products in up to three parts that share their rows, as csrc/cpu/gemm.h describes them:
 *
 *   part i:  y_i [rows, columns_i] = factor_i * (a0 b0 + a1 b1) + bias_i + residual_i
 *
 * The contraction runs over two operands one after the other, so that a LoRA term is just more steps of the same main loop
 * (forward [x | s_i] [W_i | B_i]^T, backward [dy | ds] [W ; A]) and the result is written once and never read again.
 *
 *   form    left           right          used for
 *   NT      [rows, depth]  [columns, depth]   y = x W^T
 *   NN      [rows, depth]  [depth, columns]   dx = dy W
 *   TN      [depth, rows]  [depth, columns]   dA += ds^T x
 *
 * Kernels: gemm_tensor.cu (mma.sync, bf16 and f16), gemm_hopper.cu (tensor copies and wgmma, sm_90a), gemm_simt.cu (fp32 arithmetic
 * over any types), gemm_few_rows.cu (decoding), gemm_short.cu (LoRA terms). The choice depends on planned sizes and types only,
 * so that bits do not depend on how many rows are live. */
#ifndef LM_CUDA_GEMM_CUH
#define LM_CUDA_GEMM_CUH

#include <type_traits>

#include "convert.cuh"
#include "cuda.h"

/* Row counts up to this one are bound by reading the right operand once. */
#define LM_FEW_ROWS 8

enum lm_form : int32_t { LM_NT, LM_NN, LM_TN };

/* lm_cuda_at: where element i of an array lies. The caller knows whether it may write there. */
inline void *lm_cuda_at(int32_t type, const void *data, int64_t i) {
  return const_cast<char *>(static_cast<const char *>(data)) + i * (type == LM_F32 ? 4 : 2);
}

struct lm_matrix {
  const void *data;
  int32_t pitch;
  int32_t type;
};

struct lm_gemm_part {
  int32_t columns;  /* 0 = no such part */
  int32_t depth[2]; /* steps of the contraction over each operand; [1] may be 0 */
  float factor;
  lm_matrix left[2];
  lm_matrix right[2];
  const void *bias;     /* [columns] or NULL */
  const void *residual; /* [rows, columns] of y_type or NULL; may be y */
  void *y;
};

struct lm_gemm {
  lm_gemm_part part[3];
  const int32_t *live;    /* [1] device memory or NULL: what is in use: rows (NT, NN) or depth[0] (TN) */
  int32_t live_offset;    /* subtracted from *live first */
  int32_t form;           /* lm_form */
  int32_t rows;           /* planned */
  int32_t y_pitch;
  int32_t residual_pitch;
  int32_t y_type;
  int32_t bias_type;
  int32_t reserved;
  const int32_t *y_index; /* row r of y is y_index[r], or NULL */
};

/* How a product is cut into items: tiles, of which the last, those of an incomplete wave, may be shared by several blocks. */
struct lm_gemm_grid {
  int32_t row_tiles;
  int32_t part_tiles[3]; /* tiles along the columns, per part */
  int32_t whole;         /* tiles that are an item each */
  int32_t shared;        /* tiles after those, whose contraction is shared: splits items each */
  int32_t splits;        /* their sums are added in order */
  float *partial;        /* [shared][splits][tile] when splits > 1 */
  int32_t *counter;      /* [shared] zero at rest */
  __host__ __device__ int32_t items() const { return whole + shared * splits; }
};

/* lm_cuda_gemm: enqueue the product.   workspace  [workspace_bytes] for split contractions; NULL = do not split */
cudaError_t lm_cuda_gemm(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream);

/* lm_cuda_gemm_library_pays: whether cuBLASLt is expected to beat the own kernels at `base` with a LoRA term of `ranks` columns
 * beside it: the own kernels take that term into the same loop, the library leaves it to a pass of its own. */
bool lm_cuda_gemm_library_pays(const lm_cuda *cuda, const lm_gemm *base, int32_t ranks);
/* lm_cuda_gemm_library_worth: whether the library can take the product at all, and it is large enough to ask. */
bool lm_cuda_gemm_library_worth(const lm_cuda *cuda, const lm_gemm *base);
/* lm_cuda_gemm without asking: by the library, or where that refuses, and by the own kernels alone. */
cudaError_t lm_cuda_gemm_library(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream);
cudaError_t lm_cuda_gemm_own(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream);

/* The kernels behind lm_cuda_gemm. The tensor-core ones want every operand in the type `type`. */
cudaError_t lm_cuda_gemm_simt(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream);
/* For NT products of at most LM_FEW_ROWS rows whose right operands share one type. */
cudaError_t lm_cuda_gemm_few_rows(lm_cuda *cuda, const lm_gemm *g, cudaStream_t stream);
/* For NT and NN products of at most 64 steps of contraction, as LoRA terms are. can: one 16-bit type, everything aligned. */
bool lm_cuda_gemm_short_can(const lm_gemm *g, int32_t type);
cudaError_t lm_cuda_gemm_short(const lm_cuda *cuda, const lm_gemm *g, int32_t type, cudaStream_t stream);
/* hopper_can: whether the device has wgmma and this build its code; the operands lie on 16 bytes then. */
bool lm_cuda_gemm_hopper_can(const lm_cuda *cuda, const lm_gemm *g);
cudaError_t lm_cuda_gemm_hopper(lm_cuda *cuda, const lm_gemm *g, int32_t type, void *workspace, uint64_t workspace_bytes,
                                cudaStream_t stream);
cudaError_t lm_cuda_gemm_tensor(lm_cuda *cuda, const lm_gemm *g, int32_t type, void *workspace, uint64_t workspace_bytes,
                                cudaStream_t stream);

#ifdef __CUDACC__

/* lm_gemm_live: how much of `planned` is in use. */
__device__ __forceinline__ int32_t lm_gemm_live(const lm_gemm &g, int32_t planned) {
  return g.live ? max(0, min(*g.live - g.live_offset, planned)) : planned;
}

/* An item: a tile, or a share of its contraction. */
struct lm_gemm_item {
  int32_t tile, split, splits;
  __device__ __forceinline__ lm_gemm_item(const lm_gemm_grid &grid, int32_t index) : tile(index), split(0), splits(1) {
    if (index < grid.whole) return;
    const int32_t rest = index - grid.whole;
    tile = grid.whole + rest / grid.splits, split = rest % grid.splits, splits = grid.splits;
  }
  /* The first slice of `slices`; the item ends where the next split begins. */
  __device__ __forceinline__ int32_t begin(int32_t slices) const { return (int32_t)((int64_t)slices * split / splits); }
  __device__ __forceinline__ int32_t end(int32_t slices) const { return (int32_t)((int64_t)slices * (split + 1) / splits); }
};

struct lm_gemm_place {
  int32_t part, row, column; /* first row and column of the tile, the column within its part */
};

/* lm_gemm_locate: the place of a tile. Blocks that run at the same time take 8 rows of tiles by some columns of tiles, so
 * that both operands of the wave stay in L2. */
template <int ROWS, int COLUMNS>
__device__ __forceinline__ lm_gemm_place lm_gemm_locate(const lm_gemm_grid &grid, int32_t tile) {
  constexpr int group = 8;
  const int columns = grid.part_tiles[0] + grid.part_tiles[1] + grid.part_tiles[2], band = tile / (group * columns);
  const int height = min(group, grid.row_tiles - band * group), inside = tile - band * group * columns;
  int column = inside / height, part = 0;
  while (part < 2 && column >= grid.part_tiles[part]) column -= grid.part_tiles[part++];
  return {part, (band * group + inside % height) * ROWS, column * COLUMNS};
}

__host__ __device__ __forceinline__ bool lm_is_aligned(const void *p, int64_t pitch_bytes, unsigned bytes) {
  return (reinterpret_cast<uintptr_t>(p) | (uintptr_t)pitch_bytes) % bytes == 0;
}

template <typename T, int N>
__device__ __forceinline__ void lm_add(float (&x)[N], const lm_pack<T, N> &pack) {
  float v[N];
  lm_unpack(v, pack);
#pragma unroll
  for (int i = 0; i < N; i++) x[i] += v[i];
}

/* lm_add_up_to: x[i] += p[i] for i < count. whole: count is N and p is aligned to lm_load<N>'s accesses. */
template <int N, typename T>
__device__ __forceinline__ void lm_add_up_to(float (&x)[N], const T *p, int32_t count, bool whole) {
  if (whole) {
    lm_add(x, lm_fetch<N>(p));
  } else {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i < count) x[i] += lm_to_float(p[i]);
  }
}

template <int N, typename T>
__device__ __forceinline__ void lm_store_up_to(T *p, const float (&x)[N], int32_t count, bool whole) {
  if (whole) {
    lm_store<N>(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i < count) p[i] = lm_from_float<T>(x[i]);
  }
}

/* The end of a product: what happens to N neighbouring sums of a row. Built once per tile; on the host to ask for `plain`. */
struct lm_gemm_end {
  bool y_whole, residual_whole, bias_whole;
  __host__ __device__ __forceinline__ lm_gemm_end(const lm_gemm &g, const lm_gemm_part &p) {
    const int size = g.y_type == LM_F32 ? 4 : 2;
    y_whole = lm_is_aligned(p.y, (int64_t)g.y_pitch * size, 16);
    residual_whole = lm_is_aligned(p.residual, (int64_t)g.residual_pitch * size, 16);
    bias_whole = lm_is_aligned(p.bias, 0, 16);
  }
  /* plain: everything is of type T, 8 elements are a 16-byte word of y, bias and residual, and rows stay where they are. */
  template <typename T>
  __host__ __device__ __forceinline__ bool plain(const lm_gemm &g, const lm_gemm_part &p) const {
    constexpr int32_t type = std::is_same<T, lm_bf16>::value ? LM_BF16 : LM_F16;
    return g.y_type == type && y_whole && !g.y_index && p.columns % 8 == 0 && (!p.residual || residual_whole) &&
           (!p.bias || (bias_whole && g.bias_type == type));
  }
  /* x: sums of row `row`, columns [column, column + N) as far as the part reaches; column is a multiple of N, 4 or 8. */
  template <int N>
  __device__ __forceinline__ void write(const lm_gemm &g, const lm_gemm_part &p, int32_t row, int32_t column,
                                        float (&x)[N]) const {
    const int count = min(N, p.columns - column);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= p.factor;
    if (p.bias)
      LM_CUDA_BY_TYPE(g.bias_type, B, lm_add_up_to<N>(x, (const B *)p.bias + column, count, bias_whole && count == N));
    const int64_t to = (int64_t)(g.y_index ? g.y_index[row] : row) * g.y_pitch + column;
    const int64_t from = (int64_t)row * g.residual_pitch + column;
    LM_CUDA_BY_TYPE(g.y_type, Y, {
      if (p.residual) lm_add_up_to<N>(x, (const Y *)p.residual + from, count, residual_whole && count == N);
      lm_store_up_to<N>((Y *)p.y + to, x, count, y_whole && count == N);
    });
  }
};

/* lm_gemm_leave: the sums of a warp for 16 rows from `row` on by COLUMNS, as lm_multiply has them (a block of 8 columns after
 * the other), to y by way of a slab of 16 x COLUMNS floats in shared memory, so that global memory is reached in whole 16-byte
 * words. Words of the slab are swizzled: neither way meets bank conflicts.
 * The usual end, everything of type T and on 16 bytes, is unrolled and has its loads of the residual under way together; the
 * others share one short loop: code that is walked once per tile must fit the instruction cache. */
template <typename T, int COLUMNS>
__device__ __forceinline__ void lm_gemm_leave(const lm_gemm &g, const lm_gemm_part &p, const lm_gemm_end &end, float *slab,
                                              const float *sum, int32_t row, int32_t column, int32_t rows) {
  constexpr int LANES = COLUMNS / 8, LINES = 32 / LANES, PASSES = 16 / LINES;
  const auto place = [&](int line, int word) { return slab + line * COLUMNS + (word ^ word >> 3 ^ (line & 3) << 1) * 4; };
  const int lane = threadIdx.x & 31, chunk = lane % LANES, first = lane / LANES;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    float *const to = place(lane >> 2, 2 * j + (lane >> 1 & 1)) + (lane & 1) * 2;
    *reinterpret_cast<float2 *>(to) = make_float2(sum[4 * j], sum[4 * j + 1]);
    *reinterpret_cast<float2 *>(to + 8 * COLUMNS) = make_float2(sum[4 * j + 2], sum[4 * j + 3]);
  }
  __syncwarp();
  row += first, column += chunk * 8;
  const int passes = row < rows && column < p.columns ? min(PASSES, (rows - row + LINES - 1) / LINES) : 0;
  const auto read = [&](float (&x)[8], int line) {
    const float4 low = *reinterpret_cast<const float4 *>(place(line, 2 * chunk));
    const float4 high = *reinterpret_cast<const float4 *>(place(line, 2 * chunk + 1));
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  };
  if (end.template plain<T>(g, p)) {
    lm_pack<T, 8> bias, residual[PASSES];
    if (p.bias && passes > 0) bias = lm_fetch<8>((const T *)p.bias + column);
    if (p.residual)
#pragma unroll
      for (int i = 0; i < PASSES; i++)
        if (i < passes) residual[i] = lm_fetch<8>((const T *)p.residual + (int64_t)(row + i * LINES) * g.residual_pitch + column);
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      if (i >= passes) continue;
      float x[8];
      read(x, first + i * LINES);
#pragma unroll
      for (float &v : x) v *= p.factor;
      if (p.bias) lm_add(x, bias);
      if (p.residual) lm_add(x, residual[i]);
      lm_store<8>((T *)p.y + (int64_t)(row + i * LINES) * g.y_pitch + column, x);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < passes; i++) {
      float x[8];
      read(x, first + i * LINES);
      end.template write<8>(g, p, row + i * LINES, column, x);
    }
  }
  __syncwarp(); /* the slab may be filled again */
}

/* lm_gemm_join: adds up the sums of the blocks of one tile, in the order of their splits. THREADS threads call it, each with
 * COUNT sums at the same places in each block; tile: counted from the first shared one; barrier() is theirs alone;
 * arrived [1] is shared memory.
 * @return whether this block is the one that goes on, with the total */
template <int COUNT, int THREADS, typename Barrier>
__device__ __forceinline__ bool lm_gemm_join(float (&sum)[COUNT], const lm_gemm_grid &grid, int32_t tile, int32_t split,
                                             int32_t *arrived, Barrier barrier) {
  static_assert(COUNT % 4 == 0, "sums are moved four at a time");
  float4 *slot = reinterpret_cast<float4 *>(grid.partial) + (int64_t)tile * grid.splits * (COUNT / 4) * THREADS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < COUNT / 4; i++)
    __stcg(slot + ((int64_t)split * (COUNT / 4) + i) * THREADS,
           make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
  __threadfence();
  barrier();
  if (threadIdx.x == 0) {
    *arrived = atomicAdd(grid.counter + tile, 1);
    if (*arrived == grid.splits - 1) grid.counter[tile] = 0; /* at rest again for the next launch */
    __threadfence();
  }
  barrier();
  if (*arrived != grid.splits - 1) return false;
#pragma unroll
  for (int i = 0; i < COUNT; i++) sum[i] = 0;
  for (int s = 0; s < grid.splits; s++) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
      const float4 v = __ldcg(slot + ((int64_t)s * (COUNT / 4) + i) * THREADS);
      sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
    }
  }
  return true;
}

/* The usual case: the whole block. */
template <int COUNT, int THREADS>
__device__ __forceinline__ bool lm_gemm_join(float (&sum)[COUNT], const lm_gemm_grid &grid, const lm_gemm_item &item) {
  __shared__ int32_t arrived;
  if (item.splits == 1) return true;
  return lm_gemm_join<COUNT, THREADS>(sum, grid, item.tile - grid.whole, item.split, &arrived, [] { __syncthreads(); });
}

#endif
#endif
