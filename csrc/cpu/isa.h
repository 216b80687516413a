/* isa.h: the table of vector routines. One source (isa_*.h) is compiled for each instruction set (isa_portable.c,
 * isa_avx2.c, isa_avx512.c); lm_cpu_create picks one table.
 *
 * Every output element is a chain of operations whose order depends on the table and the shape alone, never on how rows are
 * grouped into tiles: that is what makes results independent of threads and of `live`. Fused multiply-adds are written out;
 * the compiler must not form others (-ffp-contract=off), or grouping could change bits.
 *
 * Tile layouts, all f32:
 *   A tile   [rows][LM_PITCH]        rows of the left operand; the odd number of cache lines keeps rows in different sets
 *   B panel  [depth][nr]             nr columns of the right operand, zero-padded
 *   C tile   [panels][LM_ROWS][nr]   sums */
#ifndef LM_CPU_ISA_H
#define LM_CPU_ISA_H

#include <stdint.h>

enum {
  LM_ROWS = 128,  /* most rows of a tile */
  LM_DEPTH = 192, /* most steps between two visits of the C tile: a B panel and a few A rows fit the L1 cache */
  LM_PITCH = 272, /* room for the largest head of attention as well */
  LM_MAX_NR = 32, /* columns of a panel in the widest table */
};

struct lm_adamw_step; /* optimizer.h */

typedef struct lm_isa {
  const char *name;
  int32_t lanes;
  int32_t nr; /* columns of a panel */
  int32_t mr; /* rows of a register tile; also the most rows of `outer` */

  /* Elementwise, n elements */
  void (*cast)(void *y, int32_t y_type, const void *x, int32_t x_type, int64_t n);
  void (*scale)(int32_t type, void *y, const void *x, int64_t n, float factor);
  void (*add)(int32_t type, void *y, const void *a, const void *b, int64_t n);
  void (*glu_forward)(int32_t type, void *h, const void *gu, int64_t n);
  void (*glu_backward)(int32_t type, void *dgu, void *h, const void *dh, const void *gu, int64_t n); /* h may be NULL */
  void (*adamw)(const struct lm_adamw_step *step, int64_t begin, int64_t end);

  /* Rows of n elements */
  int64_t (*argmax)(int32_t type, const void *x, int64_t n);
  float (*dot)(int32_t type, const void *a, const void *b, int64_t n);
  double (*sum_squares)(const float *g, int64_t n);
  void (*rms_norm_forward)(int32_t type, void *y, const void *x, const void *w, int32_t w_type, int64_t n, float eps);
  void (*rms_norm_backward)(int32_t type, void *dx, void *y, const void *dy, const void *x, const void *w, int32_t w_type,
                            const void *add, int64_t n, float eps); /* y and add may be NULL */
  void (*rope)(int32_t type, void *y, const void *x, const float *cos, const float *sin, int64_t half, float direction);
  float (*cross_entropy)(int32_t type, void *logits, int64_t n, int64_t label, float weight, int32_t gradient);

  /* Matrix tiles */
  void (*load_a)(float *a, const void *x, int32_t type, int64_t pitch, const int32_t *index, int64_t rows, int64_t depth,
                 float factor);
  void (*pack_rows)(float *b, int64_t panel, const void *w, int32_t type, int64_t pitch, int64_t columns, int64_t depth,
                    float factor);
  void (*pack_columns)(float *b, const void *w, int32_t type, int64_t pitch, int64_t columns, int64_t depth, float factor);
  void (*multiply)(float *c, const float *a, const float *b, int64_t rows, int64_t columns, int64_t depth,
                   int32_t accumulate);
  void (*store_c)(void *y, int32_t type, int64_t pitch, const int32_t *index, const float *c, const float *bias,
                  const void *residual, int64_t residual_pitch, int64_t rows, int64_t columns);
  void (*outer)(float *c, const float *a, int64_t a_pitch, const float *b, int64_t rows, int64_t columns, int64_t depth);
  void (*dots)(float *y, int64_t y_pitch, const float *x, int64_t x_pitch, int64_t rows, const void *w, int32_t type,
               int64_t pitch, int64_t columns, int64_t depth);

  /* Attention tiles */
  void (*cap_scores)(float *s, int64_t rows, int64_t columns, float cap);
  void (*cap_grad)(float *ds, const float *s, int64_t rows, int64_t columns, float cap);
  void (*softmax)(float *p, const float *s, const int32_t *visible, int64_t rows, int64_t keys, float *peak, float *sum,
                  float *shrink);
  void (*shrink_c)(float *c, const float *shrink, int64_t rows, int64_t columns);
  void (*attention_grad)(float *ds, const float *s, const float *dp, const float *lse, const float *delta,
                         const int32_t *visible, int64_t rows, int64_t keys);
  void (*attention_grad_t)(float *p, float *ds, const float *s, const float *dp, const float *lse, const float *delta,
                           const int32_t *visible, int64_t keys, int64_t rows);
} lm_isa;

extern const lm_isa lm_isa_portable;
#ifdef __x86_64__
extern const lm_isa lm_isa_avx2;
extern const lm_isa lm_isa_avx512;
#endif

#endif
