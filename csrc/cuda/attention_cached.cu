/* attention_cached.cu: attention behind a cache of keys and values: append the new rows, then attend. Many rows (prefill) take
 * the forward kernels. One row (decoding) is bound by reading the cache once: blocks share the keys of a key-value head and
 * serve its query heads together; their results are joined in a fixed order. */
#include "attention_launch.cuh"
#include "kernels.h"

enum {
  DECODE_WARPS = 8,
  DECODE_HEADS = 8,   /* query heads that a block serves at most */
  DECODE_KEYS = 256,  /* fewer per block are not worth a block */
  DECODE_SPLITS = 64, /* blocks that share the keys at most */
};

/* New rows to the end of the cache; those past its capacity are dropped. */
template <typename Word>
__global__ void __launch_bounds__(256) cache_append(const __grid_constant__ lm_attention a, Word *k_cache, Word *v_cache,
                                                    const Word *k, const Word *v, int64_t pitch, int32_t width) {
  const int32_t past = max(0, min(a.capacity, *a.past)), rows = min(lm_live_rows(a.live, a.rows), a.capacity - past);
  const int64_t index = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, row = index / width;
  if (row >= rows) return;
  const int64_t column = index % width, to = (past + row) * width + column;
  k_cache[to] = k[row * pitch + column];
  v_cache[to] = v[row * pitch + column];
}

template <typename Word>
static cudaError_t launch_append(const lm_attention &a, const lm_attention_cached_forward_args *args, int64_t bytes,
                                 cudaStream_t stream) {
  const int64_t words = (int64_t)args->kv_heads * args->head_dim * bytes / (int64_t)sizeof(Word);
  return lm_attention_start<cache_append<Word>>(lm_ceil_div(words * a.rows, 256), 256, 0, stream, a, (Word *)args->k_cache,
                                                (Word *)args->v_cache, (const Word *)args->k, (const Word *)args->v,
                                                args->qkv_pitch * bytes / (int64_t)sizeof(Word), (int32_t)words);
}

/* What a block leaves for one query head: D sums of e^(score - peak) v, the sum of the weights, and the peak. */
struct decode_parts {
  float *part; /* [heads][splits][D + 2], or NULL: one split writes o itself */
  int32_t splits;
};

/* A warp takes 32 keys at a time: eight lanes share a key for the scores, then all lanes share the columns of the values. */
template <typename T, int DEPTH>
__global__ void __launch_bounds__(DECODE_WARPS * 32)
    decode_kernel(const __grid_constant__ lm_attention a, const __grid_constant__ decode_parts parts, T *o) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int PIECES = DEPTH / 64; /* columns per lane: of a key 8 at a time, of a value 2 */
  const int depth = a.head_dim, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int slices = (a.group + DECODE_HEADS - 1) / DECODE_HEADS, kv_head = blockIdx.x / parts.splits / slices;
  const int slice = blockIdx.x / parts.splits % slices, split = blockIdx.x % parts.splits;
  const int first_head = kv_head * a.group + slice * DECODE_HEADS, heads = min(DECODE_HEADS, a.group - slice * DECODE_HEADS);
  const int32_t past = *a.past;
  if (lm_live_rows(a.live, a.rows) == 0 || past < 0 || past >= a.capacity) return;
  const int keys = past + 1, oldest = lm_window::first_key(a, past), share = (keys - oldest + parts.splits - 1) / parts.splits;
  const int begin = min(keys, oldest + split * share), end = min(keys, begin + share);

  float *const q = reinterpret_cast<float *>(shared);                     /* [heads][DEPTH], scaled */
  float *const weights = q + DECODE_HEADS * DEPTH + warp * DECODE_HEADS * 32; /* [heads][32] of the warp */
  for (int i = threadIdx.x; i < heads * DEPTH; i += DECODE_WARPS * 32)
    q[i] = i % DEPTH < depth ? lm_to_float(((const T *)a.q)[(first_head + i / DEPTH) * (int64_t)depth + i % DEPTH]) * a.scale : 0;
  __syncthreads();

  const T *const k = (const T *)a.k + (int64_t)kv_head * depth, *const v = (const T *)a.v + (int64_t)kv_head * depth;
  float out[DECODE_HEADS][PIECES][2] = {}, peak[DECODE_HEADS], sum[DECODE_HEADS];
#pragma unroll
  for (int h = 0; h < DECODE_HEADS; h++) peak[h] = -INFINITY, sum[h] = 0;
  for (int first = begin + warp * 32; first < end; first += DECODE_WARPS * 32) {
    const int count = min(32, end - first);
#pragma unroll 1
    for (int half = 0; half < 32; half += 16) {
      lm_pack<T, 8> x[4][PIECES]; /* loaded before the first is used: the loads overlap */
#pragma unroll
      for (int pass = 0; pass < 4; pass++)
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          const int key = half + pass * 4 + (lane >> 3), column = ((lane & 7) + 8 * i) * 8;
          x[pass][i] = {};
          if (key < count && column < depth) x[pass][i] = lm_fetch<8>(k + (first + key) * a.kv_pitch + column);
        }
      for (int h = 0; h < heads; h++) {
        float s[4] = {};
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          float y[8];
          lm_load<8>(y, q + h * DEPTH + ((lane & 7) + 8 * i) * 8);
#pragma unroll
          for (int pass = 0; pass < 4; pass++) {
            float z[8];
            lm_unpack(z, x[pass][i]);
#pragma unroll
            for (int e = 0; e < 8; e++) s[pass] = fmaf(z[e], y[e], s[pass]);
          }
        }
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
          const int key = half + pass * 4 + (lane >> 3);
#pragma unroll
          for (int step = 4; step; step /= 2) s[pass] += __shfl_xor_sync(0xffffffffu, s[pass], step);
          if ((lane & 7) == 0) weights[h * 32 + key] = key < count ? s[pass] : -INFINITY;
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < DECODE_HEADS; h++) {
      if (h >= heads) break;
      float s = weights[h * 32 + lane];
      if (a.softcap > 0 && lane < count) s = a.softcap * tanhf(s / a.softcap);
      const float top = fmaxf(peak[h], lm_warp_max(s)), shrink = expf(peak[h] - top);
      const float weight = expf(s - top);
      weights[h * 32 + lane] = weight;
      peak[h] = top;
      sum[h] = sum[h] * shrink + lm_warp_sum(weight);
#pragma unroll
      for (int i = 0; i < PIECES; i++) out[h][i][0] *= shrink, out[h][i][1] *= shrink;
    }
    __syncwarp();
#pragma unroll 1
    for (int part = 0; part < count; part += 8) {
      lm_pack<T, 2> x[8][PIECES];
#pragma unroll
      for (int key = 0; key < 8; key++)
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          const int column = (lane + 32 * i) * 2;
          x[key][i] = {};
          if (part + key < count && column < depth) x[key][i] = lm_fetch<2>(v + (first + part + key) * a.kv_pitch + column);
        }
#pragma unroll
      for (int h = 0; h < DECODE_HEADS; h++) {
        if (h >= heads) break;
        float w[8];
        lm_load<8>(w, weights + h * 32 + part);
#pragma unroll
        for (int key = 0; key < 8; key++)
#pragma unroll
          for (int i = 0; i < PIECES; i++) {
            float y[2];
            lm_unpack(y, x[key][i]);
            out[h][i][0] = fmaf(w[key], y[0], out[h][i][0]);
            out[h][i][1] = fmaf(w[key], y[1], out[h][i][1]);
          }
      }
    }
    __syncwarp();
  }

  /* The warps' results, in their order, through [warp][head][DEPTH + 2]. */
  __syncthreads();
  float *const all = reinterpret_cast<float *>(shared), *const own = all + warp * DECODE_HEADS * (DEPTH + 2);
#pragma unroll
  for (int h = 0; h < DECODE_HEADS; h++) {
    if (h >= heads) break;
    float *const to = own + h * (DEPTH + 2);
#pragma unroll
    for (int i = 0; i < PIECES; i++) to[(lane + 32 * i) * 2] = out[h][i][0], to[(lane + 32 * i) * 2 + 1] = out[h][i][1];
    if (lane == 0) to[DEPTH] = sum[h], to[DEPTH + 1] = peak[h];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * depth; i += DECODE_WARPS * 32) {
    const int h = i / depth, column = i % depth;
    const float *const from = all + h * (DEPTH + 2);
    float top = -INFINITY, x = 0, total = 0;
    for (int w = 0; w < DECODE_WARPS; w++) top = fmaxf(top, from[w * DECODE_HEADS * (DEPTH + 2) + DEPTH + 1]);
    for (int w = 0; w < DECODE_WARPS && top > -INFINITY; w++) {
      const float *const warp_from = from + w * DECODE_HEADS * (DEPTH + 2);
      const float factor = expf(warp_from[DEPTH + 1] - top);
      x = fmaf(factor, warp_from[column], x);
      total = fmaf(factor, warp_from[DEPTH], total);
    }
    if (parts.part == nullptr) {
      o[(first_head + h) * (int64_t)depth + column] = lm_from_float<T>(x / total);
    } else {
      float *const to = parts.part + ((int64_t)(first_head + h) * parts.splits + split) * (depth + 2);
      to[column] = x;
      if (column == 0) to[depth] = total, to[depth + 1] = top;
    }
  }
}

/* Joins the splits of one query head, in their order. */
template <typename T>
__global__ void __launch_bounds__(256)
    decode_join(const __grid_constant__ lm_attention a, const __grid_constant__ decode_parts parts, T *o) {
  const int depth = a.head_dim, column = threadIdx.x;
  const int32_t past = *a.past;
  if (lm_live_rows(a.live, a.rows) == 0 || past < 0 || past >= a.capacity || column >= depth) return;
  const float *const from = parts.part + (int64_t)blockIdx.x * parts.splits * (depth + 2);
  float top = -INFINITY, x = 0, total = 0;
  for (int s = 0; s < parts.splits; s++) top = fmaxf(top, from[s * (depth + 2) + depth + 1]);
  for (int s = 0; s < parts.splits; s++) {
    const float factor = expf(from[s * (depth + 2) + depth + 1] - top);
    x = fmaf(factor, from[s * (depth + 2) + column], x);
    total = fmaf(factor, from[s * (depth + 2) + depth], total);
  }
  o[blockIdx.x * (int64_t)depth + column] = lm_from_float<T>(x / total);
}

template <typename T, int DEPTH>
static cudaError_t launch_decode(lm_cuda *cuda, const lm_attention &a, void *o, cudaStream_t stream) {
  const int64_t blocks = (int64_t)a.heads / a.group * lm_ceil_div(a.group, DECODE_HEADS);
  int64_t splits = lm_ceil_div(2 * (int64_t)cuda->sm_count, blocks);
  const int32_t most = a.capacity < a.window ? a.capacity : a.window;
  if (splits > lm_ceil_div(most, DECODE_KEYS)) splits = lm_ceil_div(most, DECODE_KEYS);
  if (splits > DECODE_SPLITS) splits = DECODE_SPLITS;
  decode_parts parts = {nullptr, 1};
  if (splits > 1 && (uint64_t)(a.heads * splits * (a.head_dim + 2) * 4) <= cuda->workspace_bytes)
    parts.part = (float *)lm_cuda_workspace(cuda, stream);
  if (parts.part != nullptr) parts.splits = (int32_t)splits;
  const size_t working = 4 * DECODE_HEADS * (DEPTH + DECODE_WARPS * 32), leaving = 4 * DECODE_WARPS * DECODE_HEADS * (DEPTH + 2);
  const cudaError_t error = lm_attention_start<decode_kernel<T, DEPTH>>(
      blocks * parts.splits, DECODE_WARPS * 32, working > leaving ? working : leaving, stream, a, parts, (T *)o);
  if (error || parts.splits == 1) return error;
  return lm_attention_start<decode_join<T>>(a.heads, 256, 0, stream, a, parts, (T *)o);
}

cudaError_t lm_cuda_attention_cached_forward(lm_cuda *cuda, const lm_attention_cached_forward_args *args, cudaStream_t stream) {
  lm_attention a = {};
  a.q = args->q, a.k = args->k_cache, a.v = args->v_cache;
  a.past = args->past, a.live = args->live;
  a.q_pitch = args->qkv_pitch, a.kv_pitch = (int64_t)args->kv_heads * args->head_dim, a.o_pitch = args->o_pitch;
  a.rows = args->rows, a.documents = 1, a.capacity = args->capacity;
  a.heads = args->heads, a.group = args->heads / args->kv_heads, a.head_dim = args->head_dim;
  lm_attention_scores(a, args->scale, args->window, args->softcap);

  const int64_t bytes = args->type == LM_F32 ? 4 : 2;
  bool words = a.kv_pitch * bytes % 16 == 0 && args->qkv_pitch * bytes % 16 == 0;
  for (const void *p : {(const void *)args->k_cache, (const void *)args->v_cache, args->k, args->v})
    words = words && (uintptr_t)p % 16 == 0;
  const cudaError_t error = words        ? launch_append<uint4>(a, args, bytes, stream)
                            : bytes == 4 ? launch_append<uint32_t>(a, args, bytes, stream)
                                         : launch_append<uint16_t>(a, args, bytes, stream);
  if (error) return error;

  const bool vectors = a.head_dim % 8 == 0 && a.kv_pitch * bytes % 16 == 0 && ((uintptr_t)a.k | (uintptr_t)a.v) % 16 == 0;
  if (a.rows > 1 || !vectors || a.head_dim > LM_MAX_HEAD_DIM) return lm_attention_run(cuda, a, args->type, args->o, nullptr, stream);
  LM_CUDA_BY_TYPE(args->type, T, {
    if (a.head_dim <= 64) return launch_decode<T, 64>(cuda, a, args->o, stream);
    if (a.head_dim <= 128) return launch_decode<T, 128>(cuda, a, args->o, stream);
    return launch_decode<T, 256>(cuda, a, args->o, stream);
  })
}
