/* attention_tile.cuh: tiles of 16-bit elements in shared memory and the matrix products between them. */
#ifndef LM_CUDA_ATTENTION_TILE_CUH
#define LM_CUDA_ATTENTION_TILE_CUH

#include "attention.cuh"
#include "tensor.cuh"

/* A tile has rows of WIDTH elements. Its 16-byte chunks are stored at chunk ^ key(row), so that eight rows of one chunk lie in
 * eight different groups of banks and neither ldmatrix nor the copies wait for each other. */
template <int WIDTH>
struct lm_rows {
  static constexpr int CHUNKS = WIDTH / 8, BYTES = WIDTH * 2;
  static constexpr int GROUPS = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2; /* chunks that trade places */
  static_assert(CHUNKS % 2 == 0, "products take 16 elements at a time");
  static __device__ __forceinline__ int key(int row) { return row / (8 / GROUPS) % GROUPS; }
  static __device__ __forceinline__ int at(int row, int chunk) { return row * BYTES + ((chunk ^ key(row)) << 4); }
};

/* lm_copy_rows: ROWS rows of a matrix into a tile; those at or past `rows` become 0 and are not read. LANES threads share a row
 * and keep their place in it and its key, so that all else is constant distances. */
template <int ROWS, int WIDTH, int THREADS, typename T>
__device__ __forceinline__ void lm_copy_rows(uint32_t tile, const T *from, int64_t pitch, int rows) {
  using R = lm_rows<WIDTH>;
  constexpr int POWER = R::CHUNKS & -R::CHUNKS, LANES = POWER < 16 ? POWER : 16, STEP = THREADS / LANES;
  static_assert(STEP % 8 == 0 && LANES >= R::GROUPS, "the key must not change from pass to pass");
  const int first = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const uint32_t to = tile + R::at(first, lane);
  const T *at = from + (first * (int)pitch + lane * 8);
#pragma unroll
  for (int row = 0; row < ROWS; row += STEP) {
    const bool inside = first + row < rows;
    if (ROWS % STEP == 0 || first + row < ROWS)
#pragma unroll
      for (int chunk = 0; chunk < R::CHUNKS; chunk += LANES)
        lm_copy_async(to + row * R::BYTES + chunk * 16, inside ? at + chunk * 8 : from, inside ? 16 : 0);
    at += STEP * (int)pitch;
  }
}

/* Where the lane reads its part of the 16 x 16 blocks of a tile. The four 8 x 8 parts of a block arrive down the columns or
 * across the rows first, so that the words are operands as they come:
 *                     down                                     across
 *   as stored         left operand [rows, columns]             two right operands [columns, 8 rows each]
 *   transposed        two right operands [rows, 8 columns each]  left operand [columns, rows] */
enum lm_order { LM_DOWN, LM_ACROSS };

template <int WIDTH, lm_order ORDER>
struct lm_blocks {
  uint32_t base, key;
  __device__ __forceinline__ explicit lm_blocks(uint32_t tile) {
    const int lane = threadIdx.x & 31, part = lane >> 3;
    const int row = (lane & 7) + (ORDER == LM_DOWN ? part & 1 : part >> 1) * 8, chunk = ORDER == LM_DOWN ? part >> 1 : part & 1;
    base = tile + row * lm_rows<WIDTH>::BYTES;
    key = (lm_rows<WIDTH>::key(row) ^ chunk) << 4;
    if (WHOLE) base ^= key;
  }
  /* row and column are multiples of 16 */
  template <bool transposed>
  __device__ __forceinline__ void load(uint32_t (&x)[4], int row, int column) const {
    const uint32_t at = WHOLE ? base ^ column * 2 : base + (column * 2 ^ key);
    lm_load_matrices<transposed>(x, at + row * lm_rows<WIDTH>::BYTES);
  }

 private:
  /* Rows of a power of two of bytes: the chunk's bits are the address's own, so that one register holds base and key. */
  static constexpr bool WHOLE = (WIDTH & (WIDTH - 1)) == 0;
};

/* Sums of M x N products: [16 M rows, 8 N columns]; the lane holds rows lane / 4 and lane / 4 + 8 of each 16, columns
 * 2 (lane % 4) and the next of each 8. */
template <int M, int N>
struct lm_sums {
  float x[M][N][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[m][n][i] = 0;
  }
  /* += a times the 16 columns from 8 n on */
  template <typename T>
  __device__ __forceinline__ void add(const uint32_t (&a)[M][4], const uint32_t (&b)[4], int n) {
#pragma unroll
    for (int m = 0; m < M; m++) {
      lm_multiply<T>(x[m][n], a[m], b[0], b[1]);
      lm_multiply<T>(x[m][n + 1], a[m], b[2], b[3]);
    }
  }
};

/* lm_scores: s = rows [row, row + 16 M) of `left` times rows [first, first + 8 N) of `right`, transposed. */
template <typename T, int WIDTH, int M, int N>
__device__ __forceinline__ void lm_scores(lm_sums<M, N> &s, const lm_blocks<WIDTH, LM_DOWN> &left, int row,
                                          const lm_blocks<WIDTH, LM_ACROSS> &right, int first) {
  s.clear();
#pragma unroll
  for (int d = 0; d < WIDTH; d += 16) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) left.template load<false>(a[m], row + 16 * m, d);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t b[4];
      right.template load<false>(b, first + 8 * n, d);
      s.template add<T>(a, b, n);
    }
  }
}

/* lm_each_pair: fn(score, query, key) for each of the lane's scores. Rows are queries, or keys if transposed; the first of each is
 * given. */
template <bool transposed, int M, int N, typename Fn>
__device__ __forceinline__ void lm_each_pair(lm_sums<M, N> &s, int first_query, int first_key, Fn fn) {
  const int lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = row + 16 * m + (i >> 1) * 8, c = column + 8 * n + (i & 1);
        fn(s.x[m][n][i], first_query + (transposed ? c : r), first_key + (transposed ? r : c));
      }
}

/* lm_hide: scores of keys that their query does not see become -infinity, before any exponential. */
template <bool transposed, int M, int N>
__device__ __forceinline__ void lm_hide(lm_sums<M, N> &s, int first_query, int first_key) {
  lm_each_pair<transposed>(s, first_query, first_key, [](float &score, int query, int key) {
    if (!lm_causal::sees(query, key)) score = -INFINITY;
  });
}

/* lm_hide_before: so do those of keys before the window. */
template <bool transposed, int M, int N>
__device__ __forceinline__ void lm_hide_before(const lm_attention &a, lm_sums<M, N> &s, int first_query, int first_key) {
  const int last_query = first_query + (transposed ? 8 * N : 16 * M) - 1;
  if (lm_window::sees(a, last_query, first_key)) return;
  lm_each_pair<transposed>(s, first_query, first_key, [&](float &score, int query, int key) {
    if (!lm_window::sees(a, query, key)) score = -INFINITY;
  });
}

/* lm_cap: products become capped scores. @param slope also written: the derivative of the cap there, 1 - tanh^2 */
template <int M, int N>
__device__ __forceinline__ void lm_cap(const lm_attention &a, lm_sums<M, N> &s, lm_sums<M, N> &slope) {
  const float factor = a.scale / a.softcap;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float tangent = lm_tanh(s.x[m][n][i] * factor);
        s.x[m][n][i] = a.softcap * tangent;
        slope.x[m][n][i] = fmaf(-tangent, tangent, 1.0f);
      }
}

/* lm_slope: ds *= slope */
template <int M, int N>
__device__ __forceinline__ void lm_slope(lm_sums<M, N> &ds, const lm_sums<M, N> &slope) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) ds.x[m][n][i] *= slope.x[m][n][i];
}

/* lm_weights: sums rounded to the storage type, as left operands of 16 columns each. */
template <int M, int K>
struct lm_weights {
  uint32_t x[K / 2][M][4];
  template <typename T>
  __device__ __forceinline__ void round(const lm_sums<M, K> &s) {
#pragma unroll
    for (int k = 0; k < K / 2; k++)
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[k][m][i] = lm_pack2<T>(s.x[m][2 * k + i / 2][i % 2 * 2], s.x[m][2 * k + i / 2][i % 2 * 2 + 1]);
  }
};

/* lm_gather: c += weights times rows [first, first + 8 K) of `values`, of which columns [column, column + 8 N). */
template <typename T, int WIDTH, int M, int K, int N>
__device__ __forceinline__ void lm_gather(lm_sums<M, N> &c, const lm_weights<M, K> &weights,
                                          const lm_blocks<WIDTH, LM_DOWN> &values, int first, int column) {
#pragma unroll
  for (int k = 0; k < K / 2; k++)
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t b[4];
      values.template load<true>(b, first + 16 * k, column + 8 * n);
      c.template add<T>(weights.x[k], b, n);
    }
}

#endif
