/* attention.cuh: what the attention kernels share: where the operands lie, how packed documents are cut into blocks without
 * the host knowing their lengths, and which keys a query sees. */
#ifndef LM_CUDA_ATTENTION_CUH
#define LM_CUDA_ATTENTION_CUH

#include "convert.cuh"
#include "cuda.h"

enum { LM_MAX_HEAD_DIM = 256 };

/* Operands of one call. Query head h reads key-value head h / group. The rows are either packed documents (cu_seqlens) or the
 * *live last rows of one sequence, behind *past cached keys. */
struct lm_attention {
  const void *q, *k, *v;
  const int32_t *cu_seqlens; /* [documents + 1], or NULL */
  const int32_t *past, *live;
  int64_t q_pitch, kv_pitch, o_pitch;
  int32_t rows, documents, capacity;
  int32_t heads, group, head_dim;
  float scale;
  int32_t window; /* keys that a query sees at most, itself among them; INT32_MAX = all */
  float softcap;  /* 0 = none */
};

/* lm_attention_scores: what is done to the scores of a call. */
inline void lm_attention_scores(lm_attention &a, float scale, int32_t window, float softcap) {
  a.scale = scale, a.softcap = softcap;
  a.window = window > 0 ? window : INT32_MAX;
}

/* Kernels come in two kinds: plain ones, and general ones for calls with a window or a cap, which read both at run time. */
inline bool lm_attention_general(const lm_attention &a) { return a.window != INT32_MAX || a.softcap > 0; }

/* Gradients, and the workspace for their ordered sums. */
struct lm_attention_gradients {
  const void *grad_o;
  const float *lse, *delta;
  void *dq, *dk, *dv;
  int64_t pitch; /* of dq, dk, dv */
  float *dq_sum;           /* [T, Hq D]; [Hq, T, D] where warp groups multiply */
  float *dk_sum, *dv_sum;  /* [T, Hk D]; used if slices > 1 */
  int32_t *dq_turn;        /* [Hq][blocks of queries] */
  int32_t *dkv_turn;       /* [Hk][blocks of keys] */
  int32_t *rank;           /* [1]; this and the turns are 0 at the start */
  int32_t slices;          /* blocks that share the query heads of a key-value head */
  int32_t query_blocks, key_blocks; /* numbers of turns per head */
};

/* A block of rows of one document; blocks start at its first row, so results do not depend on where it lies. */
struct lm_attention_block {
  int32_t row;    /* the document's first query */
  int32_t kv_row; /* the document's first key */
  int32_t past;   /* keys before that query */
  int32_t length; /* the document's queries */
  int32_t begin;  /* the block's first row, counted from the document's first */
};

/* Document offsets as stored, kept inside the buffers. */
__device__ __forceinline__ int32_t lm_attention_offset(const lm_attention &a, int32_t document) {
  return max(0, min(a.rows, a.cu_seqlens[document]));
}

/* lm_attention_blocks: blocks of `size` rows that the documents have at most, whatever their lengths. */
inline int64_t lm_attention_blocks(const lm_attention &a, int32_t size) { return a.rows / size + (int64_t)a.documents; }

/* lm_attention_slot: a number of its own for each block of `size` rows, below lm_attention_blocks. */
__device__ __forceinline__ int32_t lm_attention_slot(int32_t document_row, int32_t document, int32_t block, int32_t size) {
  return document_row / size + document + block;
}

/* lm_attention_find: the block with rank `index` when all are sorted by falling work, so that the longest start first and the
 * short ones fill the gaps at the end. Blocks of queries (keys = false) have the more work the more keys come before, blocks of
 * keys the more queries come after. All lanes of a warp call it together.
 * @return the document, or -1 when there are not that many blocks */
template <int SIZE, bool keys>
__device__ __forceinline__ int32_t lm_attention_find(const lm_attention &a, int32_t index, lm_attention_block &b) {
  if (a.cu_seqlens == nullptr) {
    b.row = b.kv_row = 0;
    b.past = max(0, min(a.capacity, *a.past));
    b.length = min(lm_live_rows(a.live, a.rows), a.capacity - b.past);
    b.begin = ((b.length + SIZE - 1) / SIZE - 1 - index) * SIZE;
    return b.begin < 0 ? -1 : 0;
  }
  const int32_t lane = threadIdx.x & 31;
  const auto blocks_of = [&](int32_t document) {
    if (document >= a.documents) return 0;
    return (max(0, lm_attention_offset(a, document + 1) - lm_attention_offset(a, document)) + SIZE - 1) / SIZE;
  };
  const int32_t own = blocks_of(lane);
  /* A document of n blocks has one of each work 1 .. n. */
  const auto with_at_least = [&](int32_t work) {
    int32_t count = max(0, own - work + 1);
#pragma unroll 1
    for (int32_t d = lane + 32; d < a.documents; d += 32) count += max(0, blocks_of(d) - work + 1);
    return (int32_t)__reduce_add_sync(0xffffffffu, (unsigned)count);
  };
  if (with_at_least(1) <= index) return -1;
  int32_t work = 1, above = a.rows / SIZE + 2;
  while (above - work > 1) {
    const int32_t middle = (work + above) / 2;
    if (with_at_least(middle) > index) work = middle;
    else above = middle;
  }
  int32_t rank = index - with_at_least(work + 1), document = 0;
  for (int32_t first = 0;; first += 32) {
    const bool candidate = (first == 0 ? own : blocks_of(first + lane)) >= work;
    const unsigned all = __ballot_sync(0xffffffffu, candidate);
    const int32_t before = __popc(all & ((1u << lane) - 1));
    const unsigned found = __ballot_sync(0xffffffffu, candidate && before == rank);
    document = first + __ffs(found) - 1;
    if (found) break;
    rank -= __popc(all);
  }
  b.row = b.kv_row = lm_attention_offset(a, document);
  b.past = 0;
  b.length = lm_attention_offset(a, document + 1) - b.row;
  b.begin = (keys ? (b.length + SIZE - 1) / SIZE - work : work - 1) * SIZE;
  return document;
}

/* Which keys a query sees, both counted from the document's first key. */
struct lm_causal {
  static __device__ __forceinline__ bool sees(int32_t query, int32_t key) { return key <= query; }
  /* Whether each query of [first_query, ...) sees each key of [..., last_key]. */
  static __device__ __forceinline__ bool sees_all(int32_t first_query, int32_t last_key) { return last_key <= first_query; }
  /* Whether no query of [..., last_query] sees a key of [first_key, ...). */
  static __device__ __forceinline__ bool sees_none(int32_t last_query, int32_t first_key) { return first_key > last_query; }
};

/* Which of those keys the window leaves it. */
struct lm_window {
  static __device__ __forceinline__ bool sees(const lm_attention &a, int32_t query, int32_t key) { return query - key < a.window; }
  /* Whether no query of [first_query, ...) sees a key of [..., last_key]. */
  static __device__ __forceinline__ bool sees_none(const lm_attention &a, int32_t first_query, int32_t last_key) {
    return !sees(a, first_query, last_key);
  }
  /* The first key that a query sees. */
  static __device__ __forceinline__ int32_t first_key(const lm_attention &a, int32_t query) { return max(0, query - a.window + 1); }
  /* The last query of a document of `length` that sees a key; the document's last one for a key past its end. */
  static __device__ __forceinline__ int32_t last_query(const lm_attention &a, int32_t key, int32_t length) {
    return key + min(length - 1 - key, a.window - 1);
  }
};

constexpr float LM_LOG2_E = 1.4426950408889634f;

/* lm_exp2: 2^x to 2 units in the last place; 0 at -infinity. */
__device__ __forceinline__ float lm_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* lm_tanh: to about 3 units in the last place: near 0 an odd polynomial, fitted to the relative error, else by lm_exp2. */
__device__ __forceinline__ float lm_tanh(float x) {
  const float z = x * x;
  float p = fmaf(-0x1.75e1ccp-8f, z, 0x1.52269ap-6f);
  p = fmaf(p, z, -0x1.b83c5ap-5f);
  p = fmaf(p, z, 0x1.110726p-3f);
  p = fmaf(p, z, -0x1.555532p-2f);
  const float large = 1 - __fdividef(2.0f, lm_exp2(fabsf(x) * (2 * LM_LOG2_E)) + 1);
  return fabsf(x) < 0.625f ? fmaf(x * z, p, x) : copysignf(large, x);
}

#endif
