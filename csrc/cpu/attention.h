/* attention.h: what the attention kernels share. Head size at most LM_MAX_HEAD_DIM. */
#ifndef LM_CPU_ATTENTION_H
#define LM_CPU_ATTENTION_H

#include <math.h>

#include "cpu.h"

enum {
  LM_MAX_HEAD_DIM = 256,
  LM_KEYS = 64,    /* keys of a block */
  LM_QUERIES = 64, /* most queries of a block of rows */
  LM_HEADS = 8,    /* most query heads that share a block of rows */
};

/* Where the operands of one call lie. Query head h reads key-value head h / group. */
typedef struct lm_attention {
  const lm_isa *isa;
  const void *q, *k, *v;
  int64_t q_pitch, kv_pitch, o_pitch;
  int64_t rows, documents; /* documents: without the empty ones at the end */
  int64_t heads, kv_heads, head_dim, group;
  int64_t slice;   /* query heads of a block of rows */
  int64_t slices;  /* of a group */
  int64_t queries; /* of a block of rows */
  const int32_t *cu_seqlens;
  int32_t type;
  float scale;
  int64_t window; /* keys that a query sees at most, itself among them */
  float softcap;  /* 0 = none */
} lm_attention;

/* lm_attention_window: what lm_attention.window is for an argument. */
static inline int64_t lm_attention_window(int32_t window) { return window > 0 ? window : INT32_MAX; }

/* lm_attention_split: fills group, slice, slices and queries: the query heads of a key-value head form common blocks of
 * rows, so that keys and values are packed once for all of them. */
static inline void lm_attention_split(lm_attention *a) {
  a->group = a->heads / a->kv_heads;
  a->slices = lm_ceil_div(a->group, LM_HEADS);
  a->slice = lm_ceil_div(a->group, a->slices);
  a->queries = lm_min(LM_QUERIES, LM_ROWS / a->slice);
}

/* A block of rows of one document. Blocks start at the document's first row, so results do not depend on its place. */
typedef struct lm_block {
  int64_t document_begin, document_end;
  int64_t begin, end;
} lm_block;

/* Document offsets as stored, kept inside the buffers. */
static inline int64_t lm_offset(const lm_attention *a, int64_t d) { return lm_max(0, lm_min(a->rows, a->cu_seqlens[d])); }

/* lm_block_slots: how many slots lm_block_find knows for blocks of `size` rows. Document d owns the slots from
 * offset[d] / size + d: always enough, found by bisection, and at most one too many. */
static inline int64_t lm_block_slots(const lm_attention *a, int64_t size) {
  return a->documents > 0 ? lm_offset(a, a->documents) / size + a->documents : 0;
}

/* lm_block_find: @return 0 if the slot is empty */
static inline int32_t lm_block_find(const lm_attention *a, int64_t slot, int64_t size, lm_block *block) {
  int64_t low = 0, high = a->documents - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (lm_offset(a, middle) / size + middle <= slot) low = middle;
    else high = middle - 1;
  }
  block->document_begin = lm_offset(a, low);
  block->document_end = lm_offset(a, low + 1);
  block->begin = block->document_begin + (slot - block->document_begin / size - low) * size;
  block->end = lm_min(block->begin + size, block->document_end);
  return block->begin >= block->document_begin && block->begin < block->end;
}

/* lm_documents: documents up to the last one that is not empty. */
static inline int64_t lm_documents(const int32_t *cu_seqlens, int64_t documents) {
  while (documents > 0 && cu_seqlens[documents] == cu_seqlens[documents - 1]) documents--;
  return documents;
}

/* lm_head_row: a row of one head of q, k, v or grad_o. */
static inline const void *lm_head_row(const lm_attention *a, const void *base, int64_t pitch, int64_t row, int64_t head) {
  return lm_at(a->type, base, row * pitch + head * a->head_dim);
}

/* Products of a block of queries with a block of keys. Tile rows are heads x queries, head by head; query i sees the first
 * seen + i keys of the block. What no query of a panel or chunk sees is skipped: skipped sums would only add zeros. */
enum { LM_CHUNK = 32 };

/* lm_scores: C tile [rows][keys] = A tile x rows of k or v; hidden elements may be left as they were. */
static inline void lm_scores(const lm_attention *a, float *c, const float *left, const void *right, int64_t heads,
                             int64_t queries, int64_t keys, int64_t seen, float *panel) {
  const int64_t nr = a->isa->nr;
  for (int64_t n = 0; n < keys; n += nr) {
    const int64_t columns = lm_min(nr, keys - n), first = lm_max(0, n - seen + 1);
    if (first >= queries) return;
    a->isa->pack_columns(panel, lm_at(a->type, right, n * a->kv_pitch), a->type, a->kv_pitch, columns, a->head_dim, 1.0f);
    if (first == 0) {
      a->isa->multiply(c + n * LM_ROWS, left, panel, heads * queries, columns, a->head_dim, 0);
      continue;
    }
    for (int64_t r = first; r < heads * queries; r += queries)
      a->isa->multiply(c + n * LM_ROWS + r * nr, left + r * LM_PITCH, panel, queries - first, columns, a->head_dim, 0);
  }
}

/* lm_prepare: caps a tile of scores and hides the keys before the window: from query i the first seen + i - window.
 * @param visible [rows] written: how many of the first keys a query sees, but for the hidden ones; 0 = none at all */
static inline void lm_prepare(const lm_attention *a, float *s, int32_t *visible, int64_t heads, int64_t queries, int64_t keys,
                              int64_t seen) {
  const int64_t nr = a->isa->nr;
  if (a->softcap > 0) a->isa->cap_scores(s, heads * queries, keys, a->softcap);
  for (int64_t i = 0; i < queries; i++) {
    const int64_t before = seen + i - a->window, hidden = before < keys ? before : 0;
    for (int64_t h = 0, r = i; h < heads; h++, r += queries) {
      visible[r] = before < keys ? (int32_t)(seen + i) : 0;
      for (int64_t n = 0; n < hidden; n++) s[n / nr * (LM_ROWS * nr) + r * nr + n % nr] = -INFINITY;
    }
  }
}

/* lm_first_key: the first key, counted as `seen` is, of the first block of LM_KEYS that has one which a query sees. */
static inline int64_t lm_first_key(const lm_attention *a, int64_t seen) {
  return lm_max(0, seen - a->window) / LM_KEYS * LM_KEYS;
}

/* lm_gather: C tile [rows][head_dim] (+)= A tile of weights x rows of k or v. */
static inline void lm_gather(const lm_attention *a, float *c, const float *left, const void *right, int64_t heads,
                             int64_t queries, int64_t keys, int64_t seen, float factor, int32_t accumulate, float *panel) {
  const int64_t nr = a->isa->nr;
  for (int64_t n = 0; n < a->head_dim; n += nr) {
    const int64_t columns = lm_min(nr, a->head_dim - n);
    float *cn = c + n * LM_ROWS;
    a->isa->pack_rows(panel, 0, lm_at(a->type, right, n), a->type, a->kv_pitch, columns, keys, factor);
    if (seen >= keys) {
      a->isa->multiply(cn, left, panel, heads * queries, columns, keys, accumulate);
      continue;
    }
    for (int64_t r = 0; r < heads * queries; r += queries)
      for (int64_t q = 0; q < queries; q += LM_CHUNK) {
        const int64_t count = lm_min(LM_CHUNK, queries - q), depth = lm_min(keys, seen + q + count - 1);
        if (depth > 0)
          a->isa->multiply(cn + (r + q) * nr, left + (r + q) * LM_PITCH, panel, count, columns, depth, accumulate);
      }
  }
}

#endif
