/* attention_query_gradient.cuh: dq alone, for callers without a workspace: a block owns queries as in the forward pass and
 * computes the scores once more, so that seven matrix products do the work of five but nothing is summed between blocks. */
#ifndef LM_CUDA_ATTENTION_QUERY_GRADIENT_CUH
#define LM_CUDA_ATTENTION_QUERY_GRADIENT_CUH

#include "attention_backward.cuh"

template <int D_, int QUERIES_, int KEYS_>
struct lm_query_tile {
  static constexpr int D = D_, QUERIES = QUERIES_, KEYS = KEYS_, WARPS = QUERIES / 16, THREADS = WARPS * 32;
  static constexpr int SHARED = (2 * QUERIES + 4 * KEYS) * D * 2;
};

template <typename T, typename C, bool GENERAL>
__global__ void __launch_bounds__(C::THREADS)
    lm_attention_query_gradient(const __grid_constant__ lm_attention a, const __grid_constant__ lm_attention_gradients g) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int D = C::D, QUERIES = C::QUERIES, KEYS = C::KEYS, THREADS = C::THREADS;
  const int head = blockIdx.x % a.heads;
  lm_attention_block b;
  if (lm_attention_find<QUERIES, false>(a, blockIdx.x / a.heads, b) < 0) return;

  const int lane = threadIdx.x & 31, warp_row = (threadIdx.x >> 5) * 16;
  const int queries = min(QUERIES, b.length - b.begin), keys = b.begin + queries;
  const uint32_t q_tile = lm_shared_address(shared), go_tile = q_tile + QUERIES * D * 2;
  const uint32_t k_tile = go_tile + QUERIES * D * 2, v_tile = k_tile + 2 * KEYS * D * 2;
  const int64_t first_row = b.row + b.begin, kv_at = b.kv_row * a.kv_pitch + head / a.group * D;
  const T *const k = (const T *)a.k + kv_at, *const v = (const T *)a.v + kv_at;
  const auto fetch = [&](int key, int stage) {
    lm_copy_rows<KEYS, D, THREADS>(k_tile + stage * KEYS * D * 2, k + key * a.kv_pitch, a.kv_pitch, keys - key);
    lm_copy_rows<KEYS, D, THREADS>(v_tile + stage * KEYS * D * 2, v + key * a.kv_pitch, a.kv_pitch, keys - key);
    lm_copy_commit();
  };
  lm_copy_rows<QUERIES, D, THREADS>(q_tile, (const T *)a.q + first_row * a.q_pitch + head * D, a.q_pitch, queries);
  lm_copy_rows<QUERIES, D, THREADS>(go_tile, (const T *)g.grad_o + first_row * a.o_pitch + head * D, a.o_pitch, queries);
  const int start = GENERAL ? lm_window::first_key(a, b.begin) / KEYS * KEYS : 0;
  fetch(start, 0);

  const float factor = GENERAL && a.softcap > 0 ? LM_LOG2_E : a.scale * LM_LOG2_E;
  const int first_query = b.begin + warp_row;
  float zero[2], delta[2]; /* of the lane's two queries */
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = warp_row + (lane >> 2) + 8 * i;
    const int64_t at = (int64_t)head * a.rows + first_row + row;
    zero[i] = row < queries ? g.lse[at] * -LM_LOG2_E : 0;
    delta[i] = row < queries ? g.delta[at] : 0;
  }
  const lm_blocks<D, LM_DOWN> q_blocks(q_tile);
  lm_sums<1, D / 8> dq;
  dq.clear();
  for (int key = start, stage = 0; key < keys; key += KEYS, stage ^= 1) {
    lm_copy_wait<0>();
    __syncthreads(); /* the stage is complete, and the other one has been read by all */
    if (key + KEYS < keys) fetch(key + KEYS, stage ^ 1);
    if (lm_causal::sees_none(first_query + 15, key)) continue;
    if (GENERAL && lm_window::sees_none(a, first_query, key + KEYS - 1)) continue;
    const lm_blocks<D, LM_ACROSS> kv_blocks(k_tile + stage * KEYS * D * 2); /* v lies two stages of rows behind k */
    lm_sums<1, KEYS / 8> p, ds, slope;
    lm_scores<T>(p, q_blocks, warp_row, kv_blocks, 0);
    lm_scores<T>(ds, q_blocks, QUERIES + warp_row, kv_blocks, 2 * KEYS);
    if constexpr (GENERAL) {
      if (a.softcap > 0) lm_cap(a, p, slope);
      lm_hide_before<false>(a, p, first_query, key);
    }
    if (!lm_causal::sees_all(first_query, key + KEYS - 1)) lm_hide<false>(p, first_query, key);
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        ds.x[0][n][i] = lm_exp2(fmaf(p.x[0][n][i], factor, zero[i >> 1])) * (ds.x[0][n][i] - delta[i >> 1]);
    if (GENERAL && a.softcap > 0) lm_slope(ds, slope);
    lm_weights<1, KEYS / 8> weights;
    weights.template round<T>(ds);
    lm_gather<T>(dq, weights, lm_blocks<D, LM_DOWN>(k_tile + stage * KEYS * D * 2), 0, 0);
  }
  lm_add_part(dq, (T *)g.dq + (first_row + warp_row) * g.pitch + head * D, g.pitch, (float *)nullptr, 0, queries - warp_row,
              a.scale, true, true);
}

#endif
