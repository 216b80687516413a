/* gemm.h: matrix products in up to three parts that share their rows.
 *
 * Part i:  y_i [rows, columns_i] = factor_i * [a0 | a1] [b0 | b1]^T + bias + residual
 * The contraction runs over two operands one after the other, so a LoRA term is just more steps of the same accumulation:
 * forward [x | s_i] [W_i | B_i]^T, backward [dy | ds] [W ; A]. */
#ifndef LM_CPU_GEMM_H
#define LM_CPU_GEMM_H

#include "cpu.h"

typedef struct lm_matrix {
  const void *data;
  int64_t pitch;
  int32_t type;
} lm_matrix;

typedef struct lm_gemm_part {
  int64_t columns;   /* 0 = no such part */
  int64_t depth[2];  /* steps of the contraction over each operand; [1] may be 0 */
  lm_matrix left[2]; /* [rows, depth] */
  lm_matrix right[2];
  const void *bias;     /* [columns] or NULL */
  const void *residual; /* [rows, columns] or NULL */
  void *y;
  float factor;
} lm_gemm_part;

typedef struct lm_gemm {
  lm_gemm_part part[3];
  int64_t rows;
  int64_t planned_rows; /* rows at plan time: chooses the algorithm, so that bits do not depend on `live` */
  int64_t y_pitch;
  int64_t residual_pitch;
  const int32_t *left_index; /* row r of left[0] is left_index[r], or NULL */
  const int32_t *y_index;    /* row r of y is y_index[r], or NULL */
  int32_t y_type;            /* also of residual */
  int32_t bias_type;
  int32_t transposed; /* right is [columns, depth], else [depth, columns] */
  int32_t reserved;
  /* filled by lm_gemm_plan */
  const lm_isa *isa;
  float *shared;        /* packed panels, or NULL: every tile packs its own */
  int64_t panels;       /* in all parts */
  int64_t first, last;  /* panels of this pass */
  int64_t panel_floats; /* between packed panels */
  int64_t row_blocks;   /* grid of tiles: rows */
  int64_t tile_panels;  /* most panels of a tile */
} lm_gemm;

/* Row counts up to this one take lm_gemm_few_rows if the right operand is transposed. */
#define LM_FEW_ROWS 8

/* lm_gemm_run: the whole product. */
void lm_gemm_run(lm_cpu *cpu, lm_gemm *g);

/* lm_gemm_few_rows: for decoding: reads the right operand once, in place.
 * @return 0 if the left operand is too long for shared scratch: nothing was done */
int32_t lm_gemm_few_rows(lm_cpu *cpu, const lm_gemm *g);

/* The steps of lm_gemm_run, for kernels that fill a parallel region with several kinds of tasks. */
void lm_gemm_plan(lm_cpu *cpu, lm_gemm *g, int32_t private_panels);
int64_t lm_gemm_pack_tasks(const lm_gemm *g);
void lm_gemm_pack_task(const lm_gemm *g, int64_t task);
int64_t lm_gemm_tile_tasks(const lm_gemm *g);
void lm_gemm_tile_task(const lm_gemm *g, int64_t task, float *scratch);

/* lm_gemm_next: move to the next pass. @return 0 when the product is complete */
int32_t lm_gemm_next(lm_gemm *g);

#endif
