/* attention.c: attention forward, over packed documents and over a cache. The tile algorithm is that of FlashAttention-2
 * (Dao 2023, arXiv:2307.08691): blocks of keys with a running maximum; no score outlives its block. Blocks that lie before the
 * window of every query are left out. */
#include "attention.h"

#include "kernels.h"

/* Thread scratch. */
typedef struct forward_tiles {
  float q[LM_ROWS * LM_PITCH]; /* A tile, scaled */
  float p[LM_ROWS * LM_PITCH]; /* A tile */
  float s[LM_ROWS * LM_KEYS];  /* C tile */
  float o[LM_ROWS * LM_MAX_HEAD_DIM];
  float panel[LM_MAX_HEAD_DIM * LM_MAX_NR];
  float peak[LM_ROWS], sum[LM_ROWS], shrink[LM_ROWS];
  int32_t visible[LM_ROWS];
} forward_tiles;
_Static_assert(sizeof(forward_tiles) <= sizeof(float) * LM_THREAD_FLOATS,
               "attention forward must fit the thread's scratch");

/* attend: rows = query heads [head, head + heads) x queries [q_row, q_row + queries), head by head. The first query sees
 * `seen` keys from kv_row on, each next one a key more. */
static void attend(const lm_attention *a, void *o, float *lse, int64_t head, int64_t heads, int64_t q_row, int64_t queries,
                   int64_t kv_row, int64_t seen, forward_tiles *t) {
  const lm_isa *isa = a->isa;
  const int64_t nr = isa->nr, depth = a->head_dim, rows = heads * queries, keys = seen + queries - 1;
  const int64_t kv_head = head / a->group, first = lm_first_key(a, seen);
  for (int64_t h = 0; h < heads; h++)
    isa->load_a(t->q + h * queries * LM_PITCH, lm_head_row(a, a->q, a->q_pitch, q_row, head + h), a->type, a->q_pitch, NULL,
                queries, depth, a->scale);
  for (int64_t r = 0; r < rows; r++) {
    t->peak[r] = -INFINITY;
    t->sum[r] = 0;
  }
  for (int64_t k0 = first; k0 < keys; k0 += LM_KEYS) {
    const int64_t count = lm_min(LM_KEYS, keys - k0);
    lm_scores(a, t->s, t->q, lm_head_row(a, a->k, a->kv_pitch, kv_row + k0, kv_head), heads, queries, count, seen - k0,
              t->panel);
    lm_prepare(a, t->s, t->visible, heads, queries, count, seen - k0);
    isa->softmax(t->p, t->s, t->visible, rows, count, t->peak, t->sum, t->shrink);
    for (int64_t n = 0; n < depth && k0 > first; n += nr)
      isa->shrink_c(t->o + n * LM_ROWS, t->shrink, rows, lm_min(nr, depth - n));
    lm_gather(a, t->o, t->p, lm_head_row(a, a->v, a->kv_pitch, kv_row + k0, kv_head), heads, queries, count, seen - k0,
              1.0f, k0 > first, t->panel);
  }
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < queries; i++) {
      const int64_t r = h * queries + i;
      t->shrink[r] = 1.0f / t->sum[r];
      if (lse != NULL) lse[(head + h) * a->rows + q_row + i] = t->peak[r] + logf(t->sum[r]);
    }
  for (int64_t n = 0; n < depth; n += nr) {
    const int64_t columns = lm_min(nr, depth - n);
    isa->shrink_c(t->o + n * LM_ROWS, t->shrink, rows, columns);
    for (int64_t h = 0; h < heads; h++)
      isa->store_c(lm_at_mut(a->type, o, q_row * a->o_pitch + (head + h) * depth + n), a->type, a->o_pitch, NULL,
                   t->o + n * LM_ROWS + h * queries * nr, NULL, NULL, 0, queries, columns);
  }
}

typedef struct forward_job {
  lm_attention a;
  void *o;
  float *lse;
  /* cached attention only */
  const lm_attention_cached_forward_args *cached;
  int64_t past;
} forward_job;

/* slice_heads: query heads of slice `index`, counted over all key-value heads. */
static int64_t slice_heads(const lm_attention *a, int64_t index, int64_t *head) {
  const int64_t kv_head = index / a->slices, first = index % a->slices * a->slice;
  *head = kv_head * a->group + first;
  return lm_min(a->slice, a->group - first);
}

static void forward_task(const void *pointer, int64_t task, float *scratch) {
  const forward_job *j = pointer;
  const int64_t slices = j->a.kv_heads * j->a.slices;
  lm_block b;
  if (!lm_block_find(&j->a, task / slices, j->a.queries, &b)) return;
  int64_t head;
  const int64_t heads = slice_heads(&j->a, task % slices, &head);
  attend(&j->a, j->o, j->lse, head, heads, b.begin, b.end - b.begin, b.document_begin, b.begin - b.document_begin + 1,
         (forward_tiles *)scratch);
}

void lm_cpu_attention_forward(lm_cpu *cpu, const lm_attention_forward_args *args) {
  forward_job j = {.a = {.isa = lm_cpu_table(cpu),
                         .q = args->q,
                         .k = args->k,
                         .v = args->v,
                         .q_pitch = args->qkv_pitch,
                         .kv_pitch = args->qkv_pitch,
                         .o_pitch = args->o_pitch,
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
                   .o = args->o,
                   .lse = args->lse};
  lm_attention_split(&j.a);
  lm_cpu_enter(cpu);
  lm_cpu_parallel(cpu, lm_block_slots(&j.a, j.a.queries) * j.a.kv_heads * j.a.slices, forward_task, &j);
  lm_cpu_leave(cpu);
}

/* append_rows: copy new keys and values behind the cached ones. */
static void append_rows(const void *pointer, int64_t begin, int64_t end, float *scratch) {
  const forward_job *j = pointer;
  const lm_attention_cached_forward_args *c = j->cached;
  const int64_t width = j->a.kv_heads * j->a.head_dim;
  (void)scratch;
  for (int64_t t = begin; t < end; t++) {
    j->a.isa->cast(lm_at_mut(c->type, c->k_cache, (j->past + t) * width), c->type, lm_at(c->type, c->k, t * c->qkv_pitch),
                   c->type, width);
    j->a.isa->cast(lm_at_mut(c->type, c->v_cache, (j->past + t) * width), c->type, lm_at(c->type, c->v, t * c->qkv_pitch),
                   c->type, width);
  }
}

static void cached_task(const void *pointer, int64_t task, float *scratch) {
  const forward_job *j = pointer;
  const int64_t slices = j->a.kv_heads * j->a.slices, begin = task / slices * j->a.queries;
  int64_t head;
  const int64_t heads = slice_heads(&j->a, task % slices, &head);
  attend(&j->a, j->o, NULL, head, heads, begin, lm_min(j->a.queries, j->a.rows - begin), 0, j->past + begin + 1,
         (forward_tiles *)scratch);
}

void lm_cpu_attention_cached_forward(lm_cpu *cpu, const lm_attention_cached_forward_args *args) {
  const int64_t past = lm_max(0, lm_min(*args->past, args->capacity));
  forward_job j = {.a = {.isa = lm_cpu_table(cpu),
                         .q = args->q,
                         .k = args->k_cache,
                         .v = args->v_cache,
                         .q_pitch = args->qkv_pitch,
                         .kv_pitch = (int64_t)args->kv_heads * args->head_dim,
                         .o_pitch = args->o_pitch,
                         .rows = lm_min(lm_live_rows(args->live, args->rows), args->capacity - past),
                         .heads = args->heads,
                         .kv_heads = args->kv_heads,
                         .head_dim = args->head_dim,
                         .type = args->type,
                         .scale = args->scale,
                         .window = lm_attention_window(args->window),
                         .softcap = args->softcap},
                   .o = args->o,
                   .cached = args,
                   .past = past};
  lm_attention_split(&j.a);
  lm_cpu_enter(cpu);
  lm_cpu_ranges(cpu, j.a.rows, lm_grain_rows(j.a.kv_pitch), append_rows, &j);
  lm_cpu_parallel(cpu, lm_ceil_div(j.a.rows, j.a.queries) * j.a.kv_heads * j.a.slices, cached_task, &j);
  lm_cpu_leave(cpu);
}
