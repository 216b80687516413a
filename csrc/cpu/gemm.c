/* gemm.c: splits a product into tiles (gemm.h; tile layouts in isa.h).
 *
 * A tile is at most LM_ROWS rows by a few panels of one part. It loads its left rows as f32 (cheap: no transposition), and
 * multiplies them with panels of the right operand, which are packed once for all tiles into shared scratch, as many panels
 * at a time as fit. When there is one block of rows, or the contraction is too long for shared scratch (the output matrix's
 * gradient at a large vocabulary), every tile packs the panels it needs into its own scratch.
 *
 * The grid depends on the number of threads. The bits do not: each sum is one chain over the contraction. */
#include "gemm.h"

/* Thread scratch: A tile, C tile, B panels. */
enum {
  TILE_COLUMNS = 256,
  NARROW = 64,     /* up to this wide, loading left rows costs as much as multiplying: they stay in the L1 cache */
  STORE_ROWS = 16, /* stored panel by panel: few pages at a time, and whole rows of the tile soon after each other */
  A_FLOATS = LM_ROWS * LM_PITCH,
  B_FLOATS = LM_DEPTH * NARROW,
  C_FLOATS = LM_ROWS * TILE_COLUMNS,
};
_Static_assert(A_FLOATS + B_FLOATS + C_FLOATS <= LM_THREAD_FLOATS, "a tile must fit the thread's scratch");

static int64_t part_depth(const lm_gemm_part *part) { return part->depth[0] + part->depth[1]; }

static int64_t part_panels(const lm_gemm *g, int32_t i) { return lm_ceil_div(g->part[i].columns, g->isa->nr); }

/* depth_step: the contraction is cut into even blocks of at most LM_DEPTH. */
static int64_t depth_step(int64_t depth) {
  const int64_t blocks = lm_ceil_div(depth, LM_DEPTH);
  return lm_min(LM_DEPTH, (lm_ceil_div(depth, blocks) + 7) / 8 * 8);
}

/* pack: rows [k0, k1) of one panel. */
static void pack(const lm_gemm *g, const lm_gemm_part *part, int64_t panel, int64_t k0, int64_t k1, float *b) {
  const int64_t nr = g->isa->nr, column = panel * nr, columns = lm_min(nr, part->columns - column);
  int64_t base = 0;
  for (int32_t i = 0; i < 2; i++) {
    const int64_t begin = lm_max(k0, base) - base, end = lm_min(k1, base + part->depth[i]) - base;
    if (begin < end) {
      const lm_matrix *w = &part->right[i];
      float *out = b + (base + begin - k0) * nr;
      if (g->transposed)
        g->isa->pack_columns(out, lm_at(w->type, w->data, column * w->pitch + begin), w->type, w->pitch, columns,
                             end - begin, part->factor);
      else
        g->isa->pack_rows(out, 0, lm_at(w->type, w->data, begin * w->pitch + column), w->type, w->pitch, columns,
                          end - begin, part->factor);
    }
    base += part->depth[i];
  }
}

/* load: columns [k0, k1) of the left rows [row, row + rows). */
static void load(const lm_gemm *g, const lm_gemm_part *part, int64_t row, int64_t rows, int64_t k0, int64_t k1, float *a) {
  int64_t base = 0;
  for (int32_t i = 0; i < 2; i++) {
    const int64_t begin = lm_max(k0, base) - base, end = lm_min(k1, base + part->depth[i]) - base;
    if (begin < end) {
      const lm_matrix *x = &part->left[i];
      const int32_t *index = i == 0 && g->left_index != NULL ? g->left_index + row : NULL;
      const int64_t first = index != NULL ? 0 : row;
      g->isa->load_a(a + base + begin - k0, lm_at(x->type, x->data, first * x->pitch + begin), x->type, x->pitch, index,
                     rows, end - begin, 1.0f);
    }
    base += part->depth[i];
  }
}

/* store: C tile rows of one panel into y, with bias and residual. */
static void store(const lm_gemm *g, const lm_gemm_part *part, int64_t row, int64_t rows, int64_t column, const float *c) {
  const lm_isa *isa = g->isa;
  const int64_t columns = lm_min(isa->nr, part->columns - column), first = g->y_index != NULL ? 0 : row;
  float bias[LM_MAX_NR] = {0};
  if (part->bias != NULL) isa->cast(bias, LM_F32, lm_at(g->bias_type, part->bias, column), g->bias_type, columns);
  isa->store_c(lm_at_mut(g->y_type, part->y, first * g->y_pitch + column), g->y_type, g->y_pitch,
               g->y_index != NULL ? g->y_index + row : NULL, c, part->bias != NULL ? bias : NULL,
               part->residual != NULL ? lm_at(g->y_type, part->residual, row * g->residual_pitch + column) : NULL,
               g->residual_pitch, rows, columns);
}

/* multiply_tile: rows [row, row + rows) by panels [p0, p1) of part i. slot: the first panel's place in shared scratch. */
static void multiply_tile(const lm_gemm *g, int32_t i, int64_t row, int64_t rows, int64_t p0, int64_t p1, int64_t slot,
                          float *scratch) {
  const lm_gemm_part *part = &g->part[i];
  const int64_t nr = g->isa->nr, depth = part_depth(part), step = depth_step(depth);
  const int32_t narrow = (p1 - p0) * nr <= NARROW;
  const int64_t strip = narrow ? 2 * g->isa->mr : rows;
  float *a = scratch, *c = a + A_FLOATS, *own = c + C_FLOATS;
  for (int64_t k0 = 0; k0 < depth; k0 += step) {
    const int64_t k1 = lm_min(depth, k0 + step);
    for (int64_t p = p0; p < p1 && narrow && g->shared == NULL; p++)
      pack(g, part, p, k0, k1, own + (p - p0) * LM_DEPTH * nr);
    for (int64_t r = 0; r < rows; r += strip) {
      const int64_t count = lm_min(strip, rows - r);
      load(g, part, row + r, count, k0, k1, a);
      for (int64_t p = p0; p < p1; p++) {
        float *cp = c + ((p - p0) * LM_ROWS + r) * nr;
        const float *b = narrow ? own + (p - p0) * LM_DEPTH * nr : own;
        if (g->shared != NULL) b = g->shared + (slot + p - p0) * g->panel_floats + k0 * nr;
        else if (!narrow) pack(g, part, p, k0, k1, own);
        g->isa->multiply(cp, a, b, count, lm_min(nr, part->columns - p * nr), k1 - k0, k0 > 0);
      }
      for (int64_t s = 0; s < count && k1 == depth; s += STORE_ROWS)
        for (int64_t p = p0; p < p1; p++)
          store(g, part, row + r + s, lm_min(STORE_ROWS, count - s), p * nr, c + ((p - p0) * LM_ROWS + r + s) * nr);
    }
  }
}

/* Panels of the pass that belong to part i, as [*begin, *end) within the part. */
static int64_t pass_panels(const lm_gemm *g, int32_t i, int64_t *begin, int64_t *end) {
  int64_t base = 0;
  for (int32_t j = 0; j < i; j++) base += part_panels(g, j);
  *begin = lm_max(g->first - base, 0);
  *end = lm_min(g->last - base, part_panels(g, i));
  return base;
}

int64_t lm_gemm_pack_tasks(const lm_gemm *g) { return g->shared != NULL ? g->last - g->first : 0; }

void lm_gemm_pack_task(const lm_gemm *g, int64_t task) {
  int64_t panel = g->first + task;
  int32_t i = 0;
  for (; panel >= part_panels(g, i); i++) panel -= part_panels(g, i);
  pack(g, &g->part[i], panel, 0, part_depth(&g->part[i]), g->shared + task * g->panel_floats);
}

static int64_t column_tiles(const lm_gemm *g, int64_t tile_panels) {
  int64_t tiles = 0;
  for (int32_t i = 0; i < 3; i++) {
    int64_t begin, end;
    pass_panels(g, i, &begin, &end);
    if (begin < end) tiles += lm_ceil_div(end - begin, tile_panels);
  }
  return tiles;
}

int64_t lm_gemm_tile_tasks(const lm_gemm *g) { return column_tiles(g, g->tile_panels) * g->row_blocks; }

void lm_gemm_tile_task(const lm_gemm *g, int64_t task, float *scratch) {
  const int64_t block = task % g->row_blocks;
  int64_t column_tile = task / g->row_blocks;
  const int64_t row = g->rows * block / g->row_blocks, row_end = g->rows * (block + 1) / g->row_blocks;
  for (int32_t i = 0; i < 3; i++) {
    int64_t begin, end;
    const int64_t base = pass_panels(g, i, &begin, &end);
    if (begin >= end) continue;
    const int64_t tiles = lm_ceil_div(end - begin, g->tile_panels);
    if (column_tile < tiles) {
      const int64_t p0 = begin + (end - begin) * column_tile / tiles,
                    p1 = begin + (end - begin) * (column_tile + 1) / tiles;
      multiply_tile(g, i, row, row_end - row, p0, p1, base + p0 - g->first, scratch);
      return;
    }
    column_tile -= tiles;
  }
}

/* choose_grid: the tile size with the least estimated time: rounds of tasks over the threads, times a tile's
 * multiplications plus its loads, in units of one multiplied element per step of the contraction. */
static void choose_grid(lm_gemm *g, int64_t threads) {
  const int64_t nr = g->isa->nr;
  int64_t best = INT64_MAX;
  for (int64_t panels = TILE_COLUMNS / nr; panels >= 1; panels /= 2) {
    const int64_t columns = column_tiles(g, panels);
    int64_t before = 0;
    for (int64_t rows = LM_ROWS; rows >= 16; rows -= 16) {
      const int64_t blocks = lm_ceil_div(g->rows, rows);
      if (blocks == before) continue;
      before = blocks;
      const int64_t height = lm_ceil_div(g->rows, blocks), width = lm_min(panels, g->last - g->first) * nr;
      const int64_t tile = (height + 8) * (width + 8) + (g->shared == NULL ? width * 16 : 0);
      const int64_t cost = lm_ceil_div(blocks * columns, threads) * tile;
      if (cost < best) {
        best = cost;
        g->row_blocks = blocks;
        g->tile_panels = panels;
      }
    }
  }
}

static void start_pass(lm_gemm *g, int64_t first) {
  g->first = first;
  g->last = g->shared != NULL ? lm_min(g->panels, first + LM_SHARED_FLOATS / g->panel_floats) : g->panels;
}

void lm_gemm_plan(lm_cpu *cpu, lm_gemm *g, int32_t private_panels) {
  g->isa = lm_cpu_table(cpu);
  g->panels = 0;
  int64_t depth = 0;
  for (int32_t i = 0; i < 3; i++) {
    g->panels += part_panels(g, i);
    if (g->part[i].columns > 0) depth = lm_max(depth, part_depth(&g->part[i]));
  }
  g->panel_floats = depth * g->isa->nr;
  const int64_t fit = LM_SHARED_FLOATS / lm_max(g->panel_floats, 1);
  const int32_t private = private_panels || g->rows <= LM_ROWS || fit < 4;
  g->shared = private ? NULL : lm_cpu_shared(cpu);
  start_pass(g, 0);
  choose_grid(g, lm_cpu_threads(cpu));
}

int32_t lm_gemm_next(lm_gemm *g) {
  if (g->last >= g->panels) return 0;
  start_pass(g, g->last);
  return 1;
}

static void pack_task(const void *g, int64_t task, float *scratch) {
  (void)scratch;
  lm_gemm_pack_task(g, task);
}

static void tile_task(const void *g, int64_t task, float *scratch) { lm_gemm_tile_task(g, task, scratch); }

void lm_gemm_run(lm_cpu *cpu, lm_gemm *g) {
  if (g->rows <= 0) return;
  if (g->transposed && g->planned_rows <= LM_FEW_ROWS && lm_gemm_few_rows(cpu, g)) return;
  lm_gemm_plan(cpu, g, 0);
  do {
    lm_cpu_parallel(cpu, lm_gemm_pack_tasks(g), pack_task, g);
    lm_cpu_parallel(cpu, lm_gemm_tile_tasks(g), tile_task, g);
  } while (lm_gemm_next(g));
}
