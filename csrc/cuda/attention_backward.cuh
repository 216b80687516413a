/* attention_backward.cuh: gradients of attention on the tensor cores, probabilities recomputed tile by tile from lse.
 *
 *   p = e^(q k - lse)   dv = p^T do   ds = p (do v^T - delta)   dk = ds^T q   dq = ds k   delta = row sum of o do
 *
 * With a cap c, p = e^(c t - lse) of t = tanh(q k / c), and ds is multiplied by 1 - t^2.
 *
 * A block owns KEYS keys of one key-value head and walks over the query heads that read them and over the later queries that see
 * them. Its scores are transposed, [keys, queries]: p^T and ds^T then lie in registers as the left operands of dv and dk, which a
 * warp sums over the whole walk; only ds goes through shared memory, for dq.
 *
 * dq is the sum over blocks of keys, which run at the same time. It is added in their order, so that the bits never change:
 * each block of queries has a turn, the number of key blocks that have added their part; key block j waits for turn j. The
 * blocks before it have more work and so a lower rank, and ranks are drawn when a block starts, so whoever is waited for runs
 * already. The first part is stored, the last adds the sum and rounds: no memory is cleared and no pass follows. */
#ifndef LM_CUDA_ATTENTION_BACKWARD_CUH
#define LM_CUDA_ATTENTION_BACKWARD_CUH

#include "attention_tile.cuh"

/* M: 16 keys each per warp. SPLIT: warps that share keys, each with a part of the columns of dk and dv. QUERIES: per step;
 * STEP: of them in registers at a time. DOWN: groups of warps along the queries of dq, the others along its columns. */
template <int D_, int M_, int KEY_WARPS_, int SPLIT_, int QUERIES_, int STEP_, int DOWN_, int BLOCKS_>
struct lm_backward_tile {
  static constexpr int D = D_, M = M_, SPLIT = SPLIT_, QUERIES = QUERIES_, STEP = STEP_, BLOCKS = BLOCKS_, DOWN = DOWN_;
  static constexpr int KEY_WARPS = KEY_WARPS_, WARPS = KEY_WARPS * SPLIT, THREADS = WARPS * 32, KEYS = 16 * M * KEY_WARPS;
  static constexpr int COLUMNS = D / SPLIT;               /* of dk and dv per warp */
  static constexpr int DQ_M = QUERIES / 16 / DOWN, DQ_COLUMNS = D * DOWN / WARPS;
  static constexpr int STAGE = 2 * QUERIES * D * 2;       /* bytes: q and grad_o */
  static constexpr int KV = 2 * KEYS * D * 2, DS = KEYS * QUERIES * 2, ROWS = 2 * 2 * QUERIES * 4; /* lse and delta */
  static constexpr int SHARED = KV + 2 * STAGE + DS + ROWS;
  static_assert(COLUMNS % 16 == 0 && DQ_COLUMNS % 16 == 0 && DQ_M * 16 * DOWN == QUERIES, "whole blocks of columns and queries");
  static_assert(QUERIES % STEP == 0 && KEYS % 64 == 0, "whole steps");
};

/* lm_copy_async4: 4 bytes, of which the first `bytes` are read and the others are 0. */
__device__ __forceinline__ void lm_copy_async4(uint32_t to, const void *from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* lm_turn_await: the thread goes on when the turn has come; what was added before is visible then. */
__device__ __forceinline__ void lm_turn_await(const int32_t *turn, int32_t value) {
  int32_t now;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  while (now != value);
}

/* lm_turn_wait: the same for a warp. */
__device__ __forceinline__ void lm_turn_wait(const int32_t *turn, int32_t value) {
  if ((threadIdx.x & 31) == 0) lm_turn_await(turn, value);
  __syncwarp();
}

/* lm_turn_pass: by one thread, after a barrier behind which the block has added its part. */
__device__ __forceinline__ void lm_turn_pass(int32_t *turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

__device__ __forceinline__ void lm_add_to(float *sum, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(sum), "f"(x), "f"(y) : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum + 1), "f"(y) : "memory");
#endif
}

/* lm_add_part: one of several parts of y = factor * sum of parts, in their order. Pointers are those of row 0, column 0 of c;
 * only rows below `rows` are touched. */
template <typename T, int M, int N>
__device__ __forceinline__ void lm_add_part(const lm_sums<M, N> &c, T *y, int64_t y_pitch, float *sum, int64_t sum_pitch,
                                            int rows, float factor, bool first, bool last) {
  const int lane = threadIdx.x & 31, column = (lane & 3) * 2;
  const auto each = [&](auto *at, int64_t pitch, auto put) {
    at += (lane >> 2) * pitch + column;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i += 2, at += 8 * pitch)
        if ((lane >> 2) + 16 * m + 4 * i < rows)
#pragma unroll
          for (int n = 0; n < N; n++) put(at + 8 * n, m, n, i);
  };
  if (!first && !last) {
    each(sum, sum_pitch, [&](float *at, int m, int n, int i) { lm_add_to(at, c.x[m][n][i], c.x[m][n][i + 1]); });
  } else if (!last) {
    each(sum, sum_pitch, [&](float *at, int m, int n, int i) {
      __stcg(reinterpret_cast<float2 *>(at), make_float2(c.x[m][n][i], c.x[m][n][i + 1]));
    });
  } else {
    each(y, y_pitch, [&](T *at, int m, int n, int i) {
      float2 x = make_float2(c.x[m][n][i], c.x[m][n][i + 1]);
      if (!first) {
        const int64_t row = (lane >> 2) + 16 * m + 4 * i;
        const float2 before = __ldcg(reinterpret_cast<const float2 *>(sum + row * sum_pitch + column + 8 * n));
        x.x += before.x, x.y += before.y;
      }
      *reinterpret_cast<uint32_t *>(at) = lm_pack2<T>(x.x * factor, x.y * factor);
    });
  }
}

/* What a block computes: dk and dv of KEYS keys of one key-value head, from query heads [first_head, end_head) and blocks of
 * QUERIES queries [first_block, last_block]. */
struct lm_backward_part : lm_attention_block {
  int32_t document, kv_head, slice, key_block, first_head, end_head, first_block, last_block;
};

/* lm_backward_find: the part of this block; all its threads call it together. ranked: blocks wait for each other. Then they
 * take their numbers in the order they start in, so that whoever is waited for runs already.
 * @param word shared memory
 * @return whether there is one */
template <int KEYS, int QUERIES>
__device__ __forceinline__ bool lm_backward_find(const lm_attention &a, const lm_attention_gradients &g, bool ranked, int32_t *word,
                                                 lm_backward_part &b) {
  int32_t index = blockIdx.x;
  if (ranked) {
    if (threadIdx.x == 0) *word = atomicAdd(g.rank, 1);
    __syncthreads();
    index = *word;
    __syncthreads();
  }
  const int32_t parts = a.heads / a.group * g.slices, part = index % parts;
  b.kv_head = part / g.slices, b.slice = part % g.slices;
  b.document = lm_attention_find<KEYS, true>(a, index / parts, b);
  if (b.document < 0) return false;
  b.key_block = b.begin / KEYS;
  b.first_head = b.kv_head * a.group + a.group * b.slice / g.slices;
  b.end_head = b.kv_head * a.group + a.group * (b.slice + 1) / g.slices;
  b.first_block = b.begin / QUERIES;
  b.last_block = (b.length - 1) / QUERIES;
  return true;
}

/* lm_add_keys: the part's share of dk and dv. Row 0 and column 0 of the sums are the block's `key` and the head's `column`;
 * barrier: among the threads that call it. */
template <typename T, int KEYS, int D, int M, int N, typename B>
__device__ __forceinline__ void lm_add_keys(const lm_attention &a, const lm_attention_gradients &g, const lm_backward_part &b,
                                            const lm_sums<M, N> &dk, const lm_sums<M, N> &dv, int key, int column, B barrier) {
  int32_t *const turn = g.dkv_turn + (int64_t)b.kv_head * g.key_blocks + lm_attention_slot(b.row, b.document, b.key_block, KEYS);
  const int64_t row = b.row + b.begin + key, at = b.kv_head * D + column, width = (int64_t)(a.heads / a.group) * D;
  const int rows = b.length - b.begin - key;
  const bool first = b.slice == 0, last = b.slice == g.slices - 1;
  if (!first) lm_turn_wait(turn, b.slice);
  lm_add_part(dk, (T *)g.dk + row * g.pitch + at, g.pitch, g.dk_sum + row * width + at, width, rows, a.scale, first, last);
  lm_add_part(dv, (T *)g.dv + row * g.pitch + at, g.pitch, g.dv_sum + row * width + at, width, rows, 1.0f, first, last);
  if (last) return;
  barrier();
  if (threadIdx.x == blockDim.x - 1) lm_turn_pass(turn);
}

/* DQ: dq is summed in order; without it another kernel computes dq. The order counts on each query block meeting all key blocks
 * before it, so the general kernel has no DQ. */
template <typename T, typename C, bool DQ, bool GENERAL>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    lm_attention_backward_kernel(const __grid_constant__ lm_attention a, const __grid_constant__ lm_attention_gradients g) {
  static_assert(!DQ || !GENERAL, "turns are counted without a window");
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int D = C::D, M = C::M, KEYS = C::KEYS, QUERIES = C::QUERIES, STEP = C::STEP, THREADS = C::THREADS;
  const uint32_t k_tile = lm_shared_address(shared), v_tile = k_tile + KEYS * D * 2, stages = v_tile + KEYS * D * 2;
  const uint32_t ds_tile = stages + 2 * C::STAGE, row_tile = ds_tile + C::DS;
  unsigned char *const ds_data = shared + C::KV + 2 * C::STAGE;
  float *const row_data = reinterpret_cast<float *>(ds_data + C::DS);

  lm_backward_part b;
  if (!lm_backward_find<KEYS, QUERIES>(a, g, DQ, reinterpret_cast<int32_t *>(row_data), b)) return;
  if constexpr (GENERAL) b.last_block = lm_window::last_query(a, b.begin + KEYS - 1, b.length) / QUERIES;

  /* Steps: query heads one after the other, for each the blocks of queries from the last to the first. */
  const auto fetch = [&](int head, int block, int stage) {
    const int64_t row = b.row + block * QUERIES;
    const int rows = b.length - block * QUERIES;
    const uint32_t to = stages + stage * C::STAGE;
    lm_copy_rows<QUERIES, D, THREADS>(to, (const T *)a.q + row * a.q_pitch + head * D, a.q_pitch, rows);
    lm_copy_rows<QUERIES, D, THREADS>(to + C::STAGE / 2, (const T *)g.grad_o + row * a.o_pitch + head * D, a.o_pitch, rows);
    if (threadIdx.x < 2 * QUERIES) {
      const int i = threadIdx.x % QUERIES;
      const float *const from = (threadIdx.x < QUERIES ? g.lse : g.delta) + (int64_t)head * a.rows + row;
      lm_copy_async4(row_tile + (stage * 2 * QUERIES + threadIdx.x) * 4, from + (i < rows ? i : 0), i < rows ? 4 : 0);
    }
    lm_copy_commit();
  };
  static_assert(2 * QUERIES <= THREADS, "one thread copies one number");
  {
    const int64_t at = (b.kv_row + b.begin) * a.kv_pitch + b.kv_head * D;
    lm_copy_rows<KEYS, D, THREADS>(k_tile, (const T *)a.k + at, a.kv_pitch, b.length - b.begin);
    lm_copy_rows<KEYS, D, THREADS>(v_tile, (const T *)a.v + at, a.kv_pitch, b.length - b.begin);
  }
  fetch(b.first_head, b.last_block, 0);

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_key = warp % C::KEY_WARPS * 16 * M;
  const int column = warp / C::KEY_WARPS * C::COLUMNS; /* of dk and dv */
  const int dq_row = warp % C::DOWN * 16 * C::DQ_M, dq_column = warp / C::DOWN * C::DQ_COLUMNS;
  const int first_key = b.begin + warp_key;
  const float factor = GENERAL && a.softcap > 0 ? LM_LOG2_E : a.scale * LM_LOG2_E;
  const lm_blocks<D, LM_DOWN> kv_blocks(k_tile); /* v lies KEYS rows behind k, grad_o QUERIES rows behind q */
  lm_sums<M, C::COLUMNS / 8> dk, dv;
  dk.clear();
  dv.clear();
  int32_t pass = -1; /* number of the turn that ends at the next barrier */

  int head = b.first_head, block = b.last_block;
  for (int stage = 0; head < b.end_head; stage ^= 1) {
    const bool more = block > b.first_block;
    const int next_head = more ? head : head + 1, next_block = more ? block - 1 : b.last_block;
    lm_copy_wait<0>();
    __syncthreads(); /* the stage is complete, and the other one and ds have been read by all */
    if (next_head < b.end_head) fetch(next_head, next_block, stage ^ 1);
    const lm_blocks<D, LM_ACROSS> across(stages + stage * C::STAGE);
    const lm_blocks<D, LM_DOWN> down(stages + stage * C::STAGE);

#pragma unroll 1
    for (int step = 0; step < QUERIES; step += STEP) {
      const int first_query = block * QUERIES + step;
      const bool none = lm_causal::sees_none(first_query + STEP - 1, first_key) ||
                        (GENERAL && lm_window::sees_none(a, first_query, first_key + 16 * M - 1));
      lm_sums<M, STEP / 8> ds;
      if (none) {
        ds.clear();
      } else {
        lm_sums<M, STEP / 8> p, slope;
        lm_weights<M, STEP / 8> weights;
        /* Queries past the document's end are zeros with lse 0: they add nothing. */
        lm_scores<T>(p, kv_blocks, warp_key, across, step);
        if constexpr (GENERAL) {
          if (a.softcap > 0) lm_cap(a, p, slope);
          lm_hide_before<true>(a, p, first_query, first_key);
        }
        if (!lm_causal::sees_all(first_query, first_key + 16 * M - 1)) lm_hide<true>(p, first_query, first_key);
        const float *const lse = row_data + stage * 2 * QUERIES + step + (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) {
          const float2 zero = *reinterpret_cast<const float2 *>(lse + 8 * n);
#pragma unroll
          for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) p.x[m][n][i] = lm_exp2(fmaf(p.x[m][n][i], factor, (i & 1 ? zero.y : zero.x) * -LM_LOG2_E));
        }
        weights.template round<T>(p);
        lm_gather<T>(dv, weights, down, QUERIES + step, column);
        lm_scores<T>(ds, kv_blocks, KEYS + warp_key, across, QUERIES + step);
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) {
          const float2 delta = *reinterpret_cast<const float2 *>(lse + QUERIES + 8 * n);
#pragma unroll
          for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) ds.x[m][n][i] = p.x[m][n][i] * (ds.x[m][n][i] - (i & 1 ? delta.y : delta.x));
        }
        if (GENERAL && a.softcap > 0) lm_slope(ds, slope);
      }
      lm_weights<M, STEP / 8> weights;
      weights.template round<T>(ds);
      if (DQ && warp < C::KEY_WARPS) {
#pragma unroll
        for (int k = 0; k < STEP / 16; k++)
#pragma unroll
          for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
              *reinterpret_cast<uint32_t *>(ds_data + lm_rows<QUERIES>::at(warp_key + 16 * m + (lane >> 2) + (i & 1) * 8,
                                                                           step / 8 + 2 * k + (i >> 1)) + (lane & 3) * 4) =
                  weights.x[k][m][i];
      }
      if (!none) lm_gather<T>(dk, weights, down, step, column);
    }

    if constexpr (DQ) {
      __syncthreads(); /* ds is complete, and the block has added its part of the last step's dq */
      if (pass >= 0 && threadIdx.x == 0) lm_turn_pass(g.dq_turn + pass);
      const lm_blocks<QUERIES, LM_ACROSS> ds_blocks(ds_tile);
      lm_sums<C::DQ_M, C::DQ_COLUMNS / 8> dq;
      dq.clear();
      const int last_query = block * QUERIES + dq_row + 16 * C::DQ_M - 1;
#pragma unroll
      for (int first = 0; first < KEYS; first += 64) {
        if (lm_causal::sees_none(last_query, b.begin + first)) break;
#pragma unroll
        for (int key = first; key < first + 64; key += 16) {
          uint32_t x[C::DQ_M][4];
#pragma unroll
          for (int m = 0; m < C::DQ_M; m++) ds_blocks.template load<true>(x[m], key, dq_row + 16 * m);
#pragma unroll
          for (int n = 0; n < C::DQ_COLUMNS / 8; n += 2) {
            uint32_t y[4];
            kv_blocks.template load<true>(y, key, dq_column + 8 * n);
            dq.template add<T>(x, y, n);
          }
        }
      }
      const int64_t row = b.row + block * QUERIES + dq_row, at = head * D + dq_column, width = (int64_t)a.heads * D;
      const int last_key_block = min(b.length, (block + 1) * QUERIES) - 1;
      pass = head * g.query_blocks + lm_attention_slot(b.row, b.document, block, QUERIES);
      if (b.key_block > 0) lm_turn_wait(g.dq_turn + pass, b.key_block);
      lm_add_part(dq, (T *)g.dq + row * g.pitch + at, g.pitch, g.dq_sum + row * width + at, width,
                  b.length - block * QUERIES - dq_row, a.scale, b.key_block == 0, b.key_block == last_key_block / KEYS);
    }
    head = next_head, block = next_block;
  }

  if constexpr (DQ) {
    __syncthreads();
    if (threadIdx.x == 0) lm_turn_pass(g.dq_turn + pass);
  }
  lm_add_keys<T, KEYS, D>(a, g, b, dk, dv, warp_key, column, [] { __syncthreads(); });
}

#endif
