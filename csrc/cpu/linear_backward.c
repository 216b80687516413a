/* linear_backward.c: gradients of a linear group, in two parallel regions:
 *   1  ds_i = scale_i dy_i B_i by rows;  dB_i += dy_i^T s_i by output columns;  W and A are packed for region 2
 *   2  dx = [dy | ds] [W ; A] by tiles;  dA += ds^T x by input columns
 * The sums over tokens (dB, dA) run over all tokens inside one task, in order. */
#include <string.h>

#include "gemm.h"
#include "kernels.h"

/* Thread scratch of a token sum. */
enum {
  TOKENS = 128,     /* visited at a time */
  SUM_RANKS = 32,   /* most rows of the result in a task */
  SUM_COLUMNS = 64, /* most columns: whole cache lines of each row, and few rows per page, want them wide */
  LEFT_FLOATS = TOKENS * LM_PITCH,
  RIGHT_FLOATS = TOKENS * SUM_COLUMNS,
};
_Static_assert(LEFT_FLOATS + RIGHT_FLOATS + SUM_RANKS * SUM_COLUMNS <= LM_THREAD_FLOATS, "scratch of a token sum");

/* A sum over tokens: out[r][n] += sum_t left[t][r] right[t][n], with right [rows, columns] the wide operand. */
typedef struct token_sum {
  const lm_isa *isa;
  lm_matrix left, right;
  float *out;
  int64_t rows, ranks, columns;
  int64_t rank_step, column_step;     /* where out[r][n] lies */
  int64_t rank_groups, column_groups; /* tasks: filled by sum_plan */
} token_sum;

/* sum_plan: as wide as leaves every thread two tasks. @return the number of tasks */
static int64_t sum_plan(token_sum *s, int64_t threads) {
  const int64_t panels = lm_ceil_div(s->columns, s->isa->nr), most = SUM_COLUMNS / s->isa->nr;
  s->rank_groups = lm_ceil_div(s->ranks, SUM_RANKS);
  s->column_groups = lm_max(lm_ceil_div(panels, most), lm_min(panels, 2 * threads));
  return s->rank_groups * s->column_groups;
}

static void sum_task(const token_sum *s, int64_t task, float *scratch) {
  const lm_isa *isa = s->isa;
  const int64_t nr = isa->nr, panels = lm_ceil_div(s->columns, nr);
  const int64_t group = task % s->rank_groups, strip = task / s->rank_groups;
  const int64_t begin = panels * strip / s->column_groups * nr,
                columns = lm_min(panels * (strip + 1) / s->column_groups * nr, s->columns) - begin;
  const int64_t r0 = s->ranks * group / s->rank_groups, ranks = s->ranks * (group + 1) / s->rank_groups - r0;
  const int64_t tiles = lm_ceil_div(ranks, isa->mr);
  float *wide = scratch + LEFT_FLOATS, *sum = wide + RIGHT_FLOATS;
  memset(sum, 0, sizeof(float) * SUM_RANKS * SUM_COLUMNS);
  for (int64_t t = 0; t < s->rows; t += TOKENS) {
    const int64_t count = lm_min(TOKENS, s->rows - t);
    const float *left = scratch;
    int64_t pitch = LM_PITCH;
    if (s->left.type == LM_F32) {
      pitch = s->left.pitch;
      left = (const float *)s->left.data + t * pitch + r0;
    } else {
      isa->load_a(scratch, lm_at(s->left.type, s->left.data, t * s->left.pitch + r0), s->left.type, s->left.pitch, NULL,
                  count, ranks, 1.0f);
    }
    isa->pack_rows(wide, TOKENS * nr, lm_at(s->right.type, s->right.data, t * s->right.pitch + begin), s->right.type,
                   s->right.pitch, columns, count, 1.0f);
    for (int64_t n = 0; n < columns; n += nr)
      for (int64_t i = 0; i < tiles; i++) {
        const int64_t r = ranks * i / tiles, end = ranks * (i + 1) / tiles;
        isa->outer(sum + n * SUM_RANKS + r * nr, left + r, pitch, wide + n * TOKENS, end - r, lm_min(nr, columns - n),
                   count);
      }
  }
  for (int64_t n = 0; n < columns; n++)
    for (int64_t r = 0; r < ranks; r++)
      s->out[(r0 + r) * s->rank_step + (begin + n) * s->column_step] += sum[n / nr * nr * SUM_RANKS + r * nr + n % nr];
}

typedef struct backward_job {
  lm_gemm ds, dx;
  token_sum da, db[3];
  int64_t ds_tasks, db_tasks[3], dx_tasks, da_tasks;
} backward_job;

static void first_region(const void *pointer, int64_t task, float *scratch) {
  const backward_job *j = pointer;
  if (task < j->ds_tasks) {
    lm_gemm_tile_task(&j->ds, task, scratch);
    return;
  }
  task -= j->ds_tasks;
  for (int32_t i = 0; i < 3; i++) {
    if (task < j->db_tasks[i]) {
      sum_task(&j->db[i], task, scratch);
      return;
    }
    task -= j->db_tasks[i];
  }
  lm_gemm_pack_task(&j->dx, task);
}

static void second_region(const void *pointer, int64_t task, float *scratch) {
  const backward_job *j = pointer;
  if (task < j->dx_tasks) lm_gemm_tile_task(&j->dx, task, scratch);
  else sum_task(&j->da, task - j->dx_tasks, scratch);
}

static void pack_task(const void *pointer, int64_t task, float *scratch) {
  (void)scratch;
  lm_gemm_pack_task(&((const backward_job *)pointer)->dx, task);
}

/* da_sum: dA += ds^T x; the pitch of ds is the sum of the ranks. */
static token_sum da_sum(lm_cpu *cpu, float *da, lm_matrix ds, lm_matrix x, int64_t rows, int64_t in) {
  return (token_sum){.isa = lm_cpu_table(cpu),
                     .left = ds,
                     .right = x,
                     .out = da,
                     .rows = rows,
                     .ranks = ds.pitch,
                     .columns = in,
                     .rank_step = in,
                     .column_step = 1};
}

/* fill_adapters: ds, dA and dB of each part. */
static void fill_adapters(lm_cpu *cpu, backward_job *j, const lm_lora_linear_backward_args *args, int64_t rows,
                          int64_t ranks) {
  const int32_t out[3] = {args->out0, args->out1, args->out2}, rank[3] = {args->rank0, args->rank1, args->rank2};
  const float scale[3] = {args->scale0, args->scale1, args->scale2};
  const void *b[3] = {args->b0, args->b1, args->b2};
  float *db[3] = {args->db0, args->db1, args->db2};
  const lm_isa *isa = lm_cpu_table(cpu);
  int64_t column = 0, offset = 0;
  int32_t used = 0;
  for (int32_t i = 0; i < 3; i++) {
    if (rank[i] > 0) {
      const lm_matrix dy = {lm_at(args->type, args->dy, column), args->dy_pitch, args->type};
      lm_gemm_part *part = &j->ds.part[used++];
      part->columns = rank[i];
      part->depth[0] = out[i];
      part->left[0] = dy;
      part->right[0] = (lm_matrix){b[i], rank[i], args->a_type};
      part->y = args->ds + offset;
      part->factor = scale[i];
      j->db[i] = (token_sum){.isa = isa,
                             .left = {lm_at(args->type, args->s, offset), args->s_pitch, args->type},
                             .right = dy,
                             .out = db[i],
                             .rows = rows,
                             .ranks = rank[i],
                             .columns = out[i],
                             .rank_step = 1,
                             .column_step = rank[i]};
      j->db_tasks[i] = sum_plan(&j->db[i], lm_cpu_threads(cpu));
    }
    column += out[i];
    offset += rank[i];
  }
  j->ds.rows = rows;
  j->ds.y_pitch = ranks;
  j->ds.y_type = LM_F32;
  lm_gemm_plan(cpu, &j->ds, 1);
  j->ds_tasks = lm_gemm_tile_tasks(&j->ds);
  if (args->da == NULL) return;
  const lm_matrix ds = {args->ds, ranks, LM_F32}, x = {args->x, args->x_pitch, args->type};
  j->da = da_sum(cpu, args->da, ds, x, rows, args->in);
  j->da_tasks = sum_plan(&j->da, lm_cpu_threads(cpu));
}

void lm_cpu_lora_linear_backward(lm_cpu *cpu, const lm_lora_linear_backward_args *args) {
  const int64_t rows = lm_live_rows(args->live, args->rows), ranks = (int64_t)args->rank0 + args->rank1 + args->rank2;
  if (rows == 0) return;
  backward_job j = {0};
  lm_cpu_enter(cpu);
  if (ranks > 0) fill_adapters(cpu, &j, args, rows, ranks);
  int64_t pack_tasks = 0;
  if (args->dx != NULL) {
    j.dx = (lm_gemm){.rows = rows, .y_pitch = args->dx_pitch, .y_type = args->type};
    j.dx.part[0] = (lm_gemm_part){.columns = args->in,
                                  .depth = {args->out, ranks},
                                  .left = {{args->dy, args->dy_pitch, args->type}, {args->ds, ranks, LM_F32}},
                                  .right = {{args->w, args->w_pitch, args->w_type}, {args->a, args->in, args->a_type}},
                                  .y = args->dx,
                                  .factor = 1.0f};
    lm_gemm_plan(cpu, &j.dx, 0);
    pack_tasks = lm_gemm_pack_tasks(&j.dx);
    j.dx_tasks = lm_gemm_tile_tasks(&j.dx);
  }
  lm_cpu_parallel(cpu, j.ds_tasks + j.db_tasks[0] + j.db_tasks[1] + j.db_tasks[2] + pack_tasks, first_region, &j);
  lm_cpu_parallel(cpu, j.dx_tasks + j.da_tasks, second_region, &j);
  while (args->dx != NULL && lm_gemm_next(&j.dx)) { /* panels that did not fit into shared scratch at once */
    j.dx_tasks = lm_gemm_tile_tasks(&j.dx);
    lm_cpu_parallel(cpu, lm_gemm_pack_tasks(&j.dx), pack_task, &j);
    lm_cpu_parallel(cpu, j.dx_tasks, second_region, &j);
  }
  lm_cpu_leave(cpu);
}

static void da_task(const void *pointer, int64_t task, float *scratch) { sum_task(pointer, task, scratch); }

void lm_cpu_lora_down_backward(lm_cpu *cpu, const lm_lora_down_backward_args *args) {
  const int64_t rows = lm_live_rows(args->live, args->rows), ranks = (int64_t)args->rank0 + args->rank1 + args->rank2;
  if (rows == 0) return;
  const lm_matrix ds = {args->ds, ranks, LM_F32}, x = {args->x, args->x_pitch, args->type};
  lm_cpu_enter(cpu);
  token_sum da = da_sum(cpu, args->da, ds, x, rows, args->in);
  const int64_t tasks = sum_plan(&da, lm_cpu_threads(cpu));
  lm_cpu_parallel(cpu, tasks, da_task, &da);
  lm_cpu_leave(cpu);
}
