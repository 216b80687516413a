/* attention_simt.cu: attention in fp32 arithmetic, for f32 storage and whatever the tensor cores do not take: any head size up
 * to LM_MAX_HEAD_DIM, any alignment. The same walks as on the tensor cores; 256 threads as 16 x 16, of which each owns
 * ROWS / 16 rows of a tile. */
#include "attention_launch.cuh"

enum { SIMT_THREADS = 256 };

/* DEPTH: largest head size. Rows of a tile are 4 floats longer, so that threads of neighbouring rows meet no bank conflicts. */
template <int DEPTH_, int ROWS_>
struct simt_tile {
  static constexpr int DEPTH = DEPTH_, ROWS = ROWS_, PITCH = DEPTH + 4, OWN = ROWS / 16, SCORES = ROWS + 4;
  static constexpr int TILE = ROWS * PITCH, WEIGHTS = ROWS * SCORES; /* floats */
};

/* Rows at or past `rows` and columns up to the next multiple of 4 become 0. */
template <typename C, typename T>
__device__ __forceinline__ void simt_load(float *tile, const T *from, int64_t pitch, int rows, int depth) {
  const int padded = (depth + 3) & ~3;
  for (int i = threadIdx.x; i < C::ROWS * padded; i += SIMT_THREADS) {
    const int row = i / padded, column = i % padded;
    tile[row * C::PITCH + column] = row < rows && column < depth ? lm_to_float(from[row * pitch + column]) : 0;
  }
}

/* s[r][j] = row OWN y + r of left times row x + 16 j of right. */
template <typename C>
__device__ __forceinline__ void simt_scores(float (&s)[C::OWN][C::OWN], const float *left, const float *right, int depth) {
  const int x = threadIdx.x % 16, y = threadIdx.x / 16 * C::OWN;
#pragma unroll
  for (int r = 0; r < C::OWN; r++)
#pragma unroll
    for (int j = 0; j < C::OWN; j++) s[r][j] = 0;
  for (int d = 0; d < depth; d += 4) {
    float4 a[C::OWN], b[C::OWN];
#pragma unroll
    for (int r = 0; r < C::OWN; r++) {
      a[r] = *reinterpret_cast<const float4 *>(left + (y + r) * C::PITCH + d);
      b[r] = *reinterpret_cast<const float4 *>(right + (x + 16 * r) * C::PITCH + d);
    }
#pragma unroll
    for (int r = 0; r < C::OWN; r++)
#pragma unroll
      for (int j = 0; j < C::OWN; j++) {
        s[r][j] = fmaf(a[r].x, b[j].x, s[r][j]), s[r][j] = fmaf(a[r].y, b[j].y, s[r][j]);
        s[r][j] = fmaf(a[r].z, b[j].z, s[r][j]), s[r][j] = fmaf(a[r].w, b[j].w, s[r][j]);
      }
  }
}

template <bool GENERAL>
__device__ __forceinline__ bool simt_sees(const lm_attention &a, int query, int key) {
  return lm_causal::sees(query, key) && (!GENERAL || lm_window::sees(a, query, key));
}

/* What a product of q and k is as a score: scaled, and capped if asked. */
template <bool GENERAL>
__device__ __forceinline__ float simt_score(const lm_attention &a, float product) {
  const float score = product * a.scale;
  return GENERAL && a.softcap > 0 ? a.softcap * tanhf(score / a.softcap) : score;
}

/* p, a product of q and k, becomes the weight of the pair; ds, that of grad_o and v, the gradient of its score. */
template <bool GENERAL>
__device__ __forceinline__ void simt_gradient(const lm_attention &a, bool seen, float &p, float &ds, float lse, float delta) {
  if constexpr (GENERAL) {
    const float score = simt_score<true>(a, p), tangent = a.softcap > 0 ? score / a.softcap : 0;
    p = seen ? expf(score - lse) : 0;
    ds = p * (ds - delta) * fmaf(-tangent, tangent, 1.0f);
  } else {
    p = seen ? expf(fmaf(p, a.scale, -lse)) : 0;
    ds = p * (ds - delta);
  }
}

/* The thread's sums: rows OWN y + r, columns 64 i + 4 x + e. */
template <typename C>
struct simt_sums {
  float x[C::OWN][C::DEPTH / 64][4];
};

/* weights[row][k] = s, for the half-warp that owns the row: it alone reads them. */
template <typename C>
__device__ __forceinline__ void simt_keep(float *weights, const float (&s)[C::OWN][C::OWN]) {
  const int x = threadIdx.x % 16, y = threadIdx.x / 16 * C::OWN;
  __syncwarp(); /* the last ones have been read */
#pragma unroll
  for (int r = 0; r < C::OWN; r++)
#pragma unroll
    for (int j = 0; j < C::OWN; j++) weights[(y + r) * C::SCORES + x + 16 * j] = s[r][j];
  __syncwarp();
}

/* c += weights times values [ROWS, depth] */
template <typename C>
__device__ __forceinline__ void simt_gather(simt_sums<C> &c, const float *weights, const float *values, int depth) {
  const int x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * C::OWN;
#pragma unroll 4
  for (int k = 0; k < C::ROWS; k++) {
    float w[C::OWN];
#pragma unroll
    for (int r = 0; r < C::OWN; r++) w[r] = weights[(y + r) * C::SCORES + k];
#pragma unroll
    for (int i = 0; i < C::DEPTH / 64; i++) {
      if (64 * i + x >= depth) continue;
      const float4 v = *reinterpret_cast<const float4 *>(values + k * C::PITCH + 64 * i + x);
#pragma unroll
      for (int r = 0; r < C::OWN; r++) {
        c.x[r][i][0] = fmaf(w[r], v.x, c.x[r][i][0]), c.x[r][i][1] = fmaf(w[r], v.y, c.x[r][i][1]);
        c.x[r][i][2] = fmaf(w[r], v.z, c.x[r][i][2]), c.x[r][i][3] = fmaf(w[r], v.w, c.x[r][i][3]);
      }
    }
  }
}

/* y = factor[r] c; y is row 0 of the tile. */
template <typename C, typename T>
__device__ __forceinline__ void simt_store(T *y, int64_t pitch, const simt_sums<C> &c, const float (&factor)[C::OWN], int rows,
                                           int depth) {
  const int x = threadIdx.x % 16 * 4, first = threadIdx.x / 16 * C::OWN;
#pragma unroll
  for (int r = 0; r < C::OWN; r++)
#pragma unroll
    for (int i = 0; i < C::DEPTH / 64; i++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (first + r < rows && 64 * i + x + e < depth)
          y[(first + r) * pitch + 64 * i + x + e] = lm_from_float<T>(c.x[r][i][e] * factor[r]);
}

template <typename T, typename C, bool GENERAL>
__global__ void __launch_bounds__(SIMT_THREADS, 2) simt_forward(const __grid_constant__ lm_attention a, T *o, float *lse) {
  extern __shared__ __align__(1024) unsigned char shared[];
  float *const q = reinterpret_cast<float *>(shared), *const kv = q + C::TILE, *const weights = kv + C::TILE;
  const int head = blockIdx.x % a.heads, depth = a.head_dim;
  lm_attention_block b;
  if (lm_attention_find<C::ROWS, false>(a, blockIdx.x / a.heads, b) < 0) return;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16 * C::OWN, first_query = b.past + b.begin;
  const int queries = min(C::ROWS, b.length - b.begin), keys = first_query + queries;
  const int64_t first_row = b.row + b.begin, kv_at = b.kv_row * a.kv_pitch + (int64_t)(head / a.group) * depth;
  simt_load<C>(q, (const T *)a.q + first_row * a.q_pitch + (int64_t)head * depth, a.q_pitch, queries, depth);
  simt_sums<C> out = {};
  float peak[C::OWN], sum[C::OWN];
#pragma unroll
  for (int r = 0; r < C::OWN; r++) peak[r] = -INFINITY, sum[r] = 0;
  for (int key = GENERAL ? lm_window::first_key(a, first_query) / C::ROWS * C::ROWS : 0; key < keys; key += C::ROWS) {
    __syncthreads();
    simt_load<C>(kv, (const T *)a.k + kv_at + key * a.kv_pitch, a.kv_pitch, keys - key, depth);
    __syncthreads();
    float s[C::OWN][C::OWN];
    simt_scores<C>(s, q, kv, depth);
#pragma unroll
    for (int r = 0; r < C::OWN; r++) {
      float top = peak[r];
#pragma unroll
      for (int j = 0; j < C::OWN; j++) {
        const bool seen = simt_sees<GENERAL>(a, first_query + y + r, key + x + 16 * j);
        s[r][j] = seen ? simt_score<GENERAL>(a, s[r][j]) : -INFINITY;
        top = fmaxf(top, s[r][j]);
      }
#pragma unroll
      for (int step = 8; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
      const float zero = top == -INFINITY ? 0 : top; /* a row that sees nothing yet */
      const float shrink = expf(peak[r] - zero);
      peak[r] = top;
      sum[r] *= shrink;
#pragma unroll
      for (int j = 0; j < C::OWN; j++) {
        s[r][j] = expf(s[r][j] - zero);
        sum[r] += s[r][j];
      }
#pragma unroll
      for (int i = 0; i < C::DEPTH / 64; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) out.x[r][i][e] *= shrink;
    }
    simt_keep<C>(weights, s);
    __syncthreads();
    simt_load<C>(kv, (const T *)a.v + kv_at + key * a.kv_pitch, a.kv_pitch, keys - key, depth);
    __syncthreads();
    simt_gather<C>(out, weights, kv, depth);
  }
#pragma unroll
  for (int r = 0; r < C::OWN; r++) {
#pragma unroll
    for (int step = 8; step; step /= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
    if (lse != nullptr && x == 0 && y + r < queries) lse[(int64_t)head * a.rows + first_row + y + r] = peak[r] + logf(sum[r]);
    sum[r] = 1 / sum[r];
  }
  simt_store<C>(o + first_row * a.o_pitch + (int64_t)head * depth, a.o_pitch, out, sum, queries, depth);
}

/* Row of a tile for each of the thread's 16 j + x, or of its OWN y + r; rows past the end count as 0. */
template <typename C>
__device__ __forceinline__ void simt_numbers(float (&n)[C::OWN], const float *from, int first, int distance, int rows) {
#pragma unroll
  for (int r = 0; r < C::OWN; r++) n[r] = first + distance * r < rows ? from[first + distance * r] : 0;
}

template <typename T, typename C, bool GENERAL>
__global__ void __launch_bounds__(SIMT_THREADS, 2)
    simt_key_gradients(const __grid_constant__ lm_attention a, const __grid_constant__ lm_attention_gradients g) {
  extern __shared__ __align__(1024) unsigned char shared[];
  float *const k = reinterpret_cast<float *>(shared), *const v = k + C::TILE, *const q = v + C::TILE, *const go = q + C::TILE;
  float *const p_weights = go + C::TILE, *const ds_weights = p_weights + C::WEIGHTS;
  const int kv_heads = a.heads / a.group, kv_head = blockIdx.x % kv_heads, depth = a.head_dim;
  lm_attention_block b;
  if (lm_attention_find<C::ROWS, true>(a, blockIdx.x / kv_heads, b) < 0) return;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16 * C::OWN, keys = min(C::ROWS, b.length - b.begin);
  const int64_t first_row = b.row + b.begin, kv_at = first_row * a.kv_pitch + (int64_t)kv_head * depth;
  simt_load<C>(k, (const T *)a.k + kv_at, a.kv_pitch, keys, depth);
  simt_load<C>(v, (const T *)a.v + kv_at, a.kv_pitch, keys, depth);
  simt_sums<C> dk = {}, dv = {};
  const int last_query = GENERAL ? lm_window::last_query(a, b.begin + C::ROWS - 1, b.length) : b.length - 1;
  for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; head++)
    for (int query = b.begin; query <= last_query; query += C::ROWS) {
      const int64_t row = b.row + query;
      const int queries = min(C::ROWS, b.length - query);
      __syncthreads();
      simt_load<C>(q, (const T *)a.q + row * a.q_pitch + (int64_t)head * depth, a.q_pitch, queries, depth);
      simt_load<C>(go, (const T *)g.grad_o + row * a.o_pitch + (int64_t)head * depth, a.o_pitch, queries, depth);
      __syncthreads();
      float p[C::OWN][C::OWN], ds[C::OWN][C::OWN], lse[C::OWN], delta[C::OWN];
      simt_scores<C>(p, k, q, depth);
      simt_scores<C>(ds, v, go, depth);
      simt_numbers<C>(lse, g.lse + (int64_t)head * a.rows + row, x, 16, queries);
      simt_numbers<C>(delta, g.delta + (int64_t)head * a.rows + row, x, 16, queries);
#pragma unroll
      for (int r = 0; r < C::OWN; r++)
#pragma unroll
        for (int j = 0; j < C::OWN; j++) {
          const bool seen = simt_sees<GENERAL>(a, query + x + 16 * j, b.begin + y + r);
          simt_gradient<GENERAL>(a, seen, p[r][j], ds[r][j], lse[j], delta[j]);
        }
      simt_keep<C>(p_weights, p);
      simt_keep<C>(ds_weights, ds);
      simt_gather<C>(dv, p_weights, go, depth);
      simt_gather<C>(dk, ds_weights, q, depth);
    }
  float one[C::OWN], scale[C::OWN];
#pragma unroll
  for (int r = 0; r < C::OWN; r++) one[r] = 1, scale[r] = a.scale;
  const int64_t at = first_row * g.pitch + (int64_t)kv_head * depth;
  simt_store<C>((T *)g.dk + at, g.pitch, dk, scale, keys, depth);
  simt_store<C>((T *)g.dv + at, g.pitch, dv, one, keys, depth);
}

template <typename T, typename C, bool GENERAL>
__global__ void __launch_bounds__(SIMT_THREADS, 2)
    simt_query_gradient(const __grid_constant__ lm_attention a, const __grid_constant__ lm_attention_gradients g) {
  extern __shared__ __align__(1024) unsigned char shared[];
  float *const q = reinterpret_cast<float *>(shared), *const go = q + C::TILE, *const k = go + C::TILE, *const v = k + C::TILE;
  float *const weights = v + C::TILE;
  const int head = blockIdx.x % a.heads, depth = a.head_dim;
  lm_attention_block b;
  if (lm_attention_find<C::ROWS, false>(a, blockIdx.x / a.heads, b) < 0) return;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16 * C::OWN;
  const int queries = min(C::ROWS, b.length - b.begin), keys = b.begin + queries;
  const int64_t first_row = b.row + b.begin, kv_at = b.kv_row * a.kv_pitch + (int64_t)(head / a.group) * depth;
  simt_load<C>(q, (const T *)a.q + first_row * a.q_pitch + (int64_t)head * depth, a.q_pitch, queries, depth);
  simt_load<C>(go, (const T *)g.grad_o + first_row * a.o_pitch + (int64_t)head * depth, a.o_pitch, queries, depth);
  float lse[C::OWN], delta[C::OWN], scale[C::OWN];
  simt_numbers<C>(lse, g.lse + (int64_t)head * a.rows + first_row, y, 1, queries);
  simt_numbers<C>(delta, g.delta + (int64_t)head * a.rows + first_row, y, 1, queries);
  simt_sums<C> dq = {};
  for (int key = GENERAL ? lm_window::first_key(a, b.begin) / C::ROWS * C::ROWS : 0; key < keys; key += C::ROWS) {
    __syncthreads();
    simt_load<C>(k, (const T *)a.k + kv_at + key * a.kv_pitch, a.kv_pitch, keys - key, depth);
    simt_load<C>(v, (const T *)a.v + kv_at + key * a.kv_pitch, a.kv_pitch, keys - key, depth);
    __syncthreads();
    float p[C::OWN][C::OWN], ds[C::OWN][C::OWN];
    simt_scores<C>(p, q, k, depth);
    simt_scores<C>(ds, go, v, depth);
#pragma unroll
    for (int r = 0; r < C::OWN; r++)
#pragma unroll
      for (int j = 0; j < C::OWN; j++) {
        const bool seen = simt_sees<GENERAL>(a, b.begin + y + r, key + x + 16 * j);
        simt_gradient<GENERAL>(a, seen, p[r][j], ds[r][j], lse[r], delta[r]);
      }
    simt_keep<C>(weights, ds);
    simt_gather<C>(dq, weights, k, depth);
  }
#pragma unroll
  for (int r = 0; r < C::OWN; r++) scale[r] = a.scale;
  simt_store<C>((T *)g.dq + first_row * g.pitch + (int64_t)head * depth, g.pitch, dq, scale, queries, depth);
}

template <typename T, typename C, bool GENERAL>
static cudaError_t start_forward(const lm_attention &a, void *o, float *lse, cudaStream_t stream) {
  return lm_attention_start<simt_forward<T, C, GENERAL>>(lm_attention_blocks(a, C::ROWS) * a.heads, SIMT_THREADS,
                                                         4 * (2 * C::TILE + C::WEIGHTS), stream, a, (T *)o, lse);
}

template <typename T, typename C>
static cudaError_t launch_forward(const lm_attention &a, void *o, float *lse, cudaStream_t stream) {
  return lm_attention_general(a) ? start_forward<T, C, true>(a, o, lse, stream) : start_forward<T, C, false>(a, o, lse, stream);
}

cudaError_t lm_attention_simt(const lm_attention &a, int32_t type, void *o, float *lse, cudaStream_t stream) {
  if (a.head_dim > LM_MAX_HEAD_DIM) return cudaErrorInvalidValue;
  LM_CUDA_BY_TYPE(type, T, {
    if (a.head_dim <= 64) return launch_forward<T, simt_tile<64, 64>>(a, o, lse, stream);
    if (a.head_dim <= 128) return launch_forward<T, simt_tile<128, 64>>(a, o, lse, stream);
    return launch_forward<T, simt_tile<256, 32>>(a, o, lse, stream);
  })
}

template <typename T, typename C, bool GENERAL>
static cudaError_t start_backward(const lm_attention &a, const lm_attention_gradients &g, cudaStream_t stream) {
  const int64_t blocks = lm_attention_blocks(a, C::ROWS);
  const cudaError_t error = lm_attention_start<simt_key_gradients<T, C, GENERAL>>(
      blocks * (a.heads / a.group), SIMT_THREADS, 4 * (4 * C::TILE + 2 * C::WEIGHTS), stream, a, g);
  if (error) return error;
  return lm_attention_start<simt_query_gradient<T, C, GENERAL>>(blocks * a.heads, SIMT_THREADS, 4 * (4 * C::TILE + C::WEIGHTS),
                                                                stream, a, g);
}

template <typename T, typename C>
static cudaError_t launch_backward(const lm_attention &a, const lm_attention_gradients &g, cudaStream_t stream) {
  return lm_attention_general(a) ? start_backward<T, C, true>(a, g, stream) : start_backward<T, C, false>(a, g, stream);
}

cudaError_t lm_attention_simt_backward(const lm_attention &a, const lm_attention_gradients &g, int32_t type, cudaStream_t stream) {
  if (a.head_dim > LM_MAX_HEAD_DIM) return cudaErrorInvalidValue;
  LM_CUDA_BY_TYPE(type, T, {
    if (a.head_dim <= 64) return launch_backward<T, simt_tile<64, 32>>(a, g, stream);
    if (a.head_dim <= 128) return launch_backward<T, simt_tile<128, 32>>(a, g, stream);
    return launch_backward<T, simt_tile<256, 16>>(a, g, stream);
  })
}
