/* loramem_training.h: the kernels that training alone needs: loss, optimizer and gradient scaler. Included by loramem.h.
 * Conventions and the structs in device memory (lm_batch_header, lm_optimizer_control, ...) are those of loramem_kernels.h. */

/* Loss ----------------------------------------------------------------------------------------------------------- */

/* lm_linear_cross_entropy: for the labelled rows of one chunk, logits = x W^T, loss = lse(logits) - logit[label], and, if dx
 * is given, dx[row] = loss_weight * scale * (softmax - onehot) W. The gradient of the logits replaces them in place; only
 * chunk_rows of them exist at a time. Chunk c covers the labelled rows [c * chunk_rows, min(labelled, (c + 1) * chunk_rows)).
 *   loss [labelled] f32 written for the chunk's rows;  dx [T, C] written at the labelled rows only, NULL = evaluation;
 *   logits [chunk_rows, V] of type, workspace;
 *   gathered [chunk_rows, C] of type, workspace, NULL on the CPU, which reads labelled rows where they are;
 *   x [T, C] read;  w [V, C] of w_type read;  label_rows, label_ids [M] i32 read;  batch [1] lm_batch_header read;
 *   scaler [1] read for its scale, NULL = a scale of 1 */
typedef struct lm_linear_cross_entropy_args {
  uint32_t size;
  int32_t type;
  float *loss;
  void *dx;
  void *logits;
  void *gathered;
  const void *x;
  const void *w;
  const int32_t *label_rows;
  const int32_t *label_ids;
  const lm_batch_header *batch;
  int32_t rows;
  int32_t width; /* C */
  int32_t vocab; /* V */
  int32_t chunk;
  int32_t chunk_rows;
  int32_t dx_pitch;
  int32_t x_pitch;
  int32_t w_pitch;
  int32_t w_type;
  int32_t reserved;
  const lm_scaler *scaler;
} lm_linear_cross_entropy_args;
LM_API int32_t lm_linear_cross_entropy(lm_ctx *ctx, const lm_linear_cross_entropy_args *args, lm_stream *stream);

/* lm_loss_sum: metrics->loss_sum += sum of loss[0 .. labelled), in a fixed order, in double precision.
 *   metrics [1] updated;  loss [M] f32 read;  batch [1] read */
typedef struct lm_loss_sum_args {
  uint32_t size;
  int32_t type;
  lm_step_metrics *metrics;
  const float *loss;
  const lm_batch_header *batch;
  int32_t rows; /* M */
  int32_t reserved;
} lm_loss_sum_args;
LM_API int32_t lm_loss_sum(lm_ctx *ctx, const lm_loss_sum_args *args, lm_stream *stream);

/* Optimizer ------------------------------------------------------------------------------------------------------ */

/* lm_grad_norm: the L2 norm of a gradient, and with it everything that is decided about an optimizer step, so that the host
 * need not wait for it. The order is fixed: (1) is any element of g, as it stands, not finite? (2) the norm of g / scale, the
 * clip factor min(1, max_norm / (norm + 1e-6)), the learning rate of the schedule at state->step; (3) the update is skipped if
 * (1), if *found is not 0, or if the scaled-down gradient or its square would not be finite in f32; (4) state->step or
 * state->skipped is counted; (5) the scaler takes its step.
 *   metrics [1] written but for loss_sum;  partial [ceil(n / 65536)] f64 workspace;  state [1] updated;
 *   scaler [1] updated, NULL = a scale of 1 that never changes;
 *   found [1] f32 read, NULL = 0: not 0 says that another part of the gradient is not finite;
 *   g [n] f32 read;  control [1] read */
typedef struct lm_grad_norm_args {
  uint32_t size;
  int32_t type;
  lm_step_metrics *metrics;
  double *partial;
  lm_optimizer_state *state;
  lm_scaler *scaler;
  const float *found;
  const float *g;
  const lm_optimizer_control *control;
  int64_t n;
} lm_grad_norm_args;
LM_API int32_t lm_grad_norm(lm_ctx *ctx, const lm_grad_norm_args *args, lm_stream *stream);

/* lm_adamw: one AdamW update of a flat arena (Loshchilov & Hutter 2017, arXiv:1711.05101), then g = 0. If metrics->skipped,
 * p, m, v and copy keep every bit and g is zeroed all the same.
 *   p, m, v [n] f32 updated;  g [n] f32 read and zeroed;  copy [n] of copy_type written with the new p, or NULL;
 *   control, metrics [1] read, as lm_grad_norm left them */
typedef struct lm_adamw_args {
  uint32_t size;
  int32_t type;
  float *p;
  float *m;
  float *v;
  float *g;
  void *copy;
  const lm_optimizer_control *control;
  const lm_step_metrics *metrics;
  int64_t n;
  int32_t copy_type;
  int32_t reserved;
} lm_adamw_args;
LM_API int32_t lm_adamw(lm_ctx *ctx, const lm_adamw_args *args, lm_stream *stream);

/* Gradient scaler ------------------------------------------------------------------------------------------------- */

/* lm_scaler_set: writes a scaler; its values travel with the call.   scaler [1] written */
typedef struct lm_scaler_set_args {
  uint32_t size;
  int32_t type;
  lm_scaler *scaler;
  float scale;
  int32_t growth_tracker;
  float growth_factor;
  float backoff_factor;
  int32_t growth_interval;
  float min_scale;
  float max_scale;
  int32_t reserved;
} lm_scaler_set_args;
LM_API int32_t lm_scaler_set(lm_ctx *ctx, const lm_scaler_set_args *args, lm_stream *stream);

/* lm_scaler_scale: y = x * scale.   y [n] f32 written, may be x;  x [n] f32 read;  scaler [1] read */
typedef struct lm_scaler_scale_args {
  uint32_t size;
  int32_t type;
  float *y;
  const float *x;
  const lm_scaler *scaler;
  int64_t n;
} lm_scaler_scale_args;
LM_API int32_t lm_scaler_scale(lm_ctx *ctx, const lm_scaler_scale_args *args, lm_stream *stream);

/* lm_scaler_unscale: *found = 1 if an element of g is not finite, then g /= scale (multiplied by the f32 nearest to 1 / scale).
 *   g [n] f32 updated;  found [1] f32 written only if an element is not finite;  scaler [1] read */
typedef struct lm_scaler_unscale_args {
  uint32_t size;
  int32_t type;
  float *g;
  float *found;
  const lm_scaler *scaler;
  int64_t n;
} lm_scaler_unscale_args;
LM_API int32_t lm_scaler_unscale(lm_ctx *ctx, const lm_scaler_unscale_args *args, lm_stream *stream);

/* lm_scaler_update: the scaler takes its step, as if its gradient was not finite where any of found is not 0; then found = 0.
 *   scaler [1] updated;  found [count] f32 read and zeroed;
 *   new_scale  not 0: the scale becomes this instead, and nothing else changes */
typedef struct lm_scaler_update_args {
  uint32_t size;
  int32_t type;
  lm_scaler *scaler;
  float *found;
  int32_t count;
  float new_scale;
} lm_scaler_update_args;
LM_API int32_t lm_scaler_update(lm_ctx *ctx, const lm_scaler_update_args *args, lm_stream *stream);
