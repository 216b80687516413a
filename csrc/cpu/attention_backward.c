/* attention_backward.c: gradients of attention, probabilities recomputed from lse block by block.
 *   p = e^(q k - lse)   dv = p^T do   ds = p (do v^T - delta)   dk = ds^T q   dq = ds k   delta = row sum of o do
 * A cap c makes it p = e^(c t - lse), t = tanh(q k / c), and ds times 1 - t^2.
 * A short document is one task per key-value head: five products. Longer ones are two kinds of tasks, each the only writer
 * of its rows: a block of keys gathers dk and dv from later queries, a block of queries gathers dq from earlier keys. That
 * computes the scores twice (seven products); in return nothing is summed between tasks, and the bits are the same. */
#include "attention.h"

#include <string.h>

#include "kernels.h"

enum {
  BACK_QUERIES = 128, /* queries that a block of keys visits at a time */
  SHORT_BLOCKS = 2,   /* a document up to this many times BACK_QUERIES rows is short */
};

/* Thread scratch of a block of keys. */
typedef struct key_tiles {
  float k[LM_KEYS * LM_PITCH], v[LM_KEYS * LM_PITCH];          /* A tiles */
  float p[LM_KEYS * LM_PITCH], ds[LM_KEYS * LM_PITCH];         /* A tiles, transposed: [keys][queries] */
  float s[LM_ROWS * BACK_QUERIES], dp[LM_ROWS * BACK_QUERIES]; /* C tiles, transposed */
  float dk[LM_ROWS * LM_MAX_HEAD_DIM], dv[LM_ROWS * LM_MAX_HEAD_DIM];
  float panel[LM_MAX_HEAD_DIM * LM_MAX_NR];
  float k_panels[LM_KEYS * LM_MAX_HEAD_DIM]; /* B panels, scaled; short documents only */
  float lse[BACK_QUERIES], delta[BACK_QUERIES];
  int32_t visible[BACK_QUERIES];
  float dq[]; /* C tiles of a short document, by query head and block of queries */
} key_tiles;

/* Thread scratch of a block of queries. */
typedef struct query_tiles {
  float q[LM_ROWS * LM_PITCH], go[LM_ROWS * LM_PITCH], ds[LM_ROWS * LM_PITCH]; /* A tiles */
  float s[LM_ROWS * LM_KEYS], dp[LM_ROWS * LM_KEYS];
  float dq[LM_ROWS * LM_MAX_HEAD_DIM];
  float panel[LM_MAX_HEAD_DIM * LM_MAX_NR];
  float lse[LM_ROWS], delta[LM_ROWS];
  int32_t visible[LM_ROWS];
} query_tiles;
_Static_assert(sizeof(key_tiles) <= sizeof(float) * LM_THREAD_FLOATS, "a block of keys must fit the thread's scratch");
_Static_assert(sizeof(query_tiles) <= sizeof(float) * LM_THREAD_FLOATS, "a block of queries must fit the thread's scratch");

typedef struct backward_job {
  lm_attention a;
  const lm_attention_backward_args *args;
  int64_t key_tasks;
} backward_job;

static void delta_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const backward_job *j = pointer;
  const lm_attention_backward_args *g = j->args;
  const int64_t depth = j->a.head_dim;
  (void)scratch;
  for (int64_t t = begin; t < end; t++)
    for (int64_t h = 0; h < j->a.heads; h++) {
      const int64_t at = t * g->o_pitch + h * depth;
      g->delta[h * j->a.rows + t] = j->a.isa->dot(g->type, lm_at(g->type, g->grad_o, at), lm_at(g->type, g->o, at), depth);
    }
}

static int64_t padded_dim(const lm_attention *a) { return lm_ceil_div(a->head_dim, a->isa->nr) * a->isa->nr; }

/* short_document: dq of all its queries fits behind the tiles of a block of keys. */
static int32_t short_document(const lm_attention *a, const lm_block *b) {
  const int64_t blocks = lm_ceil_div(b->document_end - b->document_begin, BACK_QUERIES);
  const int64_t room = (int64_t)(sizeof(float) * LM_THREAD_FLOATS - sizeof(key_tiles)) / 4;
  return blocks <= SHORT_BLOCKS && a->group * blocks * LM_ROWS * padded_dim(a) <= room;
}

/* scores_t: C tile [keys][queries] = A tile x rows of q or grad_o. Query i sees keys up to ahead + i. */
static void scores_t(const lm_attention *a, float *c, const float *left, const void *right, int64_t pitch, int64_t keys,
                     int64_t queries, int64_t ahead, float factor, float *panel) {
  const int64_t nr = a->isa->nr;
  for (int64_t n = 0; n < queries; n += nr) {
    const int64_t columns = lm_min(nr, queries - n), rows = lm_min(keys, ahead + n + columns);
    a->isa->pack_columns(panel, lm_at(a->type, right, n * pitch), a->type, pitch, columns, a->head_dim, factor);
    a->isa->multiply(c + n * LM_ROWS, left, panel, rows, columns, a->head_dim, 0);
  }
}

/* hide_t: hides the queries whose window a key lies before: all from key + window on. */
static void hide_t(const lm_attention *a, float *s, int64_t keys, int64_t queries, int64_t ahead) {
  const int64_t nr = a->isa->nr;
  for (int64_t k = 0; k < keys; k++)
    for (int64_t n = lm_max(0, k + a->window - ahead); n < queries; n++)
      s[n / nr * (LM_ROWS * nr) + k * nr + n % nr] = -INFINITY;
}

/* gather_t: C tile [keys][head_dim] (+)= A tile of transposed weights x rows of q or grad_o, from the first query that sees
 * any of a chunk of keys. */
static void gather_t(const lm_attention *a, float *c, const float *left, const void *right, int64_t pitch, int64_t keys,
                     int64_t queries, int64_t ahead, float factor, int32_t accumulate, float *panel) {
  const int64_t nr = a->isa->nr, chunk = ahead >= keys ? keys : LM_CHUNK;
  for (int64_t n = 0; n < a->head_dim; n += nr) {
    const int64_t columns = lm_min(nr, a->head_dim - n);
    a->isa->pack_rows(panel, 0, lm_at(a->type, right, n), a->type, pitch, columns, queries, factor);
    for (int64_t k = 0; k < keys; k += chunk) {
      const int64_t first = lm_max(0, k - ahead);
      if (first < queries)
        a->isa->multiply(c + n * LM_ROWS + k * nr, left + k * LM_PITCH + first, panel + first * nr, lm_min(chunk, keys - k),
                         columns, queries - first, accumulate);
    }
  }
}

/* add_dq: dq tile [queries][head_dim] += ds k, ds as left by attention_grad_t. */
static void add_dq(const lm_attention *a, float *dq, const key_tiles *t, int64_t keys, int64_t queries, int64_t ahead) {
  const int64_t nr = a->isa->nr, tiles = lm_ceil_div(queries, a->isa->mr);
  for (int64_t n = 0; n < a->head_dim; n += nr)
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t q = queries * i / tiles, end = queries * (i + 1) / tiles;
      a->isa->outer(dq + n * LM_ROWS + q * nr, t->ds + q, LM_PITCH, t->k_panels + n * LM_KEYS, end - q,
                    lm_min(nr, a->head_dim - n), lm_min(keys, ahead + end));
    }
}

static void store_head(const lm_attention *a, void *y, int64_t pitch, int64_t row, int64_t head, const float *c,
                       int64_t rows) {
  const int64_t nr = a->isa->nr;
  for (int64_t n = 0; n < a->head_dim; n += nr)
    a->isa->store_c(lm_at_mut(a->type, y, row * pitch + head * a->head_dim + n), a->type, pitch, NULL, c + n * LM_ROWS,
                    NULL, NULL, 0, rows, lm_min(nr, a->head_dim - n));
}

/* key_block: dk and dv of a block of keys; with dq, also what the block adds to it. */
static void key_block(const backward_job *j, const lm_block *b, int64_t kv_head, key_tiles *t, float *dq) {
  const lm_attention *a = &j->a;
  const lm_attention_backward_args *g = j->args;
  const lm_isa *isa = a->isa;
  const int64_t keys = b->end - b->begin, nr = isa->nr, tile = LM_ROWS * padded_dim(a);
  const int64_t blocks = lm_ceil_div(b->document_end - b->document_begin, BACK_QUERIES);
  const void *k = lm_head_row(a, a->k, a->kv_pitch, b->begin, kv_head),
             *v = lm_head_row(a, a->v, a->kv_pitch, b->begin, kv_head);
  isa->load_a(t->k, k, a->type, a->kv_pitch, NULL, keys, a->head_dim, 1.0f);
  isa->load_a(t->v, v, a->type, a->kv_pitch, NULL, keys, a->head_dim, 1.0f);
  if (dq != NULL) isa->pack_rows(t->k_panels, nr * LM_KEYS, k, a->type, a->kv_pitch, a->head_dim, keys, a->scale);
  const int64_t limit = lm_min(b->document_end, b->end - 1 + a->window); /* no query from here on sees one of the keys */
  int32_t accumulate = 0;
  for (int64_t h = kv_head * a->group; h < (kv_head + 1) * a->group; h++) {
    int64_t row = b->begin;
    for (int64_t end; row < limit; row = end) { /* blocks of queries have fixed borders, so that dq tiles do */
      const int64_t block = (row - b->document_begin) / BACK_QUERIES;
      end = lm_min(b->document_begin + (block + 1) * BACK_QUERIES, limit);
      const int64_t queries = end - row, padded = lm_ceil_div(queries, nr) * nr, ahead = row - b->begin;
      const void *q = lm_head_row(a, a->q, a->q_pitch, row, h), *go = lm_head_row(a, g->grad_o, g->o_pitch, row, h);
      for (int64_t i = 0; i < padded; i++) {
        const int32_t inside = i < queries;
        t->lse[i] = inside ? g->lse[h * a->rows + row + i] : 0;
        t->delta[i] = inside ? g->delta[h * a->rows + row + i] : 0;
        t->visible[i] = inside ? (int32_t)(ahead + i + 1) : 0;
      }
      scores_t(a, t->s, t->k, q, a->q_pitch, keys, queries, ahead, a->scale, t->panel);
      scores_t(a, t->dp, t->v, go, g->o_pitch, keys, queries, ahead, 1.0f, t->panel);
      if (a->softcap > 0) isa->cap_scores(t->s, keys, queries, a->softcap);
      hide_t(a, t->s, keys, queries, ahead);
      isa->attention_grad_t(t->p, t->ds, t->s, t->dp, t->lse, t->delta, t->visible, keys, queries);
      if (a->softcap > 0) isa->cap_grad(t->ds, t->s, keys, queries, a->softcap);
      gather_t(a, t->dv, t->p, go, g->o_pitch, keys, queries, ahead, 1.0f, accumulate, t->panel);
      gather_t(a, t->dk, t->ds, q, a->q_pitch, keys, queries, ahead, a->scale, accumulate, t->panel);
      accumulate = 1;
      if (dq != NULL) {
        const int64_t first = row - b->document_begin - block * BACK_QUERIES;
        add_dq(a, dq + ((h % a->group) * blocks + block) * tile + first * nr, t, keys, queries, ahead);
      }
    }
  }
  store_head(a, g->dk, g->dqkv_pitch, b->begin, kv_head, t->dk, keys);
  store_head(a, g->dv, g->dqkv_pitch, b->begin, kv_head, t->dv, keys);
}

/* whole_document: all gradients of a short document and one key-value head. */
static void whole_document(const backward_job *j, const lm_block *document, int64_t kv_head, key_tiles *t) {
  const lm_attention *a = &j->a;
  const int64_t begin = document->document_begin, end = document->document_end, tile = LM_ROWS * padded_dim(a);
  const int64_t blocks = lm_ceil_div(end - begin, BACK_QUERIES);
  memset(t->dq, 0, sizeof(float) * (size_t)(a->group * blocks * tile));
  for (int64_t row = begin; row < end; row += LM_KEYS) {
    const lm_block b = {begin, end, row, lm_min(row + LM_KEYS, end)};
    key_block(j, &b, kv_head, t, t->dq);
  }
  for (int64_t h = 0; h < a->group; h++)
    for (int64_t i = 0; i < blocks; i++) {
      const int64_t row = begin + i * BACK_QUERIES;
      store_head(a, j->args->dq, j->args->dqkv_pitch, row, kv_head * a->group + h, t->dq + (h * blocks + i) * tile,
                 lm_min(BACK_QUERIES, end - row));
    }
}

/* query_block: dq of a block of queries, for the query heads of one slice. */
static void query_block(const backward_job *j, const lm_block *b, int64_t slice, query_tiles *t) {
  const lm_attention *a = &j->a;
  const lm_attention_backward_args *g = j->args;
  const lm_isa *isa = a->isa;
  const int64_t depth = a->head_dim, queries = b->end - b->begin;
  const int64_t kv_head = slice / a->slices, first = slice % a->slices * a->slice, head = kv_head * a->group + first;
  const int64_t heads = lm_min(a->slice, a->group - first);
  for (int64_t h = 0; h < heads; h++) {
    isa->load_a(t->q + h * queries * LM_PITCH, lm_head_row(a, a->q, a->q_pitch, b->begin, head + h), a->type, a->q_pitch,
                NULL, queries, depth, a->scale);
    isa->load_a(t->go + h * queries * LM_PITCH, lm_head_row(a, g->grad_o, g->o_pitch, b->begin, head + h), a->type,
                g->o_pitch, NULL, queries, depth, 1.0f);
    for (int64_t i = 0; i < queries; i++) {
      t->lse[h * queries + i] = g->lse[(head + h) * a->rows + b->begin + i];
      t->delta[h * queries + i] = g->delta[(head + h) * a->rows + b->begin + i];
    }
  }
  const int64_t start = b->document_begin + lm_first_key(a, b->begin - b->document_begin + 1);
  for (int64_t row = start; row < b->end; row += LM_KEYS) {
    const int64_t keys = lm_min(LM_KEYS, b->end - row), seen = b->begin - row + 1;
    const void *k = lm_head_row(a, a->k, a->kv_pitch, row, kv_head), *v = lm_head_row(a, a->v, a->kv_pitch, row, kv_head);
    lm_scores(a, t->s, t->q, k, heads, queries, keys, seen, t->panel);
    lm_scores(a, t->dp, t->go, v, heads, queries, keys, seen, t->panel);
    lm_prepare(a, t->s, t->visible, heads, queries, keys, seen);
    isa->attention_grad(t->ds, t->s, t->dp, t->lse, t->delta, t->visible, heads * queries, keys);
    if (a->softcap > 0) isa->cap_grad(t->ds, t->s, heads * queries, keys, a->softcap);
    lm_gather(a, t->dq, t->ds, k, heads, queries, keys, seen, a->scale, row > start, t->panel);
  }
  for (int64_t h = 0; h < heads; h++)
    store_head(a, g->dq, g->dqkv_pitch, b->begin, head + h, t->dq + h * queries * isa->nr, queries);
}

static void backward_task(const void *pointer, int64_t task, float *scratch) {
  const backward_job *j = pointer;
  const lm_attention *a = &j->a;
  lm_block b;
  if (task < j->key_tasks) {
    if (!lm_block_find(a, task / a->kv_heads, LM_KEYS, &b)) return;
    if (!short_document(a, &b)) key_block(j, &b, task % a->kv_heads, (key_tiles *)scratch, NULL);
    else if (b.begin == b.document_begin) whole_document(j, &b, task % a->kv_heads, (key_tiles *)scratch);
    return;
  }
  task -= j->key_tasks;
  const int64_t slices = a->kv_heads * a->slices;
  if (lm_block_find(a, task / slices, a->queries, &b) && !short_document(a, &b))
    query_block(j, &b, task % slices, (query_tiles *)scratch);
}

void lm_cpu_attention_backward(lm_cpu *cpu, const lm_attention_backward_args *args) {
  backward_job j = {.a = {.isa = lm_cpu_table(cpu),
                          .q = args->q,
                          .k = args->k,
                          .v = args->v,
                          .q_pitch = args->qkv_pitch,
                          .kv_pitch = args->qkv_pitch,
                          .rows = args->rows,
                          .documents = lm_documents(args->cu_seqlens, args->documents),
                          .heads = args->heads,
                          .kv_heads = args->kv_heads,
                          .head_dim = args->head_dim,
                          .cu_seqlens = args->cu_seqlens,
                          .type = args->type,
                          .scale = args->scale,
                          .window = lm_attention_window(args->window),
                          .softcap = args->softcap},
                    .args = args};
  const lm_attention *a = &j.a;
  lm_attention_split(&j.a);
  if (a->documents == 0) return;
  j.key_tasks = lm_block_slots(a, LM_KEYS) * a->kv_heads;
  const int64_t query_tasks = lm_block_slots(a, a->queries) * a->kv_heads * a->slices;
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, lm_offset(a, a->documents), lm_grain_rows(a->heads * a->head_dim), delta_rows, &j);
  lm_cpu_parallel(cpu, j.key_tasks + query_tasks, backward_task, &j);
  lm_cpu_leave(cpu);
}
