/* loramem_kernels.h: the kernels of the ABI, included by loramem.h.
 *
 * Every kernel is
 *     int32_t lm_<op>(lm_ctx *ctx, const lm_<op>_args *args, lm_stream *stream);
 * It checks args, enqueues the work on stream and returns; args is copied, the memory that it points to is borrowed until
 * the stream has passed. The struct is filled once, at plan time, and used again for every step.
 *   size   sizeof of the struct that the caller filled; another size is LM_ERR_ARGUMENT
 *   type   element type of the activations (LM_F32, LM_BF16, LM_F16): everything whose entry does not say otherwise
 *   *_pitch  elements from one row to the next, at least the row's width
 *   live   [1] i32 in device memory: how many leading rows hold data; later rows are neither read nor written.
 *          NULL = all rows. It lets one recorded step serve shorter micro-batches.
 * "written" outputs are overwritten, "accumulated" ones are added to. Arithmetic is fp32 whatever the storage type.
 * Reductions have a fixed order: the same inputs give the same bits for any number of threads.
 *
 * Letters: T rows (tokens), C width of the residual stream, K inputs and N outputs of a linear, R sum of LoRA ranks of a
 * group, Hq/Hk query/key-value heads, D head size, I width of the gated MLP, V vocabulary, M labelled rows, P positions. */

/* Header of a micro-batch, in device memory. */
typedef struct lm_batch_header {
  int32_t tokens;    /* live rows */
  int32_t documents; /* documents in cu_seqlens */
  int32_t labelled;  /* rows that carry a label */
  float loss_weight; /* d(step loss)/d(row loss): 1 / labelled tokens of the whole optimizer step */
} lm_batch_header;

/* Learning-rate schedules; t is the number of updates applied before the step, S the steps of the run. */
enum {
  LM_SCHEDULE_CONSTANT = 0,
  LM_SCHEDULE_COSINE = 1, /* (1 + cos(pi t / S)) / 2 (Loshchilov & Hutter 2016, arXiv:1608.03983) */
  LM_SCHEDULE_LINEAR = 2  /* 1 - t / S */
};

/* Settings of the optimizer, in device memory: the same for every step of a run. */
typedef struct lm_optimizer_control {
  double learning_rate; /* peak of the schedule */
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double max_norm;      /* clip the gradient to this L2 norm; 0 = do not clip */
  int64_t warmup_steps; /* the rate is multiplied by min(1, (t + 1) / warmup_steps); 0 = no warm-up */
  int64_t total_steps;  /* S, warm-up included */
  int32_t schedule;     /* LM_SCHEDULE_* */
  int32_t reserved;
} lm_optimizer_control;

/* What the optimizer remembers from step to step, in device memory; a checkpoint holds it. Zero bytes = a new run. */
typedef struct lm_optimizer_state {
  int64_t step;    /* updates applied: the t of the schedule and of the bias corrections */
  int64_t skipped; /* updates that were skipped because the gradient was not finite */
} lm_optimizer_state;

/* A gradient scaler with its settings, in device memory; a checkpoint holds it (Micikevicius et al. 2017,
 * arXiv:1710.03740). After an update with a gradient that is not finite: scale *= backoff_factor, growth_tracker = 0. After
 * any other: growth_tracker += 1 and, once it is growth_interval: scale *= growth_factor unless that overflows, growth_tracker = 0. */
typedef struct lm_scaler {
  float scale;            /* what the loss, and so every gradient, is multiplied by */
  int32_t growth_tracker; /* updates with a finite gradient since the scale was last set */
  float growth_factor;    /* > 1 */
  float backoff_factor;   /* in (0, 1) */
  int32_t growth_interval;
  float min_scale; /* the scale never falls below; 0 = it may fall without end */
  float max_scale; /* the scale never grows beyond; 0 = no limit but that of f32 */
  int32_t reserved;
} lm_scaler;

/* Results of a step, in device memory. lm_loss_sum adds to the first field, lm_grad_norm writes the others. */
typedef struct lm_step_metrics {
  double loss_sum;      /* sum of the row losses since it was zeroed */
  double grad_norm;     /* L2 norm of the gradient, loss scale taken out, before clipping; NaN if it is not finite */
  double clip;          /* factor of clipping */
  double learning_rate; /* of this step */
  int64_t step;         /* updates applied so far, this one included unless it is skipped */
  int64_t bad_element;  /* first element of the gradient that is not finite, -1 = none */
  float loss_scale;     /* that the gradient was multiplied by */
  int32_t skipped;      /* 1 = lm_adamw leaves everything as it is */
  float factor;         /* clip / loss_scale: lm_adamw multiplies the gradient by it */
  float decay;          /* 1 - learning_rate * weight_decay */
  float rate;           /* learning_rate / (1 - beta1^step) */
  float root;           /* 1 / sqrt(1 - beta2^step) */
} lm_step_metrics;

/* Elementwise --------------------------------------------------------------------------------------------------- */

/* lm_scale: y = x * factor.   y [n] written, may be x;  x [n] read */
typedef struct lm_scale_args {
  uint32_t size;
  int32_t type;
  void *y;
  const void *x;
  int64_t n;
  float factor;
  int32_t reserved;
} lm_scale_args;
LM_API int32_t lm_scale(lm_ctx *ctx, const lm_scale_args *args, lm_stream *stream);

/* lm_add: y = a + b.   y [n] written, may be a or b;  a, b [n] read */
typedef struct lm_add_args {
  uint32_t size;
  int32_t type;
  void *y;
  const void *a;
  const void *b;
  int64_t n;
} lm_add_args;
LM_API int32_t lm_add(lm_ctx *ctx, const lm_add_args *args, lm_stream *stream);

/* lm_cast: y = x in another element type, rounded to nearest even.   y [n] of y_type written;  x [n] of type read */
typedef struct lm_cast_args {
  uint32_t size;
  int32_t type;
  void *y;
  const void *x;
  int64_t n;
  int32_t y_type;
  int32_t reserved;
} lm_cast_args;
LM_API int32_t lm_cast(lm_ctx *ctx, const lm_cast_args *args, lm_stream *stream);

/* Rows ---------------------------------------------------------------------------------------------------------- */

/* lm_embedding_forward: y[t] = table[ids[t]].
 *   y [T, C] written;  table [V, C] of table_type read;  ids [T] i32 read, each in [0, V) (others read row 0) */
typedef struct lm_embedding_forward_args {
  uint32_t size;
  int32_t type;
  void *y;
  const void *table;
  const int32_t *ids;
  const int32_t *live;
  int32_t rows;
  int32_t width;
  int32_t vocab;
  int32_t y_pitch;
  int32_t table_type;
  int32_t reserved;
} lm_embedding_forward_args;
LM_API int32_t lm_embedding_forward(lm_ctx *ctx, const lm_embedding_forward_args *args, lm_stream *stream);

/* lm_gather_rows: y[i] = x[index[i]].   y [rows, C] written;  x [source_rows, C] read;  index [rows] i32 read */
typedef struct lm_gather_rows_args {
  uint32_t size;
  int32_t type;
  void *y;
  const void *x;
  const int32_t *index;
  const int32_t *live;
  int32_t rows;
  int32_t width;
  int32_t source_rows;
  int32_t y_pitch;
  int32_t x_pitch;
  int32_t reserved;
} lm_gather_rows_args;
LM_API int32_t lm_gather_rows(lm_ctx *ctx, const lm_gather_rows_args *args, lm_stream *stream);

/* lm_argmax: out[t] = index of the largest x[t, :], the lowest index on ties.
 *   out [rows] i32 written;  x [rows, width] read */
typedef struct lm_argmax_args {
  uint32_t size;
  int32_t type;
  int32_t *out;
  const void *x;
  const int32_t *live;
  int32_t rows;
  int32_t width;
  int32_t x_pitch;
  int32_t reserved;
} lm_argmax_args;
LM_API int32_t lm_argmax(lm_ctx *ctx, const lm_argmax_args *args, lm_stream *stream);

/* lm_rms_norm_forward: y = x / sqrt(mean(x^2) + eps) * weight, row by row (Zhang & Sennrich 2019, arXiv:1910.07467).
 *   y [T, C] written, may be x;  x [T, C] read;  weight [C] of weight_type read */
typedef struct lm_rms_norm_forward_args {
  uint32_t size;
  int32_t type;
  void *y;
  const void *x;
  const void *weight;
  const int32_t *live;
  int32_t rows;
  int32_t width;
  int32_t y_pitch;
  int32_t x_pitch;
  int32_t weight_type;
  float eps;
} lm_rms_norm_forward_args;
LM_API int32_t lm_rms_norm_forward(lm_ctx *ctx, const lm_rms_norm_forward_args *args, lm_stream *stream);

/* lm_rms_norm_backward: dx = d(norm)/dx applied to dy, plus add. The weight is frozen; the row's scale is computed again.
 *   dx [T, C] written, may be dy or add;  dy, x [T, C] read;  weight [C] of weight_type read;  add [T, C] read or NULL;  y [T, C]
 *   written, or NULL: the bits of the forward pass if rows begin on 16 bytes in both or in neither; may be dy or add, not dx */
typedef struct lm_rms_norm_backward_args {
  uint32_t size;
  int32_t type;
  void *dx;
  const void *dy;
  const void *x;
  const void *weight;
  const void *add;
  const int32_t *live;
  int32_t rows;
  int32_t width;
  int32_t dx_pitch;
  int32_t dy_pitch;
  int32_t x_pitch;
  int32_t add_pitch;
  int32_t weight_type;
  float eps;
  void *y;
  int32_t y_pitch;
  int32_t reserved;
} lm_rms_norm_backward_args;
LM_API int32_t lm_rms_norm_backward(lm_ctx *ctx, const lm_rms_norm_backward_args *args, lm_stream *stream);

/* lm_glu_forward: h = silu(g) * u with gu = [g | u] (Shazeer 2020, arXiv:2002.05202).
 *   h [T, I] written;  gu [T, 2 I] read */
typedef struct lm_glu_forward_args {
  uint32_t size;
  int32_t type;
  void *h;
  const void *gu;
  const int32_t *live;
  int32_t rows;
  int32_t width; /* I */
  int32_t h_pitch;
  int32_t gu_pitch;
} lm_glu_forward_args;
LM_API int32_t lm_glu_forward(lm_ctx *ctx, const lm_glu_forward_args *args, lm_stream *stream);

/* lm_glu_backward: dgu = [dh * u * silu'(g) | dh * silu(g)].
 *   dgu [T, 2 I] written, may be gu;  dh [T, I] read;  gu [T, 2 I] read;
 *   h [T, I] written with what the forward pass wrote, bit for bit, or NULL; may be dh */
typedef struct lm_glu_backward_args {
  uint32_t size;
  int32_t type;
  void *dgu;
  const void *dh;
  const void *gu;
  const int32_t *live;
  int32_t rows;
  int32_t width; /* I */
  int32_t dgu_pitch;
  int32_t dh_pitch;
  int32_t gu_pitch;
  int32_t h_pitch;
  void *h;
} lm_glu_backward_args;
LM_API int32_t lm_glu_backward(lm_ctx *ctx, const lm_glu_backward_args *args, lm_stream *stream);

/* lm_rope: rotate the first `heads` heads of every row by its position, half-split pairs (i, i + D/2); copy the rest.
 * direction 1 is forward, -1 its transpose, the backward pass (Su et al. 2021, arXiv:2104.09864).
 *   y [T, width] written, may be x;  x [T, width] read;  cos, sin [P, D/2] f32 read;  positions [T] i32 read, each in [0, P) */
typedef struct lm_rope_args {
  uint32_t size;
  int32_t type;
  void *y;
  const void *x;
  const float *cos;
  const float *sin;
  const int32_t *positions;
  const int32_t *live;
  int32_t rows;
  int32_t width;
  int32_t heads;
  int32_t head_dim;
  int32_t position_count; /* P */
  int32_t y_pitch;
  int32_t x_pitch;
  int32_t direction;
} lm_rope_args;
LM_API int32_t lm_rope(lm_ctx *ctx, const lm_rope_args *args, lm_stream *stream);

/* Linear groups with LoRA (Hu et al. 2021, arXiv:2106.09685) -------------------------------------------------------
 * A group is one matrix product over up to three matrices that lie next to each other, such as q|k|v or gate|up:
 * W [N, K] with N = out0 + out1 + out2. Part i may carry an adapter of rank rank<i> (0 = none), scale scale<i> = alpha / r.
 * All A_i lie next to each other: A [R, K]; each B_i is [out<i>, rank<i>], rows dense. */

/* lm_lora_down: s_i = scale<i> * x A_i^T.
 *   s [T, R] written;  x [T, K] read;  a [R, K] of a_type read */
typedef struct lm_lora_down_args {
  uint32_t size;
  int32_t type;
  void *s;
  const void *x;
  const void *a;
  const int32_t *live;
  int32_t rows;
  int32_t in; /* K */
  int32_t s_pitch;
  int32_t x_pitch;
  int32_t a_type;
  int32_t rank0;
  int32_t rank1;
  int32_t rank2;
  float scale0;
  float scale1;
  float scale2;
  int32_t reserved;
} lm_lora_down_args;
LM_API int32_t lm_lora_down(lm_ctx *ctx, const lm_lora_down_args *args, lm_stream *stream);

/* lm_lora_linear_forward: y = x W^T + bias + residual + [s_i B_i^T].
 *   y [T, N] written, may be residual;  x [T, K] read;  w [N, K] of w_type read;  bias [N] of bias_type read or NULL;
 *   residual [T, N] read or NULL;  s [T, R] read, NULL if R = 0;  b<i> [out<i>, rank<i>] of b_type read, NULL if rank<i> = 0 */
typedef struct lm_lora_linear_forward_args {
  uint32_t size;
  int32_t type;
  void *y;
  const void *x;
  const void *w;
  const void *bias;
  const void *residual;
  const void *s;
  const void *b0;
  const void *b1;
  const void *b2;
  const int32_t *live;
  int32_t rows;
  int32_t in;  /* K */
  int32_t out; /* N */
  int32_t y_pitch;
  int32_t x_pitch;
  int32_t w_pitch;
  int32_t residual_pitch;
  int32_t s_pitch;
  int32_t w_type;
  int32_t bias_type;
  int32_t b_type;
  int32_t out0;
  int32_t out1;
  int32_t out2;
  int32_t rank0;
  int32_t rank1;
  int32_t rank2;
  int32_t reserved;
} lm_lora_linear_forward_args;
LM_API int32_t lm_lora_linear_forward(lm_ctx *ctx, const lm_lora_linear_forward_args *args, lm_stream *stream);

/* lm_lora_linear_backward: with ds_i = scale<i> * dy_i B_i:  dB_i += dy_i^T s_i,  dA_i += ds_i^T x,  dx = dy W + ds A.
 *   dx [T, K] written, NULL = not wanted;  da [R, K] f32 accumulated;  db<i> [out<i>, rank<i>] f32 accumulated;
 *   ds [T, R] f32 workspace;  dy [T, N], x [T, K], s [T, R], w [N, K], a [R, K], b<i> read.
 *   x and da are both NULL where lm_lora_down_backward adds to da later: ds must stay until then.
 *   Without adapters (R = 0) a, s, x, ds, da, b<i> and db<i> are NULL and only dx is computed. */
typedef struct lm_lora_linear_backward_args {
  uint32_t size;
  int32_t type;
  void *dx;
  float *da;
  float *db0;
  float *db1;
  float *db2;
  float *ds;
  const void *dy;
  const void *x;
  const void *s;
  const void *w;
  const void *a;
  const void *b0;
  const void *b1;
  const void *b2;
  const int32_t *live;
  int32_t rows;
  int32_t in;  /* K */
  int32_t out; /* N */
  int32_t dx_pitch;
  int32_t dy_pitch;
  int32_t x_pitch;
  int32_t s_pitch;
  int32_t w_pitch;
  int32_t w_type;
  int32_t a_type; /* also of b<i> */
  int32_t out0;
  int32_t out1;
  int32_t out2;
  int32_t rank0;
  int32_t rank1;
  int32_t rank2;
  float scale0;
  float scale1;
  float scale2;
  int32_t reserved;
} lm_lora_linear_backward_args;
LM_API int32_t lm_lora_linear_backward(lm_ctx *ctx, const lm_lora_linear_backward_args *args, lm_stream *stream);

/* lm_lora_down_backward: dA_i += ds_i^T x, the part of lm_lora_linear_backward that reads x, for callers that have x only later.
 *   da [R, K] f32 accumulated;  ds [T, R] as lm_lora_linear_backward left it on the same device, read;  x [T, K] read;
 *   type, a_type, rows, live and the ranks are those of that call */
typedef struct lm_lora_down_backward_args {
  uint32_t size;
  int32_t type;
  float *da;
  const float *ds;
  const void *x;
  const int32_t *live;
  int32_t rows;
  int32_t in; /* K */
  int32_t x_pitch;
  int32_t a_type;
  int32_t rank0;
  int32_t rank1;
  int32_t rank2;
  int32_t reserved;
} lm_lora_down_backward_args;
LM_API int32_t lm_lora_down_backward(lm_ctx *ctx, const lm_lora_down_backward_args *args, lm_stream *stream);

/* Attention ------------------------------------------------------------------------------------------------------ */

/* lm_attention_forward: causal grouped-query attention over packed documents, tiled with a running maximum, no T x T memory
 * (Dao 2023, arXiv:2307.08691). Query head h reads key-value head h / (Hq / Hk). Rows of one document see only that document.
 * window: row i of a document sees its rows i - window < j <= i, itself among them (as in Mistral, arXiv:2310.06825); what lies
 * before costs nothing. softcap: a scaled score s counts as cap tanh(s / cap) (as in Gemma 2, arXiv:2408.00118).
 *   o [T, Hq D] written;  lse [Hq, T] f32 written (log-sum-exp of the scores, scaled and capped, natural log);
 *   q [T, Hq D], k [T, Hk D], v [T, Hk D] read, all with row pitch qkv_pitch;
 *   cu_seqlens [documents + 1] i32 read, ascending from 0, equal around an empty document; no row from the last on is touched */
typedef struct lm_attention_forward_args {
  uint32_t size;
  int32_t type;
  void *o;
  float *lse;
  const void *q;
  const void *k;
  const void *v;
  const int32_t *cu_seqlens;
  int32_t rows; /* T */
  int32_t documents;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t qkv_pitch;
  int32_t o_pitch;
  float scale;
  int32_t window; /* 0 = all rows before */
  float softcap;  /* 0 = no cap */
} lm_attention_forward_args;
LM_API int32_t lm_attention_forward(lm_ctx *ctx, const lm_attention_forward_args *args, lm_stream *stream);

/* lm_attention_backward: gradients of lm_attention_forward, probabilities recomputed tile by tile from lse.
 *   dq [T, Hq D], dk [T, Hk D], dv [T, Hk D] written with row pitch dqkv_pitch;  delta [Hq, T] f32 workspace;
 *   grad_o, o [T, Hq D] read with row pitch o_pitch;  lse [Hq, T] read;  q, k, v, cu_seqlens, window, softcap as in forward;
 *   workspace  NULL, or 16-byte aligned memory of 4 (T D (Hq + 2 Hk) + (Hq + Hk) (T / 16 + documents) + 4) bytes: a GPU computes
 *              scores once then, not twice, where it gains (16 bits, D 32, 64, 128, no window or cap); few rows use the 2 Hk */
typedef struct lm_attention_backward_args {
  uint32_t size;
  int32_t type;
  void *dq;
  void *dk;
  void *dv;
  float *delta;
  const void *grad_o;
  const void *o;
  const float *lse;
  const void *q;
  const void *k;
  const void *v;
  const int32_t *cu_seqlens;
  int32_t rows; /* T */
  int32_t documents;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t qkv_pitch;
  int32_t dqkv_pitch;
  int32_t o_pitch;
  float scale;
  int32_t window;
  float softcap;
  int32_t reserved;
  void *workspace;
  int64_t workspace_bytes;
} lm_attention_backward_args;
LM_API int32_t lm_attention_backward(lm_ctx *ctx, const lm_attention_backward_args *args, lm_stream *stream);

/* lm_attention_cached_forward: append the live rows' k and v to the cache at row *past, then attend causally to everything
 * cached: row t sees cache rows 0 .. *past + t, or the last `window` of them. Prefill is *past = 0, decode is one row.
 *   o [T, Hq D] written;  k_cache, v_cache [capacity, Hk D] updated;  q, k, v read with row pitch qkv_pitch;
 *   past [1] i32 read, *past + live <= capacity (rows past the capacity are dropped) */
typedef struct lm_attention_cached_forward_args {
  uint32_t size;
  int32_t type;
  void *o;
  void *k_cache;
  void *v_cache;
  const void *q;
  const void *k;
  const void *v;
  const int32_t *past;
  const int32_t *live;
  int32_t rows;
  int32_t capacity;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t qkv_pitch;
  int32_t o_pitch;
  float scale;
  int32_t window;
  float softcap;
} lm_attention_cached_forward_args;
LM_API int32_t lm_attention_cached_forward(lm_ctx *ctx, const lm_attention_cached_forward_args *args, lm_stream *stream);
