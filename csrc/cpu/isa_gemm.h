/* isa_gemm.h: matrix tiles, compiled once per instruction set (see isa.h for the layouts).
 * A register tile is MR rows by two vectors; MR fills the register file: 28 + 3 of 32 (AVX-512), 12 + 3 of 16 (AVX2). */

#define NR (2 * VW)
#define AHEAD 12 /* rows between a prefetch and its use */

/* load_a: A tile rows from storage, times factor. Up to VW - 1 floats after each row's depth are cleared. */
LM_INLINE void load_a_rows(const int32_t type, float *a, const void *x, int64_t pitch, const int32_t *index, int64_t rows,
                           int64_t depth, float factor) {
  const vf f = vf_set(factor);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t begin = (index != 0 ? index[r] : r) * pitch;
    for (int64_t k = 0; k < depth; k += VW)
      vf_store(a + r * LM_PITCH + k, vf_mul(f, vf_get(type, x, begin + k, begin + depth)));
  }
}

static void load_a(float *a, const void *x, int32_t type, int64_t pitch, const int32_t *index, int64_t rows, int64_t depth,
                   float factor) {
  LM_BY_TYPE(type, load_a_rows(T, a, x, pitch, index, rows, depth, factor));
}

/* pack_rows: b[k][n] = w[k][n] * factor, a plain copy into panels that lie `panel` floats apart. It walks down a strip of
 * the matrix, a pitch from row to row, which hardware prefetchers do not follow. */
LM_INLINE void pack_rows_typed(const int32_t type, float *b, int64_t panel, const void *w, int64_t pitch, int64_t columns,
                               int64_t depth, float factor) {
  const int64_t size = type == LM_F32 ? 4 : 2;
  const vf f = vf_set(factor);
  for (int64_t k = 0; k < depth; k++) {
    const int64_t begin = k * pitch, end = begin + columns;
    if (k + AHEAD < depth) {
      const char *next = (const char *)w + (begin + AHEAD * pitch) * size;
      for (int64_t i = 0; i < columns * size; i += 64) __builtin_prefetch(next + i);
    }
    float *out = b + k * NR;
    for (int64_t n = 0; n < columns; n += NR, out += panel) {
      vf_store(out, vf_mul(f, vf_get(type, w, begin + n, end)));
      vf_store(out + VW, n + VW < columns ? vf_mul(f, vf_get(type, w, begin + n + VW, end)) : vf_zero());
    }
  }
}

static void pack_rows(float *b, int64_t panel, const void *w, int32_t type, int64_t pitch, int64_t columns, int64_t depth,
                      float factor) {
  LM_BY_TYPE(type, pack_rows_typed(T, b, panel, w, pitch, columns, depth, factor));
}

/* pack_columns: b[k][n] = w[n][k] * factor, transposed in blocks of VW x VW registers. */
LM_INLINE void pack_columns_typed(const int32_t type, float *b, const void *w, int64_t pitch, int64_t columns,
                                  int64_t depth, float factor) {
  const vf f = vf_set(factor);
  for (int64_t n = 0; n < NR; n += VW) {
    for (int64_t k = 0; k < depth; k += VW) {
      vf block[VW];
      for (int64_t i = 0; i < VW; i++) {
        const int64_t row = (n + i) * pitch;
        block[i] = n + i < columns ? vf_mul(f, vf_get(type, w, row + k, row + depth)) : vf_zero();
      }
      vf_transpose(block);
      float *out = b + k * NR + n;
      if (depth - k >= VW) {
        for (int64_t i = 0; i < VW; i++) vf_store(out + i * NR, block[i]);
      } else {
        for (int64_t i = 0; i < depth - k; i++) vf_store(out + i * NR, block[i]);
      }
    }
  }
}

static void pack_columns(float *b, const void *w, int32_t type, int64_t pitch, int64_t columns, int64_t depth,
                         float factor) {
  LM_BY_TYPE(type, pack_columns_typed(T, b, w, pitch, columns, depth, factor));
}

/* One register tile: c[rows][NR] (+)= a b, where a[r][k] lies at a[r * row_step + k * depth_step]. */
LM_INLINE void tile(const int rows, const int vectors, const int64_t row_step, const int64_t depth_step, float *c,
                    const float *a, const float *b, int64_t depth, int32_t accumulate) {
  vf sum[MR][2];
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) sum[r][v] = accumulate ? vf_load(c + r * NR + v * VW) : vf_zero();
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; k++) {
    vf right[2];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) right[v] = vf_load(b + v * VW);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
      const vf left = vf_set(a[r * row_step]);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; v++) sum[r][v] = vf_fma(left, right[v], sum[r][v]);
    }
    a += depth_step;
    b += NR;
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) vf_store(c + r * NR + v * VW, sum[r][v]);
  }
}

/* LM_TILE_ROWS: a switch over the row count, so that each register tile is straight-line code. */
#define LM_TILE_CASE(n, ...) \
  case n: tile(n <= MR ? n : MR, __VA_ARGS__); break;
#if MR > 6
#define LM_TILE_ROWS(rows, ...)                                                                     \
  switch (rows) {                                                                                   \
    LM_TILE_CASE(1, __VA_ARGS__) LM_TILE_CASE(2, __VA_ARGS__) LM_TILE_CASE(3, __VA_ARGS__)          \
    LM_TILE_CASE(4, __VA_ARGS__) LM_TILE_CASE(5, __VA_ARGS__) LM_TILE_CASE(6, __VA_ARGS__)          \
    LM_TILE_CASE(7, __VA_ARGS__) LM_TILE_CASE(8, __VA_ARGS__) LM_TILE_CASE(9, __VA_ARGS__)          \
    LM_TILE_CASE(10, __VA_ARGS__) LM_TILE_CASE(11, __VA_ARGS__) LM_TILE_CASE(12, __VA_ARGS__)       \
    LM_TILE_CASE(13, __VA_ARGS__) LM_TILE_CASE(14, __VA_ARGS__)                                     \
  }
#else
#define LM_TILE_ROWS(rows, ...)                                                                     \
  switch (rows) {                                                                                   \
    LM_TILE_CASE(1, __VA_ARGS__) LM_TILE_CASE(2, __VA_ARGS__) LM_TILE_CASE(3, __VA_ARGS__)          \
    LM_TILE_CASE(4, __VA_ARGS__) LM_TILE_CASE(5, __VA_ARGS__) LM_TILE_CASE(6, __VA_ARGS__)          \
  }
#endif

/* multiply: c[rows][NR] (+)= A tile x B panel. Rows are dealt evenly to register tiles: a short last one would be slow. */
static void multiply(float *c, const float *a, const float *b, int64_t rows, int64_t columns, int64_t depth,
                     int32_t accumulate) {
  const int64_t tiles = (rows + MR - 1) / MR;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t begin = rows * i / tiles, count = rows * (i + 1) / tiles - begin;
    float *ci = c + begin * NR;
    const float *ai = a + begin * LM_PITCH;
    if (columns > VW) {
      LM_TILE_ROWS(count, 2, LM_PITCH, 1, ci, ai, b, depth, accumulate)
    } else {
      LM_TILE_ROWS(count, 1, LM_PITCH, 1, ci, ai, b, depth, accumulate)
    }
  }
}

/* outer: c[rows][NR] += a^T b with a [depth][a_pitch] and a B panel, rows <= MR. */
static void outer(float *c, const float *a, int64_t a_pitch, const float *b, int64_t rows, int64_t columns, int64_t depth) {
  if (columns > VW) {
    LM_TILE_ROWS(rows, 2, 1, a_pitch, c, a, b, depth, 1)
  } else {
    LM_TILE_ROWS(rows, 1, 1, a_pitch, c, a, b, depth, 1)
  }
}

/* store_c: y = c + bias + residual, row by row into storage. bias [NR] or NULL, residual of y's type or NULL, may be y. */
LM_INLINE void store_c_rows(const int32_t type, void *y, int64_t pitch, const int32_t *index, const float *c,
                            const float *bias, const void *residual, int64_t residual_pitch, int64_t rows,
                            int64_t columns) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t target = index != 0 ? index[r] : r;
    for (int64_t n = 0; n < columns; n += VW) {
      vf v = vf_load(c + r * NR + n);
      if (bias != 0) v = vf_add(v, vf_load(bias + n));
      if (residual != 0) {
        const int64_t begin = r * residual_pitch;
        v = vf_add(v, vf_get(type, residual, begin + n, begin + columns));
      }
      vf_put(type, y, target * pitch + n, target * pitch + columns, v);
    }
  }
}

static void store_c(void *y, int32_t type, int64_t pitch, const int32_t *index, const float *c, const float *bias,
                    const void *residual, int64_t residual_pitch, int64_t rows, int64_t columns) {
  LM_BY_TYPE(type, store_c_rows(T, y, pitch, index, c, bias, residual, residual_pitch, rows, columns));
}

/* dots: y[r][n] = x[r] . w[n] for few rows, reading w once: the bandwidth-bound products of decoding.
 * Four columns at a time keep enough loads in flight; each dot product is one chain of vectors, whatever the grouping. */
LM_INLINE void dots_block(const int32_t type, const int rows, const int columns, float *y, int64_t y_pitch, const float *x,
                          int64_t x_pitch, const void *w, int64_t pitch, int64_t depth) {
  vf sum[4][4];
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < columns; n++) sum[r][n] = vf_zero();
  int64_t k = 0;
  for (; k + VW <= depth; k += VW) {
    vf left[4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) left[r] = vf_load(x + r * x_pitch + k);
#pragma GCC unroll 4
    for (int n = 0; n < columns; n++) {
      const vf right = vf_get(type, w, n * pitch + k, n * pitch + k + VW);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r][n] = vf_fma(left[r], right, sum[r][n]);
    }
  }
  if (k < depth) {
    for (int n = 0; n < columns; n++) {
      const vf right = vf_get(type, w, n * pitch + k, n * pitch + depth);
      for (int r = 0; r < rows; r++) sum[r][n] = vf_fma(vf_load_part(x + r * x_pitch + k, depth - k), right, sum[r][n]);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < columns; n++) y[r * y_pitch + n] = vf_sum(sum[r][n]);
}

LM_INLINE void dots_rows(const int32_t type, const int rows, float *y, int64_t y_pitch, const float *x, int64_t x_pitch,
                         const void *w, int64_t pitch, int64_t columns, int64_t depth) {
  const int64_t size = type == LM_F32 ? 4 : 2;
  for (int64_t n = 0; n < columns; n += 4) {
    const void *wn = (const char *)w + n * pitch * size;
    if (columns - n >= 4) dots_block(type, rows, 4, y + n, y_pitch, x, x_pitch, wn, pitch, depth);
    else
      for (int64_t i = 0; i < columns - n; i++)
        dots_block(type, rows, 1, y + n + i, y_pitch, x, x_pitch, (const char *)wn + i * pitch * size, pitch, depth);
  }
}

static void dots(float *y, int64_t y_pitch, const float *x, int64_t x_pitch, int64_t rows, const void *w, int32_t type,
                 int64_t pitch, int64_t columns, int64_t depth) {
  for (; rows > 0; rows -= 4, x += 4 * x_pitch, y += 4 * y_pitch) {
    switch (rows) {
      case 1: LM_BY_TYPE(type, dots_rows(T, 1, y, y_pitch, x, x_pitch, w, pitch, columns, depth)); break;
      case 2: LM_BY_TYPE(type, dots_rows(T, 2, y, y_pitch, x, x_pitch, w, pitch, columns, depth)); break;
      case 3: LM_BY_TYPE(type, dots_rows(T, 3, y, y_pitch, x, x_pitch, w, pitch, columns, depth)); break;
      default: LM_BY_TYPE(type, dots_rows(T, 4, y, y_pitch, x, x_pitch, w, pitch, columns, depth)); break;
    }
  }
}
