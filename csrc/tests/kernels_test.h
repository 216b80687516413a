/* kernels_test.h: what the kernel tests share: typed matrices with poison around them, and every instruction set at 1, 2
 * and 3 threads. Values are compared with double-precision references; bits are compared between thread counts. */
#ifndef LM_KERNELS_TEST_H
#define LM_KERNELS_TEST_H

#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../cpu/kernels.h"
#include "../include/loramem.h"

static int passed, failed;

#define CHECK(condition, ...)                                                                                              \
  do {                                                                                                                     \
    if (condition) {                                                                                                       \
      passed++;                                                                                                            \
    } else if (failed++ < 40) {                                                                                            \
      printf("%s:%d: ", __FILE__, __LINE__);                                                                               \
      printf(__VA_ARGS__);                                                                                                 \
      printf("\n");                                                                                                        \
    }                                                                                                                      \
  } while (0)

static inline int report(void) {
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

/* Random numbers ---------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 88172645463325252u;

static inline uint32_t random_u32(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 32);
}

/* About normal: the sum of four uniforms, variance 1. */
static inline double random_normal(void) {
  double sum = -2;
  for (int i = 0; i < 4; i++) sum += random_u32() / 4294967296.0;
  return sum * 1.7320508;
}

/* Storage types ----------------------------------------------------------------------------------------------------- */

static const int32_t all_types[3] = {LM_F32, LM_BF16, LM_F16};
static const char *const type_names[3] = {"f32", "bf16", "f16"};

static inline size_t type_size(int32_t type) { return type == LM_F32 || type == LM_I32 ? 4 : 2; }

/* Half a unit in the last place, relative. */
static inline double type_step(int32_t type) { return type == LM_F32 ? 0x1p-24 : type == LM_BF16 ? 0x1p-8 : 0x1p-11; }

static inline double get(int32_t type, const void *data, int64_t i) {
  if (type == LM_F32) return ((const float *)data)[i];
  const uint16_t h = ((const uint16_t *)data)[i];
  if (type == LM_BF16) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
  }
  const int exponent = h >> 10 & 31, fraction = h & 1023, sign = h >> 15 ? -1 : 1;
  if (exponent == 31) return fraction ? (double)NAN : sign * (double)INFINITY;
  return sign * (exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25));
}

/* Nearest value of a type, ties to even, by the definition of rounding. */
static inline double rounded(int32_t type, double x) {
  if (type == LM_F32) return (float)x;
  if (x == 0 || isnan(x) || isinf(x)) return x;
  int exponent;
  frexp(x, &exponent);
  const int bits = type == LM_BF16 ? 8 : 11, lowest = type == LM_BF16 ? -133 : -24;
  int shift = exponent - bits;
  if (shift < lowest) shift = lowest;
  const double y = ldexp(nearbyint(ldexp(x, -shift)), shift);
  const double limit = type == LM_BF16 ? 0x1.ffp127 : 65520.0;
  return fabs(x) >= limit ? copysign(INFINITY, x) : y;
}

static inline void put(int32_t type, void *data, int64_t i, double x) {
  if (type == LM_F32) {
    ((float *)data)[i] = (float)x;
    return;
  }
  uint16_t h;
  x = rounded(type, x);
  if (type == LM_BF16) {
    const float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    h = (uint16_t)(bits >> 16);
  } else if (isnan(x)) {
    h = 0x7e00;
  } else {
    int exponent;
    const double a = fabs(x);
    frexp(a, &exponent);
    if (isinf(a)) h = 0x7c00;
    else if (a < 0x1p-14) h = (uint16_t)ldexp(a, 24);
    else h = (uint16_t)((exponent + 14) * 1024 + (int)ldexp(a, 11 - exponent) - 1024);
    if (signbit(x)) h |= 0x8000;
  }
  ((uint16_t *)data)[i] = h;
}

/* Matrices: exactly as large as the contract says, so that the address sanitizer sees each step outside. ----------- */

typedef struct matrix {
  void *data;
  int64_t rows, width, pitch;
  int32_t type;
} matrix;

static inline matrix matrix_empty(int32_t type, int64_t rows, int64_t width, int64_t pitch) {
  const matrix m = {malloc((size_t)((rows - 1) * pitch + width) * type_size(type) + 1), rows, width, pitch, type};
  memset(m.data, 0x5a, (size_t)((rows - 1) * pitch + width) * type_size(type)); /* a sentinel: about 1.5e16, 85 or 203 */
  return m;
}

static inline int in_matrix(const matrix *m, int64_t i) { return i % m->pitch < m->width; }
static inline int64_t matrix_length(const matrix *m) { return (m->rows - 1) * m->pitch + m->width; }

/* Random rows [0, live), NaN in all else. */
static inline matrix matrix_random(int32_t type, int64_t rows, int64_t width, int64_t pitch, int64_t live, double scale) {
  matrix m = matrix_empty(type, rows, width, pitch);
  for (int64_t i = 0; i < matrix_length(&m); i++)
    put(type, m.data, i, in_matrix(&m, i) && i / pitch < live ? random_normal() * scale : (double)NAN);
  return m;
}

static inline matrix matrix_copy(const matrix *m) {
  matrix copy = matrix_empty(m->type, m->rows, m->width, m->pitch);
  memcpy(copy.data, m->data, (size_t)matrix_length(m) * type_size(m->type));
  return copy;
}

static inline double at(const matrix *m, int64_t r, int64_t c) { return get(m->type, m->data, r * m->pitch + c); }

/* Rows from `live` on and the gaps between rows still hold the sentinel. */
static inline int untouched(const matrix *m, int64_t live) {
  const unsigned char *bytes = m->data;
  const size_t size = type_size(m->type);
  for (int64_t i = 0; i < matrix_length(m); i++)
    if (!in_matrix(m, i) || i / m->pitch >= live)
      for (size_t b = 0; b < size; b++)
        if (bytes[(size_t)i * size + b] != 0x5a) return 0;
  return 1;
}

/* Rows [0, live) hold the same bits. */
/* same_values: the first `live` rows hold the same bits, whatever the pitches. */
static inline int same_values(const matrix *a, const matrix *b, int64_t live) {
  const size_t size = type_size(a->type);
  for (int64_t t = 0; t < live; t++) {
    const char *x = (const char *)a->data + (size_t)(t * a->pitch) * size, *y = (const char *)b->data + (size_t)(t * b->pitch) * size;
    if (memcmp(x, y, (size_t)a->width * size) != 0) return 0;
  }
  return 1;
}

static inline int same_rows(const matrix *a, const matrix *b, int64_t live) {
  for (int64_t r = 0; r < live; r++) {
    const size_t offset = (size_t)(r * a->pitch) * type_size(a->type);
    if (memcmp((char *)a->data + offset, (char *)b->data + offset, (size_t)a->width * type_size(a->type)) != 0) return 0;
  }
  return 1;
}

/* Largest |m - reference| / (tolerance + half a step of the type), over rows [0, live). At most 1 is right; NaN gives inf.
 * reference is [live][width]; tolerance is for the arithmetic, absolute. */
static inline double distance(const matrix *m, const double *reference, int64_t live, double tolerance) {
  double worst = 0;
  for (int64_t r = 0; r < live; r++)
    for (int64_t c = 0; c < m->width; c++) {
      const double want = reference[r * m->width + c], error = fabs(at(m, r, c) - want);
      const double allowed = tolerance + fabs(want) * type_step(m->type) * 1.01 + (m->type == LM_F16 ? 0x1p-25 : 0);
      if (!(error / allowed <= worst)) worst = isnan(error) ? (double)INFINITY : error / allowed;
    }
  return worst;
}

/* Devices ------------------------------------------------------------------------------------------------------------- */

enum { MAX_DEVICES = 9 };
static lm_cpu *devices[MAX_DEVICES];
static int device_count;

static inline void open_devices(void) {
  static const char *const levels[3] = {"scalar", "avx2", "avx512"};
  for (int level = 0; level < 3; level++)
    for (int threads = 1; threads <= 3; threads++) {
      setenv("LORAMEM_ISA", levels[level], 1);
      lm_cpu *cpu = lm_cpu_create(threads);
      if (strcmp(lm_cpu_isa(cpu), levels[level]) == 0) devices[device_count++] = cpu;
      else lm_cpu_destroy(cpu); /* this machine does not have the level */
    }
  unsetenv("LORAMEM_ISA");
}

static inline void close_devices(void) {
  for (int i = 0; i < device_count; i++) lm_cpu_destroy(devices[i]);
}

/* The one-thread device of the same level comes first: the others must reproduce its bits. */
static inline int first_of_level(int device) { return device % 3 == 0; }

#define NAME(device) lm_cpu_isa(devices[device]), (int)lm_cpu_threads(devices[device])

#endif
