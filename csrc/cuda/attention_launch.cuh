/* attention_launch.cuh: what the launch functions of attention share. */
#ifndef LM_CUDA_ATTENTION_LAUNCH_CUH
#define LM_CUDA_ATTENTION_LAUNCH_CUH

#include "attention.cuh"

/* Data-centre cards let two blocks of about 100 KB share a multiprocessor; all other tiles fit into the 99 KB of the others. */
inline bool lm_attention_large(const lm_cuda *cuda) { return cuda->shared_max >= 200 * 1024; }

/* lm_attention_start: launches `blocks` blocks in one dimension. */
template <auto kernel, typename... Arguments>
inline cudaError_t lm_attention_start(int64_t blocks, int threads, size_t shared, cudaStream_t stream,
                                      const Arguments &...arguments) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error) return error;
  }
  return lm_cuda_launch<kernel>(dim3((unsigned)blocks), dim3((unsigned)threads), shared, stream, arguments...);
}

/* lm_attention_tensor: whether the tensor cores serve: 16-bit storage, one of their head sizes, rows of 16-byte words, distances
 * inside a tile that 32 bits hold. A scale that is not positive would turn the running maximum around. */
inline bool lm_attention_tensor(const lm_attention &a, int32_t type) {
  const int32_t d = a.head_dim;
  const bool size = d == 32 || d == 64 || d == 80 || d == 96 || d == 128 || d == 256;
  const lm_bf16 *const q = (const lm_bf16 *)a.q, *const k = (const lm_bf16 *)a.k, *const v = (const lm_bf16 *)a.v;
  const bool near = a.q_pitch < 1 << 23 && a.kv_pitch < 1 << 23 && a.o_pitch < 1 << 23;
  return type != LM_F32 && size && near && a.scale > 0 && lm_aligned(q, a.q_pitch, 16) && lm_aligned(k, a.kv_pitch, 16) &&
         lm_aligned(v, a.kv_pitch, 16);
}

/* LM_BY_HEAD_DIM(head_dim, D, statements): runs the statements with D a head size of the tensor-core tiles. */
#define LM_BY_HEAD_DIM(head_dim, D, ...) \
  switch (head_dim) {                    \
    case 32: {                           \
      constexpr int D = 32;              \
      __VA_ARGS__;                       \
    } break;                             \
    case 64: {                           \
      constexpr int D = 64;              \
      __VA_ARGS__;                       \
    } break;                             \
    case 80: {                           \
      constexpr int D = 80;              \
      __VA_ARGS__;                       \
    } break;                             \
    case 96: {                           \
      constexpr int D = 96;              \
      __VA_ARGS__;                       \
    } break;                             \
    case 128: {                          \
      constexpr int D = 128;             \
      __VA_ARGS__;                       \
    } break;                             \
    default: {                           \
      constexpr int D = 256;             \
      __VA_ARGS__;                       \
    }                                    \
  }

/* lm_attention_run: the forward pass, on the tensor cores where they serve; lse may be NULL. */
cudaError_t lm_attention_run(lm_cuda *cuda, const lm_attention &a, int32_t type, void *o, float *lse, cudaStream_t stream);

/* The fp32 path: any storage type, head sizes up to LM_MAX_HEAD_DIM, any alignment. */
cudaError_t lm_attention_simt(const lm_attention &a, int32_t type, void *o, float *lse, cudaStream_t stream);
cudaError_t lm_attention_simt_backward(const lm_attention &a, const lm_attention_gradients &g, int32_t type, cudaStream_t stream);

#endif
