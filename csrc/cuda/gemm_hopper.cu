/* gemm_hopper.cu: matrix products on Hopper's own path (sm_90a): tensor copies into a ring of stages, products of two warp
 * groups of 64 rows each, blocks that stay and take one tile after the other, so that a tile's first slices arrive while the
 * one before it is written. NT and NN; the LoRA columns are further slices of the same loop. */
#include "gemm_plan.cuh"
#include "hopper.cuh"

struct hopper_maps {
  CUtensorMap left[3][2], right[3][2]; /* by part and operand */
};

/* 128 x COLUMNS per block. The first 256 threads multiply, one of the last 128 copies. */
template <int COLUMNS_>
struct hopper_tile {
  static constexpr int ROWS = 128, COLUMNS = COLUMNS_, DEPTH = 64, STAGES = COLUMNS == 256 ? 4 : 6;
  static constexpr int WORKERS = 256, THREADS = WORKERS + 128, SUMS = COLUMNS / 2;
  static constexpr int LEFT = ROWS * DEPTH * 2, STAGE = LEFT + COLUMNS * DEPTH * 2; /* bytes */
  static constexpr int SLAB = 16 * 64 * 4;                                          /* a warp's way out: 16 x 64 floats */
  static constexpr int SLABS = STAGES * STAGE, BARRIERS = SLABS + WORKERS / 32 * SLAB, ARRIVED = BARRIERS + 2 * STAGES * 8;
  static constexpr int SHARED = ARRIVED + 16;
};

/* One thing to do: a tile, or its share of a split contraction. */
struct hopper_item {
  lm_gemm_place place;
  int begin, end, first_slices;
  bool live;
};

template <typename C>
__device__ __forceinline__ hopper_item hopper_item_at(const lm_gemm &g, const lm_gemm_grid &grid, int index, int rows) {
  hopper_item item;
  const int tile = index / grid.splits, split = index - tile * grid.splits;
  item.place = lm_gemm_locate<C::ROWS, C::COLUMNS>(grid, tile);
  const lm_gemm_part &part = g.part[item.place.part];
  item.first_slices = (part.depth[0] + C::DEPTH - 1) / C::DEPTH;
  const int slices = item.first_slices + (part.depth[1] + C::DEPTH - 1) / C::DEPTH;
  item.begin = (int)((int64_t)slices * split / grid.splits);
  item.end = (int)((int64_t)slices * (split + 1) / grid.splits);
  item.live = item.place.row < rows;
  return item;
}

template <typename T, int FORM, typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    hopper_product(const __grid_constant__ lm_gemm g, const __grid_constant__ lm_gemm_grid grid,
                   const __grid_constant__ hopper_maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = lm_shared_address(shared), full = base + C::BARRIERS, empty = full + C::STAGES * 8;
  const int items = grid.tiles * grid.splits, rows = lm_gemm_live(g, g.rows);
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::STAGES; s++) {
      lm_barrier_create(full + 8 * s, 1);
      lm_barrier_create(empty + 8 * s, C::WORKERS / 32);
    }
    lm_barriers_publish();
  }
  __syncthreads();

  if (threadIdx.x >= C::WORKERS) { /* the copying group: one thread of it works */
    lm_registers_lower<40>();
    if (threadIdx.x != C::WORKERS) return;
    int stage = 0;
    uint32_t parity = 1; /* a stage that was never filled counts as empty */
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      const hopper_item item = hopper_item_at<C>(g, grid, index, rows);
      if (!item.live) continue;
      for (int slice = item.begin; slice < item.end; slice++) {
        const int second = slice >= item.first_slices, step = (slice - (second ? item.first_slices : 0)) * C::DEPTH;
        const uint32_t to = base + stage * C::STAGE, ready = full + 8 * stage;
        lm_barrier_wait(empty + 8 * stage, parity);
        lm_barrier_expect(ready, C::STAGE);
        lm_tensor_copy(to, &maps.left[item.place.part][second], step, item.place.row, ready);
        const CUtensorMap *const right = &maps.right[item.place.part][second];
        if constexpr (FORM == LM_NT) {
          lm_tensor_copy(to + C::LEFT, right, step, item.place.column, ready);
        } else {
#pragma unroll
          for (int block = 0; block < C::COLUMNS / 64; block++)
            lm_tensor_copy(to + C::LEFT + block * 64 * C::DEPTH * 2, right, item.place.column + 64 * block, step, ready);
        }
        if (++stage == C::STAGES) stage = 0, parity ^= 1;
      }
    }
  } else {
    lm_registers_raise<232>();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group_row = warp / 4 * 64;
    float *const slab = reinterpret_cast<float *>(shared + C::SLABS) + warp * (C::SLAB / 4);
    int32_t *const arrived = reinterpret_cast<int32_t *>(shared + C::ARRIVED);
    int stage = 0;
    uint32_t parity = 0;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      const hopper_item item = hopper_item_at<C>(g, grid, index, rows);
      if (!item.live) continue;
      float sum[C::SUMS];
#pragma unroll
      for (int i = 0; i < C::SUMS; i++) sum[i] = 0;
      lm_hold(sum);
      int before = -1; /* the stage whose products may still be under way */
      for (int slice = item.begin; slice < item.end; slice++) {
        const uint32_t left = base + stage * C::STAGE + group_row * C::DEPTH * 2, right = base + stage * C::STAGE + C::LEFT;
        lm_barrier_wait(full + 8 * stage, parity);
        lm_group_fence();
#pragma unroll
        for (int k = 0; k < C::DEPTH / 16; k++) {
          const uint64_t a = lm_matrix_descriptor(left + 32 * k, 0);
          const uint64_t b = FORM == LM_NT ? lm_matrix_descriptor(right + 32 * k, 0)
                                           : lm_matrix_descriptor(right + 16 * 128 * k, 64 * C::DEPTH * 2);
          lm_group_multiply<FORM != LM_NT>(sum, a, b, T{});
        }
        lm_group_commit();
        lm_group_wait<1>();
        if (before >= 0 && lane == 0) lm_barrier_arrive(empty + 8 * before);
        before = stage;
        if (++stage == C::STAGES) stage = 0, parity ^= 1;
      }
      lm_group_wait<0>();
      lm_hold(sum);
      if (before >= 0 && lane == 0) lm_barrier_arrive(empty + 8 * before);

      if (grid.splits > 1) {
        const int tile = index / grid.splits;
        const auto barrier = [] { asm volatile("bar.sync 1, %0;" ::"n"(C::WORKERS) : "memory"); };
        if (!lm_gemm_join<C::SUMS, C::WORKERS>(sum, grid, tile, index - tile * grid.splits, arrived, barrier)) continue;
      }
      const lm_gemm_part &part = g.part[item.place.part];
      const lm_gemm_end end(g, part);
#pragma unroll
      for (int chunk = 0; chunk < C::COLUMNS / 64; chunk++)
        lm_gemm_leave<T, 64>(g, part, end, slab, &sum[chunk * 32], item.place.row + warp * 16, item.place.column + chunk * 64,
                             rows);
    }
  }
#endif
}

/* The driver's function that describes a matrix for tensor copies. */
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

/* m [lines, width]; a box is 64 elements of up to 256 lines. */
static bool describe(CUtensorMap *map, const lm_matrix &m, int32_t lines, int32_t width, int32_t box_lines) {
  const cuuint64_t extent[2] = {(cuuint64_t)width, (cuuint64_t)lines}, pitch[1] = {(cuuint64_t)m.pitch * 2};
  const cuuint32_t box[2] = {64, (cuuint32_t)box_lines}, step[2] = {1, 1};
  return encode()(map, m.type == LM_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                  const_cast<void *>(m.data), extent, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T, int FORM, typename C>
static cudaError_t launch_hopper(lm_cuda *cuda, const lm_gemm *g, const lm_gemm_grid &grid, cudaStream_t stream) {
  constexpr auto kernel = hopper_product<T, FORM, C>;
  hopper_maps maps = {};
  for (int p = 0; p < 3; p++) {
    const lm_gemm_part &part = g->part[p];
    for (int i = 0; i < 2; i++) {
      if (part.columns == 0 || part.depth[i] == 0) continue;
      const bool nt = FORM == LM_NT;
      if (!describe(&maps.left[p][i], part.left[i], g->rows, part.depth[i], C::ROWS) ||
          !describe(&maps.right[p][i], part.right[i], nt ? part.columns : part.depth[i], nt ? part.depth[i] : part.columns,
                    nt ? C::COLUMNS : C::DEPTH))
        return cudaErrorInvalidValue;
    }
  }
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
  if (error) return error;
  const int64_t items = (int64_t)grid.tiles * grid.splits;
  const int blocks = items < cuda->sm_count ? (int)items : cuda->sm_count;
  return lm_cuda_launch<kernel>(blocks, C::THREADS, C::SHARED, stream, *g, grid, maps);
}

/* Whether this build holds code for the device: other targets compile the kernel without a body. */
static bool has_code(void) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, hopper_product<lm_bf16, LM_NT, hopper_tile<256>>) == cudaSuccess)
    return attributes.numRegs > 128;
  cudaGetLastError();
  return false;
}

bool lm_cuda_gemm_hopper_can(const lm_cuda *cuda, const lm_gemm *g) {
  if (cuda->capability != 90 || cuda->shared_max < hopper_tile<256>::SHARED || g->form == LM_TN) return false;
  static const bool ready = has_code() && encode() != nullptr;
  return ready;
}

template <typename T>
static cudaError_t launch_type(lm_cuda *cuda, const lm_gemm *g, const lm_gemm_plan &plan, cudaStream_t stream) {
  if (g->form == LM_NT)
    return plan.shape == 0 ? launch_hopper<T, LM_NT, hopper_tile<256>>(cuda, g, plan.grid, stream)
                           : launch_hopper<T, LM_NT, hopper_tile<128>>(cuda, g, plan.grid, stream);
  return plan.shape == 0 ? launch_hopper<T, LM_NN, hopper_tile<256>>(cuda, g, plan.grid, stream)
                         : launch_hopper<T, LM_NN, hopper_tile<128>>(cuda, g, plan.grid, stream);
}

cudaError_t lm_cuda_gemm_hopper(lm_cuda *cuda, const lm_gemm *g, int32_t type, void *workspace, uint64_t workspace_bytes,
                                cudaStream_t stream) {
  static const lm_tile_shape shapes[] = {{128, 256, 1, 1.0f, 1.0f}, {128, 128, 1, 0.85f, 1.0f}};
  lm_gemm_plan plan;
  const cudaError_t error = lm_gemm_make_plan(cuda, g, shapes, 2, 64, workspace, workspace_bytes, &plan);
  if (error || plan.grid.tiles == 0) return error;
  return type == LM_BF16 ? launch_type<lm_bf16>(cuda, g, plan, stream) : launch_type<lm_f16>(cuda, g, plan, stream);
}
