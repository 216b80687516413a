/* hopper.cuh: the instructions of sm_90a that C++ has no words for: barriers that count bytes, tensor copies (TMA), and
 * products of a warp group (wgmma). Everything here is for code under __CUDA_ARCH_FEAT_SM90_ALL. */
#ifndef LM_CUDA_HOPPER_CUH
#define LM_CUDA_HOPPER_CUH

#include <cuda.h>

#include "tensor.cuh"

__device__ __forceinline__ void lm_barrier_create(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/* lm_barriers_publish: before the block's barrier that follows their creation. */
__device__ __forceinline__ void lm_barriers_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void lm_barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* lm_barrier_arrive_warp: a whole warp's arrival; what its lanes read and wrote lies before it. One lane arrives for all, and
 * LM_WARP_ARRIVALS is what the barrier counts for it. compute-sanitizer's racecheck takes only the accesses of the lane that
 * arrives for ordered: for its runs (tests/cuda/one_step.ts), build with -DLM_WARP_ARRIVALS=32, where each lane does. */
#ifndef LM_WARP_ARRIVALS
#define LM_WARP_ARRIVALS 1
#endif
__device__ __forceinline__ void lm_barrier_arrive_warp(uint32_t barrier, int thread) {
  __syncwarp();
  if (LM_WARP_ARRIVALS == 32 || (thread & 31) == 0) lm_barrier_arrive(barrier);
}
/* lm_barrier_expect: arrives, and lets the phase end only after so many bytes of tensor copies. */
__device__ __forceinline__ void lm_barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* lm_barrier_wait: until the phase of this parity has ended. */
__device__ __forceinline__ void lm_barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

/* lm_tensor_copy: a box of a matrix, from element (inner, outer) on, to shared memory; what lies outside the matrix is 0. */
__device__ __forceinline__ void lm_tensor_copy(uint32_t to, const CUtensorMap *map, int inner, int outer, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
                   "r"(to),
               "l"(map), "r"(inner), "r"(outer), "r"(barrier)
               : "memory");
}

/* A tile in shared memory as wgmma reads it: lines of 128 bytes, chunks swizzled within groups of 8 lines (1024 bytes apart).
 * leading: bytes between blocks of 64 columns of a tile whose lines are the steps of the contraction; else unused. */
__device__ __forceinline__ uint64_t lm_matrix_descriptor(uint32_t address, uint32_t leading) {
  return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void lm_group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void lm_group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void lm_group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/* lm_hold: the compiler may not move what it does with these sums across this point: products write them behind its back. */
template <int COUNT>
__device__ __forceinline__ void lm_hold(float (&sum)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sum[i])::"memory");
}
template <int registers>
__device__ __forceinline__ void lm_registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void lm_registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

#define LM_8(f, c, i) f(c, i), f(c, i + 1), f(c, i + 2), f(c, i + 3), f(c, i + 4), f(c, i + 5), f(c, i + 6), f(c, i + 7)
#define LM_32_FROM(f, c, i) LM_8(f, c, i), LM_8(f, c, i + 8), LM_8(f, c, i + 16), LM_8(f, c, i + 24)
#define LM_32(f, c) LM_32_FROM(f, c, 0)
#define LM_64(f, c) LM_32_FROM(f, c, 0), LM_32_FROM(f, c, 32)
#define LM_128(f, c) LM_64(f, c), LM_32_FROM(f, c, 64), LM_32_FROM(f, c, 96)
#define LM_ADDED(c, i) "+f"(c[i])
#define LM_WRITTEN(c, i) "=f"(c[i])

#define LM_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LM_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LM_NAMES_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* lm_group_multiply: c [64, COLUMNS] += a [64, 16] b [16, COLUMNS], for the four warps of a group together.
 * along: the lines of b's tile are the steps of the contraction; left_along: those of a's.
 * lm_group_multiply_first: c = a b. */
#define LM_GROUP_MULTIPLY_AS(name, access, add, type, text, columns, count, a_place, b_place, a_along_place, b_along_place)  \
  template <bool along, bool left_along = false>                                                                               \
  __device__ __forceinline__ void name(float (&c)[count], uint64_t a, uint64_t b, type) {                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." text "." text " {" LM_NAMES_##count "}, "             \
                 a_place ", " b_place ", " #add ", 1, 1, " a_along_place ", " b_along_place ";"                                \
                 : LM_##count(access, c)                                                                                       \
                 : "l"(a), "l"(b), "n"((int)left_along), "n"((int)along));                                                     \
  }
#define LM_GROUP_MULTIPLY(...)                                            \
  LM_GROUP_MULTIPLY_AS(lm_group_multiply, LM_ADDED, 1, __VA_ARGS__)       \
  LM_GROUP_MULTIPLY_AS(lm_group_multiply_first, LM_WRITTEN, 0, __VA_ARGS__)
LM_GROUP_MULTIPLY(lm_bf16, "bf16", 256, 128, "%128", "%129", "%130", "%131")
LM_GROUP_MULTIPLY(lm_f16, "f16", 256, 128, "%128", "%129", "%130", "%131")
LM_GROUP_MULTIPLY(lm_bf16, "bf16", 128, 64, "%64", "%65", "%66", "%67")
LM_GROUP_MULTIPLY(lm_f16, "f16", 128, 64, "%64", "%65", "%66", "%67")
LM_GROUP_MULTIPLY(lm_bf16, "bf16", 64, 32, "%32", "%33", "%34", "%35")
LM_GROUP_MULTIPLY(lm_f16, "f16", 64, 32, "%32", "%33", "%34", "%35")

/* The same with a from registers, as lm_multiply wants it; the registers must not change before the product has ended, which
 * lm_keep behind the wait makes sure of. */
#define LM_GROUP_MULTIPLY_KEPT(type, text, columns, count, a_places, b_place, along_place)                                   \
  template <bool along>                                                                                                        \
  __device__ __forceinline__ void lm_group_multiply(float (&c)[count], const uint32_t (&a)[4], uint64_t b, type) {             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." text "." text " {" LM_NAMES_##count "}, {" a_places   \
                 "}, " b_place ", 1, 1, 1, " along_place ";"                                                                   \
                 : LM_##count(LM_ADDED, c)                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)along));                                       \
  }
LM_GROUP_MULTIPLY_KEPT(lm_bf16, "bf16", 128, 64, "%64, %65, %66, %67", "%68", "%69")
LM_GROUP_MULTIPLY_KEPT(lm_f16, "f16", 128, 64, "%64, %65, %66, %67", "%68", "%69")
LM_GROUP_MULTIPLY_KEPT(lm_bf16, "bf16", 64, 32, "%32, %33, %34, %35", "%36", "%37")
LM_GROUP_MULTIPLY_KEPT(lm_f16, "f16", 64, 32, "%32, %33, %34, %35", "%36", "%37")

template <int COUNT>
__device__ __forceinline__ void lm_keep(const uint32_t (&a)[COUNT][1][4]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" ::"r"(a[i][0][0]), "r"(a[i][0][1]), "r"(a[i][0][2]), "r"(a[i][0][3]) : "memory");
}

/* lm_shared_publish: what this thread wrote to shared memory is seen by products and tensor copies after the next barrier. */
__device__ __forceinline__ void lm_shared_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* lm_store_matrices: the inverse of lm_load_matrices, not transposed. */
__device__ __forceinline__ void lm_store_matrices(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
}

/* Bulk copies from shared to global memory, multiples of 16 bytes, by one thread; floats are stored or added. */
__device__ __forceinline__ void lm_bulk_store(float *to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void lm_bulk_add(float *to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
/* lm_bulk_load: the other way, counted by the barrier. */
__device__ __forceinline__ void lm_bulk_load(uint32_t to, const float *from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void lm_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* lm_bulk_wait_read: until the thread's copies have read shared memory. */
__device__ __forceinline__ void lm_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
/* lm_bulk_wait: until they are complete and visible to the thread. */
__device__ __forceinline__ void lm_bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/* lm_global_publish: what the thread knows of global memory holds for its next bulk copies. */
__device__ __forceinline__ void lm_global_publish() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

#endif
