/* Argument checks of every kernel: valid arguments pass, each single mistake is named. */
#include <math.h>

#include "core_test.h"

#include "../core/checks.h"

static lm_ctx *ctx;
static lm_stream *stream;
static _Alignas(64) double store[64];

#define P ((void *)store)
#define ODD ((void *)((uintptr_t)store + 1))
#define HALF ((void *)((uintptr_t)store + 2)) /* aligned for 2-byte types only */

/* The arguments `valid`, with one change, are refused with a text that goes on as `text` after "lm_<op>: ". */
#define REFUSES(op, change, text)                                                                  \
  do {                                                                                             \
    lm_##op##_args a = valid;                                                                      \
    a.change;                                                                                      \
    EXPECT(lm_check_##op(ctx, &a) == LM_ERR_ARGUMENT && failed_with(ctx, LM_ERR_ARGUMENT, "lm_" #op ": " text)); \
  } while (0)

/* ... and with one change that is allowed, they are accepted. */
#define ACCEPTS(op, change)                   \
  do {                                        \
    lm_##op##_args a = valid;                 \
    a.change;                                 \
    EXPECT(lm_check_##op(ctx, &a) == LM_OK);  \
  } while (0)

static void entry_points(void) {
  lm_scale_args a = {.size = sizeof a, .type = LM_F32, .y = P, .x = P, .n = 1};
  EXPECT(lm_scale(ctx, NULL, stream) == LM_ERR_ARGUMENT && failed_with(ctx, LM_ERR_ARGUMENT, "lm_scale: args must be"));
  EXPECT(lm_scale(ctx, &a, NULL) == LM_ERR_ARGUMENT && failed_with(ctx, LM_ERR_ARGUMENT, "lm_scale: stream is NULL"));
  EXPECT(lm_scale(NULL, &a, stream) == LM_ERR_ARGUMENT);
  EXPECT(lm_scale(ctx, (const lm_scale_args *)((uintptr_t)&a + 4), stream) == LM_ERR_ARGUMENT);
  a.size = 16;
  EXPECT(lm_scale(ctx, &a, stream) == LM_ERR_ARGUMENT);
  EXPECT(failed_with(ctx, LM_ERR_ARGUMENT, "lm_scale: args is of another version: size=16, wanted 40"));
  EXPECT(stats_of(ctx).kernel_launches == 0);
}

static void elementwise(void) {
  {
    lm_scale_args valid = {.size = sizeof valid, .type = LM_F32, .y = P, .x = P, .n = 4, .factor = 1};
    ACCEPTS(scale, type = LM_BF16);
    REFUSES(scale, type = 7, "type is not a float type: type=7");
    REFUSES(scale, type = LM_I32, "type is not a float type: type=3");
    REFUSES(scale, type = -1, "type is not");
    REFUSES(scale, n = 0, "n is too small: n=0: at least 1");
    REFUSES(scale, n = INT64_MAX, "n is too large: n=9223372036854775807");
    REFUSES(scale, y = NULL, "y is NULL");
    REFUSES(scale, x = NULL, "x is NULL");
    REFUSES(scale, x = HALF, "x is not aligned to 4 bytes: x=0x");
    valid.type = LM_F16;
    ACCEPTS(scale, x = HALF);
    REFUSES(scale, y = ODD, "y is not aligned to 2 bytes");
  }
  {
    lm_add_args valid = {.size = sizeof valid, .type = LM_F32, .y = P, .a = P, .b = P, .n = 4};
    ACCEPTS(add, type = LM_F16);
    REFUSES(add, type = LM_F64, "type is not");
    REFUSES(add, n = -1, "n is too small: n=-1");
    REFUSES(add, y = NULL, "y is NULL");
    REFUSES(add, a = NULL, "a is NULL");
    REFUSES(add, b = ODD, "b is not aligned");
  }
  {
    lm_cast_args valid = {.size = sizeof valid, .type = LM_BF16, .y = P, .x = HALF, .n = 4, .y_type = LM_F32};
    ACCEPTS(cast, n = 1);
    REFUSES(cast, type = 9, "type is not");
    REFUSES(cast, y_type = 9, "y_type is not");
    REFUSES(cast, n = 0, "n is too small");
    REFUSES(cast, y = HALF, "y is not aligned to 4");
    REFUSES(cast, x = ODD, "x is not aligned to 2");
  }
}

static void rows(void) {
  {
    lm_embedding_forward_args valid = {.size = sizeof valid, .y = P, .table = P, .ids = P, .rows = 2, .width = 4,
        .vocab = 8, .y_pitch = 4};
    ACCEPTS(embedding_forward, live = P);
    REFUSES(embedding_forward, table_type = 5, "table_type is not");
    REFUSES(embedding_forward, rows = 0, "rows is too small: rows=0");
    REFUSES(embedding_forward, width = 0, "width is too small");
    REFUSES(embedding_forward, vocab = 0, "vocab is too small");
    REFUSES(embedding_forward, y_pitch = 3, "y_pitch is smaller than the width of a row: y_pitch=3 width=4");
    REFUSES(embedding_forward, y = NULL, "y is NULL");
    REFUSES(embedding_forward, table = NULL, "table is NULL");
    REFUSES(embedding_forward, ids = NULL, "ids is NULL");
    REFUSES(embedding_forward, live = HALF, "live is not aligned");
  }
  {
    lm_gather_rows_args valid = {.size = sizeof valid, .y = P, .x = P, .index = P, .rows = 2, .width = 4,
        .source_rows = 8, .y_pitch = 4, .x_pitch = 4};
    ACCEPTS(gather_rows, y_pitch = 9);
    REFUSES(gather_rows, source_rows = 0, "source_rows is too small");
    REFUSES(gather_rows, x_pitch = 0, "x_pitch is smaller");
    REFUSES(gather_rows, y_pitch = -4, "y_pitch is smaller");
    REFUSES(gather_rows, index = NULL, "index is NULL");
    valid.source_rows = INT32_MAX;
    REFUSES(gather_rows, x_pitch = INT32_MAX, "the matrix is too large: rows=2147483647 x_pitch=2147483647");
  }
  {
    lm_argmax_args valid = {.size = sizeof valid, .out = P, .x = P, .rows = 2, .width = 4, .x_pitch = 4};
    ACCEPTS(argmax, live = P);
    REFUSES(argmax, out = NULL, "out is NULL");
    REFUSES(argmax, x = NULL, "x is NULL");
    REFUSES(argmax, x_pitch = 3, "x_pitch is smaller");
    REFUSES(argmax, rows = -1, "rows is too small");
  }
  {
    lm_rms_norm_forward_args valid = {.size = sizeof valid, .y = P, .x = P, .weight = P, .rows = 2, .width = 4,
        .y_pitch = 4, .x_pitch = 4};
    ACCEPTS(rms_norm_forward, weight_type = LM_BF16);
    REFUSES(rms_norm_forward, weight = NULL, "weight is NULL");
    REFUSES(rms_norm_forward, weight_type = 3, "weight_type is not");
    REFUSES(rms_norm_forward, y_pitch = 1, "y_pitch is smaller");
    REFUSES(rms_norm_forward, x_pitch = 1, "x_pitch is smaller");
    REFUSES(rms_norm_forward, width = -3, "width is too small");
  }
  {
    lm_rms_norm_backward_args valid = {.size = sizeof valid, .dx = P, .dy = P, .x = P, .weight = P, .rows = 2,
        .width = 4, .dx_pitch = 4, .dy_pitch = 4, .x_pitch = 4};
    ACCEPTS(rms_norm_backward, add_pitch = 0);
    REFUSES(rms_norm_backward, add = P, "add_pitch is smaller");
    REFUSES(rms_norm_backward, dx = NULL, "dx is NULL");
    REFUSES(rms_norm_backward, dy = NULL, "dy is NULL");
    REFUSES(rms_norm_backward, x = NULL, "x is NULL");
    REFUSES(rms_norm_backward, dx_pitch = 0, "dx_pitch is smaller");
    REFUSES(rms_norm_backward, dy_pitch = 0, "dy_pitch is smaller");
    valid.add_pitch = 4;
    ACCEPTS(rms_norm_backward, add = P);
    REFUSES(rms_norm_backward, add = ODD, "add is not aligned");
    REFUSES(rms_norm_backward, y = P, "y_pitch is smaller");
    valid.y_pitch = 4;
    REFUSES(rms_norm_backward, y = P, "y is dx");
    REFUSES(rms_norm_backward, y = ODD, "y is not aligned");
  }
  {
    lm_glu_forward_args valid = {.size = sizeof valid, .h = P, .gu = P, .rows = 2, .width = 4, .h_pitch = 4,
        .gu_pitch = 8};
    ACCEPTS(glu_forward, type = LM_F16);
    REFUSES(glu_forward, gu_pitch = 7, "gu_pitch is smaller than the width of a row: gu_pitch=7 width=8");
    REFUSES(glu_forward, h_pitch = 3, "h_pitch is smaller");
    REFUSES(glu_forward, h = NULL, "h is NULL");
    valid.width = INT32_MAX;
    valid.h_pitch = INT32_MAX;
    REFUSES(glu_forward, gu_pitch = INT32_MAX,
            "gu_pitch is smaller than the width of a row: gu_pitch=2147483647 width=4294967294");
  }
  {
    lm_glu_backward_args valid = {.size = sizeof valid, .dgu = P, .dh = P, .gu = P, .rows = 2, .width = 4,
        .dgu_pitch = 8, .dh_pitch = 4, .gu_pitch = 8};
    ACCEPTS(glu_backward, live = P);
    REFUSES(glu_backward, dgu_pitch = 7, "dgu_pitch is smaller");
    REFUSES(glu_backward, dh_pitch = 3, "dh_pitch is smaller");
    REFUSES(glu_backward, gu_pitch = 7, "gu_pitch is smaller");
    REFUSES(glu_backward, dh = NULL, "dh is NULL");
    REFUSES(glu_backward, h = P, "h_pitch is smaller");
    valid.h_pitch = 4;
    ACCEPTS(glu_backward, h = P);
    REFUSES(glu_backward, h = ODD, "h is not aligned");
  }
  {
    lm_rope_args valid = {.size = sizeof valid, .y = P, .x = P, .cos = P, .sin = P, .positions = P, .rows = 2,
        .width = 16, .heads = 2, .head_dim = 8, .position_count = 4, .y_pitch = 16, .x_pitch = 16, .direction = 1};
    ACCEPTS(rope, direction = -1);
    REFUSES(rope, direction = 0, "direction is neither 1 (forward) nor -1 (backward): direction=0");
    REFUSES(rope, head_dim = 7, "head_dim is odd: head_dim=7");
    REFUSES(rope, heads = 3, "the heads do not fit into a row: heads=3 head_dim=8 width=16");
    REFUSES(rope, heads = 0, "heads is too small");
    REFUSES(rope, position_count = 0, "position_count is too small");
    REFUSES(rope, positions = NULL, "positions is NULL");
    REFUSES(rope, cos = NULL, "cos is NULL");
    REFUSES(rope, sin = HALF, "sin is not aligned to 4");
  }
}

static void linear(void) {
  {
    lm_lora_down_args valid = {.size = sizeof valid, .s = P, .x = P, .a = P, .rows = 2, .in = 4, .s_pitch = 3,
        .x_pitch = 4, .rank0 = 1, .rank2 = 2};
    ACCEPTS(lora_down, a_type = LM_BF16);
    REFUSES(lora_down, s_pitch = 2, "s_pitch is smaller than the width of a row: s_pitch=2 width=3");
    REFUSES(lora_down, rank1 = -1, "rank1 is negative: rank1=-1");
    REFUSES(lora_down, rank1 = INT32_MAX, "the ranks are too large");
    REFUSES(lora_down, in = 0, "in is too small");
    REFUSES(lora_down, a = NULL, "a is NULL");
    valid.rank0 = valid.rank2 = 0;
    REFUSES(lora_down, rank1 = 0, "there is no adapter");
  }
  {
    lm_lora_linear_forward_args valid = {.size = sizeof valid, .y = P, .x = P, .w = P, .rows = 2, .in = 4, .out = 6,
        .y_pitch = 6, .x_pitch = 4, .w_pitch = 4, .out0 = 4, .out1 = 2};
    ACCEPTS(lora_linear_forward, live = P);
    REFUSES(lora_linear_forward, w_type = 3, "w_type is not");
    REFUSES(lora_linear_forward, out2 = 1, "the parts do not add up: out=6 out0=4 out1=2 out2=1");
    REFUSES(lora_linear_forward, out1 = -2, "out1 is negative");
    REFUSES(lora_linear_forward, rank2 = 1, "an adapter on a part without outputs: rank2=1 out2=0");
    REFUSES(lora_linear_forward, w_pitch = 3, "w_pitch is smaller");
    REFUSES(lora_linear_forward, y_pitch = 5, "y_pitch is smaller");
    REFUSES(lora_linear_forward, residual = P, "residual_pitch is smaller");
    REFUSES(lora_linear_forward, bias = ODD, "bias is not aligned");
    REFUSES(lora_linear_forward, w = NULL, "w is NULL");
    REFUSES(lora_linear_forward, rank0 = 1, "s_pitch is smaller");
    valid.s_pitch = 3;
    REFUSES(lora_linear_forward, rank0 = 1, "s is NULL");
    valid.s = P;
    valid.rank0 = 1;
    REFUSES(lora_linear_forward, rank1 = 2, "b0 is NULL");
    valid.b0 = P;
    ACCEPTS(lora_linear_forward, b_type = LM_BF16);
    REFUSES(lora_linear_forward, b_type = 8, "b_type is not");
    REFUSES(lora_linear_forward, rank1 = 2, "b1 is NULL");
    valid.bias = HALF;
    ACCEPTS(lora_linear_forward, bias_type = LM_F16);
    REFUSES(lora_linear_forward, bias_type = 12, "bias_type is not");
  }
  {
    lm_lora_linear_backward_args valid = {.size = sizeof valid, .dx = P, .dy = P, .w = P, .rows = 2, .in = 4, .out = 6,
        .dx_pitch = 4, .dy_pitch = 6, .w_pitch = 4, .out0 = 6};
    ACCEPTS(lora_linear_backward, type = LM_BF16);
    REFUSES(lora_linear_backward, dx = NULL, "nothing to compute");
    REFUSES(lora_linear_backward, dx_pitch = 3, "dx_pitch is smaller");
    REFUSES(lora_linear_backward, dy = NULL, "dy is NULL");
    REFUSES(lora_linear_backward, dy_pitch = 5, "dy_pitch is smaller");
    REFUSES(lora_linear_backward, w = NULL, "w is NULL");
    REFUSES(lora_linear_backward, rank0 = 2, "s_pitch is smaller");
    valid.rank0 = 2;
    valid.x_pitch = 4;
    valid.s_pitch = 2;
    valid.x = valid.s = valid.a = valid.b0 = P;
    valid.da = valid.db0 = valid.ds = P;
    ACCEPTS(lora_linear_backward, dx = NULL);
    REFUSES(lora_linear_backward, s_pitch = 1, "s_pitch is smaller");
    REFUSES(lora_linear_backward, x = NULL, "one of x and da is NULL");
    REFUSES(lora_linear_backward, x_pitch = 3, "x_pitch is smaller");
    REFUSES(lora_linear_backward, s = NULL, "s is NULL");
    REFUSES(lora_linear_backward, a = NULL, "a is NULL");
    REFUSES(lora_linear_backward, da = NULL, "one of x and da is NULL");
    REFUSES(lora_linear_backward, da = HALF, "da is not aligned");
    REFUSES(lora_linear_backward, ds = HALF, "ds is not aligned");
    REFUSES(lora_linear_backward, b0 = NULL, "b0 is NULL");
    REFUSES(lora_linear_backward, db0 = NULL, "db0 is NULL");
    REFUSES(lora_linear_backward, a_type = 6, "a_type is not");
    valid.x = NULL, valid.da = NULL, valid.x_pitch = 0;
    ACCEPTS(lora_linear_backward, dx = NULL);
  }
  {
    lm_lora_down_backward_args valid = {.size = sizeof valid, .da = P, .ds = P, .x = P, .rows = 2, .in = 4, .x_pitch = 4,
        .rank0 = 2};
    ACCEPTS(lora_down_backward, type = LM_BF16);
    REFUSES(lora_down_backward, da = NULL, "da is NULL");
    REFUSES(lora_down_backward, ds = NULL, "ds is NULL");
    REFUSES(lora_down_backward, x = NULL, "x is NULL");
    REFUSES(lora_down_backward, x_pitch = 3, "x_pitch is smaller");
    REFUSES(lora_down_backward, rank0 = 0, "there is no adapter");
    REFUSES(lora_down_backward, rank1 = -1, "rank1 is negative");
    REFUSES(lora_down_backward, a_type = 9, "a_type is not");
    REFUSES(lora_down_backward, live = ODD, "live is not aligned");
  }
}

static void attention(void) {
  {
    lm_attention_forward_args valid = {.size = sizeof valid, .o = P, .lse = P, .q = P, .k = P, .v = P, .cu_seqlens = P,
        .rows = 4, .documents = 1, .heads = 4, .kv_heads = 2, .head_dim = 8, .qkv_pitch = 64, .o_pitch = 32,
        .scale = 1};
    ACCEPTS(attention_forward, kv_heads = 4);
    REFUSES(attention_forward, kv_heads = 3, "heads is no multiple of kv_heads: heads=4 kv_heads=3");
    REFUSES(attention_forward, kv_heads = 0, "kv_heads is too small");
    REFUSES(attention_forward, head_dim = 257, "head_dim is too large: head_dim=257: at most 256");
    REFUSES(attention_forward, qkv_pitch = 31, "qkv_pitch is smaller than the width of a row: qkv_pitch=31 width=32");
    REFUSES(attention_forward, o_pitch = 31, "o_pitch is smaller");
    REFUSES(attention_forward, documents = 0, "documents is too small");
    REFUSES(attention_forward, lse = NULL, "lse is NULL");
    REFUSES(attention_forward, cu_seqlens = NULL, "cu_seqlens is NULL");
    ACCEPTS(attention_forward, window = INT32_MAX);
    REFUSES(attention_forward, window = -1, "window is too small: window=-1: at least 0");
    ACCEPTS(attention_forward, softcap = 50);
    REFUSES(attention_forward, softcap = -1, "softcap is not a finite number of 0 or more: softcap=-1");
    REFUSES(attention_forward, softcap = NAN, "softcap is not a finite number");
    REFUSES(attention_forward, softcap = INFINITY, "softcap is not a finite number");
  }
  {
    lm_attention_backward_args valid = {.size = sizeof valid, .dq = P, .dk = P, .dv = P, .delta = P, .grad_o = P,
        .o = P, .lse = P, .q = P, .k = P, .v = P, .cu_seqlens = P, .rows = 4, .documents = 1, .heads = 4, .kv_heads = 2,
        .head_dim = 8, .qkv_pitch = 64, .dqkv_pitch = 64, .o_pitch = 32, .scale = 1};
    ACCEPTS(attention_backward, type = LM_F16);
    REFUSES(attention_backward, dqkv_pitch = 8, "dqkv_pitch is smaller");
    REFUSES(attention_backward, dk = NULL, "dk is NULL");
    REFUSES(attention_backward, delta = NULL, "delta is NULL");
    REFUSES(attention_backward, grad_o = NULL, "grad_o is NULL");
    REFUSES(attention_backward, heads = 5, "heads is no multiple");
    REFUSES(attention_backward, window = -1, "window is too small");
    REFUSES(attention_backward, softcap = -1, "softcap is not a finite number");
  }
  {
    lm_attention_cached_forward_args valid = {.size = sizeof valid, .o = P, .k_cache = P, .v_cache = P, .q = P, .k = P,
        .v = P, .past = P, .rows = 1, .capacity = 16, .heads = 4, .kv_heads = 2, .head_dim = 8, .qkv_pitch = 64,
        .o_pitch = 32, .scale = 1};
    ACCEPTS(attention_cached_forward, live = P);
    REFUSES(attention_cached_forward, capacity = 0, "capacity is too small");
    REFUSES(attention_cached_forward, k_cache = NULL, "k_cache is NULL");
    REFUSES(attention_cached_forward, past = NULL, "past is NULL");
    REFUSES(attention_cached_forward, window = -1, "window is too small");
    REFUSES(attention_cached_forward, softcap = -1, "softcap is not a finite number");
  }
}

static void training(void) {
  {
    lm_linear_cross_entropy_args valid = {.size = sizeof valid, .loss = P, .logits = P, .gathered = P, .x = P, .w = P,
        .label_rows = P, .label_ids = P, .batch = P, .rows = 4, .width = 8, .vocab = 16, .chunk_rows = 4, .x_pitch = 8,
        .w_pitch = 8};
    ACCEPTS(linear_cross_entropy, chunk = 3);
    REFUSES(linear_cross_entropy, chunk = -1, "chunk is too small: chunk=-1: at least 0");
    REFUSES(linear_cross_entropy, chunk_rows = 0, "chunk_rows is too small");
    REFUSES(linear_cross_entropy, vocab = 0, "vocab is too small");
    REFUSES(linear_cross_entropy, dx = P, "dx_pitch is smaller");
    REFUSES(linear_cross_entropy, w_pitch = 7, "w_pitch is smaller");
    REFUSES(linear_cross_entropy, batch = NULL, "batch is NULL");
    REFUSES(linear_cross_entropy, label_ids = NULL, "label_ids is NULL");
    valid.vocab = INT32_MAX;
    valid.w_pitch = valid.width;
    REFUSES(linear_cross_entropy, chunk_rows = INT32_MAX,
            "the logits are too large: chunk_rows=2147483647 vocab=2147483647");
  }
  {
    lm_loss_sum_args valid = {.size = sizeof valid, .metrics = P, .loss = P, .batch = P, .rows = 4};
    ACCEPTS(loss_sum, rows = 1);
    REFUSES(loss_sum, rows = 0, "rows is too small");
    REFUSES(loss_sum, metrics = NULL, "metrics is NULL");
    REFUSES(loss_sum, metrics = (lm_step_metrics *)((uintptr_t)P + 4), "metrics is not aligned to 8");
    REFUSES(loss_sum, loss = NULL, "loss is NULL");
  }
  {
    lm_grad_norm_args valid = {.size = sizeof valid, .metrics = P, .partial = P, .state = P, .g = P, .control = P, .n = 4};
    ACCEPTS(grad_norm, n = 1);
    ACCEPTS(grad_norm, scaler = P);
    REFUSES(grad_norm, state = NULL, "state is NULL");
    REFUSES(grad_norm, scaler = HALF, "scaler is not aligned to 4");
    REFUSES(grad_norm, found = HALF, "found is not aligned to 4");
    REFUSES(grad_norm, n = 0, "n is too small");
    REFUSES(grad_norm, partial = NULL, "partial is NULL");
    REFUSES(grad_norm, control = NULL, "control is NULL");
  }
  {
    lm_adamw_args valid = {.size = sizeof valid, .p = P, .m = P, .v = P, .g = P, .control = P, .metrics = P, .n = 4};
    ACCEPTS(adamw, copy_type = 77); /* means nothing without a copy */
    REFUSES(adamw, n = 0, "n is too small");
    REFUSES(adamw, p = NULL, "p is NULL");
    REFUSES(adamw, m = HALF, "m is not aligned to 4");
    REFUSES(adamw, metrics = NULL, "metrics is NULL");
    valid.copy = HALF;
    ACCEPTS(adamw, copy_type = LM_BF16);
    REFUSES(adamw, copy_type = LM_F32, "copy is not aligned to 4");
    REFUSES(adamw, copy_type = 77, "copy_type is not");
  }
  {
    lm_scaler_set_args valid = {.size = sizeof valid, .scaler = P, .scale = 1, .growth_factor = 2, .backoff_factor = 0.5f,
                                .growth_interval = 1};
    ACCEPTS(scaler_set, growth_tracker = 3);
    REFUSES(scaler_set, scaler = NULL, "scaler is NULL");
    REFUSES(scaler_set, scale = 0, "wanted scale > 0");
    REFUSES(scaler_set, growth_factor = 1, "wanted scale > 0, growth_factor > 1");
    REFUSES(scaler_set, backoff_factor = 1, "wanted scale > 0, growth_factor > 1");
    REFUSES(scaler_set, growth_interval = 0, "growth_interval is too small");
  }
  {
    lm_scaler_scale_args valid = {.size = sizeof valid, .y = P, .x = P, .scaler = P, .n = 4};
    ACCEPTS(scaler_scale, n = 1);
    REFUSES(scaler_scale, x = NULL, "x is NULL");
  }
  {
    lm_scaler_unscale_args valid = {.size = sizeof valid, .g = P, .found = P, .scaler = P, .n = 4};
    ACCEPTS(scaler_unscale, n = 1);
    REFUSES(scaler_unscale, found = NULL, "found is NULL");
    REFUSES(scaler_unscale, n = 0, "n is too small");
  }
  {
    lm_scaler_update_args valid = {.size = sizeof valid, .scaler = P, .found = P, .count = 4};
    ACCEPTS(scaler_update, new_scale = 2);
    REFUSES(scaler_update, count = 0, "count is too small");
    REFUSES(scaler_update, found = NULL, "found is NULL");
  }
}

int main(void) {
  ctx = open_device("cpu");
  stream = lm_stream_create(ctx, 0);
  test("lm_<op>() checks context, stream, alignment and size of its arguments", entry_points);
  test("lm_scale(), lm_add() and lm_cast() name bad arguments", elementwise);
  test("lm_<row kernel>() names bad arguments", rows);
  test("lm_lora_*() names bad arguments", linear);
  test("lm_attention_*() names bad arguments", attention);
  test("lm_linear_cross_entropy(), lm_loss_sum(), lm_grad_norm(), lm_adamw() and lm_scaler_*() name bad arguments", training);
  lm_stream_destroy(stream);
  lm_ctx_destroy(ctx);
  return summary();
}
