/* cuda_test.h: what the tests of CUDA kernels share: the same random inputs on the CPU device and on the GPU, through the public
 * interface, poison around every array, and the comparison of what came out.
 *
 *   array x = make(LM_BF16, rows, width, pitch);   random, also what lies past the live rows if asked
 *   run([&](side &s) { lm_scale_args a = {...s.at(x)...}; return lm_scale(s.ctx, &a, s.stream); });
 *   same(x, ...)                                   reads back both and compares
 *
 * One file is one program; its last line is "N passed, N failed". Without a GPU it says so and ends well. */
#ifndef LM_CUDA_TEST_H
#define LM_CUDA_TEST_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "../include/loramem.h"

static int passed, failed;

#define CHECK(condition, ...)                     \
  do {                                            \
    if (condition) {                              \
      passed++;                                   \
    } else if (failed++ < 60) {                   \
      printf("%s:%d: ", __FILE__, __LINE__);      \
      printf(__VA_ARGS__);                        \
      printf("\n");                               \
    }                                             \
  } while (0)

static inline int report(void) {
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

/* Random numbers --------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 88172645463325252u;

static inline uint32_t random_u32(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 32);
}

/* About normal: the sum of four uniforms, variance 1. */
static inline float random_normal(void) {
  double sum = -2;
  for (int i = 0; i < 4; i++) sum += random_u32() / 4294967296.0;
  return (float)(sum * 1.7320508);
}

/* Storage types ---------------------------------------------------------------------------------------------------- */

static const int32_t all_types[3] = {LM_F32, LM_BF16, LM_F16};
static const char *const type_names[] = {"f32", "bf16", "f16", "i32", "f64"};

static inline size_t type_size(int32_t type) { return type == LM_F64 ? 8 : type == LM_F32 || type == LM_I32 ? 4 : 2; }

/* A unit in the last place, relative: the most that one rounding more or less can change. */
static inline double type_ulp(int32_t type) { return type == LM_BF16 ? 0x1p-7 : type == LM_F16 ? 0x1p-10 : 0x1p-23; }

static inline float float_of(int32_t type, const void *data, int64_t i) {
  float f;
  if (type == LM_F32) {
    memcpy(&f, (const char *)data + i * 4, 4);
    return f;
  }
  uint16_t h;
  memcpy(&h, (const char *)data + i * 2, 2);
  if (type == LM_BF16) {
    const uint32_t bits = (uint32_t)h << 16;
    memcpy(&f, &bits, 4);
    return f;
  }
  const int exponent = h >> 10 & 31, fraction = h & 1023, sign = h >> 15 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return (float)(sign * (exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25)));
}

static inline void put_float(int32_t type, void *data, int64_t i, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (type == LM_F32) {
    memcpy((char *)data + i * 4, &x, 4);
    return;
  }
  uint16_t h;
  if (isnan(x)) {
    h = type == LM_BF16 ? 0x7fc0 : 0x7e00;
  } else if (type == LM_BF16) {
    h = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  } else {
    const double a = fabs((double)x);
    int exponent = 0;
    frexp(a, &exponent);
    const int shift = exponent - 11 < -24 ? -24 : exponent - 11;
    const double units = nearbyint(ldexp(a, -shift)), value = ldexp(units, shift);
    if (value >= 65520) h = 0x7c00;
    else if (value < 0x1p-14) h = (uint16_t)ldexp(value, 24);
    else {
      frexp(value, &exponent);
      h = (uint16_t)((exponent + 14) * 1024 + (int)ldexp(value, 11 - exponent) - 1024);
    }
    if (signbit(x)) h |= 0x8000;
  }
  memcpy((char *)data + i * 2, &h, 2);
}

/* The two devices -------------------------------------------------------------------------------------------------- */

#define ARENA_BYTES (UINT64_C(768) << 20)
#define STAGING_BYTES (UINT64_C(32) << 20)
#define GUARD 256 /* bytes of poison on both sides of an array */
#define POISON 0x5a

struct array {
  int32_t type;
  int64_t rows, width, pitch, offset; /* offset: elements by which it is not aligned */
  uint64_t place;                     /* in the arenas, of the guard */
  std::vector<uint8_t> host;          /* guard, array, guard: what was uploaded */
  uint8_t *data() { return host.data() + GUARD + offset * type_size(type); }
  int64_t length() const { return rows ? (rows - 1) * pitch + width : 0; }
};

struct side {
  const char *name;
  lm_ctx *ctx;
  lm_stream *stream;
  uint8_t *arena;
  lm_pinned *staging;
  void *at(const array &a) const { return arena + a.place + GUARD + a.offset * type_size(a.type); }
  float *floats(const array &a) const { return static_cast<float *>(at(a)); }
  int32_t *ints(const array &a) const { return static_cast<int32_t *>(at(a)); }
};

static side sides[2]; /* the CPU, the GPU */
static uint64_t arena_used;

static inline std::string error_of(lm_ctx *ctx) {
  char text[2048];
  lm_last_error(ctx, text, sizeof text);
  return text;
}

/* Opens both devices; LORAMEM_TEST_DEVICE names another second one. @return false if there is no GPU, which was said then */
static inline bool open_sides(void) {
  const char *const chosen = getenv("LORAMEM_TEST_DEVICE");
  const char *const names[2] = {"cpu", chosen ? chosen : "cuda:0"};
  for (int i = 1; i >= 0; i--) {
    char error[2048] = "";
    side &s = sides[i];
    s.name = names[i];
    s.ctx = lm_ctx_open(names[i], 0, error, sizeof error);
    if (!s.ctx && i == 1) {
      printf("skipped: %s\n0 passed, 0 failed\n", error);
      return false;
    }
    if (s.ctx) s.stream = lm_stream_create(s.ctx, 0);
    if (s.stream) s.arena = static_cast<uint8_t *>(lm_mem_reserve(s.ctx, ARENA_BYTES));
    if (s.arena) s.staging = lm_pinned_create(s.ctx, STAGING_BYTES, 0);
    if (!s.staging) {
      printf("%s: %s\n", names[i], s.ctx ? error_of(s.ctx).c_str() : error);
      exit(1);
    }
  }
  return true;
}

static inline void close_sides(void) {
  for (side &s : sides) {
    lm_pinned_destroy(s.staging);
    lm_mem_release(s.ctx, s.arena);
    lm_stream_destroy(s.stream);
    lm_ctx_destroy(s.ctx);
  }
}

static inline void transfer(side &s, uint64_t place, uint8_t *host, uint64_t bytes, bool up) {
  uint8_t *staging = static_cast<uint8_t *>(lm_pinned_data(s.staging));
  for (uint64_t at = 0; at < bytes; at += STAGING_BYTES) {
    const uint64_t count = bytes - at < STAGING_BYTES ? bytes - at : STAGING_BYTES;
    if (up) memcpy(staging, host + at, count);
    int32_t status = up ? lm_mem_copy(s.ctx, s.arena + place + at, staging, count, s.stream)
                        : lm_mem_copy(s.ctx, staging, s.arena + place + at, count, s.stream);
    if (!status) status = lm_stream_wait(s.stream);
    if (status) {
      printf("%s: %s\n", s.name, error_of(s.ctx).c_str());
      exit(1);
    }
    if (!up) memcpy(host + at, staging, count);
  }
}

static inline void upload(array &a) {
  for (side &s : sides) transfer(s, a.place, a.host.data(), a.host.size(), true);
}

static inline std::vector<uint8_t> download(const array &a, int device) {
  std::vector<uint8_t> host(a.host.size());
  transfer(sides[device], a.place, host.data(), host.size(), false);
  return host;
}

/* Forgets all arrays; the next ones use their place. */
static inline void clear_arrays(void) { arena_used = 0; }

/* An array on both devices, poison everywhere; `offset` elements away from alignment. */
static inline array make_empty(int32_t type, int64_t rows, int64_t width, int64_t pitch, int64_t offset = 0) {
  array a = {type, rows, width, pitch, offset, arena_used, {}};
  a.host.assign((size_t)((a.length() + offset) * (int64_t)type_size(type)) + 2 * GUARD, POISON);
  arena_used += (a.host.size() + 511) / 256 * 256;
  if (arena_used > ARENA_BYTES) {
    printf("the arena is too small\n");
    exit(1);
  }
  upload(a);
  return a;
}

/* Random rows [0, live), NaN in all other rows and in the gaps between rows. */
static inline array make(int32_t type, int64_t rows, int64_t width, int64_t pitch, int64_t live = INT64_MAX, float scale = 1,
                         int64_t offset = 0) {
  array a = make_empty(type, rows, width, pitch, offset);
  for (int64_t i = 0; i < a.length(); i++)
    put_float(type, a.data(), i, i % pitch < width && i / pitch < live ? random_normal() * scale : NAN);
  upload(a);
  return a;
}

static inline array make_ints(const std::vector<int32_t> &values) {
  array a = make_empty(LM_I32, 1, (int64_t)values.size(), (int64_t)values.size());
  memcpy(a.data(), values.data(), values.size() * 4);
  upload(a);
  return a;
}

/* Any bytes, such as a header or settings. */
template <typename T>
static inline array make_struct(const T &value) {
  static_assert(sizeof(T) % 4 == 0, "whole words");
  array a = make_empty(LM_I32, 1, sizeof(T) / 4, sizeof(T) / 4);
  memcpy(a.data(), &value, sizeof(T));
  upload(a);
  return a;
}

/* Runs fn on both devices and waits. fn(side) enqueues and returns the status. */
template <typename Fn>
static inline bool run(const char *what, Fn fn) {
  bool good = true;
  for (side &s : sides) {
    int32_t status = fn(s);
    if (!status) status = lm_stream_wait(s.stream);
    CHECK(status == LM_OK, "%s on %s: %d %s", what, s.name, status, error_of(s.ctx).c_str());
    good = good && status == LM_OK;
  }
  return good;
}

/* Comparison ------------------------------------------------------------------------------------------------------- */

struct bounds {
  double norm;     /* |gpu - cpu| over |cpu|, both as norms over all */
  double element;  /* largest |gpu - cpu| for one element, relative to it ... */
  double absolute; /* ... plus this */
};

/* For arithmetic that differs in the order of sums and the last bits of exp and sqrt: 16-bit results round the other way now and
 * then, by one unit. */
static inline bounds close_bounds(int32_t type, double absolute = 1e-6) {
  if (type == LM_F32) return {2e-6, 1e-5, absolute};
  return {type_ulp(type) / 16, type_ulp(type) * 1.01, absolute + (type == LM_F16 ? 0x1p-24 : 0)};
}

/* Whether everything outside rows [0, live) is what was uploaded. */
static inline bool untouched(const array &a, const std::vector<uint8_t> &now, int64_t live) {
  const size_t size = type_size(a.type);
  const size_t start = GUARD + (size_t)a.offset * size;
  std::vector<uint8_t> masked = now;
  for (int64_t r = 0; r < live && r < a.rows; r++) {
    const size_t at = start + (size_t)(r * a.pitch) * size;
    memcpy(&masked[at], &a.host[at], (size_t)a.width * size);
  }
  return masked == a.host;
}

/* Compares rows [0, live) of the two devices, and that nothing else changed on the GPU. NaN must meet NaN. */
static inline bool same(const array &a, int64_t live, const bounds &limit, const char *what) {
  const std::vector<uint8_t> cpu = download(a, 0), gpu = download(a, 1);
  const uint8_t *x = cpu.data() + GUARD + a.offset * type_size(a.type), *y = gpu.data() + GUARD + a.offset * type_size(a.type);
  double distance = 0, norm = 0, worst = 0;
  int64_t nans = 0, at = -1;
  for (int64_t r = 0; r < live && r < a.rows; r++)
    for (int64_t c = 0; c < a.width; c++) {
      const double p = float_of(a.type, x, r * a.pitch + c), q = float_of(a.type, y, r * a.pitch + c), d = fabs(p - q);
      if (isnan(p) || isnan(q)) {
        nans += isnan(p) != isnan(q);
        continue;
      }
      if (p == q) {
        if (!isinf(p)) norm += p * p;
        continue;
      }
      distance += d * d, norm += p * p;
      const double over = d / (limit.element * fabs(p) + limit.absolute);
      if (over > worst) worst = over, at = r * a.pitch + c;
    }
  const double ratio = norm > 0 ? sqrt(distance / norm) : distance > 0 ? INFINITY : 0;
  const bool inside = untouched(a, gpu, live);
  const bool good = nans == 0 && ratio <= limit.norm + limit.absolute && worst <= 1 && inside;
  CHECK(good, "%s %s: norm-wise %.2e (limit %.2e), worst element %.2f of its limit at row %lld column %lld (%g, wanted %g), %lld NaN%s",
        what, type_names[a.type], ratio, limit.norm, worst, at < 0 ? -1LL : (long long)(at / a.pitch),
        at < 0 ? -1LL : (long long)(at % a.pitch), at < 0 ? 0.0 : float_of(a.type, y, at), at < 0 ? 0.0 : float_of(a.type, x, at),
        (long long)nans, inside ? "" : ", and wrote outside");
  return good;
}

/* The same bits on both devices in rows [0, live), nothing else changed. NaN may differ in its bits. */
static inline bool same_bits(const array &a, int64_t live, const char *what) {
  if (a.type != LM_I32) return same(a, live, {0, 0, 0}, what);
  const std::vector<uint8_t> cpu = download(a, 0), gpu = download(a, 1);
  bool good = untouched(a, gpu, live);
  for (int64_t r = 0; r < live && r < a.rows; r++)
    good = good && memcmp(&cpu[GUARD + (size_t)(r * a.pitch) * 4], &gpu[GUARD + (size_t)(r * a.pitch) * 4], (size_t)a.width * 4) == 0;
  CHECK(good, "%s: integers differ or something else was written", what);
  return good;
}

/* Runs fn twice on the GPU from the same start; the arrays must get the same bits. */
template <typename Fn>
static inline void repeats(const char *what, const std::vector<array *> &arrays, Fn fn) {
  std::vector<std::vector<uint8_t>> first;
  for (int turn = 0; turn < 2; turn++) {
    for (array *a : arrays) transfer(sides[1], a->place, a->host.data(), a->host.size(), true);
    int32_t status = fn(sides[1]);
    if (!status) status = lm_stream_wait(sides[1].stream);
    CHECK(status == LM_OK, "%s: %s", what, error_of(sides[1].ctx).c_str());
    for (size_t i = 0; i < arrays.size(); i++) {
      if (turn == 0) first.push_back(download(*arrays[i], 1));
      else CHECK(first[i] == download(*arrays[i], 1), "%s: a second run gave other bits", what);
    }
  }
}

/* "name rows x width live", for messages. */
static inline std::string named(const char *name, int64_t rows, int64_t width, int64_t live) {
  return std::string(name) + " " + std::to_string(rows) + " x " + std::to_string(width) + " live " + std::to_string(live);
}

#endif
