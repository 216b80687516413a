/* attention_hopper_forward.cu: attention with the products of warp groups (sm_90a), head sizes 64 and 128, with the running maximum of
 * attention_forward.cuh, from the last keys to the first.
 *
 * Blocks stay and take one item after the other: 128 queries of one head. One warp fetches: tensor copies bring queries into one
 * of two tiles, keys and values into a ring of slots, so that what an item needs arrives while the one before it is multiplied
 * and written. Two groups multiply, each its own 64 queries, whose weights stay in registers as left operand. A group asks for
 * the scores of the next keys before it multiplies this step's weights by values, and the groups take turns to ask: exponentials
 * of one overlap with products of the other.
 *
 * Items are sorted by falling work and dealt out forth and back, always the same way: shares differ by less than the longest item,
 * and nothing is counted in memory. */
#include "attention_hopper.cuh"
#include "tensor_map.h"

/* At head size 128 the registers of a multiprocessor are those of one team of two groups, with 128 keys a step. A score of head size
 * 64 has half the products to hide its exponential: two teams share a block, and nothing else. */
template <int D_>
struct hopper_queries {
  static constexpr int D = D_, TEAMS = D == 64 ? 2 : 1, QUERIES = 128, KEYS = D == 64 ? 64 : 128, SLOTS = D == 64 ? 8 : 4;
  static constexpr int WORKERS = 256 * TEAMS, THREADS = WORKERS + 128;
  /* Registers of a thread that multiplies, and of one that fetches. */
  static constexpr int WORKING = D == 64 ? 112 : 232, FETCHING = D == 64 ? 32 : 40;
  static constexpr int Q = QUERIES * D * 2, SLOT = KEYS * D * 2; /* bytes */
  static constexpr int RING = 2 * Q, TILES = RING + SLOTS * SLOT; /* of a team */
  static constexpr int ITEMS = TEAMS * TILES, BARRIERS = ITEMS + TEAMS * 2 * 16, COUNT = 2 * SLOTS + 5;
  static constexpr int SHARED = BARRIERS + TEAMS * COUNT * 8;
};

struct hopper_inputs {
  CUtensorMap q, k, v;
};

/* What a team works on; two of these lie behind the tiles, one per tile of queries. */
struct hopper_item {
  int32_t row, queries; /* none: nothing is left to do */
  int32_t first;        /* query, counted as the keys are */
  int32_t head;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* Where a team's parts of shared memory are. */
template <typename C>
struct hopper_team {
  uint32_t tiles, q_full, q_empty, full, empty, landed; /* barriers: one per tile of queries or slot */
  __device__ __forceinline__ hopper_team(const unsigned char *shared, int number) {
    const uint32_t base = lm_shared_address(shared);
    tiles = base + number * C::TILES;
    q_full = base + C::BARRIERS + number * C::COUNT * 8, q_empty = q_full + 16;
    full = q_empty + 16, empty = full + 8 * C::SLOTS, landed = empty + 8 * C::SLOTS;
  }
  __device__ __forceinline__ uint32_t slot(int i) const { return tiles + C::RING + i * C::SLOT; }
  static __device__ __forceinline__ hopper_item &item(unsigned char *shared, int number, int buffer) {
    return reinterpret_cast<hopper_item *>(shared + C::ITEMS)[2 * number + buffer];
  }
};

/* A place in the ring: keys of the first step, then keys of the next step and values of the one before, at last values. */
template <int SLOTS>
struct hopper_cursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void move() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};

/* Where the steps of an item start: its queries see no key of any 64 before. */
template <bool WINDOW>
__device__ __forceinline__ int first_step(const lm_attention &a, int first_query) {
  return WINDOW ? lm_window::first_key(a, first_query) / 64 * 64 : 0;
}

/* The warp that fetches. */
template <typename C, bool WINDOW>
__device__ __forceinline__ void forward_fetch(const lm_attention &a, const hopper_inputs &inputs, unsigned char *shared, int number) {
  constexpr int D = C::D, KEYS = C::KEYS;
  const hopper_team<C> team(shared, number);
  const int lane = threadIdx.x & 31, teams = gridDim.x * C::TEAMS, place = blockIdx.x + number * gridDim.x;
  hopper_cursor<C::SLOTS> at;
  uint32_t landed = 0;
#pragma unroll 1
  for (int round = 0;; round++) {
    const int buffer = round & 1, index = round * teams + (round & 1 ? teams - 1 - place : place);
    const uint32_t q_full = team.q_full + 8 * buffer;
    lm_attention_block b;
    const bool found = lm_attention_find<C::QUERIES, false>(a, index / a.heads, b) >= 0;
    lm_barrier_wait(team.q_empty + 8 * buffer, (round >> 1 & 1) ^ 1);
    if (!found) {
      if (lane == 0) {
        hopper_team<C>::item(shared, number, buffer).queries = 0;
        lm_barrier_arrive(q_full);
      }
      return;
    }
    const int head = index % a.heads, kv_column = head / a.group * D;
    const int first = b.past + b.begin, keys = first + min(C::QUERIES, b.length - b.begin), end = b.past + b.length;
    if (lane == 0) {
      hopper_team<C>::item(shared, number, buffer) = {b.row + b.begin, keys - first, first, head};
      lm_barrier_expect(q_full, C::Q);
#pragma unroll
      for (int part = 0; part < D / 64; part++)
        lm_tensor_copy(team.tiles + buffer * C::Q + part * C::QUERIES * 128, &inputs.q, head * D + part * 64, b.row + b.begin, q_full);
    }
    /* Rows past the document's end are another's or nobody's: scores of such keys are hidden whatever they are, but their
     * weights, which are 0, would meet their values. */
    const auto fetch = [&](const CUtensorMap *map, int key, bool values) {
      const uint32_t to = team.slot(at.slot), full = team.full + 8 * at.slot;
      const bool tail = values && key + KEYS > end;
      lm_barrier_wait(team.empty + 8 * at.slot, at.parity ^ 1);
      if (lane == 0) {
        const uint32_t barrier = tail ? team.landed : full;
        lm_barrier_expect(barrier, C::SLOT);
#pragma unroll
        for (int part = 0; part < D / 64; part++)
          lm_tensor_copy(to + part * KEYS * 128, map, kv_column + part * 64, b.kv_row + key, barrier);
      }
      __syncwarp();
      if (tail) {
        lm_barrier_wait(team.landed, landed);
        landed ^= 1;
#pragma unroll
        for (int part = 0; part < D / 64; part++)
#pragma unroll 1
          for (int word = (end - key) * 8 + lane; word < KEYS * 8; word += 32)
            lm_store_shared(to + part * KEYS * 128 + word * 16, make_uint4(0, 0, 0, 0));
        lm_shared_publish();
        __syncwarp();
        if (lane == 0) lm_barrier_arrive(full);
      }
      at.move();
    };
    const int bottom = first_step<WINDOW>(a, first), top = bottom + (keys - 1 - bottom) / KEYS * KEYS;
#pragma unroll 1
    for (int key = top; key >= bottom - KEYS; key -= KEYS) {
      if (key >= bottom) fetch(&inputs.k, key, false);
      if (key < top) fetch(&inputs.v, key + KEYS, true);
    }
  }
}

/* The running state of a thread's two rows: the maximum is kept of the raw scores, everything else in powers of two. */
struct hopper_rows {
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  /* Scores become weights. The maximum in use follows the true one only when that has grown by more than 2^8: until then weights
   * are at most that large, and what was summed keeps its scale. @param shrink what to multiply it by otherwise, or 1 */
  template <int COUNT>
  __device__ __forceinline__ void weigh(float (&s)[COUNT], float factor, float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = fmaxf(s[2 * i], s[2 * i + 1]), other = fmaxf(s[4 + 2 * i], s[4 + 2 * i + 1]);
#pragma unroll
      for (int n = 2; n < COUNT / 4; n += 2) {
        top = fmaxf(top, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
        other = fmaxf(other, fmaxf(s[4 * n + 4 + 2 * i], s[4 * n + 4 + 2 * i + 1]));
      }
      top = fmaxf(top, other);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const bool grows = (top - peak[i]) * factor > 8; /* false while a row sees nothing */
      shrink[i] = grows ? lm_exp2((peak[i] - top) * factor) : 1;
      if (grows) peak[i] = top;
      const float zero = peak[i] == -INFINITY ? 0 : peak[i] * factor;
      float part[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < COUNT / 4; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float &x = s[4 * n + 2 * i + j];
          x = lm_exp2(fmaf(x, factor, -zero));
          part[j] += x;
        }
      sum[i] = fmaf(sum[i], shrink[i], part[0] + part[1]);
    }
  }
};

/* The group's rows leave through its rows of the query tile in 16-byte words. */
template <typename T, typename C>
__device__ __forceinline__ void forward_leave(const lm_attention &a, T *o, float *lse, const hopper_item &item, unsigned char *tile,
                                              int warp_row, float (&out)[C::D / 2], const hopper_rows &rows) {
  constexpr int D = C::D;
  const int lane = threadIdx.x & 31, queries = item.queries, head = item.head;
  const int64_t first_row = item.row;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float total = rows.sum[i];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int row = warp_row + (lane >> 2) + 8 * i;
    if (lse != nullptr && (lane & 3) == 0 && row < queries)
      lse[(int64_t)head * a.rows + first_row + row] = fmaf(rows.peak[i], a.scale, logf(total));
    const float share = 1 / total;
#pragma unroll
    for (int n = 0; n < D / 8; n++) out[4 * n + 2 * i] *= share, out[4 * n + 2 * i + 1] *= share;
  }
  lm_weights<1, D / 8> words;
  words.template round<T>(as_sums(out));
#pragma unroll
  for (int k = 0; k < D / 16; k++)
    lm_store_matrices(lm_shared_address(tile) + k / 4 * C::QUERIES * 128 +
                          lm_rows<64>::at(warp_row + lane % 16, k % 4 * 2 + lane / 16),
                      words.x[k][0]);
  __syncwarp();
#pragma unroll
  for (int index = lane; index < 16 * D / 8; index += 32) {
    const int row = warp_row + index / (D / 8), chunk = index % (D / 8);
    if (row < queries)
      *reinterpret_cast<uint4 *>(o + (first_row + row) * a.o_pitch + head * D + chunk * 8) =
          *reinterpret_cast<const uint4 *>(tile + chunk / 8 * C::QUERIES * 128 + lm_rows<64>::at(row, chunk % 8));
  }
  lm_shared_publish();
}

/* A group that multiplies. */
template <typename T, typename C, bool WINDOW>
__device__ __forceinline__ void forward_multiply(const lm_attention &a, T *o, float *lse, unsigned char *shared) {
  constexpr int D = C::D, KEYS = C::KEYS;
  const int thread = threadIdx.x, number = __shfl_sync(0xffffffffu, thread / 128, 0), group = number & 1;
  const int warp_row = group * 64 + thread / 32 % 4 * 16;
  const hopper_team<C> team(shared, number / 2);
  const float factor = a.scale * LM_LOG2_E;
  const auto await = [&](const hopper_cursor<C::SLOTS> &at) { lm_barrier_wait(team.full + 8 * at.slot, at.parity); };
  const auto release = [&](const hopper_cursor<C::SLOTS> &at) { lm_barrier_arrive_warp(team.empty + 8 * at.slot, thread); };
  /* Both groups of a team take one turn for each step of an item but the first. */
  const auto take_turn = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + number) : "memory"); };
  const auto pass_turn = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(1 + (number ^ 1)) : "memory"); };
  if (group == 1) pass_turn();

  hopper_cursor<C::SLOTS> at;
  const auto skip = [&] {
    await(at);
    release(at);
    at.move();
  };
#pragma unroll 1
  for (int round = 0;; round++) {
    const int buffer = round & 1;
    const uint32_t q_tile = team.tiles + buffer * C::Q + group * 64 * 128, q_empty = team.q_empty + 8 * buffer;
    lm_barrier_wait(team.q_full + 8 * buffer, round >> 1 & 1);
    const hopper_item &item = hopper_team<C>::item(shared, number / 2, buffer);
    const int queries = item.queries, first = item.first;
    if (queries == 0) return;
    const int bottom = first_step<WINDOW>(a, first), top = bottom + (first + queries - 1 - bottom) / KEYS * KEYS;
    const int group_query = first + group * 64, first_query = first + warp_row;
    if (group * 64 >= queries) { /* it has no query */
      skip();
#pragma unroll 1
      for (int key = top - KEYS; key >= bottom; key -= KEYS) {
        take_turn(), pass_turn();
        skip(), skip();
      }
      skip();
      lm_barrier_arrive_warp(q_empty, thread);
      continue;
    }

    hopper_rows rows;
    float out[D / 2], s[KEYS / 2], shrink[2];
    lm_weights<1, KEYS / 8> p;
    clear(out);
    int key = top;
    const bool unseen = lm_causal::sees_none(group_query + 63, top); /* the first group need not see the last keys */
    if (unseen) {
      take_turn(), pass_turn();
      skip();
      key -= KEYS;
    }
    await(at);
    lm_group_fence();
    multiply_rows<D, C::QUERIES, KEYS, T>(s, q_tile, team.slot(at.slot));
    lm_group_commit();
    lm_group_wait<0>();
    lm_hold(s);
    release(at);
    at.move();
    if (unseen) skip();
    if constexpr (WINDOW) lm_hide_before<false>(a, as_sums(s), first_query, key);
    lm_hide<false>(as_sums(s), first_query, key);
    rows.weigh(s, factor, shrink);
    p.template round<T>(as_sums(s));

#pragma unroll 1
    for (key -= KEYS; key >= bottom; key -= KEYS) {
      const hopper_cursor<C::SLOTS> k_at = at;
      at.move();
      const hopper_cursor<C::SLOTS> v_at = at;
      at.move();
      await(k_at);
      take_turn();
      lm_hold(out);
      lm_group_fence();
      multiply_rows<D, C::QUERIES, KEYS, T>(s, q_tile, team.slot(k_at.slot));
      lm_group_commit();
      await(v_at);
      lm_group_fence();
      multiply_weights<KEYS, T>(out, p, team.slot(v_at.slot));
      lm_group_commit();
      pass_turn();
      lm_group_wait<1>();
      lm_hold(s);
      release(k_at);
      if constexpr (WINDOW) lm_hide_before<false>(a, as_sums(s), first_query, key);
      if (!lm_causal::sees_all(group_query, key + KEYS - 1)) lm_hide<false>(as_sums(s), first_query, key);
      rows.weigh(s, factor, shrink);
      lm_group_wait<0>();
      lm_hold(out);
      lm_keep(p.x);
      release(v_at);
      if (__any_sync(0xffffffffu, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
        for (int n = 0; n < D / 2; n++) out[n] *= shrink[n >> 1 & 1];
      }
      p.template round<T>(as_sums(s));
    }
    await(at);
    lm_hold(out);
    lm_group_fence();
    multiply_weights<KEYS, T>(out, p, team.slot(at.slot));
    lm_group_commit();
    lm_group_wait<0>();
    lm_hold(out);
    lm_keep(p.x);
    release(at);
    at.move();
    /* No warp of the group reads its queries any more. */
    asm volatile("bar.sync %0, 128;" ::"r"(1 + 2 * C::TEAMS + number) : "memory");
    forward_leave<T, C>(a, o, lse, item, shared + number / 2 * C::TILES + buffer * C::Q, warp_row, out, rows);
    lm_barrier_arrive_warp(q_empty, thread);
  }
}
#endif

/* lse may be NULL. */
template <typename T, typename C, bool WINDOW>
__global__ void __launch_bounds__(C::THREADS, 1)
    attention_hopper_forward(const __grid_constant__ lm_attention a, const __grid_constant__ hopper_inputs inputs, T *o, float *lse) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  if (threadIdx.x == 0) {
    constexpr int readers = 2 * 4 * LM_WARP_ARRIVALS;
    for (int number = 0; number < C::TEAMS; number++) {
      const hopper_team<C> team(shared, number);
      for (int i = 0; i < 2; i++) {
        lm_barrier_create(team.q_full + 8 * i, 1);
        lm_barrier_create(team.q_empty + 8 * i, readers);
      }
      for (int i = 0; i < C::SLOTS; i++) {
        lm_barrier_create(team.full + 8 * i, 1);
        lm_barrier_create(team.empty + 8 * i, readers);
      }
      lm_barrier_create(team.landed, 1);
    }
    lm_barriers_publish();
  }
  __syncthreads();
  if (threadIdx.x < C::WORKERS) {
    lm_registers_raise<C::WORKING>();
    forward_multiply<T, C, WINDOW>(a, o, lse, shared);
  } else {
    lm_registers_lower<C::FETCHING>();
    const int number = threadIdx.x / 32 - C::WORKERS / 32;
    if (number < C::TEAMS) forward_fetch<C, WINDOW>(a, inputs, shared, number);
  }
#endif
}

/* Whether this build holds code for the device: other targets compile the kernels without a body. */
static bool has_code(void) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, attention_hopper_forward<lm_bf16, hopper_queries<128>, false>) == cudaSuccess)
    return attributes.numRegs > 128;
  (void)cudaGetLastError();
  return false;
}

bool lm_attention_hopper_can_forward(const lm_cuda *cuda, const lm_attention &a) {
  const bool size = a.head_dim == 64 || a.head_dim == 128;
  if (a.softcap > 0 || cuda->capability != 90 || cuda->shared_max < 224 * 1024 || !size) return false;
  static const bool ready = has_code() && lm_cuda_has_tensor_maps();
  return ready;
}

bool lm_attention_hopper_can(const lm_cuda *cuda, const lm_attention &a) {
  return !lm_attention_general(a) && lm_attention_hopper_can_forward(cuda, a);
}

template <typename T, typename C, bool WINDOW>
static cudaError_t start(const lm_cuda *cuda, const lm_attention &a, int32_t type, void *o, float *lse, cudaStream_t stream) {
  static_assert(C::SHARED <= 224 * 1024, "lm_attention_hopper_can_forward asks for as much");
  const int32_t kv_rows = a.cu_seqlens == nullptr ? a.capacity : a.rows, kv_width = a.heads / a.group * C::D;
  const int32_t q_pitch = (int32_t)a.q_pitch, kv_pitch = (int32_t)a.kv_pitch;
  hopper_inputs inputs;
  if (!lm_cuda_tensor_map(&inputs.q, {a.q, q_pitch, type}, a.rows, a.heads * C::D, C::QUERIES) ||
      !lm_cuda_tensor_map(&inputs.k, {a.k, kv_pitch, type}, kv_rows, kv_width, C::KEYS) ||
      !lm_cuda_tensor_map(&inputs.v, {a.v, kv_pitch, type}, kv_rows, kv_width, C::KEYS))
    return cudaErrorInvalidValue;
  const int64_t blocks = lm_ceil_div(lm_attention_blocks(a, C::QUERIES) * a.heads, C::TEAMS);
  return lm_attention_start<attention_hopper_forward<T, C, WINDOW>>(blocks < cuda->sm_count ? blocks : cuda->sm_count, C::THREADS,
                                                                    C::SHARED, stream, a, inputs, (T *)o, lse);
}

template <typename T, typename C>
static cudaError_t launch(const lm_cuda *cuda, const lm_attention &a, int32_t type, void *o, float *lse, cudaStream_t stream) {
  return lm_attention_general(a) ? start<T, C, true>(cuda, a, type, o, lse, stream)
                                 : start<T, C, false>(cuda, a, type, o, lse, stream);
}

cudaError_t lm_attention_hopper_forward(const lm_cuda *cuda, const lm_attention &a, int32_t type, void *o, float *lse,
                                        cudaStream_t stream) {
  if (a.head_dim == 64)
    return type == LM_BF16 ? launch<lm_bf16, hopper_queries<64>>(cuda, a, type, o, lse, stream)
                           : launch<lm_f16, hopper_queries<64>>(cuda, a, type, o, lse, stream);
  return type == LM_BF16 ? launch<lm_bf16, hopper_queries<128>>(cuda, a, type, o, lse, stream)
                         : launch<lm_f16, hopper_queries<128>>(cuda, a, type, o, lse, stream);
}
