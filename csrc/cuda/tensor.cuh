/* tensor.cuh: the instructions of the tensor-core kernels that C++ has no words for, sm_80 and later. */
#ifndef LM_CUDA_TENSOR_CUH
#define LM_CUDA_TENSOR_CUH

#include "convert.cuh"

__device__ __forceinline__ uint32_t lm_shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* lm_copy_async: 16 bytes from global to shared memory, of which the first `bytes` are read and the others are 0. */
__device__ __forceinline__ void lm_copy_async(uint32_t to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void lm_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* lm_copy_wait: until at most `pending` of the thread's last groups are under way. */
template <int pending>
__device__ __forceinline__ void lm_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void lm_store_shared(uint32_t to, uint4 word) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w) : "memory");
}

/* lm_chunk_place: where a 16-byte chunk of a line of WIDTH elements lies in a tile, in bytes: lines of one chunk lie in
 * different banks. */
template <int WIDTH>
__device__ __forceinline__ uint32_t lm_chunk_place(int line, int chunk) {
  const int turn = WIDTH == 16 ? line >> 2 & 1 : WIDTH == 32 ? line >> 1 & 3 : line & 7;
  return line * WIDTH * 2 + ((chunk ^ turn) << 4);
}

/* lm_load_matrices: four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. */
template <bool transposed>
__device__ __forceinline__ void lm_load_matrices(uint32_t (&x)[4], uint32_t from) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

/* lm_multiply: c [16, 8] += a [16, 16] b [16, 8], fp32 sums. */
template <typename T>
__device__ __forceinline__ void lm_multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void lm_multiply<lm_bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void lm_multiply<lm_f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
