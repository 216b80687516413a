/* gemm_hopper.cu: matrix products on Hopper's own path (sm_90a): tensor copies into a ring of stages, products of two warp
 * groups of 64 rows each, blocks that stay and take one item after the other, so that a tile's first slices arrive while the
 * one before it is written. NT and NN; the LoRA columns are further slices of the same loop.
 *
 * The usual end has kernels of its own: what is walked once per tile costs short contractions most, by its length alone. */
#include "gemm_plan.cuh"
#include "hopper.cuh"
#include "tensor_map.h"

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

/* What a block does of an item: its share of the slices of a tile. */
struct hopper_work {
  lm_gemm_place place;
  int begin, end, first_slices;
  bool live;
};

template <typename C>
__device__ __forceinline__ hopper_work hopper_work_at(const lm_gemm &g, const lm_gemm_grid &grid, int index, int rows) {
  const lm_gemm_item item(grid, index);
  hopper_work work;
  work.place = lm_gemm_locate<C::ROWS, C::COLUMNS>(grid, item.tile);
  const lm_gemm_part &part = g.part[work.place.part];
  work.first_slices = (part.depth[0] + C::DEPTH - 1) / C::DEPTH;
  const int slices = work.first_slices + (part.depth[1] + C::DEPTH - 1) / C::DEPTH;
  work.begin = item.begin(slices);
  work.end = item.end(slices);
  work.live = work.place.row < rows;
  return work;
}

/* The usual end: everything is plain, and to the sums of a part is added one thing at most, a residual or a bias. A warp's 16 rows
 * leave by 64 columns at a time. The sums are rounded before they enter the slab, and what is added waits there for them: half
 * the traffic of lm_gemm_leave. The slab holds 64 columns twice, so what is added to the first is on its way while the last
 * products are. */
template <typename T>
struct hopper_way_out {
  const lm_gemm &g;
  const lm_gemm_part &p;
  unsigned char *const slab;
  const int row, column, rows; /* first ones, and the live ones */

  static bool serves(const lm_gemm &g) {
    for (const lm_gemm_part &p : g.part)
      if (p.columns > 0 && (!lm_gemm_end(g, p).plain<T>(g, p) || (p.bias && p.residual))) return false;
    return true;
  }

  static __device__ __forceinline__ int place(int line, int chunk) { return (int)lm_chunk_place<64>(line, chunk); }
  /* Read anew for every 64 columns: no register holds it or what follows from it. */
  static __device__ __forceinline__ int lane() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread & 31;
  }
  __device__ __forceinline__ bool adds() const { return p.bias || p.residual; }
  __device__ __forceinline__ int half(int step) const { return (step & 1) * 2048; }
  __device__ __forceinline__ bool inside(int line, int at) const { return row + line < rows && at < p.columns; }

  /* Of columns 64 `step` and on; every row has the same bias. */
  __device__ __forceinline__ void fetch(int step) const {
    if (!adds()) return;
    const int own = lane(), first = own / 8, chunk = own % 8, at = column + 64 * step + chunk * 8;
    const T *const from = (const T *)(p.bias ? p.bias : p.residual);
    const int64_t pitch = p.bias ? 0 : g.residual_pitch;
#pragma unroll
    for (int line = first; line < 16; line += 4) {
      const bool live = inside(line, at);
      lm_copy_async(lm_shared_address(slab) + half(step) + place(line, chunk), from + (live ? (row + line) * pitch + at : 0),
                    live ? 16 : 0);
    }
    lm_copy_commit();
  }

  /* pending: how many fetches have followed that of this step. */
  template <bool ADDS, int pending>
  __device__ __forceinline__ void leave(const float *sum, int step) const {
    const int own = lane(), first = own / 8, chunk = own % 8;
    if constexpr (ADDS) {
      lm_copy_wait<pending>();
      __syncwarp();
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint32_t matrices = lm_shared_address(slab) + half(step) + place(own % 16, 2 * k + own / 16);
      uint32_t x[4];
      if constexpr (ADDS) lm_load_matrices<false>(x, matrices);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float2 v = make_float2(sum[8 * k + 2 * i] * p.factor, sum[8 * k + 2 * i + 1] * p.factor);
        if constexpr (ADDS) {
          const float2 more = lm_unpack2<T>(x[i]);
          v = make_float2(v.x + more.x, v.y + more.y);
        }
        x[i] = lm_pack2<T>(v.x, v.y);
      }
      lm_store_matrices(matrices, x);
    }
    __syncwarp();
    const int at = column + 64 * step + chunk * 8;
    T *const y = (T *)p.y + (int64_t)row * g.y_pitch + at;
#pragma unroll
    for (int line = first; line < 16; line += 4)
      if (inside(line, at))
        *reinterpret_cast<uint4 *>(y + (int64_t)line * g.y_pitch) =
            *reinterpret_cast<const uint4 *>(slab + half(step) + place(line, chunk));
    __syncwarp(); /* this half may be filled again */
  }

  template <int STEPS>
  __device__ __forceinline__ void leave_all(const float *sum) const {
    if (!adds()) {
#pragma unroll
      for (int step = 0; step < STEPS; step++) leave<false, 0>(sum + step * 32, step);
    } else {
#pragma unroll
      for (int step = 0; step < STEPS - 1; step++) {
        leave<true, 1>(sum + step * 32, step);
        if (step + 2 < STEPS) fetch(step + 2);
      }
      leave<true, 0>(sum + (STEPS - 1) * 32, STEPS - 1);
    }
  }
};

/* USUAL: hopper_way_out serves. */
template <typename T, int FORM, typename C, bool USUAL>
__global__ void __launch_bounds__(C::THREADS, 1)
    hopper_product(const __grid_constant__ lm_gemm g, const __grid_constant__ lm_gemm_grid grid,
                   const __grid_constant__ hopper_maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = lm_shared_address(shared), full = base + C::BARRIERS, empty = full + C::STAGES * 8;
  const int items = grid.items(), rows = lm_gemm_live(g, g.rows);
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
      const hopper_work work = hopper_work_at<C>(g, grid, index, rows);
      if (!work.live) continue;
      for (int slice = work.begin; slice < work.end; slice++) {
        const int second = slice >= work.first_slices, step = (slice - (second ? work.first_slices : 0)) * C::DEPTH;
        const uint32_t to = base + stage * C::STAGE, ready = full + 8 * stage;
        lm_barrier_wait(empty + 8 * stage, parity);
        lm_barrier_expect(ready, C::STAGE);
        lm_tensor_copy(to, &maps.left[work.place.part][second], step, work.place.row, ready);
        const CUtensorMap *const right = &maps.right[work.place.part][second];
        if constexpr (FORM == LM_NT) {
          lm_tensor_copy(to + C::LEFT, right, step, work.place.column, ready);
        } else {
#pragma unroll
          for (int block = 0; block < C::COLUMNS / 64; block++)
            lm_tensor_copy(to + C::LEFT + block * 64 * C::DEPTH * 2, right, work.place.column + 64 * block, step, ready);
        }
        if (++stage == C::STAGES) stage = 0, parity ^= 1;
      }
    }
  } else {
    lm_registers_raise<232>();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group_row = warp / 4 * 64;
    unsigned char *const slab = shared + C::SLABS + warp * C::SLAB;
    int32_t *const arrived = reinterpret_cast<int32_t *>(shared + C::ARRIVED);
    int stage = 0;
    uint32_t parity = 0;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      const hopper_work work = hopper_work_at<C>(g, grid, index, rows);
      if (!work.live) continue;
      float sum[C::SUMS];
#pragma unroll
      for (int i = 0; i < C::SUMS; i++) sum[i] = 0;
      lm_hold(sum);
      int before = -1; /* the stage whose products may still be under way */
      for (int slice = work.begin; slice < work.end; slice++) {
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

      const lm_gemm_part &part = g.part[work.place.part];
      const int row = work.place.row + warp * 16, column = work.place.column;
      const hopper_way_out<T> way_out = {g, part, slab, row, column, rows};
      if (USUAL && index < grid.whole) way_out.fetch(0), way_out.fetch(1);
      lm_group_wait<0>();
      lm_hold(sum);
      if (before >= 0 && lane == 0) lm_barrier_arrive(empty + 8 * before);

      if (index >= grid.whole) {
        const lm_gemm_item item(grid, index);
        const auto barrier = [] { asm volatile("bar.sync 1, %0;" ::"n"(C::WORKERS) : "memory"); };
        if (!lm_gemm_join<C::SUMS, C::WORKERS>(sum, grid, item.tile - grid.whole, item.split, arrived, barrier)) continue;
        if (USUAL) way_out.fetch(0), way_out.fetch(1);
      }
      if constexpr (USUAL) {
        way_out.template leave_all<C::COLUMNS / 64>(sum);
      } else {
        const lm_gemm_end end(g, part);
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i += 64)
          lm_gemm_leave<T, 64>(g, part, end, reinterpret_cast<float *>(slab), &sum[i / 2], row, column + i, rows);
      }
    }
  }
#endif
}

template <typename T, int FORM, typename C, bool USUAL>
static cudaError_t launch_hopper(lm_cuda *cuda, const lm_gemm *g, const lm_gemm_grid &grid, cudaStream_t stream) {
  constexpr auto kernel = hopper_product<T, FORM, C, USUAL>;
  hopper_maps maps = {};
  for (int p = 0; p < 3; p++) {
    const lm_gemm_part &part = g->part[p];
    for (int i = 0; i < 2; i++) {
      if (part.columns == 0 || part.depth[i] == 0) continue;
      const bool nt = FORM == LM_NT;
      if (!lm_cuda_tensor_map(&maps.left[p][i], part.left[i], g->rows, part.depth[i], C::ROWS) ||
          !lm_cuda_tensor_map(&maps.right[p][i], part.right[i], nt ? part.columns : part.depth[i],
                              nt ? part.depth[i] : part.columns, nt ? C::COLUMNS : C::DEPTH))
        return cudaErrorInvalidValue;
    }
  }
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
  if (error) return error;
  const int blocks = grid.items() < cuda->sm_count ? grid.items() : cuda->sm_count;
  return lm_cuda_launch<kernel>(blocks, C::THREADS, C::SHARED, stream, *g, grid, maps);
}

/* Whether this build holds code for the device: other targets compile the kernel without a body. */
static bool has_code(void) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, hopper_product<lm_bf16, LM_NT, hopper_tile<256>, true>) == cudaSuccess)
    return attributes.numRegs > 128;
  cudaGetLastError();
  return false;
}

bool lm_cuda_gemm_hopper_can(const lm_cuda *cuda, const lm_gemm *g) {
  if (cuda->capability != 90 || cuda->shared_max < hopper_tile<256>::SHARED || g->form == LM_TN) return false;
  static const bool ready = has_code() && lm_cuda_has_tensor_maps();
  return ready;
}

template <typename T, int FORM, typename C>
static cudaError_t launch_end(lm_cuda *cuda, const lm_gemm *g, const lm_gemm_grid &grid, cudaStream_t stream) {
  return hopper_way_out<T>::serves(*g) ? launch_hopper<T, FORM, C, true>(cuda, g, grid, stream)
                                       : launch_hopper<T, FORM, C, false>(cuda, g, grid, stream);
}

template <typename T, typename C>
static cudaError_t launch_form(lm_cuda *cuda, const lm_gemm *g, const lm_gemm_grid &grid, cudaStream_t stream) {
  return g->form == LM_NT ? launch_end<T, LM_NT, C>(cuda, g, grid, stream) : launch_end<T, LM_NN, C>(cuda, g, grid, stream);
}

template <typename T>
static cudaError_t launch_type(lm_cuda *cuda, const lm_gemm *g, const lm_gemm_plan &plan, cudaStream_t stream) {
  return plan.shape == 0 ? launch_form<T, hopper_tile<256>>(cuda, g, plan.grid, stream)
                         : launch_form<T, hopper_tile<128>>(cuda, g, plan.grid, stream);
}

cudaError_t lm_cuda_gemm_hopper(lm_cuda *cuda, const lm_gemm *g, int32_t type, void *workspace, uint64_t workspace_bytes,
                                cudaStream_t stream) {
  static const lm_tile_shape shapes[] = {{128, 256, 1, 1.0f, 1.0f}, {128, 128, 1, 0.85f, 1.0f}};
  lm_gemm_plan plan;
  const cudaError_t error = lm_gemm_make_plan(cuda, g, shapes, 2, 64, workspace, workspace_bytes, &plan);
  if (error || plan.grid.items() == 0) return error;
  return type == LM_BF16 ? launch_type<lm_bf16>(cuda, g, plan, stream) : launch_type<lm_f16>(cuda, g, plan, stream);
}
