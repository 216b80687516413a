/* attention_forward.cu: attention over packed documents; tiles by head size and by the shared memory of the device. */
#include "attention_forward.cuh"

#include "attention_hopper.h"
#include "attention_launch.cuh"
#include "kernels.h"

/* LARGE: 32 queries per warp halve the bytes that a product needs from shared memory, and two blocks on a multiprocessor hide
 * each other's barriers. Cards with less shared memory have room for one block, so it has eight warps; the general kernels have
 * these tiles everywhere. */
template <int D, bool LARGE>
struct forward_sizes {
  using tile = lm_forward_tile<D, 128, 64, LARGE ? 4 : 8, LARGE || D <= 64 ? 2 : 1>;
};
template <bool LARGE>
struct forward_sizes<256, LARGE> {
  using tile = lm_forward_tile<256, LARGE ? 128 : 64, LARGE ? 64 : 32, LARGE ? 8 : 4, 1>;
};

template <typename T, typename C, bool GENERAL = false>
static cudaError_t launch(const lm_attention &a, void *o, float *lse, cudaStream_t stream) {
  return lm_attention_start<lm_attention_forward_kernel<T, C, GENERAL>>(lm_attention_blocks(a, C::QUERIES) * a.heads, C::THREADS,
                                                                        C::SHARED, stream, a, (T *)o, lse);
}

template <typename T>
static cudaError_t launch_size(const lm_attention &a, void *o, float *lse, bool large, cudaStream_t stream) {
  LM_BY_HEAD_DIM(a.head_dim, D, {
    if (lm_attention_general(a)) return launch<T, typename forward_sizes<D, false>::tile, true>(a, o, lse, stream);
    if (large) return launch<T, typename forward_sizes<D, true>::tile>(a, o, lse, stream);
    return launch<T, typename forward_sizes<D, false>::tile>(a, o, lse, stream);
  })
}

cudaError_t lm_attention_run(lm_cuda *cuda, const lm_attention &a, int32_t type, void *o, float *lse, cudaStream_t stream) {
  if (!lm_attention_tensor(a, type) || !lm_aligned((const lm_bf16 *)o, a.o_pitch, 16))
    return lm_attention_simt(a, type, o, lse, stream);
  if (lm_attention_hopper_can_forward(cuda, a)) return lm_attention_hopper_forward(cuda, a, type, o, lse, stream);
  const bool large = lm_attention_large(cuda);
  return type == LM_BF16 ? launch_size<lm_bf16>(a, o, lse, large, stream) : launch_size<lm_f16>(a, o, lse, large, stream);
}

cudaError_t lm_cuda_attention_forward(lm_cuda *cuda, const lm_attention_forward_args *args, cudaStream_t stream) {
  lm_attention a = {};
  a.q = args->q, a.k = args->k, a.v = args->v;
  a.cu_seqlens = args->cu_seqlens;
  a.q_pitch = a.kv_pitch = args->qkv_pitch, a.o_pitch = args->o_pitch;
  a.rows = args->rows, a.documents = args->documents;
  a.heads = args->heads, a.group = args->heads / args->kv_heads, a.head_dim = args->head_dim;
  lm_attention_scores(a, args->scale, args->window, args->softcap);
  return lm_attention_run(cuda, a, args->type, args->o, args->lse, stream);
}
