/* attention_hopper_backward.cu: gradients of attention with the products of warp groups (sm_90a), head sizes 64 and 128: five
 * products, dq added in order as attention_backward.cuh describes.
 *
 * A block owns 128 keys of one key-value head and visits blocks of queries from the last to the first, each with all of its
 * query heads before the next: blocks of the same head then follow each other a step apart, however many queries they have.
 *
 * Three warp groups. Two multiply, each owning 64 keys: scores are transposed, p^T and ds^T stay in registers as left operands of
 * dv and dk, and ds goes through shared memory for dq, of which each group computes half. The scores of the next step are
 * asked for before the products of this one have ended, so that exponentials overlap with products. In the first group two
 * warps fetch q and grad_o, one step ahead, and two take turns to carry dq out: they wait for its turn, the others do not. */
#include "attention_backward.cuh"
#include "attention_hopper.cuh"

/* Kept in shared memory: registers are scarce. */
struct hopper_part : lm_backward_part {
  int32_t steps, first_query[2]; /* of the even and the odd step under way */
};

template <int D_>
struct hopper_backward {
  static constexpr int D = D_, KEYS = 128, QUERIES = D == 64 ? 128 : 64, PARTS = QUERIES / 64;
  static constexpr int WORKERS = 256, THREADS = 128 + WORKERS;
  static constexpr int KV = KEYS * D * 2, STAGE = 2 * QUERIES * D * 2; /* bytes: k or v; q and grad_o */
  static constexpr int DS = KEYS * QUERIES * 2, DQ = QUERIES * D * 4, ROWS = 2 * QUERIES * 4; /* ROWS: lse and delta */
  static constexpr int STAGES = 2 * KV, DS_AT = STAGES + 2 * STAGE, DQ_AT = DS_AT + DS, ROWS_AT = DQ_AT + 2 * DQ;
  static constexpr int BARRIERS = ROWS_AT + 2 * ROWS, PART = BARRIERS + 11 * 8, SHARED = PART + sizeof(hopper_part);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* Where the barriers are. Two of a kind are for even and odd steps. */
struct backward_barriers {
  uint32_t full, empty; /* stages of q and grad_o */
  uint32_t dq_full, dq_empty, dq_back; /* tiles of dq on their way out */
  uint32_t ds_empty;
  __device__ __forceinline__ explicit backward_barriers(uint32_t at)
      : full(at), empty(at + 16), dq_full(at + 32), dq_empty(at + 48), dq_back(at + 64), ds_empty(at + 80) {}
};

/* Which query head and block of queries a step visits. */
struct backward_place {
  int head, block;
  __device__ __forceinline__ explicit backward_place(const lm_backward_part &b) : head(b.first_head), block(b.last_block) {}
  __device__ __forceinline__ void move(const lm_backward_part &b) {
    if (++head == b.end_head) head = b.first_head, block--;
  }
};

/* A tile of dq in fp32 has QUERIES rows as they lie in dq_sum [Hq, T, D]. Within a row, words of 32 bytes trade places, so that
 * the rows of a warp's sums lie in different banks. */
__device__ __forceinline__ int dq_swap(int row, int column) { return column ^ (row & 3) << 3; }

/* ROWS rows of a head into a tile by one warp; those at or past `rows` become 0 and are not read. */
template <int D, int ROWS, typename T>
__device__ __forceinline__ void copy_by_warp(uint32_t tile, const T *from, int pitch, int rows) {
  const int lane = threadIdx.x & 31, chunk = lane & 7;
#pragma unroll 2
  for (int row = lane >> 3; row < ROWS; row += 4) {
    const bool inside = row < rows;
    const T *const at = from + (inside ? row * pitch + chunk * 8 : 0);
#pragma unroll
    for (int part = 0; part < D / 64; part++)
      lm_copy_async(tile + part * ROWS * 128 + lm_rows<64>::at(row, chunk), at + part * 64, inside ? 16 : 0);
  }
}

/* One of the two warps that fetch: k, then q and lse step by step, or v, then grad_o and delta. */
template <typename T, typename C>
__device__ __forceinline__ void backward_fetch(const lm_attention &a, const lm_attention_gradients &g, hopper_part &b,
                                               uint32_t tiles, const backward_barriers &barriers, int which) {
  constexpr int D = C::D, QUERIES = C::QUERIES;
  const T *const from = (const T *)(which ? g.grad_o : a.q);
  const int pitch = (int)(which ? a.o_pitch : a.q_pitch), lane = threadIdx.x & 31;
  const float *const statistics = which ? g.delta : g.lse;
  backward_place at(b);
  const auto fetch = [&](int step) {
    const int row = b.row + at.block * QUERIES, rows = b.length - at.block * QUERIES, stage = step & 1;
    copy_by_warp<D, QUERIES>(tiles + C::STAGES + stage * C::STAGE + which * C::STAGE / 2,
                             from + ((int64_t)row * pitch + at.head * D), pitch, rows);
    const float *const row_statistics = statistics + (int64_t)at.head * a.rows + row;
    const uint32_t to = tiles + C::ROWS_AT + stage * C::ROWS + which * C::ROWS / 2;
    if (which == 0 && lane == 0) b.first_query[stage] = at.block * QUERIES;
#pragma unroll
    for (int i = lane; i < QUERIES; i += 32) lm_copy_async4(to + i * 4, row_statistics + (i < rows ? i : 0), i < rows ? 4 : 0);
    lm_copy_commit();
  };
  const auto publish = [&](int step) {
    lm_shared_publish();
    lm_barrier_arrive_warp(barriers.full + 8 * (step & 1), lane);
  };
  copy_by_warp<D, C::KEYS>(tiles + which * C::KV,
                           (const T *)(which ? a.v : a.k) + ((b.kv_row + b.begin) * a.kv_pitch + b.kv_head * D),
                           (int)a.kv_pitch, b.length - b.begin);
#pragma unroll 1
  for (int step = 0; step < b.steps; step++) {
    if (step >= 2) lm_barrier_wait(barriers.empty + 8 * (step & 1), (step >> 1 & 1) ^ 1);
    fetch(step);
    at.move(b);
    if (step == 0 && b.steps > 1) continue; /* the first two travel together */
    if (step == 1) {
      lm_copy_wait<1>();
      publish(0);
    }
    lm_copy_wait<0>();
    publish(step);
  }
}

/* One of the two warps that carry dq out: every other step is its own. The last part is added as the others are; then the sum
 * comes back through the tile to be rounded. */
template <typename T, typename C>
__device__ __forceinline__ void backward_carry(const lm_attention &a, const lm_attention_gradients &g, const hopper_part &b,
                                               const unsigned char *shared, const backward_barriers &barriers, int which) {
  constexpr int D = C::D, QUERIES = C::QUERIES;
  const int lane = threadIdx.x & 31;
  const unsigned char *const data = shared + C::DQ_AT + which * C::DQ;
  const uint32_t tile = lm_shared_address(data), empty = barriers.dq_empty + 8 * which, back = barriers.dq_back + 8 * which;
  uint32_t parity = 0; /* of the next sum to come back */
  backward_place at(b);
#pragma unroll 1
  for (int step = 0; step < b.steps; step++, at.move(b)) {
    if ((step & 1) != which) continue;
    const int first_query = at.block * QUERIES, rows = min(QUERIES, b.length - first_query), row = b.row + first_query;
    const bool first = b.key_block == 0, last = b.key_block == (first_query + rows - 1) / C::KEYS;
    int32_t *const turn = g.dq_turn + (int64_t)at.head * g.query_blocks + lm_attention_slot(b.row, b.document, at.block, QUERIES);
    lm_barrier_wait(barriers.dq_full + 8 * which, step >> 1 & 1);
    if (lane == 0 && !(first && last)) {
      const int bytes = rows * D * 4;
      float *const sum = g.dq_sum + ((int64_t)at.head * a.rows + row) * D;
      if (first) {
        lm_bulk_store(sum, tile, bytes);
      } else {
        lm_turn_await(turn, b.key_block);
        lm_global_publish();
        lm_bulk_add(sum, tile, bytes);
      }
      lm_bulk_commit();
      if (last) {
        lm_bulk_wait();
        lm_global_publish();
        lm_barrier_expect(back, bytes);
        lm_bulk_load(tile, sum, bytes, back);
      } else {
        lm_bulk_wait_read();
        for (int i = 0; i < LM_WARP_ARRIVALS; i++) lm_barrier_arrive(empty); /* for the warp, which did nothing else to the tile */
        lm_bulk_wait();
        lm_turn_pass(turn);
      }
    }
    if (last) {
      if (!first) {
        lm_barrier_wait(back, parity);
        parity ^= 1;
      }
      T *const y = (T *)g.dq + row * g.pitch + at.head * D;
#pragma unroll 2
      for (int word = lane; word < rows * D / 4; word += 32) {
        const int r = word / (D / 4), column = dq_swap(r, word % (D / 4) * 4);
        const float4 x = reinterpret_cast<const float4 *>(data)[word];
        *reinterpret_cast<uint2 *>(y + r * g.pitch + column) =
            make_uint2(lm_pack2<T>(x.x * a.scale, x.y * a.scale), lm_pack2<T>(x.z * a.scale, x.w * a.scale));
      }
      lm_barrier_arrive_warp(empty, lane);
    }
    __syncwarp();
  }
}

/* The number of a thread that multiplies, read anew wherever it is used: no register holds it or what follows from it. */
__device__ __forceinline__ int worker() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - 128;
}

/* The two groups that multiply. */
template <typename T, typename C>
__device__ __forceinline__ void backward_multiply(const lm_attention &a, const lm_attention_gradients &g, const hopper_part &b,
                                                  unsigned char *shared, const backward_barriers &barriers) {
  constexpr int D = C::D, KEYS = C::KEYS, QUERIES = C::QUERIES, PARTS = C::PARTS;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
  const uint32_t tiles = lm_shared_address(shared), ds_tile = tiles + C::DS_AT;
  const uint32_t k_rows = tiles + group * 64 * 128, v_rows = k_rows + C::KV, ds_rows = ds_tile + group * 64 * 128;
  /* Of dq a group computes half of the rows, or of the columns. */
  const uint32_t ds_columns = ds_tile + (D == 64 ? group * KEYS * 128 : 0);
  const uint32_t k_columns = tiles + (D == 128 ? group * KEYS * 128 : 0);
  const auto wait_workers = [] { asm volatile("bar.sync 1, %0;" ::"n"(C::WORKERS) : "memory"); };

  float dk[D / 2], dv[D / 2];
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int step = 0; step < b.steps; step++) {
    const int stage = step & 1, parity = step >> 1 & 1;
    const uint32_t q_tile = tiles + C::STAGES + stage * C::STAGE, go_tile = q_tile + C::STAGE / 2;
    float p[QUERIES / 2], ds[QUERIES / 2];
    lm_barrier_wait(barriers.full + 8 * stage, parity);
    lm_group_fence();
    multiply_rows<D, KEYS, QUERIES, T>(p, k_rows, q_tile);
    lm_group_commit();
    lm_group_wait<1>(); /* dk of the step before */
    lm_hold(dk);
    if (step > 0) lm_barrier_arrive_warp(barriers.ds_empty, worker());
    if (step > 0) lm_barrier_arrive_warp(barriers.empty + 8 * (stage ^ 1), worker());
    lm_group_fence();
    multiply_rows<D, KEYS, QUERIES, T>(ds, v_rows, go_tile);
    lm_group_commit();

    lm_group_wait<1>();
    lm_hold(p);
    const int first_query = b.first_query[stage], first_key = b.begin + (worker() >> 5) * 16;
    if (!lm_causal::sees_all(first_query, first_key + 15)) lm_hide<true>(as_sums(p), first_query, first_key);
    /* Queries past the document's end are zeros with lse 0: they add nothing. */
    const float *const lse = reinterpret_cast<const float *>(shared + C::ROWS_AT + stage * C::ROWS) + (worker() & 3) * 2;
    const float factor = a.scale * LM_LOG2_E;
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++) {
      const float2 zero = *reinterpret_cast<const float2 *>(lse + 8 * n);
#pragma unroll
      for (int i = 0; i < 4; i++) p[4 * n + i] = lm_exp2(fmaf(p[4 * n + i], factor, (i & 1 ? zero.y : zero.x) * -LM_LOG2_E));
    }
    lm_weights<1, 8> p_weights[PARTS], ds_weights[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      p_weights[part].template round<T>(as_sums(part_of(p, part)));
      lm_group_fence();
      multiply_weights<QUERIES, T>(dv, p_weights[part], go_tile + part * 64 * 128);
      lm_group_commit();
      if (part == 0) {
        lm_group_wait<1>();
        lm_hold(ds);
      }
#pragma unroll
      for (int n = 8 * part; n < 8 * part + 8; n++) {
        const float2 delta = *reinterpret_cast<const float2 *>(lse + QUERIES + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; i++) ds[4 * n + i] = p[4 * n + i] * (ds[4 * n + i] - (i & 1 ? delta.y : delta.x));
      }
      ds_weights[part].template round<T>(as_sums(part_of(ds, part)));
    }

    lm_barrier_wait(barriers.ds_empty, (step & 1) ^ 1);
    {
      const int thread = worker(), key = thread / 32 * 16 + thread % 16, chunk = thread / 16 % 2;
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          lm_store_matrices(ds_tile + part * KEYS * 128 + lm_rows<64>::at(key, 2 * k + chunk), ds_weights[part].x[k][0]);
    }
    lm_shared_publish();
    wait_workers(); /* ds is complete */
    float dq[32];
    lm_group_fence();
    lm_group_multiply_first<true, true>(dq, lm_matrix_descriptor(ds_columns, 0), lm_matrix_descriptor(k_columns, 0), T{});
#pragma unroll
    for (int k = 1; k < KEYS / 16; k++)
      lm_group_multiply<true, true>(dq, lm_matrix_descriptor(ds_columns + 16 * k * 128, 0),
                                    lm_matrix_descriptor(k_columns + 16 * k * 128, 0), T{});
    lm_group_commit();
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        lm_group_multiply<true>(dk, lm_matrix_descriptor(ds_rows + part * KEYS * 128 + k * 32, 0),
                                lm_matrix_descriptor(q_tile + (part * 64 + 16 * k) * 128, QUERIES * 128), T{});
    lm_group_commit();
    lm_group_wait<1>();
    lm_hold(dv);
    lm_hold(dq);
#pragma unroll
    for (int part = 0; part < PARTS; part++) lm_keep(p_weights[part].x);

    lm_barrier_wait(barriers.dq_empty + 8 * stage, parity ^ 1);
    const int thread = worker(), dq_row = (D == 64 ? thread / 128 * 64 : 0) + thread / 32 % 4 * 16 + thread % 32 / 4;
    const int dq_column = (D == 128 ? thread / 128 * 64 : 0) + thread % 4 * 2;
    float *const dq_tile = reinterpret_cast<float *>(shared + C::DQ_AT + stage * C::DQ);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        *reinterpret_cast<float2 *>(dq_tile + (dq_row + 8 * i) * D + dq_swap(dq_row, dq_column + 8 * n)) =
            make_float2(dq[4 * n + 2 * i], dq[4 * n + 2 * i + 1]);
    lm_shared_publish();
    lm_barrier_arrive_warp(barriers.dq_full + 8 * stage, thread);
  }
  lm_group_wait<0>();
  lm_hold(dk);
  lm_add_keys<T, KEYS, D>(a, g, b, as_sums(dk), as_sums(dv), worker() / 32 * 16, 0, wait_workers);
}
#endif

template <typename T, typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    attention_hopper_backward(const __grid_constant__ lm_attention a, const __grid_constant__ lm_attention_gradients g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  hopper_part &b = *reinterpret_cast<hopper_part *>(shared + C::PART);
  {
    hopper_part part;
    if (!lm_backward_find<C::KEYS, C::QUERIES>(a, g, true, &b.steps, part)) return;
    part.steps = (part.last_block - part.first_block + 1) * (part.end_head - part.first_head);
    if (threadIdx.x == 0) b = part;
  }
  const uint32_t tiles = lm_shared_address(shared);
  const backward_barriers barriers(tiles + C::BARRIERS);
  if (threadIdx.x == 0) {
    const int workers = C::WORKERS / 32 * LM_WARP_ARRIVALS;
    for (int i = 0; i < 2; i++) {
      lm_barrier_create(barriers.full + 8 * i, 2 * LM_WARP_ARRIVALS);
      lm_barrier_create(barriers.empty + 8 * i, workers);
      lm_barrier_create(barriers.dq_full + 8 * i, workers);
      lm_barrier_create(barriers.dq_empty + 8 * i, LM_WARP_ARRIVALS);
      lm_barrier_create(barriers.dq_back + 8 * i, 1);
    }
    lm_barrier_create(barriers.ds_empty, workers);
    lm_barriers_publish();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    lm_registers_lower<40>();
    const int warp = threadIdx.x / 32;
    if (warp < 2) backward_fetch<T, C>(a, g, b, tiles, barriers, warp);
    else backward_carry<T, C>(a, g, b, shared, barriers, warp - 2);
  } else {
    lm_registers_raise<232>();
    backward_multiply<T, C>(a, g, b, shared, barriers);
  }
#endif
}

int32_t lm_attention_hopper_keys(void) { return hopper_backward<64>::KEYS; }
int32_t lm_attention_hopper_queries(const lm_attention &a) {
  return a.head_dim == 64 ? hopper_backward<64>::QUERIES : hopper_backward<128>::QUERIES;
}

template <typename T, typename C>
static cudaError_t launch(const lm_attention &a, const lm_attention_gradients &g, cudaStream_t stream) {
  const int64_t blocks = lm_attention_blocks(a, C::KEYS) * (a.heads / a.group) * g.slices;
  return lm_attention_start<attention_hopper_backward<T, C>>(blocks, C::THREADS, C::SHARED, stream, a, g);
}

cudaError_t lm_attention_hopper_backward(const lm_attention &a, const lm_attention_gradients &g, int32_t type,
                                         cudaStream_t stream) {
  if (a.head_dim == 64)
    return type == LM_BF16 ? launch<lm_bf16, hopper_backward<64>>(a, g, stream) : launch<lm_f16, hopper_backward<64>>(a, g, stream);
  return type == LM_BF16 ? launch<lm_bf16, hopper_backward<128>>(a, g, stream) : launch<lm_f16, hopper_backward<128>>(a, g, stream);
}
