/* gemm.cu: which kernel serves a product, and how it is cut. */
#include <mutex>

#include "cublaslt.h"
#include "gemm_choice.h"
#include "gemm_plan.cuh"

/* Split products count the blocks that have arrived at each tile. The counts are 0 between launches. A workspace serves one
 * launch at a time, so every workspace has counts of its own. */
enum { COUNTER_SETS = 64, COUNTERS = 1024 };
__device__ int32_t split_counters[COUNTER_SETS][COUNTERS];

/* The 65th workspace takes over the counts of the first: that one would have to run a split product at that very moment to be
 * disturbed. */
static int32_t *counters_of(const void *workspace) {
  static std::mutex mutex;
  static const void *owners[COUNTER_SETS];
  static uint32_t used;
  void *base = nullptr;
  if (cudaGetSymbolAddress(&base, split_counters) != cudaSuccess) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  uint32_t set = 0;
  while (set < used && set < COUNTER_SETS && owners[set] != workspace) set++;
  if (set == used || set == COUNTER_SETS) {
    set = used++ % COUNTER_SETS;
    owners[set] = workspace;
  }
  return static_cast<int32_t *>(base) + set * COUNTERS;
}

/* What `items` alike cost, in slices of a 128 x 128 tile on a full multiprocessor: waves of blocks, each with its slices, its
 * start and end, and, if the contraction is split, its trip through memory. */
static float cost_of(const lm_cuda *cuda, const lm_tile_shape &shape, int64_t items, int32_t slices, int32_t splits) {
  const float area = (float)(shape.rows * shape.columns) / (128 * 128);
  const int64_t slots = (int64_t)cuda->sm_count * shape.blocks, rest = items % slots;
  float load = (float)(items / slots * shape.blocks);
  if (rest > 0) load += fmaxf((float)lm_ceil_div(rest, cuda->sm_count), 1 / shape.alone);
  const float ends = splits > 1 ? 12 + 4 * splits : 8;
  return load * area * ((float)slices / (float)splits + ends) / shape.speed;
}

cudaError_t lm_gemm_make_plan(const lm_cuda *cuda, const lm_gemm *g, const lm_tile_shape *shapes, int32_t count, int32_t depth,
                              void *workspace, uint64_t workspace_bytes, lm_gemm_plan *plan) {
  static const int32_t splits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  float best = 0;
  *plan = {};
  int64_t slices = 1;
  for (const lm_gemm_part &p : g->part)
    if (p.columns > 0) {
      const int64_t own = lm_ceil_div(p.depth[0], depth) + lm_ceil_div(p.depth[1], depth);
      if (own > slices) slices = own;
    }
  for (int32_t i = 0; i < count; i++) {
    const lm_tile_shape &shape = shapes[i];
    if (shape.blocks == 0) continue;
    lm_gemm_grid grid = {};
    int64_t columns = 0;
    grid.row_tiles = (int32_t)lm_ceil_div(g->rows, shape.rows);
    for (int p = 0; p < 3; p++) columns += grid.part_tiles[p] = (int32_t)lm_ceil_div(g->part[p].columns, shape.columns);
    const int64_t tiles = columns * grid.row_tiles, slots = (int64_t)cuda->sm_count * shape.blocks;
    if (tiles > INT32_MAX) return cudaErrorInvalidValue;
    for (const int32_t s : splits) {
      const int64_t shared = s == 1 ? 0 : tiles % slots, whole = tiles - shared;
      const uint64_t bytes = (uint64_t)shared * s * shape.rows * shape.columns * 4;
      if (s > 1 && (shared == 0 || !workspace || bytes > workspace_bytes || shared > COUNTERS || slices < 4 * s)) break;
      const float cost = cost_of(cuda, shape, whole, (int32_t)slices, 1) + cost_of(cuda, shape, shared * s, (int32_t)slices, s);
      if (best > 0 && cost >= best) continue;
      best = cost;
      grid.whole = (int32_t)whole, grid.shared = (int32_t)shared, grid.splits = s;
      plan->shape = i;
      plan->grid = grid;
    }
  }
  if (best == 0) return cudaErrorNotSupported;
  if (plan->grid.splits > 1) {
    plan->grid.partial = static_cast<float *>(workspace);
    plan->grid.counter = counters_of(workspace);
    if (!plan->grid.counter) return cudaGetLastError();
  }
  return cudaSuccess;
}

/* The one type of all left or of all right operands, or -1. */
static int32_t common_type(const lm_gemm *g, lm_matrix (lm_gemm_part::*side)[2]) {
  int32_t type = -1;
  for (const lm_gemm_part &p : g->part)
    for (int i = 0; i < 2; i++) {
      if (p.columns == 0 || p.depth[i] == 0) continue;
      const int32_t own = (p.*side)[i].type;
      if (type >= 0 && own != type) return -1;
      type = own;
    }
  return type;
}

/* The rate of the own tensor-core product relative to cuBLASLt's, for large shapes. */
static float own_speed(const lm_cuda *cuda, const lm_gemm *g) {
  return cuda->capability != 90 ? 0.8f : lm_cuda_gemm_hopper_can(cuda, g) ? 0.85f : 0.55f;
}

bool lm_cuda_gemm_library_worth(const lm_cuda *cuda, const lm_gemm *base) {
  return base->rows >= 256 && base->part[0].columns >= 256 && lm_cuda_blas_can(cuda, base);
}

bool lm_cuda_gemm_library_pays(const lm_cuda *cuda, const lm_gemm *base, int32_t ranks) {
  if (!lm_cuda_gemm_library_worth(cuda, base)) return false;
  const int32_t chosen = lm_cuda_choice_of(cuda, base, ranks);
  if (chosen >= 0) return chosen;
  /* What a separate LoRA term costs: y is written once more and read once more, 4 bytes per element, while a device multiplies
   * and adds about 350 times in the time of 4 bytes (H200: 720 TFLOP/s over 4.1 TB/s; A100 and RTX 4090 are alike). */
  const float detour = ranks > 0 ? 350.0f : 0.0f;
  const float depth = (float)base->part[0].depth[0];
  return depth + detour < (depth + (float)ranks) / own_speed(cuda, base);
}

cudaError_t lm_cuda_gemm(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream) {
  lm_cuda_gemm_time(cuda, g, NULL, g, 0, workspace, workspace_bytes, stream);
  return lm_cuda_gemm_library_pays(cuda, g, 0) ? lm_cuda_gemm_library(cuda, g, workspace, workspace_bytes, stream)
                                               : lm_cuda_gemm_own(cuda, g, workspace, workspace_bytes, stream);
}

cudaError_t lm_cuda_gemm_library(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream) {
  const cudaError_t error = lm_cuda_blas_gemm(cuda, g, workspace, workspace_bytes, stream);
  return error == cudaErrorNotSupported ? lm_cuda_gemm_own(cuda, g, workspace, workspace_bytes, stream) : error;
}

cudaError_t lm_cuda_gemm_own(lm_cuda *cuda, const lm_gemm *g, void *workspace, uint64_t workspace_bytes, cudaStream_t stream) {
  const int32_t left = common_type(g, &lm_gemm_part::left), right = common_type(g, &lm_gemm_part::right);
  if (g->form == LM_NT && g->rows <= LM_FEW_ROWS && right >= 0) return lm_cuda_gemm_few_rows(cuda, g, stream);
  if (left <= LM_F32 || left != right) return lm_cuda_gemm_simt(cuda, g, workspace, workspace_bytes, stream);
  if (lm_cuda_gemm_short_can(g, left)) return lm_cuda_gemm_short(cuda, g, left, stream);
  return lm_cuda_gemm_tensor(cuda, g, left, workspace, workspace_bytes, stream);
}
