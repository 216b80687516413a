/* attention_backward.cu: gradients of attention; tiles by head size and by the shared memory of the device. */
#include "attention_backward.cuh"

#include "attention_hopper.h"
#include "attention_launch.cuh"
#include "attention_query_gradient.cuh"
#include "kernels.h"

/* Registers decide: a warp holds dk and dv of its keys. Where they are small it takes 32 keys, which halves the bytes that a
 * product needs from shared memory; where they are large, two warps share 16 keys. */
template <int D, bool LARGE>
struct backward_sizes {
  using tile = lm_backward_tile<D, D == 32 ? 2 : 1, 4, 1, 64, 32, D == 80 ? 4 : 2, 2>;
};
template <bool LARGE>
struct backward_sizes<64, LARGE> {
  using tile = lm_backward_tile<64, LARGE ? 2 : 1, 4, 1, LARGE ? 64 : 32, 32, 2, 2>;
};
template <bool LARGE>
struct backward_sizes<128, LARGE> {
  using tile = lm_backward_tile<128, 1, 4, 1, LARGE ? 64 : 32, 32, 2, LARGE ? 2 : 1>;
};
template <bool LARGE>
struct backward_sizes<256, LARGE> {
  using tile = lm_backward_tile<256, 1, 4, 2, LARGE ? 64 : 16, LARGE ? 32 : 16, LARGE ? 2 : 1, 1>;
};

/* delta[h, t] = sum of o do over a head, by `lanes` lanes; the turns of the ordered sums start at 0. */
template <typename T, int N>
__global__ void __launch_bounds__(256)
    attention_delta(const __grid_constant__ lm_attention a, const T *o, const T *grad_o, float *delta, int lanes, int32_t *turns,
                    int64_t turn_count) {
  const int64_t thread = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  for (int64_t i = thread; i < turn_count; i += gridDim.x * (int64_t)blockDim.x) turns[i] = 0;
  const int64_t row = thread / lanes / a.heads;
  const int head = (int)(thread / lanes % a.heads), lane = threadIdx.x % lanes;
  const bool inside = row < lm_attention_offset(a, a.documents);
  float sum = 0;
  if (inside)
    for (int c = lane * N; c < a.head_dim; c += lanes * N) {
      float x[N], y[N];
      lm_load<N>(x, o + row * a.o_pitch + head * a.head_dim + c);
      lm_load<N>(y, grad_o + row * a.o_pitch + head * a.head_dim + c);
#pragma unroll
      for (int i = 0; i < N; i++) sum = fmaf(x[i], y[i], sum);
    }
  for (int step = lanes / 2; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (inside && lane == 0) delta[head * (int64_t)a.rows + row] = sum;
}

template <typename T, int N>
static cudaError_t launch_delta(const lm_attention &a, const void *o, const void *grad_o, float *delta, int32_t *turns,
                                int64_t turn_count, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < 32 && lanes * N < a.head_dim) lanes *= 2;
  return lm_attention_start<attention_delta<T, N>>(lm_ceil_div((int64_t)a.rows * a.heads * lanes, 256), 256, 0, stream, a,
                                                   (const T *)o, (const T *)grad_o, delta, lanes, turns, turn_count);
}

/* A number of blocks that is a fraction of what the device holds at a time leaves it idle while the longest ones end: then the
 * query heads of a key-value head are shared by several. */
static int32_t choose_slices(const lm_attention &a, int32_t keys, int64_t wanted_blocks) {
  const int64_t blocks = lm_ceil_div(a.rows, keys) * (a.heads / a.group), wanted = lm_ceil_div(wanted_blocks, blocks);
  const int32_t heads = (int32_t)(a.group / wanted > 1 ? a.group / wanted : 1);
  return (a.group + heads - 1) / heads;
}

/* Lays out the workspace for blocks of so many keys and queries: sums of dq and turns and, where there is room, sums of dk and
 * dv, without which no query heads are shared.
 * @return the number of turns, or 0 when the workspace does not hold them */
static int64_t use_workspace(const lm_attention_backward_args *args, const lm_attention &a, int32_t keys, int32_t queries,
                             int64_t wanted_blocks, lm_attention_gradients &g) {
  const int64_t kv_heads = a.heads / a.group, q_elements = (int64_t)a.rows * a.heads * a.head_dim;
  const int64_t kv_elements = (int64_t)a.rows * kv_heads * a.head_dim, key_blocks = lm_attention_blocks(a, keys);
  const int64_t query_blocks = lm_attention_blocks(a, queries);
  const int64_t turns = (1 + a.heads * query_blocks + kv_heads * key_blocks + 1) / 2 * 2;
  const int64_t room = args->workspace_bytes / 4 - q_elements - turns;
  if (args->workspace == nullptr || (uintptr_t)args->workspace % 16 != 0 || room < 0) return 0;
  g.dq_sum = (float *)args->workspace;
  g.rank = (int32_t *)(g.dq_sum + q_elements);
  g.dq_turn = g.rank + 1;
  g.dkv_turn = g.dq_turn + a.heads * query_blocks;
  g.dk_sum = (float *)(g.rank + turns);
  g.dv_sum = g.dk_sum + kv_elements;
  g.query_blocks = (int32_t)query_blocks;
  g.key_blocks = (int32_t)key_blocks;
  g.slices = room >= 2 * kv_elements ? choose_slices(a, keys, wanted_blocks) : 1;
  return turns;
}

template <typename T, typename C, typename Q, bool GENERAL = false>
static cudaError_t launch(lm_cuda *cuda, const lm_attention &a, lm_attention_gradients g, const lm_attention_backward_args *args,
                          cudaStream_t stream) {
  /* With larger heads the turns cost more than scores that are computed twice. */
  constexpr bool ORDERED = !GENERAL && C::D <= 64;
  g.slices = 1;
  int64_t turns = 0;
  if constexpr (ORDERED) turns = use_workspace(args, a, C::KEYS, C::QUERIES, 2 * (int64_t)cuda->sm_count * C::BLOCKS, g);
  cudaError_t error = launch_delta<T, 8>(a, args->o, args->grad_o, args->delta, g.rank, turns, stream);
  if (error) return error;
  const int64_t blocks = lm_attention_blocks(a, C::KEYS) * (a.heads / a.group) * g.slices;
  if constexpr (ORDERED)
    if (turns > 0)
      return lm_attention_start<lm_attention_backward_kernel<T, C, true, false>>(blocks, C::THREADS, C::SHARED, stream, a, g);
  error = lm_attention_start<lm_attention_backward_kernel<T, C, false, GENERAL>>(blocks, C::THREADS, C::SHARED, stream, a, g);
  if (error) return error;
  return lm_attention_start<lm_attention_query_gradient<T, Q, GENERAL>>(lm_attention_blocks(a, Q::QUERIES) * a.heads, Q::THREADS,
                                                                        Q::SHARED, stream, a, g);
}

template <typename T>
static cudaError_t launch_size(lm_cuda *cuda, const lm_attention &a, lm_attention_gradients g,
                               const lm_attention_backward_args *args, cudaStream_t stream) {
  if (lm_attention_hopper_can(cuda, a)) {
    /* Few slices: a block has its multiprocessor to itself. Without the workspace the tiles of all cards serve. */
    const int64_t turns =
        use_workspace(args, a, lm_attention_hopper_keys(), lm_attention_hopper_queries(a), cuda->sm_count, g);
    if (turns > 0) {
      const cudaError_t error = launch_delta<T, 8>(a, args->o, args->grad_o, args->delta, g.rank, turns, stream);
      return error ? error : lm_attention_hopper_backward(a, g, args->type, stream);
    }
  }
  LM_BY_HEAD_DIM(a.head_dim, D, {
    using query_tile = lm_query_tile<D, (D == 256 ? 64 : 128), (D == 256 ? 16 : D > 64 ? 32 : 64)>;
    if (lm_attention_general(a))
      return launch<T, typename backward_sizes<D, false>::tile, query_tile, true>(cuda, a, g, args, stream);
    if (lm_attention_large(cuda))
      return launch<T, typename backward_sizes<D, true>::tile, query_tile>(cuda, a, g, args, stream);
    return launch<T, typename backward_sizes<D, false>::tile, query_tile>(cuda, a, g, args, stream);
  })
}

cudaError_t lm_cuda_attention_backward(lm_cuda *cuda, const lm_attention_backward_args *args, cudaStream_t stream) {
  lm_attention a = {};
  a.q = args->q, a.k = args->k, a.v = args->v;
  a.cu_seqlens = args->cu_seqlens;
  a.q_pitch = a.kv_pitch = args->qkv_pitch, a.o_pitch = args->o_pitch;
  a.rows = args->rows, a.documents = args->documents;
  a.heads = args->heads, a.group = args->heads / args->kv_heads, a.head_dim = args->head_dim;
  lm_attention_scores(a, args->scale, args->window, args->softcap);
  lm_attention_gradients g = {};
  g.grad_o = args->grad_o, g.lse = args->lse, g.delta = args->delta;
  g.dq = args->dq, g.dk = args->dk, g.dv = args->dv;
  g.pitch = args->dqkv_pitch;
  bool tensor = lm_attention_tensor(a, args->type);
  for (const void *p : {args->o, args->grad_o}) tensor = tensor && lm_aligned((const lm_bf16 *)p, a.o_pitch, 16);
  for (const void *p : {args->dq, args->dk, args->dv}) tensor = tensor && lm_aligned((const lm_bf16 *)p, g.pitch, 4);
  if (tensor)
    return args->type == LM_BF16 ? launch_size<lm_bf16>(cuda, a, g, args, stream) : launch_size<lm_f16>(cuda, a, g, args, stream);
  cudaError_t error = cudaErrorInvalidValue;
  LM_CUDA_BY_TYPE(args->type, T, error = launch_delta<T, 1>(a, args->o, args->grad_o, args->delta, nullptr, 0, stream));
  return error ? error : lm_attention_simt_backward(a, g, args->type, stream);
}
