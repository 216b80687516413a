/* attention_hopper.cu: attention with the products of warp groups (sm_90a), head sizes 64 and 128: the walk of
 * attention_forward.cuh. The weights stay in registers as left operand; while one group is at its exponentials, the others
 * multiply. */
#include "attention_hopper.cuh"

enum { STEP = 64 }; /* keys that are visited at a time */

/* BLOCKS: that share a multiprocessor. */
template <int D_, int GROUPS_, int BLOCKS_>
struct hopper_queries {
  static constexpr int D = D_, GROUPS = GROUPS_, BLOCKS = BLOCKS_, QUERIES = 64 * GROUPS, THREADS = 128 * GROUPS;
  static constexpr int Q = QUERIES * D * 2, STAGE = 2 * STEP * D * 2; /* bytes: q; k and v */
  static constexpr int SHARED = Q + 2 * STAGE;
};

/* QUERIES queries of one head; lse may be NULL. */
template <typename T, typename C, bool WINDOW>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    attention_hopper_forward(const __grid_constant__ lm_attention a, T *o, float *lse) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int D = C::D, QUERIES = C::QUERIES, THREADS = C::THREADS;
  const int head = blockIdx.x % a.heads;
  lm_attention_block b;
  if (lm_attention_find<QUERIES, false>(a, blockIdx.x / a.heads, b) < 0) return;

  const int queries = min(QUERIES, b.length - b.begin), keys = b.past + b.begin + queries;
  const uint32_t q_tile = lm_shared_address(shared), stages = q_tile + C::Q;
  const int64_t first_row = b.row + b.begin, kv_at = b.kv_row * a.kv_pitch + head / a.group * D;
  const T *const k = (const T *)a.k + kv_at, *const v = (const T *)a.v + kv_at;
  const auto fetch = [&](int key, int stage) {
    const uint32_t to = stages + stage * C::STAGE;
    copy_head<D, STEP, THREADS>(to, k + key * a.kv_pitch, a.kv_pitch, keys - key);
    copy_head<D, STEP, THREADS>(to + C::STAGE / 2, v + key * a.kv_pitch, a.kv_pitch, keys - key);
    lm_copy_commit();
  };
  copy_head<D, QUERIES, THREADS>(q_tile, (const T *)a.q + first_row * a.q_pitch + head * D, a.q_pitch, queries);
  const int start = WINDOW ? lm_window::first_key(a, b.past + b.begin) / STEP * STEP : 0;
  fetch(start, 0);

  const int lane = threadIdx.x & 31, group = threadIdx.x / 128, warp_row = group * 64 + (threadIdx.x >> 5) % 4 * 16;
  const int first_query = b.past + b.begin + warp_row, last_query = b.past + b.begin + group * 64 + 63;
  /* The maximum is kept of the raw scores, everything else in powers of two. */
  const float factor = a.scale * LM_LOG2_E;
  float out[D / 2], peak[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  clear(out);
  for (int key = start, stage = 0; key < keys; key += STEP, stage ^= 1) {
    lm_copy_wait<0>();
    lm_shared_publish();
    __syncthreads(); /* the stage is complete, and the other one has been read by all */
    if (key + STEP < keys) fetch(key + STEP, stage ^ 1);
    if (lm_causal::sees_none(last_query, key)) continue;
    if (WINDOW && lm_window::sees_none(a, last_query - 63, key + STEP - 1)) continue;
    const uint32_t kv_tile = stages + stage * C::STAGE;
    float s[32];
    lm_group_fence();
    multiply_rows<D, QUERIES, STEP, T>(s, q_tile + group * 64 * 128, kv_tile);
    lm_group_commit();
    lm_group_wait<0>();
    lm_hold(s);
    if constexpr (WINDOW) lm_hide_before<false>(a, as_sums(s), first_query, key);
    if (!lm_causal::sees_all(first_query, key + STEP - 1)) lm_hide<false>(as_sums(s), first_query, key);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = peak[i];
#pragma unroll
      for (int n = 0; n < 8; n++) top = fmaxf(top, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float zero = top == -INFINITY ? 0 : top * factor; /* a row that sees nothing yet */
      const float shrink = lm_exp2(fmaf(peak[i], factor, -zero));
      peak[i] = top;
      sum[i] *= shrink;
#pragma unroll
      for (int n = 0; n < D / 8; n++) out[4 * n + 2 * i] *= shrink, out[4 * n + 2 * i + 1] *= shrink;
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int j = 4 * n + 2 * i; j < 4 * n + 2 * i + 2; j++) {
          s[j] = lm_exp2(fmaf(s[j], factor, -zero));
          sum[i] += s[j];
        }
    }
    lm_weights<1, 8> p;
    p.template round<T>(as_sums(s));
    lm_hold(out);
    lm_group_fence();
    multiply_weights<STEP, T>(out, p, kv_tile + C::STAGE / 2);
    lm_group_commit();
    lm_group_wait<0>();
    lm_hold(out);
    lm_keep(p.x);
  }

  /* The warp's rows leave through its rows of the query tile, which no other warp reads any more, in 16-byte words. */
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float total = sum[i];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int row = warp_row + (lane >> 2) + 8 * i;
    if (lse != nullptr && (lane & 3) == 0 && row < queries)
      lse[(int64_t)head * a.rows + first_row + row] = fmaf(peak[i], a.scale, logf(total));
    const float share = 1 / total;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<uint32_t *>(shared + lm_rows<D>::at(row, n) + (lane & 3) * 4) =
          lm_pack2<T>(out[4 * n + 2 * i] * share, out[4 * n + 2 * i + 1] * share);
  }
  __syncwarp();
#pragma unroll
  for (int index = lane; index < 16 * D / 8; index += 32) {
    const int row = warp_row + index / (D / 8), chunk = index % (D / 8);
    if (row < queries)
      *reinterpret_cast<uint4 *>(o + (first_row + row) * a.o_pitch + head * D + chunk * 8) =
          *reinterpret_cast<const uint4 *>(shared + lm_rows<D>::at(row, chunk));
  }
#endif
}

/* Whether this build holds code for the device: other targets compile the kernels without a body. */
static bool has_code(void) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, attention_hopper_forward<lm_bf16, hopper_queries<128, 3, 1>, false>) == cudaSuccess)
    return attributes.numRegs > 128;
  (void)cudaGetLastError();
  return false;
}

bool lm_attention_hopper_can_forward(const lm_cuda *cuda, const lm_attention &a) {
  const bool size = a.head_dim == 64 || a.head_dim == 128;
  if (a.softcap > 0 || cuda->capability != 90 || cuda->shared_max < 224 * 1024 || !size) return false;
  static const bool ready = has_code();
  return ready;
}

bool lm_attention_hopper_can(const lm_cuda *cuda, const lm_attention &a) {
  return !lm_attention_general(a) && lm_attention_hopper_can_forward(cuda, a);
}

template <typename T, typename Q, bool WINDOW>
static cudaError_t start(const lm_attention &a, void *o, float *lse, cudaStream_t stream) {
  return lm_attention_start<attention_hopper_forward<T, Q, WINDOW>>(lm_attention_blocks(a, Q::QUERIES) * a.heads, Q::THREADS,
                                                                    Q::SHARED, stream, a, (T *)o, lse);
}

template <typename T, typename Q>
static cudaError_t launch(const lm_attention &a, void *o, float *lse, cudaStream_t stream) {
  return lm_attention_general(a) ? start<T, Q, true>(a, o, lse, stream) : start<T, Q, false>(a, o, lse, stream);
}

cudaError_t lm_attention_hopper_forward(const lm_attention &a, int32_t type, void *o, float *lse, cudaStream_t stream) {
  if (a.head_dim == 64)
    return type == LM_BF16 ? launch<lm_bf16, hopper_queries<64, 2, 2>>(a, o, lse, stream)
                           : launch<lm_f16, hopper_queries<64, 2, 2>>(a, o, lse, stream);
  return type == LM_BF16 ? launch<lm_bf16, hopper_queries<128, 3, 1>>(a, o, lse, stream)
                         : launch<lm_f16, hopper_queries<128, 3, 1>>(a, o, lse, stream);
}
