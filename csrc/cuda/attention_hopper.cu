/* attention_hopper.cu: attention with the products of warp groups (sm_90a), head sizes 64 and 128. Forward is the walk of
 * attention_forward.cuh.
 *
 * Backward has two kernels, each the only writer of its rows: a block of keys gathers dk and dv from later queries, a block of queries gathers
 * dq from earlier keys. The scores are computed twice, seven products for five; in return nothing is added between blocks, and
 * products of 64 rows run at more than twice the rate of the others.
 *
 * A warp group owns 64 keys (or queries). Its scores are products of two tiles in shared memory; what is made of them stays in
 * registers as the left operand of the gradients. While one group is at its exponentials, the others multiply. */
#include "attention_hopper.h"

#include "attention_backward.cuh"
#include "attention_launch.cuh"
#include "hopper.cuh"

enum { STEP = 64 }; /* queries, or keys, that are visited at a time */

/* ROWS rows of a head lie as D / 64 tiles of 64 columns, swizzled as products read them. */
template <int D, int ROWS, int THREADS, typename T>
__device__ __forceinline__ void copy_head(uint32_t tile, const T *from, int64_t pitch, int rows) {
#pragma unroll
  for (int part = 0; part < D / 64; part++)
    lm_copy_rows<ROWS, 64, THREADS>(tile + part * ROWS * 128, from + 64 * part, pitch, rows);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* s [64, 64] += left [64, D] right [64, D]^T; ROWS: of the tiles, of which the operands are 64 from the given address on. */
template <int D, int LEFT_ROWS, int RIGHT_ROWS, typename T>
__device__ __forceinline__ void multiply_rows(float (&s)[32], uint32_t left, uint32_t right) {
#pragma unroll
  for (int d = 0; d < D; d += 16)
    lm_group_multiply<false>(s, lm_matrix_descriptor(left + d / 64 * LEFT_ROWS * 128 + d % 64 * 2, 0),
                             lm_matrix_descriptor(right + d / 64 * RIGHT_ROWS * 128 + d % 64 * 2, 0), T{});
}

/* c [64, D] += weights [64, 64] values [64, D] */
template <int COUNT, typename T>
__device__ __forceinline__ void multiply_weights(float (&c)[COUNT], const lm_weights<1, 8> &weights, uint32_t values) {
#pragma unroll
  for (int k = 0; k < 4; k++)
    lm_group_multiply<true>(c, weights.x[k][0], lm_matrix_descriptor(values + 16 * k * 128, STEP * 128), T{});
}

template <int COUNT>
__device__ __forceinline__ void clear(float (&c)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) c[i] = 0;
  lm_hold(c);
}

template <int COUNT>
__device__ __forceinline__ lm_sums<1, COUNT / 4> &as_sums(float (&c)[COUNT]) {
  return reinterpret_cast<lm_sums<1, COUNT / 4> &>(c);
}
#endif

template <int D_, int GROUPS_>
struct hopper_keys {
  static constexpr int D = D_, GROUPS = GROUPS_, KEYS = 64 * GROUPS, THREADS = 128 * GROUPS;
  static constexpr int KV = KEYS * D * 2, STAGE = 2 * STEP * D * 2; /* bytes: k or v; q and grad_o */
  static constexpr int SHARED = 2 * KV + 2 * STAGE + 2 * 2 * STEP * 4;
};

/* dk and dv of KEYS keys of one key-value head, from a share of the query heads that read them. */
template <typename T, typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    attention_hopper_keys(const __grid_constant__ lm_attention a, const __grid_constant__ lm_attention_gradients g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int D = C::D, KEYS = C::KEYS, THREADS = C::THREADS;
  const uint32_t k_tile = lm_shared_address(shared), v_tile = k_tile + C::KV, stages = v_tile + C::KV;
  const uint32_t row_tile = stages + 2 * C::STAGE;
  float *const row_data = reinterpret_cast<float *>(shared + 2 * C::KV + 2 * C::STAGE);

  /* Whoever waits for another block's part has drawn a later number than that one, which runs already. */
  int32_t index = blockIdx.x;
  if (g.slices > 1) {
    if (threadIdx.x == 0) row_data[0] = __int_as_float(atomicAdd(g.rank, 1));
    __syncthreads();
    index = __float_as_int(row_data[0]);
    __syncthreads();
  }
  const int32_t parts = a.heads / a.group * g.slices, part = index % parts, kv_head = part / g.slices, slice = part % g.slices;
  lm_attention_block b;
  const int32_t document = lm_attention_find<KEYS, true>(a, index / parts, b);
  if (document < 0) return;

  const int first_head = kv_head * a.group + a.group * slice / g.slices;
  const int end_head = kv_head * a.group + a.group * (slice + 1) / g.slices;
  const int first_block = b.begin / STEP, last_block = (b.length - 1) / STEP;
  const auto fetch = [&](int head, int block, int stage) {
    const int64_t row = b.row + block * STEP;
    const int rows = b.length - block * STEP;
    const uint32_t to = stages + stage * C::STAGE;
    copy_head<D, STEP, THREADS>(to, (const T *)a.q + row * a.q_pitch + head * D, a.q_pitch, rows);
    copy_head<D, STEP, THREADS>(to + C::STAGE / 2, (const T *)g.grad_o + row * a.o_pitch + head * D, a.o_pitch, rows);
    if (threadIdx.x < 2 * STEP) {
      const int i = threadIdx.x % STEP;
      const float *const from = (threadIdx.x < STEP ? g.lse : g.delta) + (int64_t)head * a.rows + row;
      lm_copy_async4(row_tile + (stage * 2 * STEP + threadIdx.x) * 4, from + (i < rows ? i : 0), i < rows ? 4 : 0);
    }
    lm_copy_commit();
  };
  {
    const int64_t at = (b.kv_row + b.begin) * a.kv_pitch + kv_head * D;
    copy_head<D, KEYS, THREADS>(k_tile, (const T *)a.k + at, a.kv_pitch, b.length - b.begin);
    copy_head<D, KEYS, THREADS>(v_tile, (const T *)a.v + at, a.kv_pitch, b.length - b.begin);
  }
  fetch(first_head, last_block, 0);

  const int lane = threadIdx.x & 31, group = threadIdx.x / 128, warp_key = group * 64 + (threadIdx.x >> 5) % 4 * 16;
  const int group_key = b.begin + group * 64, first_key = b.begin + warp_key;
  const float factor = a.scale * LM_LOG2_E;
  float dk[D / 2], dv[D / 2];
  clear(dk);
  clear(dv);
  int head = first_head, block = last_block;
  for (int stage = 0; head < end_head; stage ^= 1) {
    const int next_head = block > first_block ? head : head + 1, next_block = block > first_block ? block - 1 : last_block;
    lm_copy_wait<0>();
    lm_shared_publish();
    __syncthreads(); /* the stage is complete, and the other one has been read by all */
    if (next_head < end_head) fetch(next_head, next_block, stage ^ 1);
    const int first_query = block * STEP;
    if (!lm_causal::sees_none(first_query + STEP - 1, group_key)) {
      const uint32_t q_tile = stages + stage * C::STAGE, go_tile = q_tile + C::STAGE / 2;
      float p[32], ds[32];
      clear(p);
      clear(ds);
      lm_group_fence();
      multiply_rows<D, KEYS, STEP, T>(p, k_tile + group * 64 * 128, q_tile);
      lm_group_commit();
      multiply_rows<D, KEYS, STEP, T>(ds, v_tile + group * 64 * 128, go_tile);
      lm_group_commit();
      lm_group_wait<1>();
      lm_hold(p);
      if (!lm_causal::sees_all(first_query, first_key + 15)) lm_hide<true>(as_sums(p), first_query, first_key);
      /* Queries past the document's end are zeros with lse 0: they add nothing. */
      const float *const lse = row_data + stage * 2 * STEP + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float2 zero = *reinterpret_cast<const float2 *>(lse + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; i++) p[4 * n + i] = lm_exp2(fmaf(p[4 * n + i], factor, (i & 1 ? zero.y : zero.x) * -LM_LOG2_E));
      }
      lm_weights<1, 8> p_weights, ds_weights;
      p_weights.template round<T>(as_sums(p));
      lm_group_fence();
      multiply_weights<D / 2, T>(dv, p_weights, go_tile);
      lm_group_commit();
      lm_group_wait<1>();
      lm_hold(ds);
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float2 delta = *reinterpret_cast<const float2 *>(lse + STEP + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; i++) ds[4 * n + i] = p[4 * n + i] * (ds[4 * n + i] - (i & 1 ? delta.y : delta.x));
      }
      ds_weights.template round<T>(as_sums(ds));
      lm_group_fence();
      multiply_weights<D / 2, T>(dk, ds_weights, q_tile);
      lm_group_commit();
      lm_group_wait<0>();
      lm_hold(dk);
      lm_hold(dv);
      lm_keep(p_weights.x);
      lm_keep(ds_weights.x);
    }
    head = next_head, block = next_block;
  }

  int32_t *const turn = g.dkv_turn + (int64_t)kv_head * g.key_blocks + lm_attention_slot(b.row, document, b.begin / KEYS, KEYS);
  const int64_t row = b.row + first_key, at = kv_head * D, width = (int64_t)(a.heads / a.group) * D;
  if (slice > 0) lm_turn_wait(turn, slice);
  lm_add_part(as_sums(dk), (T *)g.dk + row * g.pitch + at, g.pitch, g.dk_sum + row * width + at, width, b.length - first_key, a.scale,
              slice == 0, slice == g.slices - 1);
  lm_add_part(as_sums(dv), (T *)g.dv + row * g.pitch + at, g.pitch, g.dv_sum + row * width + at, width, b.length - first_key, 1.0f,
              slice == 0, slice == g.slices - 1);
  if (slice < g.slices - 1) {
    __syncthreads();
    if (threadIdx.x == 0) lm_turn_pass(turn);
  }
#endif
}

/* BLOCKS: that share a multiprocessor. The forward pass has no tile of grad_o. */
template <int D_, int GROUPS_, int BLOCKS_>
struct hopper_queries {
  static constexpr int D = D_, GROUPS = GROUPS_, BLOCKS = BLOCKS_, QUERIES = 64 * GROUPS, THREADS = 128 * GROUPS;
  static constexpr int Q = QUERIES * D * 2, STAGE = 2 * STEP * D * 2; /* bytes: q or grad_o; k and v */
  static constexpr int SHARED = 2 * Q + 2 * STAGE, FORWARD_SHARED = Q + 2 * STAGE;
};

/* dq of QUERIES queries of one head. */
template <typename T, typename C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    attention_hopper_queries(const __grid_constant__ lm_attention a, const __grid_constant__ lm_attention_gradients g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int D = C::D, QUERIES = C::QUERIES, THREADS = C::THREADS;
  const int head = blockIdx.x % a.heads;
  lm_attention_block b;
  if (lm_attention_find<QUERIES, false>(a, blockIdx.x / a.heads, b) < 0) return;

  const int queries = min(QUERIES, b.length - b.begin), keys = b.begin + queries;
  const uint32_t q_tile = lm_shared_address(shared), go_tile = q_tile + C::Q, stages = go_tile + C::Q;
  const int64_t first_row = b.row + b.begin, kv_at = b.kv_row * a.kv_pitch + head / a.group * D;
  const T *const k = (const T *)a.k + kv_at, *const v = (const T *)a.v + kv_at;
  const auto fetch = [&](int key, int stage) {
    const uint32_t to = stages + stage * C::STAGE;
    copy_head<D, STEP, THREADS>(to, k + key * a.kv_pitch, a.kv_pitch, keys - key);
    copy_head<D, STEP, THREADS>(to + C::STAGE / 2, v + key * a.kv_pitch, a.kv_pitch, keys - key);
    lm_copy_commit();
  };
  copy_head<D, QUERIES, THREADS>(q_tile, (const T *)a.q + first_row * a.q_pitch + head * D, a.q_pitch, queries);
  copy_head<D, QUERIES, THREADS>(go_tile, (const T *)g.grad_o + first_row * a.o_pitch + head * D, a.o_pitch, queries);
  fetch(0, 0);

  const int lane = threadIdx.x & 31, group = threadIdx.x / 128, warp_row = group * 64 + (threadIdx.x >> 5) % 4 * 16;
  const int first_query = b.begin + warp_row, last_query = b.begin + group * 64 + 63;
  const float factor = a.scale * LM_LOG2_E;
  float zero[2], delta[2]; /* of the lane's two queries */
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = warp_row + (lane >> 2) + 8 * i;
    const int64_t at = (int64_t)head * a.rows + first_row + row;
    zero[i] = row < queries ? g.lse[at] * -LM_LOG2_E : 0;
    delta[i] = row < queries ? g.delta[at] : 0;
  }
  float dq[D / 2];
  clear(dq);
  for (int key = 0, stage = 0; key < keys; key += STEP, stage ^= 1) {
    lm_copy_wait<0>();
    lm_shared_publish();
    __syncthreads(); /* the stage is complete, and the other one has been read by all */
    if (key + STEP < keys) fetch(key + STEP, stage ^ 1);
    if (lm_causal::sees_none(last_query, key)) continue;
    const uint32_t kv_tile = stages + stage * C::STAGE;
    float p[32], ds[32];
    clear(p);
    clear(ds);
    lm_group_fence();
    multiply_rows<D, QUERIES, STEP, T>(p, q_tile + group * 64 * 128, kv_tile);
    lm_group_commit();
    multiply_rows<D, QUERIES, STEP, T>(ds, go_tile + group * 64 * 128, kv_tile + C::STAGE / 2);
    lm_group_commit();
    lm_group_wait<1>();
    lm_hold(p);
    if (!lm_causal::sees_all(first_query, key + STEP - 1)) lm_hide<false>(as_sums(p), first_query, key);
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = lm_exp2(fmaf(p[i], factor, zero[i >> 1 & 1]));
    lm_group_wait<0>();
    lm_hold(ds);
#pragma unroll
    for (int i = 0; i < 32; i++) ds[i] = p[i] * (ds[i] - delta[i >> 1 & 1]);
    lm_weights<1, 8> weights;
    weights.template round<T>(as_sums(ds));
    lm_group_fence();
    multiply_weights<D / 2, T>(dq, weights, kv_tile);
    lm_group_commit();
    lm_group_wait<0>();
    lm_hold(dq);
    lm_keep(weights.x);
  }
  lm_add_part(as_sums(dq), (T *)g.dq + (first_row + warp_row) * g.pitch + head * D, g.pitch, (float *)nullptr, 0, queries - warp_row,
              a.scale, true, true);
#endif
}

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
    clear(s);
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
    multiply_weights<D / 2, T>(out, p, kv_tile + C::STAGE / 2);
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
  if (cudaFuncGetAttributes(&attributes, attention_hopper_keys<lm_bf16, hopper_keys<128, 2>>) == cudaSuccess)
    return attributes.numRegs > 128;
  (void)cudaGetLastError();
  return false;
}

bool lm_attention_hopper_can_forward(const lm_cuda *cuda, const lm_attention &a) {
  if (a.softcap > 0 || cuda->capability != 90 || cuda->shared_max < 200 * 1024 || (a.head_dim != 64 && a.head_dim != 128)) return false;
  static const bool ready = has_code();
  return ready;
}

bool lm_attention_hopper_can(const lm_cuda *cuda, const lm_attention &a) {
  return !lm_attention_general(a) && lm_attention_hopper_can_forward(cuda, a);
}

int32_t lm_attention_hopper_keys(const lm_attention &a) { return a.head_dim == 64 ? 192 : 128; }

template <typename T, typename K, typename Q>
static cudaError_t launch(const lm_attention &a, const lm_attention_gradients &g, cudaStream_t stream) {
  const int64_t blocks = lm_attention_blocks(a, K::KEYS) * (a.heads / a.group) * g.slices;
  const cudaError_t error = lm_attention_start<attention_hopper_keys<T, K>>(blocks, K::THREADS, K::SHARED, stream, a, g);
  if (error) return error;
  return lm_attention_start<attention_hopper_queries<T, Q>>(lm_attention_blocks(a, Q::QUERIES) * a.heads, Q::THREADS, Q::SHARED,
                                                            stream, a, g);
}

template <typename T>
static cudaError_t launch_size(const lm_attention &a, const lm_attention_gradients &g, cudaStream_t stream) {
  if (a.head_dim == 64) return launch<T, hopper_keys<64, 3>, hopper_queries<64, 3, 1>>(a, g, stream);
  return launch<T, hopper_keys<128, 2>, hopper_queries<128, 3, 1>>(a, g, stream);
}

cudaError_t lm_attention_hopper_backward(const lm_attention &a, const lm_attention_gradients &g, int32_t type, cudaStream_t stream) {
  return type == LM_BF16 ? launch_size<lm_bf16>(a, g, stream) : launch_size<lm_f16>(a, g, stream);
}

template <typename T, typename Q, bool WINDOW>
static cudaError_t start_forward(const lm_attention &a, void *o, float *lse, cudaStream_t stream) {
  return lm_attention_start<attention_hopper_forward<T, Q, WINDOW>>(lm_attention_blocks(a, Q::QUERIES) * a.heads, Q::THREADS,
                                                                    Q::FORWARD_SHARED, stream, a, (T *)o, lse);
}

template <typename T, typename Q>
static cudaError_t launch_forward(const lm_attention &a, void *o, float *lse, cudaStream_t stream) {
  return lm_attention_general(a) ? start_forward<T, Q, true>(a, o, lse, stream) : start_forward<T, Q, false>(a, o, lse, stream);
}

cudaError_t lm_attention_hopper_forward(const lm_attention &a, int32_t type, void *o, float *lse, cudaStream_t stream) {
  if (a.head_dim == 64)
    return type == LM_BF16 ? launch_forward<lm_bf16, hopper_queries<64, 2, 2>>(a, o, lse, stream)
                           : launch_forward<lm_f16, hopper_queries<64, 2, 2>>(a, o, lse, stream);
  return type == LM_BF16 ? launch_forward<lm_bf16, hopper_queries<128, 3, 1>>(a, o, lse, stream)
                         : launch_forward<lm_f16, hopper_queries<128, 3, 1>>(a, o, lse, stream);
}
