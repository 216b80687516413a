/* CRC-32C: published vectors, the instruction against the tables, and pieces that are joined in any order. */
#include "core_test.h"

#include "../core/file.h"

/* RFC 3720, appendix B.4, and the check value of the Rocksoft catalogue. Mutant: another polynomial, no final complement. */
static void published_vectors(void) {
  uint8_t zeros[32] = {0}, ones[32], up[32], down[32];
  memset(ones, 0xff, sizeof ones);
  for (int i = 0; i < 32; i++) up[i] = (uint8_t)i, down[i] = (uint8_t)(31 - i);
  const struct {
    const void *data;
    uint64_t bytes;
    uint32_t crc;
  } vectors[] = {{"123456789", 9, 0xe3069283}, {zeros, 32, 0x8a9136aa}, {ones, 32, 0x62a8ab43}, {up, 32, 0x46dd794e},
                 {down, 32, 0x113fdb5c},       {"", 0, 0}};
  for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
    EXPECT(lm_crc32c(0, vectors[i].data, vectors[i].bytes) == vectors[i].crc);
    EXPECT(lm_crc32c_portable(0, vectors[i].data, vectors[i].bytes) == vectors[i].crc);
  }
  EXPECT(lm_crc32c(7, NULL, 0) == 7);
}

static uint8_t noise[40000];

static void fill_noise(void) {
  uint32_t state = 1;
  for (size_t i = 0; i < sizeof noise; i++) noise[i] = (uint8_t)((state = state * 1664525u + 1013904223u) >> 24);
}

/* Mutants: over_one and over_two swapped; the rest after the last whole word left out. */
static void instruction_is_the_tables(void) {
  fill_noise();
  for (uint64_t bytes = 0; bytes < 80; bytes++) {
    for (uint64_t at = 0; at < 9; at++) EXPECT(lm_crc32c(5, noise + at, bytes) == lm_crc32c_portable(5, noise + at, bytes));
  }
  for (uint64_t bytes = 12280; bytes < 12300; bytes++) {
    EXPECT(lm_crc32c(0, noise + bytes % 9, bytes) == lm_crc32c_portable(0, noise + bytes % 9, bytes));
  }
  EXPECT(lm_crc32c(0, noise, sizeof noise) == lm_crc32c_portable(0, noise, sizeof noise));
  EXPECT(lm_crc32c(lm_crc32c(0, noise, 777), noise + 777, sizeof noise - 777) == lm_crc32c(0, noise, sizeof noise));
}

/* Mutant: lm_crc32c_shift by the bytes before instead of after. */
static void joins_in_any_order(void) {
  fill_noise();
  uint32_t whole = lm_crc32c(0, noise, sizeof noise);
  const uint64_t cuts[] = {0, 1, 4096, 4099, 20000, 39999, sizeof noise};
  const int order[] = {3, 0, 5, 1, 4, 2};
  uint32_t joined = 0;
  for (int i = 0; i < 6; i++) {
    uint64_t from = cuts[order[i]], to = cuts[order[i] + 1];
    joined ^= lm_crc32c_shift(lm_crc32c(0, noise + from, to - from), sizeof noise - to);
  }
  EXPECT(joined == whole);
  /* Over 5 GiB of zeros, in one product instead of in steps. */
  uint32_t steps = whole;
  for (int i = 0; i < 5; i++) steps = lm_crc32c_shift(steps, UINT64_C(1) << 30);
  EXPECT(lm_crc32c_shift(whole, UINT64_C(5) << 30) == steps && steps != whole);
}

int main(void) {
  test("lm_crc32c() gives the published values", published_vectors);
  test("lm_crc32c() gives the same with and without the instruction", instruction_is_the_tables);
  test("lm_crc32c_shift() joins pieces in any order", joins_in_any_order);
  return summary();
}
