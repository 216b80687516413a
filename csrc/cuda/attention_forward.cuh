/* attention_forward.cuh: attention on the tensor cores, tiled with a running maximum (Dao 2023, arXiv:2307.08691).
 *
 * A block owns QUERIES queries of one head; each of its warps owns 16 M of them and all their results, so that nothing is
 * summed between warps. Keys and values come KEYS at a time through two stages of shared memory: while one is multiplied, the
 * next one travels. */
#ifndef LM_CUDA_ATTENTION_FORWARD_CUH
#define LM_CUDA_ATTENTION_FORWARD_CUH

#include "attention_tile.cuh"

/* BLOCKS: blocks that should fit on a multiprocessor together. */
template <int D_, int QUERIES_, int KEYS_, int WARPS_, int BLOCKS_>
struct lm_forward_tile {
  static constexpr int D = D_, QUERIES = QUERIES_, KEYS = KEYS_, WARPS = WARPS_, BLOCKS = BLOCKS_;
  static constexpr int THREADS = WARPS * 32, M = QUERIES / WARPS / 16;
  static constexpr int SHARED = (QUERIES + 4 * KEYS) * D * 2;
};

/* lse may be NULL. */
template <typename T, typename C, bool GENERAL>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    lm_attention_forward_kernel(const __grid_constant__ lm_attention a, T *o, float *lse) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int D = C::D, M = C::M, KEYS = C::KEYS, THREADS = C::THREADS;
  const int head = blockIdx.x % a.heads;
  lm_attention_block b;
  if (lm_attention_find<C::QUERIES, false>(a, blockIdx.x / a.heads, b) < 0) return;

  const int lane = threadIdx.x & 31, warp_row = (threadIdx.x >> 5) * 16 * M;
  const int queries = min(C::QUERIES, b.length - b.begin), keys = b.past + b.begin + queries;
  const uint32_t q_tile = lm_shared_address(shared), k_tile = q_tile + C::QUERIES * D * 2;
  const uint32_t v_tile = k_tile + 2 * KEYS * D * 2;
  const int64_t first_row = b.row + b.begin, kv_column = head / a.group * D;
  const T *const k = (const T *)a.k + b.kv_row * a.kv_pitch + kv_column;
  const T *const v = (const T *)a.v + b.kv_row * a.kv_pitch + kv_column;
  const auto fetch = [&](int key, int stage) {
    lm_copy_rows<KEYS, D, THREADS>(k_tile + stage * KEYS * D * 2, k + key * a.kv_pitch, a.kv_pitch, keys - key);
    lm_copy_rows<KEYS, D, THREADS>(v_tile + stage * KEYS * D * 2, v + key * a.kv_pitch, a.kv_pitch, keys - key);
    lm_copy_commit();
  };
  lm_copy_rows<C::QUERIES, D, THREADS>(q_tile, (const T *)a.q + first_row * a.q_pitch + head * D, a.q_pitch, queries);
  const int start = GENERAL ? lm_window::first_key(a, b.past + b.begin) / KEYS * KEYS : 0;
  fetch(start, 0);

  /* The maximum is kept of the raw scores, or the capped ones, everything else in powers of two. */
  const float scale = GENERAL && a.softcap > 0 ? 1 : a.scale, factor = scale * LM_LOG2_E;
  const int first_query = b.past + b.begin + warp_row; /* counted as the keys are */
  const lm_blocks<D, LM_DOWN> q_blocks(q_tile);
  lm_sums<M, D / 8> out;
  float peak[M][2], sum[M][2];
  out.clear();
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) peak[m][i] = -INFINITY, sum[m][i] = 0;

  for (int key = start, stage = 0; key < keys; key += KEYS, stage ^= 1) {
    lm_copy_wait<0>();
    __syncthreads(); /* the stage is complete, and the other one has been read by all */
    if (key + KEYS < keys) fetch(key + KEYS, stage ^ 1);
    if (lm_causal::sees_none(first_query + 16 * M - 1, key)) continue;
    if (GENERAL && lm_window::sees_none(a, first_query, key + KEYS - 1)) continue;

    lm_sums<M, KEYS / 8> s;
    lm_scores<T>(s, q_blocks, warp_row, lm_blocks<D, LM_ACROSS>(k_tile + stage * KEYS * D * 2), 0);
    if constexpr (GENERAL) {
      lm_sums<M, KEYS / 8> slope;
      if (a.softcap > 0) lm_cap(a, s, slope);
      lm_hide_before<false>(a, s, first_query, key);
    }
    if (!lm_causal::sees_all(first_query, key + KEYS - 1)) lm_hide<false>(s, first_query, key);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float top = peak[m][i];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(s.x[m][n][2 * i], s.x[m][n][2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float zero = top == -INFINITY ? 0 : top * factor; /* a row that sees nothing yet */
        const float shrink = lm_exp2(fmaf(peak[m][i], factor, -zero));
        peak[m][i] = top;
        sum[m][i] *= shrink;
#pragma unroll
        for (int n = 0; n < D / 8; n++) out.x[m][n][2 * i] *= shrink, out.x[m][n][2 * i + 1] *= shrink;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int j = 2 * i; j < 2 * i + 2; j++) {
            s.x[m][n][j] = lm_exp2(fmaf(s.x[m][n][j], factor, -zero));
            sum[m][i] += s.x[m][n][j];
          }
      }
    lm_weights<M, KEYS / 8> p;
    p.template round<T>(s);
    lm_gather<T>(out, p, lm_blocks<D, LM_DOWN>(v_tile + stage * KEYS * D * 2), 0, 0);
  }

  /* The warp's rows leave through its rows of the query tile, which no other warp reads, in 16-byte words. */
  __syncwarp();
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float total = sum[m][i];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const int row = warp_row + 16 * m + (lane >> 2) + 8 * i;
      if (lse != nullptr && (lane & 3) == 0 && row < queries)
        lse[(int64_t)head * a.rows + first_row + row] = fmaf(peak[m][i], scale, logf(total));
      const float share = 1 / total;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        *reinterpret_cast<uint32_t *>(shared + lm_rows<D>::at(row, n) + (lane & 3) * 4) =
            lm_pack2<T>(out.x[m][n][2 * i] * share, out.x[m][n][2 * i + 1] * share);
    }
  __syncwarp();
#pragma unroll
  for (int index = lane; index < 16 * M * D / 8; index += 32) {
    const int row = warp_row + index / (D / 8), chunk = index % (D / 8);
    if (row < queries)
      *reinterpret_cast<uint4 *>(o + (first_row + row) * a.o_pitch + head * D + chunk * 8) =
          *reinterpret_cast<const uint4 *>(shared + lm_rows<D>::at(row, chunk));
  }
}

#endif
